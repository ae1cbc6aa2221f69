"""Server steps per second of the server's loop when training costs nothing."""

from __future__ import annotations

import heapq
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from piebald import recipes
from piebald.contracts import Checkpoint, Result, SumRequest, Task, Update
from piebald.core.objective import OBJECTIVES
from piebald.core.parameters import Layout
from piebald.core.tensor_store import TensorStore
from piebald.methods.client_work import ClientWork
from piebald.methods.queries import Evaluate
from piebald.server import EvaluationPlan, ServerLoop
from piebald.server.cluster_state import ModelCache
from piebald.storage.store import RunStore


class Trivial:
    """A runtime whose clients all return the same change, each after its own virtual delay."""

    def __init__(self, count: int, change: torch.Tensor) -> None:
        self.numbers = range(count)
        self.update = Update({"model": change}, 10, 1, {"loss": 1.0}, float(change.norm()), nbytes=4 * len(change))
        self.due: list[tuple[float, int, Task]] = []
        self.clock = 0.0

    def submit(self, tasks: Sequence[Task], sum_request: SumRequest | None = None) -> None:
        for task in tasks:
            heapq.heappush(self.due, (self.clock + 1.0 + task.client % 97 / 97, task.id, task))

    def next(self, until: float = float("inf")) -> Result | None:
        self.clock, _, task = heapq.heappop(self.due)
        return Result(task, self.update, self.clock - 1.0, self.clock, 4000, 4000)

    def clients(self) -> Sequence[int]:
        return self.numbers

    def now(self) -> float:
        return self.clock

    def state(self) -> Checkpoint:
        return Checkpoint()

    def restore(self, checkpoint: Checkpoint, tasks: Mapping[int, Task]) -> None:
        raise NotImplementedError("this runtime is only timed")

    def close(self) -> None:
        return


class Silent:
    """A recorder that records nothing."""

    lasts = False

    def confusion(self, rows: Any) -> None:
        return

    def commit(self, step: Any, results: Any, checkpoint: Any = None, notes: Any = ()) -> None:
        return

    def scores(self, rows: Any) -> None:
        return


def steps_per_second(recorder: Any, size: int, clients: int, steps: int) -> float:
    """Run asynchronous FedAvg with the cache, without evaluation and with one checkpoint at the end."""
    module = nn.Linear(size - 1, 1)  # and one bias
    layout = Layout.of(module, ())
    recipe = recipes.async_fedavg()
    work = ClientWork(
        model=module,
        layout=layout,
        initial=layout.flatten(module),
        objective=OBJECTIVES["regression"],
        seed=0,
        shape=(size - 1,),
        outputs=(1,),
        trainer=recipe.training,
        transforms=recipe.transforms,
    )
    server = ServerLoop(
        recipe,
        Trivial(clients, torch.full((size,), 1e-3)),
        work,
        recorder,
        known=clients,
        rounds=steps,
        evaluation=EvaluationPlan(Evaluate(), every=0),
        checkpoint_every=steps,
    )
    began = time.perf_counter()
    server.run()
    return steps / (time.perf_counter() - began)


def vectors(size: int, clients: int, steps: int) -> float:
    """Return the seconds per server step of the operations on vectors, which every loop needs."""
    cache, out = ModelCache(size, TensorStore()), torch.empty(size)
    sent, change = torch.ones(size), torch.full((size,), 1e-3)
    for client in range(clients):
        cache.swap(client, 1.0, sent, out)
    began = time.perf_counter()
    for turn in range(steps):
        torch.linalg.vector_norm(change).item()  # the check of the result
        cache.swap(turn % clients, 1.0, sent + change, out)
        torch.linalg.vector_norm(out).item()  # the limit for the next change
    return (time.perf_counter() - began) / steps


def measure(size: int, clients: int, steps: int, repeats: int) -> dict[str, float]:
    """Return medians of alternating runs: steps per second without and with a run folder, and seconds of vectors."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"no run folder": [], "run folder": [], "vectors": []}
    for _ in range(repeats):
        found["vectors"].append(vectors(size, clients, steps))
        found["no run folder"].append(steps_per_second(Silent(), size, clients, steps))
        with TemporaryDirectory() as folder, RunStore.create(Path(folder) / "run", {}) as store:
            found["run folder"].append(steps_per_second(store, size, clients, steps))
    return {name: statistics.median(rates) for name, rates in found.items()}
