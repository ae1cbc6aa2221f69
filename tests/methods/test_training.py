"""Training on one client, against arithmetic by hand: a quadratic with one parameter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piebald import recipes
from piebald.core.errors import SettingError
from piebald.methods.aggregation import EqualWeighted
from piebald.methods.scheduling import Synchronous
from piebald.methods.training import Constant, Cosine, Exponential, Scaffold, StepDecay
from tests.fakes import federation, seeded, simulate

FIRST = 3.0
ENGINES = [{"engine": "sequential"}, {"engine": "vmapped", "stack": 4}, {"engine": "reference"}]


class Point(nn.Module):
    """One number, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([FIRST]))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x))


def bowl(outputs: Tensor, targets: Tensor) -> Tensor:
    """a/2 (w - b)^2 for targets (a, b): its gradient is a (w - b)."""
    return targets[:, 0] / 2 * (outputs - targets[:, 1]).square()


def bowls(*shapes: tuple[float, float]) -> Any:
    """A client for each (a, b), of one row."""
    return federation(*((torch.zeros(1, 1), torch.tensor([shape])) for shape in shapes))


def end(recipe: Any, clients: Any, **options: Any) -> float:
    """Where the global model ends."""
    metrics = {"distance": lambda outputs, targets: (outputs - targets[:, 1]).abs()}
    return float(simulate(recipe, clients, Point(), loss=bowl, metrics=metrics, **options).model().w.detach())


def walk(
    w: float,
    a: float,
    b: float,
    *,
    lr: float = 0.1,
    steps: int = 4,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float = math.inf,
    mu: float = 0.0,
    u: float = 0.0,
) -> tuple[float, float]:
    """Metis eq. 2 with the terms in the documented order; returns w and u."""
    center = w
    for _ in range(steps):
        g = a * (w - b) + mu * (w - center)
        g *= min(1.0, clip / (abs(g) + 1e-6))
        g += weight_decay * w
        u = momentum * u - lr * g
        w += u
    return w, u


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "weight decay": {"weight_decay": 0.3},
    "clipping": {"clip": 0.5},
    "clipping without effect": {"clip": 50.0},
    "full": {"momentum": 0.5, "weight_decay": 0.2, "clip": 0.7},
}


@pytest.mark.parametrize("simulator", ENGINES, ids=lambda s: s["engine"])
@pytest.mark.parametrize("case", SETTINGS)
def test_sgd_by_hand(case: str, simulator: dict[str, Any]) -> None:
    settings = SETTINGS[case]
    w, _ = walk(FIRST, 2.0, -1.0, **settings)
    recipe = recipes.fedavg(lr=0.1, epochs=4, **settings)
    assert end(recipe, bowls((2.0, -1.0)), rounds=1, simulator=simulator) == pytest.approx(w, rel=1e-4)


@pytest.mark.parametrize("simulator", ENGINES, ids=lambda s: s["engine"])
@pytest.mark.parametrize("more", [{}, {"clip": 0.5}, {"momentum": 0.5}], ids=str)
def test_the_proximal_term_of_fedprox(more: dict[str, float], simulator: dict[str, Any]) -> None:
    w, _ = walk(FIRST, 2.0, -1.0, mu=1.5, **more)
    recipe = recipes.fedprox(lr=0.1, epochs=4, mu=1.5, **more)
    assert end(recipe, bowls((2.0, -1.0)), rounds=1, simulator=simulator) == pytest.approx(w, rel=1e-4)


@pytest.mark.parametrize("keep", [False, True])
def test_momentum_outlives_the_task_if_kept(keep: bool) -> None:
    w, u = FIRST, 0.0
    for _ in range(3):
        w, u = walk(w, 1.0, 0.0, momentum=0.8, u=u if keep else 0.0)
    recipe = recipes.fedavg(lr=0.1, steps=4, momentum=0.8, keep_momentum=keep)
    assert end(recipe, bowls((1.0, 0.0)), rounds=3) == pytest.approx(w, rel=1e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_constant_rates_are_torchs_sgd(momentum: float, weight_decay: float) -> None:
    x, y = seeded(lambda: nn.Linear(3, 12)).weight.detach(), torch.arange(12) % 2
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), 1)
    run = simulate(
        recipes.fedavg(lr=0.2, epochs=7, batch=12, momentum=momentum, weight_decay=weight_decay),
        federation((x, y), classes=["a", "b"]),
        model,
        rounds=1,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=momentum, weight_decay=weight_decay)
    for _ in range(7):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    for mine, theirs in zip(run.model().parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


# ------------------------------------------------------------------------------------------------------------- SCAFFOLD


def scaffold(bowls: list[tuple[float, float]], cohorts: list[list[int]], lr: float, steps: int, eta: float) -> float:
    """Karimireddy et al. 2020, algorithm 1, option II, in double precision."""
    x, c, own = FIRST, 0.0, [0.0] * len(bowls)
    for cohort in cohorts:
        moved, changed = 0.0, 0.0
        for client in cohort:
            a, b = bowls[client]
            y = x
            for _ in range(steps):
                y -= lr * (a * (y - b) - own[client] + c)
            plus = own[client] - c + (x - y) / (steps * lr)
            moved += (y - x) / len(cohort)
            changed += (plus - own[client]) / len(cohort)
            own[client] = plus
        x += eta * moved
        c += len(cohort) / len(bowls) * changed
    return x


@pytest.mark.parametrize("simulator", ENGINES, ids=lambda s: s["engine"])
@pytest.mark.parametrize(("cohort", "eta"), [(1.0, 1.0), (1.0, 0.5), (2, 1.0)])
def test_control_variates_are_the_papers(cohort: float, eta: float, simulator: dict[str, Any]) -> None:
    shapes = [(1.0, 2.0), (3.0, -2.0), (0.5, 0.5)]
    recipe = recipes.scaffold(cohort=cohort, lr=0.1, steps=3, server_lr=eta)
    metrics = {"distance": lambda outputs, targets: (outputs - targets[:, 1]).abs()}
    run = simulate(recipe, bowls(*shapes), Point(), loss=bowl, metrics=metrics, rounds=4, simulator=simulator)
    cohorts = [[row["client"] for row in run.results if row["version"] == version] for version in range(1, 5)]
    assert all(len(asked) == (3 if cohort == 1.0 else 2) for asked in cohorts)
    assert float(run.model().w.detach()) == pytest.approx(scaffold(shapes, cohorts, 0.1, 3, eta), rel=1e-4)


@pytest.mark.full
def test_scaffold_finds_the_optimum_that_fedavg_misses() -> None:
    """Quadratics of curvature 1 and 9: many local steps move FedAvg off the optimum of the sum, but not SCAFFOLD."""
    shapes = [(1.0, 0.0), (9.0, 1.0)]
    optimum = (1 * 0.0 + 9 * 1.0) / 10
    settings: dict[str, Any] = {"lr": 0.05, "steps": 10}
    away = abs(end(recipes.fedavg(**settings), bowls(*shapes), rounds=40) - optimum)
    near = abs(end(recipes.scaffold(**settings), bowls(*shapes), rounds=40) - optimum)
    assert near < 1e-3 < 0.1 < away


@pytest.mark.parametrize("field", [{"momentum": 0.5}, {"weight_decay": 0.1}, {"clip": 1.0}])
def test_scaffold_refuses_what_breaks_its_variates(field: dict[str, float]) -> None:
    with pytest.raises(SettingError, match=f"{next(iter(field))} breaks the control variates"):
        Scaffold(**field)


def test_a_client_without_rows_changes_no_variate() -> None:
    shapes = [(1.0, 2.0), (3.0, -2.0)]
    empty = federation(
        *((torch.zeros(1, 1), torch.tensor([shape])) for shape in shapes), (torch.zeros(0, 1), torch.zeros(0, 2))
    )
    recipe = recipes.scaffold(lr=0.1, steps=3).with_(aggregation=EqualWeighted(), scheduling=Synchronous(cohort=1.0))
    value = end(recipe, empty, rounds=3)
    x, c, own = FIRST, 0.0, [0.0, 0.0]
    for _ in range(3):
        ends = []
        for client, (a, b) in enumerate(shapes):
            y = x
            for _ in range(3):
                y -= 0.1 * (a * (y - b) - own[client] + c)
            ends.append(y)
        pluses = [own[i] - c + (x - ends[i]) / 0.3 for i in range(2)]
        c += sum(plus - old for plus, old in zip(pluses, own, strict=True)) / 3
        x, own = (ends[0] + ends[1]) / 2, pluses  # who has no rows has no share
    assert value == pytest.approx(x, rel=1e-4)


# ------------------------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize(
    ("lr_schedule", "values"),
    [
        (Constant(), [1, 1, 1, 1, 1, 1]),
        (Exponential(rate=0.5), [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32]),
        (StepDecay(every=2, rate=0.1), [1, 1, 0.1, 0.1, 0.01, 0.01]),
        (Cosine(rounds=4), [1, (2 + math.sqrt(2)) / 4, 1 / 2, (2 - math.sqrt(2)) / 4, 0, 0]),
        (Cosine(rounds=2, floor=0.5), [1, 0.75, 0.5, 0.5, 0.5, 0.5]),
    ],
    ids=str,
)
def test_values_of_schedules(lr_schedule: Any, values: list[float]) -> None:
    assert [lr_schedule.factor(version) for version in range(6)] == pytest.approx(values)


def test_a_schedule_sets_the_rate_of_each_round() -> None:
    w = FIRST
    for version in range(3):
        w, _ = walk(w, 1.0, 0.0, lr=0.4 * 0.5**version, steps=2)
    recipe = recipes.fedavg(lr=0.4, steps=2, lr_schedule={"kind": "exponential", "rate": 0.5})
    assert end(recipe, bowls((1.0, 0.0)), rounds=3) == pytest.approx(w, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(Exponential, {"rate": 0.0}), (Exponential, {"rate": 1.5}), (StepDecay, {"every": 0}), (Cosine, {"rounds": 0})],
)
def test_bad_schedules_are_refused(kind: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(fields))):
        kind(**fields)


# ------------------------------------------------------------------------------------------ steps, batches and examples


@pytest.mark.parametrize(
    ("rows", "settings", "steps"),
    [
        (7, {"batch": 3, "epochs": 2}, 6),
        (6, {"batch": 3, "epochs": 2}, 4),
        (7, {"batch": 20, "epochs": 3}, 3),
        (7, {"batch": 3, "steps": 5}, 5),
        (1, {"batch": 3, "steps": 2}, 2),
        (7, {"batch": 3, "step_limit": 2}, 2),
        (7, {"batch": 3, "epochs": 2, "step_limit": 5}, 5),
        (7, {"batch": 3, "epochs": 2, "step_limit": 7}, 6),
        (3, {"batch": 3, "step_limit": 5}, 1),
    ],
)
def test_every_row_is_used_and_no_batch_is_dropped(rows: int, settings: dict[str, int], steps: int) -> None:
    x, y = torch.zeros(rows, 1), torch.zeros(rows)
    run = simulate(recipes.fedavg(**settings), federation((x, y)), nn.Linear(1, 1), rounds=1)
    assert (run.results[0]["steps"], run.results[0]["examples"]) == (steps, rows)


def test_the_loss_of_a_result_is_the_mean_over_its_steps() -> None:
    losses, w = [], FIRST
    for _ in range(4):
        losses.append(2.0 / 2 * (w + 1.0) ** 2)
        w -= 0.1 * 2.0 * (w + 1.0)
    metrics = {"distance": lambda outputs, targets: (outputs - targets[:, 1]).abs()}
    recipe = recipes.fedavg(lr=0.1, epochs=4)
    run = simulate(recipe, bowls((2.0, -1.0)), Point(), loss=bowl, metrics=metrics, rounds=1)
    assert run.results[0]["loss"] == pytest.approx(sum(losses) / 4, rel=1e-4)
    assert run.results[0]["norm"] == pytest.approx(abs(w - FIRST), rel=1e-4)
    assert run.rounds[0]["loss"] == run.results[0]["loss"]
