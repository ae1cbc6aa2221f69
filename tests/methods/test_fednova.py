"""FedNova against its equation, written out plainly (Wang et al. 2020, eq. 7)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.contracts import Cohort, Update
from piebald.core.errors import SettingError
from piebald.data.partition import clients_from
from piebald.methods.aggregation import Normalized

LR = 0.05
SIZES = (4, 8, 20)  # with batches of 4: 1, 2 and 5 steps an epoch


def line(seed: int) -> nn.Module:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 0.5)
    return module


def cohort(changes: Tensor, steps: Sequence[int], rows: Sequence[int]) -> Cohort:
    updates = [
        Update({"model": change}, examples, taken, {})
        for change, examples, taken in zip(changes, rows, steps, strict=True)
    ]
    return Cohort(range(len(updates)), [0] * len(updates), updates, changes, 0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_gradient_counts_as_often_as_momentum_repeats_it(momentum: float) -> None:
    """a_i is the sum of the coefficients with which the gradients of t steps stand in the change."""
    for steps in range(1, 8):
        velocity, change = torch.zeros(steps), torch.zeros(steps)
        for step in range(steps):
            velocity = momentum * velocity + torch.eye(steps)[step]
            change = change + velocity
        assert Normalized(momentum=momentum).accumulated(steps) == pytest.approx(float(change.sum()), rel=1e-6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 50)), min_size=1, max_size=6))
def test_the_average_is_the_papers(held: list[tuple[int, int]]) -> None:
    steps, rows = zip(*held, strict=True)
    changes = torch.randn(len(held), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    p = torch.tensor(rows, dtype=torch.float64) / sum(rows)
    a = torch.tensor(steps, dtype=torch.float64)
    expected = (p * a).sum() * (p[:, None] * changes.double() / a[:, None]).sum(0)
    average, _ = Normalized().aggregate(cohort(changes, steps, rows), None)  # type: ignore[arg-type]
    torch.testing.assert_close(average.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_client_without_steps_counts_nothing() -> None:
    changes = torch.tensor([[1.0], [100.0]])
    average, shares = Normalized().aggregate(cohort(changes, [2, 0], [5, 0]), None)  # type: ignore[arg-type]
    assert (average.tolist(), shares) == ([1.0], [1.0, 0.0])
    average, shares = Normalized().aggregate(cohort(changes, [0, 0], [0, 0]), None)  # type: ignore[arg-type]
    assert (average.tolist(), shares) == ([0.0], [0.0, 0.0])


@pytest.mark.full
def test_clients_of_unequal_speed_do_not_bias_it() -> None:
    """Quadratics with unequal numbers of steps: FedAvg ends near the busiest client, FedNova at the common minimum."""
    solutions = (-1.0, 0.0, 3.0)
    clients = []
    for size, solution in zip(SIZES, solutions, strict=True):
        x = torch.ones(size, 1)
        clients.append((x, x * solution))
    best = sum(size * solution for size, solution in zip(SIZES, solutions, strict=True)) / sum(SIZES)
    apart = {}
    for recipe in (recipes.fedavg(lr=LR, batch=4), recipes.fednova(lr=LR, batch=4)):
        run = piebald.run(
            recipe, clients_from(clients, test=0.0), line, rounds=150,
            evaluate_every=0,
        )  # fmt: skip
        apart[recipe.name] = abs(float(run.model().weight.detach()) - best)
    assert apart["fednova"] < 0.3 * apart["fedavg"], apart


def test_the_trainers_momentum_is_taken_over() -> None:
    clients = clients_from([(torch.ones(8, 1), torch.full((8, 1), y)) for y in (1.0, 3.0)], test=0.0)
    equal = {"lr": LR, "batch": 8, "momentum": 0.5, "epochs": 3}
    one, two = (
        piebald.run(recipe, clients, line, rounds=2, evaluate_every=0, seed=4)
        for recipe in (recipes.fednova(**equal), recipes.fedavg(**equal))
    )
    torch.testing.assert_close(one.model().weight, two.model().weight)  # equally many steps: FedAvg


@pytest.mark.parametrize(
    ("training", "wrong"),
    [({"kind": "proximal"}, "sgd"), ({"kind": "sgd", "momentum": 0.5, "keep_momentum": True}, "keep_momentum")],
)
def test_trainers_whose_steps_it_does_not_know_are_refused(training: dict[str, object], wrong: str) -> None:
    with pytest.raises(SettingError, match=wrong):
        recipes.fednova().with_(training=training)
