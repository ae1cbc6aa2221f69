"""Helpers of the core tests: a fake runtime, a recorder that keeps everything in memory, and tiny federations."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor, nn

import piebald
from piebald.contracts import (
    Checkpoint,
    ClientSecrets,
    Cohort,
    KeyAgreement,
    Result,
    Rows,
    ServerContext,
    SumRequest,
    Task,
    Update,
)
from piebald.contracts.data import ModelSpec
from piebald.core.objective import OBJECTIVES
from piebald.core.parameters import Layout
from piebald.data.partition import Lists, PooledClients
from piebald.methods.aggregation.base import Aggregator
from piebald.methods.client_work import ClientWork
from piebald.methods.clustering.base import Clustering
from piebald.methods.queries import Evaluate
from piebald.methods.recipe import Recipe
from piebald.methods.training import Sgd
from piebald.methods.training.base import Trainer
from piebald.methods.transforms.base import MaskingTransform, Transform
from piebald.server import EvaluationPlan, ResultChecks, ServerLoop

# Hypothesis draws the same examples in every run and never fails because a machine is busy.
few = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

Answer = Callable[[Task], Update | None]


class FakeRuntime:
    """Answers by a function after a delay; results in order of time, then of id.  It never sums updates early."""

    def __init__(self, count: int, answer: Answer, delay: Callable[[Task], float] = lambda _: 0.0) -> None:
        self.count, self.answer, self.delay = count, answer, delay
        self.sent: list[Task] = []
        self._due: list[tuple[float, int, float, Task]] = []
        self._now = 0.0

    def submit(self, tasks: Sequence[Task], sum_request: SumRequest | None = None) -> None:
        for task in tasks:
            self.sent.append(task)
            time = self._now + (0.0 if task.free else self.delay(task))
            heapq.heappush(self._due, (time, task.id, self._now, task))

    def next(self, until: float = float("inf")) -> Result | None:
        if not self._due or self._due[0][0] > until:
            self._now = self._now if until == float("inf") else max(self._now, until)
            return None
        time, _, sent, task = heapq.heappop(self._due)
        self._now = max(self._now, time)
        update = self.answer(task)
        return Result(task, update, sent, time, failure="lost" if update is None else None)

    def clients(self) -> Sequence[int]:
        return range(self.count)

    def now(self) -> float:
        return self._now

    def state(self) -> Checkpoint:
        return Checkpoint({}, {"due": [[time, id, sent] for time, id, sent, _ in self._due], "now": self._now})

    def restore(self, checkpoint: Checkpoint, tasks: Mapping[int, Task]) -> None:
        self._now = checkpoint.values["now"]
        self._due = [(time, id, sent, tasks[id]) for time, id, sent in checkpoint.values["due"]]
        heapq.heapify(self._due)

    def close(self) -> None:
        return


class MemoryRecorder:
    """A recorder that keeps everything in lists."""

    lasts = True

    def __init__(self) -> None:
        self.steps: list[Mapping[str, Any]] = []
        self.rows: list[Mapping[str, Any]] = []
        self.checkpoints: list[Checkpoint | None] = []
        self.measured: list[Mapping[str, Any]] = []
        self.notes: list[Mapping[str, Any]] = []
        self.counted: list[Mapping[str, Any]] = []
        self.single: list[Mapping[str, Any]] = []
        self.failed: list[Mapping[str, Any]] = []

    def commit(
        self,
        step: Mapping[str, Any],
        results: Sequence[Mapping[str, Any]],
        checkpoint: Any = None,
        notes: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.steps.append(step)
        self.rows += results
        self.notes += notes
        self.checkpoints.append(checkpoint)

    def scores(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.measured += rows

    def confusion(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.counted += rows

    def row_scores(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.single += rows

    def failures(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.failed += rows


class ByParity(Clustering):
    """Even clients in cluster 0, odd ones in cluster 1."""

    def assign(self, cohort: Cohort, known: Mapping[int, int], context: ServerContext) -> list[int]:
        return [client % 2 for client in cohort.clients]


class FakeMasking(MaskingTransform):
    """A stand-in for secure aggregation that nobody runs: the server sees no individual update."""

    def agree_keys(self, clients: Sequence[int], context: ServerContext) -> KeyAgreement:
        raise NotImplementedError

    def mask(self, update: Update, task: Task, secrets: ClientSecrets) -> Update:
        raise NotImplementedError

    def masked_reject_reason(self, update: Update, spec: ModelSpec) -> str | None:
        raise NotImplementedError


class FirstUpdate(Aggregator):
    """A stand-in for Krum: it takes the first update as it is."""

    def aggregate(self, cohort: Cohort, context: ServerContext) -> tuple[Tensor, list[float]]:
        assert cohort.matrix is not None
        return cohort.matrix[0], [1.0] + [0.0] * (len(cohort.updates) - 1)


def parameters(count: int = 3) -> nn.Module:
    """A model of `count` plain numbers, all zero."""
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(count))
    return model


def client_work(
    module: nn.Module,
    trainer: Trainer,
    transforms: tuple[Transform, ...] = (),
    *,
    private: Sequence[str] = (),
    seed: int = 0,
) -> ClientWork:
    """The work of clients with a classification model."""
    layout = Layout.of(module, private)
    return ClientWork(
        model=module,
        layout=layout,
        initial=layout.flatten(module),
        objective=OBJECTIVES["classification"],
        seed=seed,
        shape=(),
        outputs=(),
        trainer=trainer,
        transforms=transforms,
    )


def make_server(
    recipe: Recipe,
    runtime: FakeRuntime,
    *,
    model: nn.Module | None = None,
    rounds: int = 3,
    every: int = 0,
    seed: int = 0,
    private: Sequence[str] = (),
    secret: bool = False,
    check: ResultChecks | None = None,
) -> tuple[ServerLoop, MemoryRecorder]:
    """A server loop over a fake runtime, not yet run."""
    module = model or parameters()
    work = client_work(module, recipe.training, recipe.transforms, private=private, seed=seed)
    recorder = MemoryRecorder()
    made = ServerLoop(
        recipe,
        runtime,
        work,
        recorder,
        known=runtime.count,
        rounds=rounds,
        evaluation=EvaluationPlan(Evaluate(), every=every),
        secret=secret,
        check=check,
    )
    return made, recorder


def update(*numbers: float, examples: int = 1, **vectors: Tensor) -> Update:
    """An update whose change of the model is these numbers."""
    change = torch.tensor(numbers, dtype=torch.float32)
    norm = float(torch.linalg.vector_norm(change))
    return Update({"model": change, **vectors}, examples, 1, {"loss": 1.0}, norm, nbytes=4 * len(numbers))


def federation(*clients: tuple[Any, Any], classes: Sequence[str] | None = None) -> PooledClients:
    """Clients from (x, y) pairs, each for training and again for testing."""
    sizes = np.cumsum([0, *(len(x) for x, _ in clients)])
    lists = Lists(np.arange(sizes[-1]), sizes)
    x = torch.cat([torch.as_tensor(x) for x, _ in clients])
    y = torch.cat([torch.as_tensor(y) for _, y in clients])
    common = Rows(x[:0], y[:0])
    return PooledClients(x, y, {"train": lists, "test": lists}, classes=classes, common=common)


def classified(*sizes: int, features: int = 4, seed: int = 0) -> PooledClients:
    """Clients of these sizes with two classes that a linear model can separate."""
    draw = np.random.default_rng(seed)
    pairs = []
    for size in sizes:
        y = np.arange(size) % 2
        x = draw.normal(size=(size, features)) + y[:, None]
        pairs.append((x.astype(np.float32), y.astype(np.int64)))
    return federation(*pairs, classes=["no", "yes"])


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A module initialised from a seed, with the global random state left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def simulate(recipe: Recipe | str, clients: Any, model: nn.Module, **options: Any) -> piebald.Run:
    """A run in this process, on the sequential engine unless `simulator` says otherwise."""
    where = {"engine": "sequential", "workers": 0} | options.pop("simulator", {})
    return piebald.run(recipe, clients, model, runtime=piebald.Simulator(**where), **{"rounds": 2} | options)


SGD = Sgd(lr=0.1)
