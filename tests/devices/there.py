"""The device that the tests of this folder compute on: a pretended GPU, or what PIEBALD_TEST_DEVICE names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import piebald
from piebald.finished_run import Run
from piebald.machine import device_named
from piebald.partition import Lists, PooledClients
from piebald.recipe import Recipe
from tests.contract.conftest import HERE, federation, fitting, vector
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


def carry_out(recipe: Recipe, device: torch.device | str = "cpu", clients: Any = None, **simulator: Any) -> Run:
    """A short run, by the engine that is named."""
    where = piebald.Simulator(**HERE | simulator).model_copy(update={"device": str(device)})
    return piebald.run(recipe, clients or federation(), fitting(recipe), rounds=2, seed=1, runtime=where)


def assert_as_on_the_cpu(run: Run, expected: Run, exact: bool = True) -> None:
    """The same bits on the pretended device if `exact`, the same numbers but for rounding on another."""
    exact = exact and NAME == "pretended"
    close = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(vector(run), vector(expected), **close)
    for row, other in zip(run.rounds, expected.rounds, strict=True):
        assert row["loss"] == (other["loss"] if exact else pytest.approx(other["loss"], rel=1e-3))


def equal_clients(count: int, rows: int = 20) -> PooledClients:
    """So many clients with equally many rows, who can share every pass."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.rand(count * rows, 6, generator=draw), torch.randint(0, 4, (count * rows,), generator=draw)
    lists = Lists(np.arange(count * rows), np.arange(0, count * rows + 1, rows))
    return PooledClients(x, y, {"train": lists, "test": lists, "validation": lists}, classes=list("abcd"))  # type: ignore[arg-type]
