"""Where single rows are hidden, no row can make itself known but through the noise: by numbers that are not finite, by
an error at it, by a buffer that it moves, or by what goes along with an update.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from piebald import recipes
from piebald.contracts import Task
from piebald.engines.row_gradients import RowGradients
from piebald.experiments.file import ExperimentSettings
from piebald.experiments.run_settings import RunSettings
from piebald.federation.hub.run_terms import terms
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_process import site_work
from piebald.federation.site.task_runner import TaskRunner
from piebald.methods.transforms import Gaussian
from piebald.privacy.secure_aggregation.server_side import counted_rows
from piebald.runs.prepare import prepare
from tests.fakes import classified, federation, seeded, simulate
from tests.federation.conftest import provisioned

SIZES, FEATURES = (11, 4), 4
FULL = pytest.mark.full
ENGINES = [pytest.param("reference", 1, marks=FULL), ("sequential", 1), ("vmapped", 2)]
# of which the gradient is not finite, or its length
EXTREMES = [
    np.nan,
    1e25,
    pytest.param(np.inf, marks=FULL),
    pytest.param(3e38, marks=FULL),
]


def linear() -> nn.Module:
    return nn.Linear(FEATURES, 2)


class Recurrent(nn.Module):
    """A network whose rows vmap cannot take at once."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.classifier = nn.LSTM(FEATURES, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.cell(x.unsqueeze(1))[0][:, -1]) * x.mean(1, keepdim=True)
        return logits


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout(0.5))
        self.classifier = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.layers(x))
        return logits


class Words(nn.Module):
    """Token numbers, of which those beyond the vocabulary are an error of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.classifier = nn.Embedding(10, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.table(x).mean(1))
        return logits


class Picky(nn.Linear):
    """A model that refuses rows of a kind."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        if not torch._C._functorch.is_batchedtensor(x) and bool((x > 50).any()):
            raise ValueError("a value above 50")
        return super().forward(x)


def clients_with(canary: Any, at: int = -1, *, dtype: Any = np.float32) -> Any:
    """Two clients with a canary among their rows, at this place; without it for None."""
    draw, pairs = np.random.default_rng(3), []
    for count in SIZES:
        x, y = draw.normal(size=(count, FEATURES)), draw.integers(0, 2, count)
        x = draw.integers(0, 10, (count, FEATURES)) if dtype is np.int64 else x
        if canary is not None:
            place = count if at == -1 else at
            x, y = np.insert(x.astype(dtype), place, canary, axis=0), np.insert(y, place, 1)
        pairs.append((x.astype(dtype), y))
    return federation(*pairs, classes=["a", "b"])


def trained(clients: Any, model: nn.Module, engine: str = "sequential", stack: int = 1, **settings: Any) -> Any:
    recipe = recipes.dp_sgd(**{"lr": 1.0, "steps": 1, "batch": 50, "clip": 0.7, "noise": 0.0} | settings)
    options = {"measure": "none", "evaluate_every": 0}
    return simulate(recipe, clients, model, rounds=1, simulator={"engine": engine, "stack": stack}, **options)


def summed(run: Any, extra: int) -> Tensor:
    """The sum of all clients' clipped gradients in one step, from the mean over so many rows."""
    change: Tensor = run.work.layout.flatten(run.model()) - run.work.initial
    return change * (sum(SIZES) + extra * len(SIZES))


def statuses(run: Any) -> list[str]:
    return [row["status"] for row in run.results if row["kind"] == "train"]


@pytest.mark.parametrize(("engine", "stack"), ENGINES)
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize(("build", "at"), [(linear, 0), (linear, -1), (Recurrent, 0), (Dropping, -1)])
def test_a_row_whose_gradient_is_not_finite_counts_as_zero(
    build: Callable[[], nn.Module], at: int, extreme: float, engine: str, stack: int
) -> None:
    """All other rows move the model as they do without it, also where the row fills up the batches of a stack."""
    with_it = trained(clients_with(extreme, at), seeded(build), engine, stack)
    without = trained(clients_with(None), seeded(build), engine, stack)
    assert statuses(with_it) == ["ok", "ok"]
    torch.testing.assert_close(summed(with_it, 1), summed(without, 0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("engine", "stack"), ENGINES)
def test_a_row_at_which_the_model_raises_an_error_counts_as_zero(engine: str, stack: int) -> None:
    for build, canary, dtype in ((Words, 10, np.int64), (Words, -1, np.int64), (Picky, 60.0, np.float32)):
        with_it = trained(clients_with(canary, dtype=dtype), seeded(build), engine, stack)
        without = trained(clients_with(None, dtype=dtype), seeded(build), engine, stack)
        assert statuses(with_it) == ["ok", "ok"]
        torch.testing.assert_close(summed(with_it, 1), summed(without, 0), atol=1e-5, rtol=1e-4)


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulated": {"batch": 4, "accumulate": 3},
    "16 bits": {"precision": "bfloat16"},
    "Adam": {"optimizer": "adam", "optimizer_state": "kept"},
    "momentum": {"momentum": 0.9, "keep_momentum": True},
    "proximal, with decay": {"mu": 0.3, "weight_decay": 0.1},
    "empty samples": {"batch": 1, "steps": 40},
    "checkpointed": {"checkpointing": ["classifier"]},
}


@pytest.mark.full
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("extreme", [np.inf, *(pytest.param(one, marks=FULL) for one in (np.nan, 3e38, 1e25))])
def test_training_succeeds_whatever_is_in_a_row(settings: dict[str, Any], extreme: float) -> None:
    recipe = recipes.dp_sgd(**{"lr": 0.1, "steps": 3, "batch": 50, "noise": 1.0} | settings)
    run = simulate(recipe, clients_with(extreme), seeded(Dropping), rounds=3, measure="none")
    assert statuses(run) == ["ok"] * 6
    assert all(row["loss"] is None for row in run.results)
    assert bool(run.work.layout.flatten(run.model()).isfinite().all())


@pytest.mark.parametrize("target", [np.nan, 3e38])
def test_targets_and_losses_that_are_not_finite_count_as_zero(target: float) -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(6, FEATURES)).astype(np.float32), draw.normal(size=6).astype(np.float32)
    model = seeded(lambda: nn.Linear(FEATURES, 1))
    recipe = recipes.dp_sgd(lr=1.0, steps=1, batch=50, noise=0.0)
    ends = []
    for targets in (np.append(y[:5], target), y[:5]):
        run = simulate(recipe, federation((x[: len(targets)], targets.astype(np.float32))), model, rounds=1)
        assert statuses(run) == ["ok"]
        ends.append((run.work.layout.flatten(run.model()) - run.work.initial) * len(targets))
    torch.testing.assert_close(ends[0], ends[1], atol=1e-5, rtol=1e-4)


class Remembering(nn.Module):
    """A linear model that keeps sums of its inputs in buffers, one of them private to Python, and goes by them."""

    total: Tensor
    count: Tensor
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(FEATURES, 2)
        self.register_buffer("total", torch.zeros(FEATURES))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(x + self.total + self.hidden)
        if self.training:
            self.total += x.detach().sum(0)
            self.hidden = self.hidden + x.detach().sum()
            self.count += len(x)
        return logits


class Noting(nn.Module):
    """A linear model that keeps sums of its inputs in attributes of Python, in each way, and goes by them."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier, self.number, self.tensor, self.array = nn.Linear(FEATURES, 2), 0.0, torch.zeros(1), np.zeros(1)
        self.listed, self.table, self.elsewhere = [0.0], {"sum": {"all": 0.0}}, Notes()

    def forward(self, x: Tensor) -> Tensor:
        known = self.number + self.array[0] + self.listed[-1] + self.table["sum"]["all"] + self.elsewhere.number
        logits: Tensor = self.classifier(x + self.tensor + float(known))
        if self.training:
            here = x.detach().sum()
            self.tensor += here
            self.number += float(here)
            self.array += float(here)
            self.listed.append(self.number)
            self.table["sum"]["all"] += self.number
            self.elsewhere.number += self.number
            self.classifier.seen = getattr(self.classifier, "seen", 0.0) + self.number  # type: ignore[assignment]
        return logits


class Notes:
    number = 0.0


class Rebinding(nn.Linear):
    """A model that vmap can run, and that would keep its tensors."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 2)
        self.mean = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x + self.mean)
        self.mean = 0.5 * self.mean + x.detach().mean()
        return logits


def state_of(model: Any) -> list[float]:
    if isinstance(model, Remembering):
        return [*model.total.tolist(), float(model.hidden), float(model.count)]
    if isinstance(model, Rebinding):
        return [float(model.mean)]
    held = [model.number, float(model.tensor), float(model.array[0]), model.table["sum"]["all"], model.elsewhere.number]
    return [*held, *model.listed, getattr(model.classifier, "seen", 0.0)]


@pytest.mark.parametrize(("engine", "stack"), ENGINES)
@pytest.mark.parametrize("build", [Remembering, Noting, Rebinding])
def test_no_state_that_rows_move_leaves_or_moves_another_rows_gradient(
    build: Callable[[], nn.Module], engine: str, stack: int
) -> None:
    moved = {}
    for canary in (np.full(FEATURES, 30.0), np.full(FEATURES, 0.0)):
        run = trained(clients_with(canary, at=0), seeded(build), engine, stack, noise=1e-3, steps=2)
        assert not any(state_of(run.model()))
        moved[canary[0]] = summed(run, 1)
    # two steps at two clients, and a row at each whose clipped gradient is another one
    assert float((moved[30.0] - moved[0.0]).norm()) <= 2 * 2 * 2 * 0.7 * (1 + 1e-3)


class Choosy(nn.Linear):
    """A model that refuses all rows that anybody has, in each way in which it is tried."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not torch._C._functorch.is_batchedtensor(x) and bool((x.abs() > 5).any()):
            raise ValueError("a value beyond 5")
        return super().forward(x)


@pytest.mark.parametrize("rows", [1, 30])
def test_whether_a_model_can_be_trained_is_tried_on_no_row(rows: int) -> None:
    """Before, a client all of whose rows a model refuses took no part, so that one row more could have let it."""
    x = np.full((rows, FEATURES), 60.0, dtype=np.float32)
    x[:, 0] = np.arange(rows)  # no two are alike
    run = trained(federation((x, np.zeros(rows, dtype=np.int64)), classes=["a", "b"]), seeded(Choosy), noise=1.0)
    assert statuses(run) == ["ok"]


class ChoosyAlone(nn.Linear):
    """A model that refuses large rows where it is not vectorized."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        alone = self.training and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        if alone and bool((x.abs() > 5).any()):
            raise ValueError("a value beyond 5")
        return super().forward(x)


@pytest.mark.parametrize(("engine", "stack"), [("sequential", 1), ("vmapped", 2)])
def test_how_gradients_are_computed_is_decided_by_no_row(
    engine: str, stack: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the first rows of a batch decided whether the gradients of all others are computed at once."""
    counts = list[int]()
    clipped_sum = RowGradients.clipped_sum

    def counted(*arguments: Any) -> Any:
        counts[-1] += 1
        return clipped_sum(*arguments)

    monkeypatch.setattr(RowGradients, "clipped_sum", counted)
    for value in (60.0, 1.0):
        pair = np.full((30, FEATURES), value, dtype=np.float32), np.arange(30) % 2
        counts.append(0)
        trained(federation(pair, pair, classes=["a", "b"]), seeded(ChoosyAlone), engine, stack, noise=1.0, steps=2)
    assert counts[0] == counts[1] > 1


@pytest.mark.full
@pytest.mark.parametrize("engine", ["sequential", "vmapped", "batched"])
def test_clipped_sums_are_in_full_precision_under_autocast(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, no client could train by DP-SGD with bfloat16, whose sums were in it."""
    kinds: set[torch.dtype] = set()
    clipped_sum = RowGradients.clipped_sum

    def summed(*arguments: Any) -> Any:
        sums, losses = clipped_sum(*arguments)
        kinds.update(part.dtype for part in sums.values())
        return sums, losses

    monkeypatch.setattr(RowGradients, "clipped_sum", summed)
    recipe = recipes.dp_sgd(lr=0.5, batch=4, noise=1.0)
    run = simulate(recipe, classified(8, 6), nn.Linear(4, 2), rounds=1, simulator={"engine": engine, "bfloat16": True})
    assert not run.failures
    assert kinds == {torch.float32}


def test_noise_on_uploads_lets_no_buffer_by() -> None:
    recipe = recipes.fedavg(lr=0.1).with_(transforms=[Gaussian(clip=1.0, noise=0.1, where="client")])
    run = simulate(recipe, clients_with(np.full(FEATURES, 30.0)), seeded(Remembering), rounds=1)
    assert run.model().total.tolist() == [0.0] * FEATURES


SITES = ["north", "south", "east"]


@pytest.mark.parametrize(("row", "target"), [(0, 0.5), (6, -7.0), (12, 1e30), (18, 2.0)])
def test_a_site_takes_part_where_the_loss_cannot_take_a_rows_target(row: int, target: float, tmp_path: Path) -> None:
    """Before, a single target that the loss cannot take kept a site out of the run, which the server saw."""
    table = {
        "partition": {"kind": "sites", "clients": SITES, "inputs": [FEATURES], "targets": 2},
        "rounds": 1,
        "loss": "multilabel",
        "model": {"name": "logistic"},
        "recipe": {"name": "dp_sgd", "lr": 1.0, "steps": 1, "batch": 100, "clip": 0.7, "noise": 1e-6},
        "runtime": {"kind": "federation"},
    }
    settings = ExperimentSettings.of_table(table, "the test's settings")
    plan = settings.plan()
    options = RunSettings(seed=1, runtime="federation", loss="multilabel")
    run = prepare(next(iter(plan.recipes.values())), plan.clients, plan.model, options)
    values = json.loads(terms(run.work, settings.table(), SITES, SITES, plan.clients.classes))
    folder = provisioned(tmp_path / "credentials", SITES) / "north"
    work = site_work(folder, str(tmp_path / "rows.npz"), None)
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(20, FEATURES)).astype("f4"), draw.integers(0, 2, (20, 2)).astype("f4")
    changes, sizes = [], set()
    for odd in (target, -100):
        y[row] = odd
        np.savez(tmp_path / "rows.npz", x=x, y=y)
        site = work(values)
        runner = TaskRunner(site, Policy(), "cpu")
        update, failure, _ = runner.serve(Task(1, 0, 0, {"model": site.work.initial}), None)
        assert failure is None
        assert update is not None
        changes.append(update.vectors["model"])
        sizes.add((update.examples, *runner.rows.values(), *counted_rows(site.work, site.clients, 0).values()))
    torch.testing.assert_close(changes[0], changes[1], atol=1e-4, rtol=1e-3)
    assert len(sizes) == 1
