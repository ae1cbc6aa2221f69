"""What holds for every transform of updates, and for those that pack them."""

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
    """
    check_component(transform)
    if not isinstance(transform, MaskingTransform):
        _check_alone(transform)
    if isinstance(transform, Compressor):
        _check_packing(transform)
    if recipe:
        check_runs(in_fedavg(transforms=(transform,)), **options)


def _check_alone(transform: Transform) -> None:
    what = f"transforms {transform.kind!r}"
    draw = torch.Generator().manual_seed(0)
    vectors = {"model": torch.randn(3, 50, generator=draw)}
    before = {name: vector.clone() for name, vector in vectors.items()}
    keys, clients = [11, 12, 13], [0, 1, 2]
    made = transform.on_client(vectors, keys, clients)
    assert torch.equal(vectors["model"], before["model"]), f"{what}: it changes the vectors that it gets"
    assert set(made) == {"model"}, f"{what}: it must keep the names of vectors, got {sorted(made)}"
    assert made["model"].shape == (3, 50), f"{what}: it must keep the shape [3, 50], got {list(made['model'].shape)}"
    assert made["model"].dtype == torch.float32, f"{what}: it must keep float32, got {made['model'].dtype}"
    assert bool(made["model"].isfinite().all()), f"{what}: it makes finite numbers infinite"
    again = transform.on_client(vectors, keys, clients)
    assert torch.equal(made["model"], again["model"]), f"{what}: it must draw from the keys alone, so that runs repeat"
    for row in range(3):
        alone = transform.on_client(
            {"model": vectors["model"][row : row + 1]}, keys[row : row + 1], clients[row : row + 1]
        )
        torch.testing.assert_close(
            alone["model"][0],
            made["model"][row],
            msg=f"{what}: what it makes of a client's update depends on the other clients in the stack",
        )
    assert transform.nbytes({"model": torch.zeros(50)}) > 0, (
        f"{what}: nbytes must be the bytes of an update on the wire"
    )


def _check_packing(compressor: Compressor) -> None:
    what, model = f"transforms {compressor.kind!r}", nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    layout, draw = Layout.of(model, ["2.bias"]), torch.Generator().manual_seed(0)
    spec = ModelSpec(model, layout, layout.flatten(model), OBJECTIVES["classification"], 1, (6,), (3,))
    state, context = compressor.initial_state(spec), WireContext(layout, 1, 2, 3)
    for version in range(3):
        change = torch.randn(layout.shared, generator=draw)
        context = WireContext(layout, 1, 2, version)
        before = {name: tensor.clone() for name, tensor in [*state.items(), ("change", change)]}
        made, again = (compressor.compress(change, state, context) for _ in range(2))
        assert torch.equal(made.packed, again.packed), (
            f"{what}: it must draw from the context alone, so that runs repeat"
        )
        same = all(torch.equal(tensor, before[name]) for name, tensor in [*state.items(), ("change", change)])
        assert same, f"{what}: it changes the tensors that it gets"
        received = compressor.decompress(made.packed, context)
        assert torch.equal(received, made.change), f"{what}: the server unpacks another change than the client packed"
        assert set(made.state) == set(state), f"{what}: it must return the state that it began with, {sorted(state)}"
        state = dict(made.state)
    whole = made.packed
    garbage = torch.randint(256, (len(whole),), generator=draw, dtype=torch.uint8)
    for body in (whole[:0], whole[:-1], torch.cat([whole, whole]), torch.zeros(1 << 20, dtype=torch.uint8), garbage):
        try:
            got = compressor.decompress(body, context)
        except ValueError:
            continue
        assert len(body) == len(whole), f"{what}: it takes bytes that it did not pack"
        assert got.shape == (layout.shared,), f"{what}: it unpacks another shape than [s]"
