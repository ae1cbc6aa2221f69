"""Loading rows ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import piebald
from piebald import recipes
from piebald.models import build_model


def rows(client: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(client)
    return draw.normal(size=(12, 5)).astype(np.float32), np.arange(12) % 3


class Watched:
    """A loader that records which threads called it, and whether two did at once."""

    def __init__(self, only: threading.Thread | None = None) -> None:
        self.only, self.callers, self.concurrent = only, set[threading.Thread](), False
        self._inside = threading.Semaphore(1)

    def __call__(self, client: int) -> tuple[Any, Any]:
        here = threading.current_thread()
        if self.only not in (None, here):
            raise RuntimeError("this was opened by another thread")
        self.callers.add(here)
        alone = self._inside.acquire(blocking=False)
        self.concurrent |= not alone
        try:
            return rows(client)
        finally:
            if alone:
                self._inside.release()


def trained(load: Callable[[int], Any], workers: int = 0) -> torch.Tensor:
    clients = piebald.LazyClients(7, load, classes=["a", "b", "c"], cache=1)
    where = piebald.Simulator(engine="sequential", stack=2, workers=workers)
    recipe = recipes.fedavg(epochs=1, batch=4)
    model = build_model("mlp", (5,), 3, seed=0, hidden=(4,))
    run = piebald.run(recipe, clients, model, rounds=2, evaluate_every=0, runtime=where)
    return run.work.layout.flatten(run.model())


def test_the_next_stacks_rows_are_loaded_by_one_other_thread_with_the_same_result() -> None:
    load = Watched()
    found = trained(load)
    assert len(load.callers) == 2
    assert threading.main_thread() in load.callers
    assert not load.concurrent
    assert torch.allclose(found, trained(rows, workers=2), atol=1e-6)


def test_a_loader_bound_to_its_thread_is_called_there() -> None:
    load = Watched(only=threading.main_thread())
    assert torch.equal(trained(load), trained(rows))


def test_an_error_while_loading_ahead_leaves_out_the_client(caplog: pytest.LogCaptureFixture) -> None:
    def load(client: int) -> tuple[Any, Any]:
        if client == 5:
            raise OSError("the disk is gone")
        return rows(client)

    trained(load)
    assert "client '5', round 1, training: OSError at the client: the disk is gone" in caplog.text
