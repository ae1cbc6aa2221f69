"""What holds for every transform of updates."""

from __future__ import annotations

from typing import Any

import torch

from piebald.testing.component import check_component
from piebald.testing.recipe import check_recipe, in_fedavg
from piebald.transforms.base import MaskingTransform, Transform


def check_transform(transform: Transform, *, recipe: bool = True, **options: Any) -> None:
    """Check that a transform treats clients one by one, repeats, and keeps names, shapes and what it gets.

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
    if recipe:
        check_recipe(in_fedavg(transforms=(transform,)), **options)


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
