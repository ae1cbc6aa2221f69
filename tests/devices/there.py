"""The device that the tests of this folder compute on: a pretended GPU, or what PIEBALD_TEST_DEVICE names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import piebald
from piebald.core.machine import device_named
from piebald.data.partition import Lists, PooledClients
from piebald.methods.recipe import Recipe
from piebald.runs.finished_run import Run
from piebald.testing.components import mixing_network, narrowable_network
from tests.contract.conftest import HERE, federation, fitting, plain_network, vector
from tests.devices.pretended import DEVICE as PRETENDED
from tests.devices.pretended import pretended

NAME = os.environ.get("PIEBALD_TEST_DEVICE", "pretended")
ENGINES = ("sequential", "vmapped", "batched")


@contextlib.contextmanager
def there() -> Iterator[torch.device]:
    """The device, which exists within the context."""
    if NAME == "pretended":
        with pretended():
            yield PRETENDED
    else:
        yield torch.device(device_named(NAME))  # an error where there is none, so that nothing passes unseen


def carry_out(
    recipe: Recipe, device: torch.device | str = "cpu", clients: Any = None, model: Any = None, **simulator: Any
) -> Run:
    """A short run, by the engine that is named."""
    where = piebald.Simulator(**HERE | simulator).model_copy(update={"device": str(device)})
    model = model or fitted(recipe, where.engine)
    return piebald.run(recipe, clients or federation(), model, rounds=2, seed=1, runtime=where)


def fitted(recipe: Recipe, engine: str) -> Callable[[int], nn.Module]:
    """A network that is hard on engines; for the batched one it has no layer that falls back to vmap."""
    hardest = fitting(recipe)
    if engine != "batched" or hardest is not mixing_network:
        return hardest
    named = f"{recipe.sharing!r} {recipe.clustering.kind}"
    if "conditioning" in named:
        return hardest
    return narrowable_network if any(one in named for one in ("norm", "running", "distfl")) else plain_network


def assert_as_on_the_cpu(run: Run, expected: Run, apart: float = 0.0) -> None:
    """The same bits on the pretended device, or numbers that are so far apart; on a real one that rounds otherwise."""
    close = {"atol": apart, "rtol": 10 * apart} if NAME == "pretended" else {"atol": apart + 1e-4, "rtol": 1e-3}
    torch.testing.assert_close(vector(run), vector(expected), **close)
    for row, other in zip(run.rounds, expected.rounds, strict=True):
        near = close["rtol"] and other["loss"] is not None  # it is not told where rows are hidden
        assert row["loss"] == (pytest.approx(other["loss"], rel=close["rtol"]) if near else other["loss"])


def equal_clients(count: int, rows: int = 20, **more: Any) -> PooledClients:
    """So many clients with equally many rows, who can share every pass."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.rand(count * rows, 6, generator=draw), torch.randint(0, 4, (count * rows,), generator=draw)
    lists = Lists(np.arange(count * rows), np.arange(0, count * rows + 1, rows))
    splits: Any = {"train": lists, "test": lists, "validation": lists}
    return PooledClients(x, y, splits, classes=list("abcd"), public_rows=np.arange(9), **more)
