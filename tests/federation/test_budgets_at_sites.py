"""[stop] epsilon at a federation's server, which learns from its sites how many rows they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import piebald
from piebald.core.errors import SettingError
from piebald.core.references import USERS
from piebald.experiments.file import ExperimentSettings
from piebald.privacy.accounting import of_rows
from piebald.report.comparison import Comparison

from .in_process import InProcess, InProcessSites, in_process

ROWS = {"north": 30, "south": 20, "west": 48}
HERE = __name__
SITES = {"kind": "sites", "clients": list(ROWS), "inputs": [4], "classes": ["no", "yes"]}


def hospitals() -> dict[str, Any]:
    """Rows of three hospitals, all to train on."""
    rows: dict[str, Any] = {}
    for place, (name, count) in enumerate(ROWS.items()):
        draw, y = np.random.default_rng(place), np.array(["no", "yes"])[np.arange(count) % 2]
        x = draw.normal(size=(count, 4)).astype(np.float32)
        rows[name] = {"train": (x, y), "validation": (x[:4], y[:4]), "test": (x[:4], y[:4])}
    return rows


def experiment(noise: float, **fields: Any) -> ExperimentSettings:
    recipe = {"name": "dp_sgd", "lr": 0.1, "batch": 10, "noise": noise}
    table = {"seed": 1, "plugins": [HERE], "model": {"name": "logistic"}, "recipe": recipe, "evaluate": {"every": 0}}
    return ExperimentSettings.of_table(table | fields, "the test's settings", USERS)


DATA = {"source": f"{HERE}:hospitals"}


def carried_out(given: ExperimentSettings, runtime: Any) -> piebald.Run:
    plan = given.plan()
    (recipe,) = plan.recipes.values()
    options: dict[str, Any] = {"rounds": given.rounds, "stop": plan.stop, "seed": given.seed, "evaluate_every": 0}
    return piebald.run(recipe, plan.clients, plan.model, runtime=runtime, **options)


@pytest.mark.full
def test_a_federation_ends_before_the_round_that_would_exceed_epsilon_as_the_simulator_does() -> None:
    probe = experiment(4.0, data=DATA, rounds=1)
    (recipe,) = probe.plan().recipes.values()
    three, four = (of_rows(recipe, list(ROWS.values()), rounds).epsilon_pld for rounds in (3, 4))
    limits = {"rounds": 9, "stop": {"epsilon": (three + four) / 2}}
    here, there = experiment(4.0, data=DATA, **limits), experiment(4.0, partition=SITES, **limits)
    simulated = carried_out(here, piebald.Simulator(workers=0))
    real = carried_out(there, in_process(there, data=DATA, policy={"plugins": [HERE]}))
    assert [len(run.rounds) for run in (simulated, real)] == [3, 3]
    for theirs, ours in zip(simulated.spent, real.spent, strict=True):
        assert ours == {**theirs, "epsilon": pytest.approx(theirs["epsilon"])}
    assert real.spent[-1]["epsilon"] == pytest.approx(three, rel=2e-3)
    (budget,) = real.meta["privacy"]
    assert (budget["unit"], budget["epsilon_pld"]) == ("row", pytest.approx(three))


@pytest.mark.full
def test_a_first_round_that_would_exceed_epsilon_is_refused_before_it() -> None:
    given = experiment(0.7, partition=SITES, rounds=9, stop={"epsilon": 0.01})
    with pytest.raises(SettingError, match=r"one round would spend an epsilon of .* more than epsilon = 0.01 of stop"):
        carried_out(given, in_process(given, data=DATA, policy={"plugins": [HERE]}))


class LateSites(InProcessSites):
    """Sites of which the smallest one joins when two rounds are over."""

    def stated_rows(self) -> Sequence[int]:
        rows = list(super().stated_rows())
        return rows if self.training >= 2 * len(rows) else [rows[0], 0, rows[2]]

    training = 0

    def submit(self, tasks: Any, sum_request: Any = None) -> None:
        self.training += sum(task.query is None for task in tasks)
        super().submit(tasks, sum_request)


class Late(InProcess):
    """Their runtime."""

    kind = "late_sites"

    def open(self, work: Any, clients: Any) -> LateSites:
        whole = super().open(work, clients)
        whole.__class__ = LateSites
        return whole  # type: ignore[return-value]


@pytest.mark.full
def test_a_site_that_joins_late_with_fewer_rows_counts_from_then_on() -> None:
    (recipe,) = experiment(4.0, data=DATA, rounds=1).plan().recipes.values()
    without, whole = (of_rows(recipe, sizes, 3).epsilon_pld for sizes in ([30, 48], [30, 20, 48]))
    assert without < whole
    given = experiment(4.0, partition=SITES, rounds=9, stop={"epsilon": (without + whole) / 2})
    site = in_process(given, data=DATA, policy={"plugins": [HERE]})
    run = carried_out(given, Late(experiment=site.experiment, site=site.site))
    assert len(run.rounds) == 2


def test_real_sites_say_how_their_most_frequent_class_scores_and_the_verdict_names_it() -> None:
    there = experiment(0.0, partition=SITES, recipe={"name": "fedavg"}, rounds=1)
    plan = there.plan()
    site = in_process(there, data=DATA, policy={"plugins": [HERE], "least_rows": 1})
    run = piebald.run("fedavg", plan.clients, plan.model, rounds=1, runtime=site)
    assert run.naive("naive") == {0: 0.5, 1: 0.5, 2: 0.5}
    assert run.values_of_rows("rows") == {}
    assert "always the most frequent class" in Comparison([run]).headline()
