"""How many commits a second the server's loop manages when training costs nothing."""

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
from piebald.client_work import ClientWork
from piebald.contracts import Checkpoint, Result, SumRequest, Task, Update
from piebald.objective import OBJECTIVES
from piebald.parameters import Layout
from piebald.queries import Evaluate
from piebald.report.store import RunStore
from piebald.server import EvaluationPlan, ServerLoop
from piebald.server.model_cache import ModelCache
from piebald.tensor_store import TensorStore


class Trivial:
    """A runtime whose learners answer at once with one and the same change, each after its own delay."""

    def __init__(self, learners: int, change: torch.Tensor) -> None:
        self.learners = range(learners)
        self.update = Update({"model": change}, 10, 1, {"loss": 1.0}, float(change.norm()), nbytes=4 * len(change))
        self.due: list[tuple[float, int, Task]] = []
        self.clock = 0.0

    def submit(self, tasks: Sequence[Task], sum_request: SumRequest | None = None) -> None:
        for one in tasks:
            heapq.heappush(self.due, (self.clock + 1.0 + one.client % 97 / 97, one.id, one))

    def next(self, until: float = float("inf")) -> Result | None:
        self.clock, _, task = heapq.heappop(self.due)
        return Result(task, self.update, self.clock - 1.0, self.clock, 4000, 4000)

    def clients(self) -> Sequence[int]:
        return self.learners

    def now(self) -> float:
        return self.clock

    def state(self) -> Checkpoint:
        return Checkpoint()

    def restore(self, checkpoint: Checkpoint, tasks: Mapping[int, Task]) -> None:
        raise NotImplementedError("this runtime is only timed")

    def close(self) -> None:
        return


class Silent:
    """A recorder that writes nothing down."""

    def commit(self, step: Any, results: Any, checkpoint: Any = None, notes: Any = ()) -> None:
        return

    def scores(self, rows: Any) -> None:
        return


def commits_a_second(recorder: Any, size: int, learners: int, commits: int) -> float:
    """Asynchronous FedAvg with the cache, without evaluation; checkpoints at the end alone."""
    module = nn.Linear(size - 1, 1)  # and one bias
    layout = Layout.of(module, ())
    recipe = recipes.async_fedavg()
    task = OBJECTIVES["regression"]
    work = ClientWork(module, layout, layout.flatten(module), recipe.training, recipe.transforms, task, 0)
    server = ServerLoop(
        recipe,
        Trivial(learners, torch.full((size,), 1e-3)),
        work,
        recorder,
        known=learners,
        rounds=commits,
        evaluation=EvaluationPlan(Evaluate(), every=0),
        checkpoint_every=commits,
    )
    began = time.perf_counter()
    server.run()
    return commits / (time.perf_counter() - began)


def vectors(size: int, learners: int, commits: int) -> float:
    """Seconds of the operations on vectors that a commit needs: whatever the loop does, it does these."""
    cache, out = ModelCache(size, TensorStore()), torch.empty(size)
    sent, change = torch.ones(size), torch.full((size,), 1e-3)
    for learner in range(learners):
        cache.swap(learner, 1.0, sent, out)
    began = time.perf_counter()
    for turn in range(commits):
        torch.linalg.vector_norm(change).item()  # is it sound?
        cache.swap(turn % learners, 1.0, sent + change, out)
        torch.linalg.vector_norm(out).item()  # how long may the next change be?
    return (time.perf_counter() - began) / commits


def measure(size: int, learners: int, commits: int, repeats: int) -> dict[str, float]:
    """Medians, in turn: commits a second without writing anything down and with a run folder, seconds of vectors."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"nothing written": [], "run folder": [], "vectors": []}
    for _ in range(repeats):
        found["vectors"].append(vectors(size, learners, commits))
        found["nothing written"].append(commits_a_second(Silent(), size, learners, commits))
        with TemporaryDirectory() as folder, RunStore.create(Path(folder) / "run", {}) as store:
            found["run folder"].append(commits_a_second(store, size, learners, commits))
    return {name: statistics.median(rates) for name, rates in found.items()}
