"""Budgets are kept: a run ends before the round that would exceed one, and states what it has spent however it ends."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from torch import nn

import piebald
from piebald import recipes
from piebald.contracts import Result
from piebald.core.errors import SettingError
from piebald.experiments.run_settings import RunSettings
from piebald.methods.recipe import Recipe
from piebald.methods.transforms import Gaussian
from piebald.privacy.accounting import LossAccountant, fixed_cohorts
from piebald.privacy.spending import Spending, task_mechanism
from piebald.report.callbacks.callback import Callback
from piebald.report.comparison import Comparison
from piebald.report.page.charts import spent as spent_chart
from piebald.report.tables import History
from piebald.runs.prepare import prepare
from piebald.server.result_checks import ResultChecks
from tests.fakes import classified, seeded, simulate

SIZES = (30, 30, 45, 60)
CLIENTS = classified(*SIZES)
ROWS = recipes.dp_sgd(lr=0.1, noise=3.0, batch=60)  # batches of all rows, so that budgets are those of Gaussians
SERVER = recipes.fedavg(lr=0.1).with_(
    transforms=[Gaussian(clip=1.0, noise=4.0, where="server")], aggregation="equal_weighted"
)
LOCAL = recipes.fedavg(lr=0.1).with_(transforms=[Gaussian(clip=1.0, noise=12.0, where="client")])


def sampled(recipe: Recipe) -> Recipe:
    """Half of the clients in a round, each by chance."""
    return recipe.with_(scheduling={"kind": "synchronous", "cohort": 0.5, "sampling": "poisson"})


def by_accountant(noise: float, share: float, releases: int, delta: float) -> float:
    """Epsilon of so many releases, by dp-accounting alone."""
    event: Any = dp_accounting.GaussianDpEvent(noise)
    event = event if share == 1 else dp_accounting.PoissonSampledDpEvent(share, event)
    composed = PLDAccountant().compose(dp_accounting.SelfComposedDpEvent(event, releases))
    return float(composed.get_epsilon(delta))


def model() -> nn.Module:
    return seeded(lambda: nn.Linear(4, 2))


def spends(recipe: Recipe) -> Spending:
    return Spending(recipe, SIZES, True)


# (recipe, noise, share, releases in a round) that its paper and the classes' docstrings say
MECHANISMS = {
    "rows": (ROWS, 3.0, 1.0, 1),
    "rows, sampled": (recipes.dp_sgd(lr=0.1, noise=3.0, batch=15), 3.0, 0.5, 2),  # 30 rows: half of them twice
    "server": (SERVER, 4.0, 1.0, 1),
    "server, sampled": (sampled(SERVER), 4.0, 0.5, 1),
    "local": (LOCAL, 6.0, 1.0, 1),  # between two updates lie twice the clip
}


@pytest.mark.parametrize(
    "name", [name if "," not in name else pytest.param(name, marks=pytest.mark.full) for name in MECHANISMS]
)
def test_every_round_is_that_of_dp_accounting(name: str) -> None:
    recipe, noise, share, each = MECHANISMS[name]
    spending, rounds = spends(recipe), 6
    told = [spending.after(count)[0] for count in range(1, rounds + 1)]
    expected = [by_accountant(noise, share, each * count, 1e-5) for count in range(1, rounds + 1)]
    assert [one["epsilon"] for one in told] == pytest.approx(expected, rel=2e-3)
    assert spending.budgets(rounds)[0].epsilon_pld == pytest.approx(expected[-1], rel=2e-3)
    between = (expected[3] + expected[4]) / 2
    assert spends(recipe).most_rounds(between) == 4


@pytest.mark.full
def test_a_composition_goes_on_from_fewer_releases_and_begins_anew_for_fewer() -> None:
    losses = LossAccountant()
    for releases in (4, 6, 2):
        expected = by_accountant(1.0, 0.5, releases, 1e-5)
        assert losses.epsilon(1.0, 0.5, releases, 1e-5) == pytest.approx(expected, rel=2e-3)


@pytest.mark.full
def test_the_client_that_spends_most_is_another_one_after_more_rounds() -> None:
    """By Renyi's bound: two steps with 30 of 55 rows spend more than one with all 30 in 6 rounds, and less in 7."""
    recipe = recipes.dp_sgd(lr=0.1, noise=0.8, batch=30)

    def after(rounds: int, *sizes: int) -> float:
        return float(Spending(recipe, sizes, True).after(rounds)[0]["epsilon"])

    assert after(6, 30, 55) == after(6, 55) != after(6, 30)
    assert after(7, 30, 55) == after(7, 30) != after(7, 55)


@pytest.mark.parametrize(
    ("recipe", "rows", "mechanism"),
    [
        (recipes.dp_sgd(lr=0.1, noise=3.0, batch=15), 60, (3.0, 0.25, 4)),
        (recipes.dp_sgd(lr=0.1, noise=3.0, batch=15), 10, (3.0, 1.0, 1)),
        (LOCAL, 60, (6.0, 1.0, 1)),
        (SERVER, 60, None),
    ],
    ids=["rows", "few rows", "local", "server"],
)
def test_a_site_counts_the_noise_that_a_task_adds_there(recipe: Recipe, rows: int, mechanism: Any) -> None:
    work = prepare(recipe, CLIENTS, model(), RunSettings(rounds=1)).work
    assert task_mechanism(work, rows) == mechanism


def test_cohorts_of_a_fixed_size_are_counted_as_they_are_drawn() -> None:
    recipe = SERVER.with_(scheduling={"kind": "synchronous", "cohort": 1})
    spending = spends(recipe)
    told = [spending.after(count)[0]["epsilon"] for count in (1, 3)]
    assert told == pytest.approx([spending.budgets(count)[0].epsilon_pld for count in (1, 3)], rel=1e-6)


@pytest.mark.parametrize("recipe", [ROWS, SERVER, LOCAL], ids=["rows", "server", "local"])
def test_a_run_ends_before_the_round_that_would_exceed_its_budget(recipe: Recipe, tmp_path: Path) -> None:
    spending = spends(recipe)
    budget = (spending.after(3)[0]["epsilon"] + spending.after(4)[0]["epsilon"]) / 2
    run = simulate(recipe, CLIENTS, model(), rounds=None, stop={"epsilon": budget}, out=tmp_path / "run")
    history = History(tmp_path / "run")
    assert run.final["rounds"] == 3
    assert [row["version"] for row in history.spent] == [1, 2, 3]
    assert [row["epsilon"] for row in history.spent] == [spending.after(count)[0]["epsilon"] for count in (1, 2, 3)]
    stated = history.meta["privacy"][0]
    assert stated["epsilon_pld"] == pytest.approx(history.spent[-1]["epsilon"], rel=1e-3)
    assert stated["epsilon_pld"] <= budget < spending.after(4)[0]["epsilon"]
    # fewer rounds are fewer, and more than it allows are as many as it allows
    few, many = (simulate(recipe, CLIENTS, model(), rounds=n, stop={"epsilon": budget}) for n in (2, 9))
    assert (few.final["rounds"], many.final["rounds"]) == (2, 3)


class Interrupt(Callback):
    """Ends the run behind its second step, as Ctrl-C does."""

    def on_server_step(self, step: Any) -> None:
        if step["version"] == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("recipe", [ROWS, SERVER], ids=["rows", "server"])
def test_what_was_spent_is_stated_however_a_run_ends(recipe: Recipe, tmp_path: Path) -> None:
    """Before, a run without rounds stated nothing, and one that a limit ended what all its rounds would have spent."""
    expected = spends(recipe).budgets(2)[0].epsilon_pld
    ends = {
        "updates": {"rounds": None, "stop": {"updates": 8}},
        "limit": {"rounds": 30, "stop": {"updates": 8}},
        "rounds": {"rounds": 2},
    }
    for name, limits in ends.items():
        simulate(recipe, CLIENTS, model(), out=tmp_path / name, **limits)
        assert History(tmp_path / name).meta["privacy"][0]["epsilon_pld"] == pytest.approx(expected, rel=1e-9)
    with pytest.raises(KeyboardInterrupt):
        simulate(recipe, CLIENTS, model(), rounds=30, out=tmp_path / "stopped", callbacks=[Interrupt()])
    stopped = History(tmp_path / "stopped")
    assert stopped.meta["status"] == "stopped"
    assert stopped.meta["privacy"][0]["epsilon_pld"] == pytest.approx(expected, rel=1e-9)
    assert [row["version"] for row in stopped.spent] == [1, 2]  # written with each step, so that a kill leaves them


def test_a_resumed_and_an_extended_run_go_on_counting(tmp_path: Path) -> None:
    spending = spends(SERVER)
    budget = spending.after(4)[0]["epsilon"]
    whole = simulate(SERVER, CLIENTS, model(), rounds=9, stop={"epsilon": budget}, out=tmp_path / "whole")
    simulate(SERVER, CLIENTS, model(), rounds=2, stop={"epsilon": budget}, out=tmp_path / "parts")
    extended = piebald.resume(tmp_path / "parts", CLIENTS, model(), recipe=SERVER, rounds=9)
    assert extended.final["rounds"] == whole.final["rounds"] == 4
    assert History(tmp_path / "parts").spent == History(tmp_path / "whole").spent
    assert History(tmp_path / "parts").meta["privacy"] == History(tmp_path / "whole").meta["privacy"]
    assert torch.equal(extended.cluster_models[0], whole.cluster_models[0])


def test_a_run_that_goes_on_from_another_counts_both(tmp_path: Path) -> None:
    """Epsilons of runs add up: three rounds spent, and so many more as the rest allows."""
    spending = spends(SERVER)
    one, two, three = (spending.after(count)[0]["epsilon"] for count in (1, 2, 3))
    simulate(SERVER, CLIENTS, model(), rounds=3, out=tmp_path / "first")
    budget = three + (one + two) / 2
    options = {"rounds": None, "stop": {"epsilon": budget}, "start_from": tmp_path / "first"}
    simulate(SERVER, CLIENTS, model(), out=tmp_path / "second", **options)
    second = History(tmp_path / "second")
    assert [(row["version"], row["epsilon"]) for row in second.spent] == [(1, pytest.approx(three + one))]
    assert second.spent[0]["delta"] == pytest.approx(2e-5)
    with pytest.raises(SettingError, match="one round would spend an epsilon of"):
        simulate(SERVER, CLIENTS, model(), **options | {"stop": {"epsilon": three + one / 2}})
    comparison = Comparison([History(tmp_path / "first"), second])
    assert [total["epsilon"] for total in comparison.privacy] == [pytest.approx(three + one)]
    chart = spent_chart(comparison)
    assert chart is not None
    assert sorted(list(line.x) for line in chart.marks) == [[1], [1, 2, 3]] or len(chart.marks) == 1


@pytest.mark.parametrize(
    ("recipe", "epsilon", "message"),
    [
        (recipes.fedavg(), 8.0, "adds no noise"),
        (SERVER.with_(transforms=[Gaussian(clip=1.0, noise=0.0)]), 8.0, "needs a budget that is known"),
        (recipes.fedbuff().with_(transforms=[Gaussian(clip=1.0, noise=8.0, where="client")]), 8.0, "that is known"),
        (SERVER, 0.1, "one round would spend an epsilon of"),
    ],
    ids=["no noise", "clips only", "asynchronous", "too little"],
)
def test_a_budget_that_cannot_be_kept_is_refused_before_training(recipe: Recipe, epsilon: float, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        simulate(recipe, CLIENTS, model(), rounds=None, stop={"epsilon": epsilon})


def test_later_rounds_are_told_now_and_then() -> None:
    spending = spends(SERVER)
    told = [count for count in range(1, 401) if spending.is_told(count)]
    assert told[:100] == list(range(1, 101))
    assert all(later - earlier <= math.ceil(later / 100) + 1 for earlier, later in itertools.pairwise(told))
    assert len(told) < 250


@pytest.mark.full
def test_who_is_left_when_others_are_excluded_is_asked_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, cohorts of a fixed size were accounted as drawn from all clients, however few of them were left."""
    honest = ResultChecks.reject_reason

    def reason(check: ResultChecks, result: Result, *about: Any, **others: Any) -> str | None:
        return "not believed" if result.task.client >= 10 else honest(check, result, *about, **others)

    monkeypatch.setattr(ResultChecks, "reject_reason", reason)
    recipe, clients = SERVER.with_(scheduling={"kind": "synchronous", "cohort": 4}), classified(*[4] * 40)
    # with a limit, so that updates are looked at one by one
    options: dict[str, Any] = {"max_examples": 1000, "measure": "none", "evaluate_every": 0}
    whole = simulate(recipe, clients, model(), rounds=12, **options)
    # those whom the last round excludes were drawn from with all others
    excluded = {row["client"] for row in whole.results if row["status"] == "refused" and row["version"] < 12}
    assert len(excluded) > 15
    (stated,) = whole.meta["privacy"]
    least = [
        fixed_cohorts(4.0, 4, known, 12, stated["delta"]).epsilon_pld
        for known in (len(clients), len(clients) - len(excluded))
    ]
    assert least[0] < least[1] == stated["epsilon_pld"]
    # before, clients that the last round excluded made all rounds dearer once nothing could be done about it
    for epsilon in (0.9, 1.2, least[0], 2.5):
        stopped = simulate(recipe, clients, model(), rounds=12, stop={"epsilon": epsilon}, **options)
        (stated,) = stopped.meta["privacy"]
        assert stated["epsilon_pld"] <= epsilon
        last = int(stated["releases"])
        assert last < 12
        gone = {row["client"] for row in stopped.results if row["status"] == "refused"}
        assert fixed_cohorts(4.0, 4, 40 - len(gone), last + 1, stated["delta"]).epsilon_pld > epsilon
