"""Case 17: training ends before a round that would exceed the budget, and every run states what it spent.

`tests/privacy/test_spending.py` has every round beside dp-accounting, `tests/federation/test_budgets_at_sites.py` has
sites.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import piebald
from piebald import recipes
from piebald.core.errors import SettingError
from tests.cases.conftest import FromFile
from tests.fakes import seeded, simulate

pytest.importorskip("dp_accounting")

FILE = """
data = { name = "digits" }
partition = { kind = "iid", clients = 40 }
model = { name = "logistic" }
evaluate = { every = 0 }
[recipe]
name = "dp_sgd"
lr = 0.1
cohort = 10
noise = 2.0
[stop]
epsilon = 8.0
"""
CLIENTS = {
    f"clinic {k}": (np.random.default_rng(k).normal(size=(20 + k, 4)).astype(np.float32), np.arange(20 + k) % 2)
    for k in range(8)
}
ROWS = recipes.dp_sgd(lr=0.1, noise=2.0, cohort=4, batch=5)
NOISE = {"kind": "gaussian", "clip": 1.0, "noise": 2.0}


def private(recipe: Any, **options: Any) -> piebald.Run:
    return simulate(recipe, CLIENTS, seeded(lambda: nn.Linear(4, 2)), evaluate_every=0, **options)


def spent(run: piebald.Run) -> list[float]:
    return [row["epsilon"] for row in run.spent]


@pytest.mark.full
def test_as_many_rounds_as_epsilon_allows(from_file: FromFile, tmp_path: Path) -> None:
    run = from_file(FILE, None, "recipe.batch=20", out=tmp_path / "run")
    assert run.final["rounds"] == 14  # a fifteenth would be 8.176
    assert spent(run)[-1] == pytest.approx(7.863, abs=2e-3)
    (stated,) = run.meta["privacy"]
    assert stated["epsilon_pld"] == pytest.approx(spent(run)[-1], rel=1e-3)


@pytest.mark.full
def test_clients_that_are_drawn_by_chance_spend_less() -> None:
    """The last round fits, and one more would not."""
    made = recipes.fedavg(lr=0.1).with_(aggregation="equal_weighted", transforms=[NOISE])
    chance = made.with_(scheduling={"kind": "synchronous", "cohort": 4, "sampling": "poisson"})
    whole = private(chance, rounds=4)
    budget = (spent(whole)[2] + spent(whole)[3]) / 2
    for recipe, rounds in ((chance, 3), (made, 1)):
        ended = private(recipe, rounds=30, stop={"epsilon": budget})
        assert ended.final["rounds"] == rounds
        assert spent(ended)[-1] <= budget


@pytest.mark.full
def test_an_extended_run_goes_on_counting_and_keeps_its_limit(tmp_path: Path) -> None:
    whole = private(ROWS, rounds=4)
    budget = (spent(whole)[2] + spent(whole)[3]) / 2
    private(ROWS, rounds=1, out=tmp_path, stop={"epsilon": budget}).close()
    model = seeded(lambda: nn.Linear(4, 2))
    assert spent(piebald.resume(tmp_path, CLIENTS, model, rounds=30)) == pytest.approx(spent(whole)[:3])


@pytest.mark.full
def test_all_runs_on_the_same_rows_count_together() -> None:
    model = seeded(lambda: nn.Linear(4, 2))
    compared = piebald.compare([ROWS], CLIENTS, model, rounds=1, seeds=[0, 1], evaluate_every=0)
    (together,) = compared.privacy
    assert (together["runs"], together["epsilon"]) == (2, pytest.approx(2 * spent(compared.runs[0])[-1], rel=1e-3))
    with_plain = piebald.compare([ROWS, recipes.fedavg()], CLIENTS, model, rounds=1, evaluate_every=0)
    assert with_plain.privacy[0]["epsilon"] is None  # whose run hides nothing


def test_a_budget_without_noise_or_too_small_for_a_round_is_refused() -> None:
    with pytest.raises(SettingError, match="epsilon = 3 of stop has no effect, as fedavg adds no noise"):
        private("fedavg", stop={"epsilon": 3})
    with pytest.raises(SettingError, match=r"one round would spend an epsilon of .* more than epsilon = 0.1 of stop"):
        private(ROWS, stop={"epsilon": 0.1})
