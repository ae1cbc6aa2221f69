"""q-FedAvg, TERM and AFL end at the points that their objectives name, and equal FedAvg where they should.

Two clients hold one row each, with losses w^2 and 4 (w - 1)^2.  FedAvg ends at 0.8, where the losses are 0.64 and 0.16;
the largest loss is smallest at 2/3, where both are 4/9.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize
from torch import nn

import piebald
from piebald import recipes
from piebald.contracts import Cohort, Update
from piebald.core.errors import SettingError
from piebald.data.partition import clients_from
from piebald.methods.aggregation import Agnostic, Tilted
from piebald.methods.aggregation.agnostic import on_simplex
from piebald.methods.aggregation.q_fair import QFair
from piebald.methods.recipe import Recipe

ROWS = {"a": (torch.tensor([[1.0]]), torch.tensor([[0.0]])), "b": (torch.tensor([[2.0]]), torch.tensor([[2.0]]))}
FEDAVG = 0.8


def slope(seed: int) -> nn.Module:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 0.1)
    return module


def ends_at(recipe: Recipe, rounds: int = 400) -> float:
    clients = clients_from(ROWS, test=0, validation=0)
    run = piebald.run(
        recipe, clients, slope, rounds=rounds, evaluate_every=0, runtime=piebald.Simulator(deterministic=True)
    )
    return float(run.start())


@pytest.mark.full
@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 4.0])
def test_q_fedavg_ends_where_the_sum_of_powers_is_smallest(q: float) -> None:
    # the derivative of F_1^(q+1) + F_2^(q+1) is 0 where w / (1 - w) is this
    ratio = 4 ** ((q + 1) / (2 * q + 1))
    assert ends_at(recipes.qfedavg(q=q, lr=0.02)) == pytest.approx(ratio / (1 + ratio), abs=2e-3)


@pytest.mark.full
@pytest.mark.parametrize("t", [-0.5, 0.0, 1.0, 8.0])
def test_term_ends_where_the_tilted_loss_is_smallest(t: float) -> None:
    def derivative(w: float) -> float:
        return math.exp(t * w**2) * 2 * w - math.exp(t * 4 * (w - 1) ** 2) * 8 * (1 - w)

    assert ends_at(recipes.term(t=t, lr=0.02)) == pytest.approx(brentq(derivative, 0.5, 0.999), abs=2e-3)


@pytest.mark.long
def test_afl_ends_where_the_largest_loss_is_smallest() -> None:
    assert ends_at(recipes.afl(lambda_lr=0.02, lr=0.01), rounds=1500) == pytest.approx(2 / 3, abs=5e-3)


@pytest.mark.parametrize("recipe", [recipes.qfedavg(q=0), recipes.term(t=0), recipes.afl(lambda_lr=0)])
def test_without_effect_they_are_fedavg(recipe: Recipe) -> None:
    assert ends_at(recipe, rounds=5) == pytest.approx(ends_at(recipes.fedavg(), rounds=5), rel=1e-6)


def test_the_first_step_is_the_papers() -> None:
    """Algorithm 2 by hand, from w = 0.1 with one local step each: L = 1 / lr, Delta_k = F_k^q L (w - w_k)."""
    lr, q, w = 0.02, 2.0, 0.1
    losses, gradients = [w**2, 4 * (w - 1) ** 2], [2 * w, 8 * (w - 1)]
    steps = [f**q * g for f, g in zip(losses, gradients, strict=True)]  # L (w - (w - lr g)) = g
    h = [q * f ** (q - 1) * g**2 + f**q / lr for f, g in zip(losses, gradients, strict=True)]
    assert ends_at(recipes.qfedavg(q=q, lr=lr), rounds=1) == pytest.approx(w - sum(steps) / sum(h), rel=1e-5)


def test_a_tilted_weight_is_the_papers_and_stays_finite() -> None:
    def weight(rows: int, loss: float, t: float) -> float:
        return Tilted(t=t).weight(Update({}, rows, 1, {"initial_loss": loss}))

    assert weight(7, 0.5, 2.0) == pytest.approx(7 * math.e)
    assert weight(7, 0.5, -2.0) == pytest.approx(7 / math.e)
    assert 0 < weight(1, 1e9, -1.0) < weight(1, 0.0, 1.0) == 1 < weight(1, 1e9, 1.0) < math.inf


def test_those_who_arrive_stand_for_all() -> None:
    """Over all cohorts of two of five clients, lambda moves on average as it does where all five arrive."""
    losses = [0.1, 0.2, 0.4, 0.9, 0.3]

    def moved(clients: Sequence[int]) -> torch.Tensor:
        updates = [Update({}, 1, 1, {"initial_loss": losses[client]}) for client in clients]
        context = SimpleNamespace(known=5, state={})
        cohort = Cohort(clients, [0] * len(clients), updates, torch.zeros(len(clients), 1), 0)
        Agnostic(lambda_lr=0.05).aggregate(cohort, context)  # type: ignore[arg-type]
        return context.state["lambda"]

    pairs = torch.stack([moved(pair) for pair in itertools.combinations(range(5), 2)])
    assert bool((pairs > 0).all())  # inside the simplex, where the projection is linear
    torch.testing.assert_close(pairs.mean(0), moved(range(5)))


def test_sizes_of_clients_are_relative_to_their_mean() -> None:
    """Ten and thirty rows count a half and one and a half, in the shares as in the step of lambda."""
    updates = [Update({}, rows, 1, {"initial_loss": 1.0}) for rows in (10, 30)]
    cohort = Cohort([0, 1], [0, 0], updates, torch.eye(2), 0)
    context = SimpleNamespace(known=2, state={})
    change, shares = Agnostic(lambda_lr=0.1, weights="examples").aggregate(cohort, context)  # type: ignore[arg-type]
    assert shares == pytest.approx([0.25, 0.75])
    assert change.tolist() == pytest.approx([0.25, 0.75])
    assert context.state["lambda"].tolist() == pytest.approx([0.45, 0.55])  # (0.5 + 0.05, 0.5 + 0.15) projected


def test_a_step_is_scaled_by_the_rate_that_the_clients_had() -> None:
    """The second round of a schedule that halves the rate is the first round at half the rate, from where it began."""
    halving = {"kind": "exponential", "rate": 0.5}
    q, w = 2.0, 0.1
    for lr in (0.02, 0.01):
        losses, gradients = [w**2, 4 * (w - 1) ** 2], [2 * w, 8 * (w - 1)]
        h = [q * f ** (q - 1) * g**2 + f**q / lr for f, g in zip(losses, gradients, strict=True)]
        w -= sum(f**q * g for f, g in zip(losses, gradients, strict=True)) / sum(h)
    assert ends_at(recipes.qfedavg(q=q, lr=0.02, lr_schedule=halving), rounds=2) == pytest.approx(w, rel=1e-5)


def test_who_tells_no_rate_counts_nothing() -> None:
    told = Update({}, 1, 1, {"initial_loss": 1.0, "lr": 0.1}, norm=1.0)
    silent = Update({}, 1, 1, {"initial_loss": 9.0}, norm=1.0)
    assert QFair(q=1).weight(silent) == QFair(q=1).undamped_weight(silent) == 0.0
    assert QFair(q=1).undamped_weight(told) == pytest.approx(1 + 1 / 0.1)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=5))
def test_the_projection_is_the_nearest_point(values: list[float]) -> None:
    point = torch.tensor(values, dtype=torch.float64)
    found = on_simplex(point)
    assert float(found.sum()) == pytest.approx(1)
    assert bool((found >= 0).all())
    bounds, sums = [(0, 1)] * len(values), {"type": "eq", "fun": lambda x: x.sum() - 1}
    start = [1 / len(values)] * len(values)
    best = minimize(lambda x: ((x - values) ** 2).sum(), start, bounds=bounds, constraints=sums, tol=1e-12)
    distance = float((found - point).square().sum())
    assert distance <= best.fun + 1e-6


@pytest.mark.parametrize("recipe", ["qfedavg", "term", "afl"])
def test_they_are_refused_beside_what_hides_losses(recipe: str) -> None:
    with pytest.raises(SettingError, match="initial_loss"):
        recipes.make(recipe).with_(training={"kind": "sgd"})
    secret = {"kind": "gaussian", "clip": 1.0, "noise": 1.0, "where": "client"}
    with pytest.raises(SettingError, match="loss of the global model"):
        recipes.make(recipe).with_(transforms=[secret])


def test_a_client_whose_loss_is_enormous_leaves_numbers_finite() -> None:
    rows = {"a": ROWS["a"], "b": (torch.tensor([[1.0]]), torch.tensor([[1e3]]))}
    for recipe in (recipes.qfedavg(q=4, lr=1e-4), recipes.term(t=5, lr=1e-4), recipes.afl(lambda_lr=1, lr=1e-4)):
        run = piebald.run(recipe, clients_from(rows, test=0, validation=0), slope, rounds=3, evaluate_every=0)
        assert math.isfinite(float(run.start()))
