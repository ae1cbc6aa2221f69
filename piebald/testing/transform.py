"""The contract test of transforms of updates, and of those that pack them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from piebald.contracts.model_spec import ModelSpec
from piebald.core.objective import OBJECTIVES
from piebald.core.parameters import Layout
from piebald.methods.transforms.base import MaskingTransform, Transform
from piebald.methods.transforms.compression import Compressor, WireContext
from piebald.testing.component import check_component, promises
from piebald.testing.recipe import check_runs, in_fedavg


@promises(Transform, "a transform")
def check_transform(transform: Transform, *, recipe: bool = True, **options: Any) -> None:
    """Check that a transform treats clients one by one, repeats, and keeps names, shapes and what it gets.

    One that packs updates (`transforms.Compressor`) is also given bytes of others to unpack: it must make the change
    that its sender counts with from its own, and refuse those that are cut off, longer, or at random.

    In FedAvg: see `check_recipe`, which takes the options.

    Args:
        transform: the transform.
        recipe: whether to check it in FedAvg as well.
        options: those of `check_recipe`.

    Raises:
        AssertionError: it breaks one of these promises.

    Examples:
        >>> from piebald.methods.transforms import Gaussian
        >>> check_transform(Gaussian(clip=1.0, noise=0.5), recipe=False)
    """
    check_component(transform)
    if not isinstance(transform, MaskingTransform):
        _check_alone(transform)
    if isinstance(transform, Compressor):
        _check_packing(transform)
    if recipe:
        check_runs(in_fedavg(transforms=(transform,)), **options)


def _check_alone(transform: Transform) -> None:
    subject = f"transforms {transform.kind!r}"
    draw = torch.Generator().manual_seed(0)
    vectors = {"model": torch.randn(3, 50, generator=draw)}
    before = {name: vector.clone() for name, vector in vectors.items()}
    keys, clients = [11, 12, 13], [0, 1, 2]
    changed = transform.on_client(vectors, keys, clients)
    assert torch.equal(vectors["model"], before["model"]), f"{subject}: it changes the vectors that it gets"
    assert set(changed) == {"model"}, f"{subject}: it must keep the names of vectors, got {sorted(changed)}"
    assert changed["model"].shape == (3, 50), (
        f"{subject}: it must keep the shape [3, 50], got {list(changed['model'].shape)}"
    )
    assert changed["model"].dtype == torch.float32, f"{subject}: it must keep float32, got {changed['model'].dtype}"
    assert bool(changed["model"].isfinite().all()), f"{subject}: it makes finite numbers infinite"
    again = transform.on_client(vectors, keys, clients)
    assert torch.equal(changed["model"], again["model"]), (
        f"{subject}: it must draw from the keys alone, so that runs repeat"
    )
    for row in range(3):
        alone = transform.on_client(
            {"model": vectors["model"][row : row + 1]}, keys[row : row + 1], clients[row : row + 1]
        )
        torch.testing.assert_close(
            alone["model"][0],
            changed["model"][row],
            msg=f"{subject}: what it makes of a client's update depends on the other clients in the stack",
        )
    assert transform.nbytes({"model": torch.zeros(50)}) > 0, (
        f"{subject}: nbytes must be the bytes of an update on the wire"
    )


def _check_packing(compressor: Compressor) -> None:
    subject, model = (
        f"transforms {compressor.kind!r}",
        nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)),
    )
    layout, draw = Layout.of(model, ["2.bias"]), torch.Generator().manual_seed(0)
    spec = ModelSpec(model, layout, layout.flatten(model), OBJECTIVES["classification"], 1, (6,), (3,))
    state, context = compressor.initial_state(spec), WireContext(layout, 1, 2, 3)
    for version in range(3):
        change = torch.randn(layout.shared, generator=draw)
        context = WireContext(layout, 1, 2, version)
        before = {name: tensor.clone() for name, tensor in [*state.items(), ("change", change)]}
        compressed, again = (compressor.compress(change, state, context) for _ in range(2))
        assert torch.equal(compressed.packed, again.packed), (
            f"{subject}: it must draw from the context alone, so that runs repeat"
        )
        same = all(torch.equal(tensor, before[name]) for name, tensor in [*state.items(), ("change", change)])
        assert same, f"{subject}: it changes the tensors that it gets"
        received = compressor.decompress(compressed.packed, context)
        assert torch.equal(received, compressed.change), (
            f"{subject}: the server unpacks another change than the client packed"
        )
        assert set(compressed.state) == set(state), (
            f"{subject}: it must return the state that it began with, {sorted(state)}"
        )
        state = dict(compressed.state)
    whole = compressed.packed
    garbage = torch.randint(256, (len(whole),), generator=draw, dtype=torch.uint8)
    for body in (whole[:0], whole[:-1], torch.cat([whole, whole]), torch.zeros(1 << 20, dtype=torch.uint8), garbage):
        try:
            got = compressor.decompress(body, context)
        except ValueError:
            continue
        assert len(body) == len(whole), f"{subject}: it takes bytes that it did not pack"
        assert got.shape == (layout.shared,), f"{subject}: it unpacks another shape than [s]"
