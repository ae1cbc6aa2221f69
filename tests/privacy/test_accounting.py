"""Privacy accounting: known values, the right direction, and what a run records."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piebald import recipes
from piebald.core.errors import SettingError
from piebald.methods.transforms import Gaussian
from piebald.privacy.accounting import (
    central,
    composed_epsilon,
    gaussian_epsilon,
    local,
    of_recipe,
    of_rows,
    of_run,
    rows,
)
from piebald.privacy.ledger import Ledger, budget, noise_for
from tests.fakes import classified, seeded, simulate


def exact(noise: float, delta: float) -> float:
    """Epsilon of one Gaussian release (Balle and Wang 2018, theorem 8), by bisection."""
    from statistics import NormalDist

    phi = NormalDist().cdf

    def left(epsilon: float) -> float:
        return phi(1 / (2 * noise) - epsilon * noise) - math.exp(epsilon) * phi(-1 / (2 * noise) - epsilon * noise)

    low, high = 0.0, 100.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if left(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize("noise", [0.8, 1.5, 4.0])
def test_one_release_is_the_analytic_gaussian_mechanism(noise: float) -> None:
    budget = central(noise, 1.0, 1, 1e-5)
    assert budget.epsilon_pld == pytest.approx(exact(noise, 1e-5), rel=0.01)
    assert budget.epsilon_rdp >= budget.epsilon_pld * 0.999


def test_many_releases_are_one_with_less_noise() -> None:
    """k releases with multiplier s are one with s / sqrt(k), exactly."""
    assert central(5.0, 1.0, 25, 1e-5).epsilon_pld == pytest.approx(exact(1.0, 1e-5), rel=0.01)
    assert local(10.0, 25, 1e-5).epsilon_pld == pytest.approx(exact(1.0, 1e-5), rel=0.01)


@pytest.mark.full
@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.floats(1.0, 3), st.floats(0.1, 0.5), st.integers(2, 10))
def test_more_noise_fewer_clients_fewer_rounds_cost_less(noise: float, share: float, rounds: int) -> None:
    here = central(noise, share, rounds, 1e-5).epsilon_rdp
    assert central(2 * noise, share, rounds, 1e-5).epsilon_rdp < here
    assert central(noise, share / 2, rounds, 1e-5).epsilon_rdp < here
    assert central(noise, share, 2 * rounds, 1e-5).epsilon_rdp > here


def test_a_given_epsilon_is_that_of_the_theorem() -> None:
    """At epsilon 1 the classic calibration is safe: the true epsilon of one upload is no larger."""
    gaussian = Gaussian(clip=1.0, epsilon=1.0, where="client")
    assert gaussian.multiplier == pytest.approx(math.sqrt(2 * math.log(1.25e5)))
    assert exact(gaussian.multiplier, 1e-5) <= 1.0
    with pytest.raises(SettingError, match="epsilon"):
        Gaussian(clip=1.0, epsilon=0.0)


def test_a_run_records_what_it_spent() -> None:
    transforms: list[Any] = [{"kind": "gaussian", "clip": 1.0, "noise": 2.0}]
    recipe = recipes.fedavg(lr=0.1).with_(
        transforms=transforms,
        aggregation="equal_weighted",
        scheduling={"kind": "synchronous", "cohort": 2, "sampling": "poisson"},
    )
    from torch import nn

    run = simulate(recipe, classified(8, 8, 8, 8), seeded(lambda: nn.Linear(4, 2)), rounds=3)
    (budget,) = run.meta["privacy"]
    assert budget["epsilon_pld"] == pytest.approx(central(2.0, 0.5, 3, 1e-5).epsilon_pld)
    assert "server sees every update" in budget["meaning"]
    assert (
        of_recipe(recipe.with_(transforms=[{"kind": "gaussian", "clip": 1.0, "noise": 0.0}]), 4, 3)[0].plain()[
            "epsilon_rdp"
        ]
        is None
    )
    assert of_recipe(recipe, 4, None) == []


@pytest.mark.full
def test_rows_are_accounted_as_opacus_does() -> None:
    """PLD and PRV agree, the Renyi bound is no smaller, and opacus computes the same Renyi bound."""
    pytest.importorskip("opacus", reason="needs opacus: pip install '.[privacy]'")
    from opacus.accountants import RDPAccountant

    budget = rows(1.1, 0.05, 40, 1e-5)
    theirs = RDPAccountant()
    theirs.history = [(1.1, 0.05, 40)]
    assert budget.epsilon_prv == pytest.approx(budget.epsilon_pld, rel=0.03)
    assert budget.epsilon_rdp == pytest.approx(theirs.get_epsilon(1e-5), rel=0.03)
    assert budget.epsilon_rdp > budget.epsilon_pld
    assert "add or remove one row" in budget.meaning


@pytest.mark.full
def test_a_run_that_hides_rows_records_the_largest_budget_of_a_client() -> None:
    """Often the smallest client: its rows are in most batches; it takes ceil(rows / batch) steps an epoch."""
    from torch import nn

    recipe = recipes.dp_sgd(noise=2.0, batch=10, epochs=2)
    run = simulate(recipe, classified(25, 0, 80), seeded(lambda: nn.Linear(4, 2)), rounds=2)
    (budget,) = run.meta["privacy"]
    assert budget["unit"] == "row"
    assert budget["releases"] == 2 * 2 * 3
    assert budget["epsilon_pld"] == pytest.approx(rows(2.0, 10 / 25, 12, 1e-5).epsilon_pld)
    assert "client with 25 rows (6 steps a round)" in budget["meaning"]
    assert of_rows(recipe, [25, 80], 2).epsilon_pld > of_rows(recipe, [80], 2).epsilon_pld
    assert of_rows(recipe.with_(training={**recipe.training.table(), "noise": 0.0}), [25], 2).epsilon_pld == math.inf
    assert of_rows(recipe, [5], 1).epsilon_pld == pytest.approx(rows(2.0, 1.0, 2, 1e-5).epsilon_pld)  # all in all
    assert "no client's number of rows" in of_rows(recipe, [0, 0], 2).meaning
    both = recipe.with_(transforms=[{"kind": "gaussian", "clip": 1.0, "noise": 2.0}], aggregation="equal_weighted")
    units = [one.unit for one in of_run(both, [25, 80], 2)]
    assert units == ["client", "row"]


@pytest.mark.full
def test_a_client_with_one_row_more_than_a_batch_spends_more() -> None:
    """It takes two steps with nearly all of its rows in each, the smaller one takes one with all."""
    recipe = recipes.dp_sgd(noise=3.0, batch=20)
    fits, more = (of_rows(recipe, [size], 5, 1e-5).epsilon_pld for size in (20, 21))
    assert more > fits
    both = of_rows(recipe, [20, 21, 300], 5, 1e-5)
    assert both.epsilon_pld == more
    assert both.releases == 10


def test_a_useless_guarantee_is_computed_quickly() -> None:
    budget = rows(0.05, 1.0, 1000, 1e-5)
    assert budget.epsilon_pld == budget.epsilon_rdp > 1e4
    assert budget.epsilon_prv is None


def test_a_missing_accountant_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)  # which makes its import fail
    with pytest.raises(SettingError, match=r"pip install '\.\[privacy\]'"):
        central(1.2345, 1.0, 1, 1e-5)  # nobody has asked before, so no answer is kept
    assert composed_epsilon({}, 1e-5) == 0.0  # nothing was released, and nothing is to be accounted for


def test_a_release_without_noise_hides_nothing() -> None:
    assert gaussian_epsilon(0.0, 1e-5) == math.inf


def test_delta_is_a_probability() -> None:
    with pytest.raises(SettingError, match="delta"):
        central(1.0, 1.0, 1, 0.0)
    for promising_nothing in (Ledger, noise_for):
        with pytest.raises(SettingError, match="delta below 1"):
            promising_nothing(1.0, 1.0)


def test_the_default_delta_is_small_beside_the_rows_of_each_client_and_never_large() -> None:
    deltas = [of_rows(recipes.fedavg(), sizes, 1).delta for sizes in ([5, 3], [9_999, 7], [10_000], [10, 100_000])]
    assert deltas == pytest.approx([1e-5, 1e-5, 1e-5, 1e-6])


def test_the_noise_for_a_budget_is_the_least() -> None:
    noise = noise_for(1.0, 1e-6)
    assert budget([noise], 1e-6).epsilon_pld <= 1.0 < budget([0.999 * noise], 1e-6).epsilon_pld
