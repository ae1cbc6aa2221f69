"""Dropout by key: a mask depends on the client and the step, not on the other rows of the batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

from piebald.engines.batched_layers import KeyedDropout

DROPOUTS = [functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d]
AXES = {functional.dropout: 2, functional.dropout1d: 3, functional.dropout2d: 4, functional.dropout3d: 5}


def drop(x: Tensor, key: int, p: float = 0.5, function: Any = functional.dropout, calls: int = 1) -> Tensor:
    """The last of some calls under one key."""
    with KeyedDropout() as dropout:
        dropout.start(torch.tensor(key))
        return [function(x, p, True) for _ in range(calls)][-1]


def ones(function: Any, batch: int = 6) -> Tensor:
    return torch.ones(batch, *[5, 3, 4, 2][: AXES[function] - 1])


@pytest.mark.parametrize("function", DROPOUTS, ids=lambda f: f.__name__)
def test_the_same_key_gives_the_same_mask(function: Any) -> None:
    x = ones(function)
    first = drop(x, 1, function=function)
    torch.manual_seed(5)
    assert torch.equal(drop(x, 1, function=function), first)
    assert torch.equal(drop(3 * x, 1, function=function), 3 * first)


@pytest.mark.parametrize("function", DROPOUTS, ids=lambda f: f.__name__)
def test_rows_behind_do_not_matter(function: Any) -> None:
    """A short batch that is padded at its end has the masks that it has alone."""
    for rows in range(1, 6):
        whole, short = drop(ones(function), 9, function=function), drop(ones(function, rows), 9, function=function)
        assert torch.equal(whole[:rows], short)


@pytest.mark.parametrize("function", DROPOUTS, ids=lambda f: f.__name__)
def test_under_vmap_each_client_has_the_mask_it_has_alone(function: Any) -> None:
    keys = torch.tensor([4, 2**62, -17, 0])
    stack = torch.stack([ones(function)] * 4)
    with KeyedDropout() as dropout:
        stacked = vmap(lambda x, k: (dropout.start(k), function(x, 0.3, True))[1])(stack, keys)
    for row, key in enumerate(keys.tolist()):
        assert torch.equal(stacked[row], drop(ones(function), key, 0.3, function))


def test_different_keys_and_calls_differ() -> None:
    """Two independent fair masks of 10 000 agree on half, give or take 5 standard deviations of 50."""
    x = torch.ones(100, 100)
    masks = [drop(x, key) for key in (0, 1, 2, 2**40)] + [drop(x, 0, calls=2), drop(x, 0, calls=3)]
    for place, one in enumerate(masks):
        for two in masks[:place]:
            assert abs(int((one == two).sum()) - 5000) < 5 * 50


def test_neighbours_in_a_mask_are_independent() -> None:
    kept = drop(torch.ones(100, 100), 3) > 0
    for one, two in ((kept[1:], kept[:-1]), (kept[:, 1:], kept[:, :-1])):
        assert abs(int((one == two).sum()) - 4950) < 5 * 50


@pytest.mark.parametrize("p", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_the_share_that_is_kept(p: float) -> None:
    """Binomial with fixed keys: within 5 standard deviations, and the mean of all is kept."""
    count = 100_000
    kept = drop(torch.ones(count), 11, p)
    deviation = math.sqrt(p * (1 - p) * count)
    assert abs(int((kept == 0).sum()) - p * count) < 5 * deviation
    assert torch.allclose(kept[kept > 0], torch.tensor(1 / (1 - p)))


@pytest.mark.parametrize("function", DROPOUTS[1:], ids=lambda f: f.__name__)
def test_channels_are_dropped_as_a_whole(function: Any) -> None:
    kept = drop(ones(function, 40), 2, function=function).flatten(2)
    assert bool((kept == kept[..., :1]).all())
    assert 0 < int((kept[..., 0] == 0).sum()) < kept[..., 0].numel()
    rows = kept[..., 0]
    assert bool((rows.min(1).values != rows.max(1).values).any())  # channels of one example differ


def test_three_axes_are_batch_channel_length_for_dropout2d() -> None:
    """As in torch: a channel is dropped, never a whole example."""
    kept = drop(torch.ones(40, 5, 7), 2, function=functional.dropout2d)
    assert bool((kept == kept[..., :1]).all())
    assert bool((kept[..., 0].min(1).values != kept[..., 0].max(1).values).any())


@pytest.mark.parametrize("function", DROPOUTS, ids=lambda f: f.__name__)
def test_nothing_and_everything(function: Any) -> None:
    x = ones(function)
    assert torch.equal(drop(x, 1, 0.0, function), x)
    assert torch.equal(drop(x, 1, 1.0, function), 0 * x)


@pytest.mark.parametrize("layer", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_layers_in_training_and_evaluation(layer: Any) -> None:
    x = ones(getattr(functional, layer.__name__.lower()))
    made = layer(0.5)
    with KeyedDropout() as dropout:
        dropout.start(torch.tensor(8))
        assert torch.equal(made.eval()(x), x)
        assert torch.equal(made.train()(x), drop(x, 8, 0.5, getattr(functional, layer.__name__.lower())))


def test_gradients_pass_where_a_number_was_kept() -> None:
    x = torch.ones(50, requires_grad=True)
    y = drop(x, 6)
    torch.autograd.backward(y.sum())
    assert torch.equal(x.grad, y.detach())


def test_outside_of_it_torch_drops_as_usual() -> None:
    with KeyedDropout() as dropout:
        dropout.start(torch.tensor(1))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        one, two = (functional.dropout(torch.ones(100), 0.5, True) for _ in range(2))
    assert not torch.equal(one, two)
