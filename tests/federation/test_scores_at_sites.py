"""What sites tell for the report besides means: scores at their own thresholds, and standard errors by rows."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pandas
import pytest

import piebald
from piebald.core.errors import SettingError
from piebald.core.references import USERS
from piebald.experiments.file import ExperimentSettings
from piebald.report.comparison import Comparison
from piebald.report.findings import at_thresholds, notes

from .in_process import in_process

NAMES = ["north", "south", "west"]
HERE = __name__
HIDING = '{"least_rows": 2}'
DATA = {"source": f"{HERE}:hospitals"}
SITES = {"kind": "sites", "clients": NAMES, "inputs": [4], "classes": ["no", "yes"]}


def hospitals() -> dict[str, Any]:
    """Rows of three hospitals; a quarter is ill, and at the last one nobody of the validation rows."""
    rows: dict[str, Any] = {}
    for place, name in enumerate(NAMES):
        draw = np.random.default_rng(place)
        ill = draw.random(160) < 0.25
        x = (draw.normal(size=(160, 4)) + ill[:, None] * 0.8).astype(np.float32)
        y = np.where(ill, "yes", "no")
        y[80:120] = "no" if name == "west" else y[80:120]
        rows[name] = {"train": (x[:80], y[:80]), "validation": (x[80:120], y[80:120]), "test": (x[120:], y[120:])}
    return rows


@functools.cache
def carried_out(recipe: str, at_sites: bool, policy: str = "{}", metric: str = "auc") -> piebald.Run:
    fields = {"partition": SITES} if at_sites else {"data": DATA}
    table: dict[str, Any] = {
        "seed": 1,
        "plugins": [HERE],
        "model": {"name": "logistic"},
        "recipe": {"name": recipe, "lr": 0.3},
    }
    table["evaluate"] = {"metrics": [metric], "threshold": "f1"}
    given = ExperimentSettings.of_table(table | fields, "the test's settings", USERS)
    plan = given.plan()
    allowed: dict[str, Any] = {"plugins": [HERE]} | json.loads(policy)
    sites = in_process(given, at_once=False, data=DATA, policy=allowed)
    runtime = sites if at_sites else piebald.Simulator(engine="sequential", workers=0)
    options: dict[str, Any] = {"rounds": 3, "seed": 1, "metrics": [metric], "threshold": "f1"}
    (made,) = plan.recipes.values()
    return piebald.run(made, plan.clients, plan.model, runtime=runtime, **options)


@pytest.mark.parametrize("recipe", ["fedavg", "ditto"])
def test_sites_score_at_their_thresholds_as_the_simulator_does(recipe: str) -> None:
    here, there = carried_out(recipe, False), carried_out(recipe, True)
    table, told = pandas.DataFrame(here.threshold_scores).T, there.at_thresholds("f1")
    if recipe == "fedavg":  # personal models are kept in folders alone
        table = here.at_thresholds("f1").iloc[:, 2:]
    assert list(told.index) == ["north", "south"]  # west's validation rows are of one class
    assert list(told.columns) == list(table.columns)  # thresholds stay where the rows are
    assert told.to_numpy() == pytest.approx(table.to_numpy(), abs=1e-6)
    assert here.threshold_scores == there.threshold_scores
    said = at_thresholds(Comparison([there]))
    assert said.startswith(f"At the threshold for f1 on each client's validation rows, {recipe} has 0.")
    assert said.endswith("; none at west, which lack validation rows of both classes.")


def test_what_sites_were_not_asked_they_do_not_tell() -> None:
    for asked in (
        {"criterion": "accuracy"},
        {"criterion": "f1", "pooled": True},
        {"criterion": "f1", "split": "train"},
    ):
        with pytest.raises(SettingError, match="tell scores only by the threshold of the run's \\[evaluate\\], 'f1'"):
            carried_out("fedavg", True).at_thresholds(**{"criterion": "f1"} | asked)


def test_standard_errors_of_sites_take_the_place_of_single_rows() -> None:
    """Without the correlation of two methods on the same rows the error is larger, never smaller than it should be."""
    here, there = (Comparison([carried_out(recipe, at) for recipe in ("local", "fedavg")]) for at in (False, True))
    for label in here.labels:
        single, told = here.scores[label], there.scores[label]
        assert not told.rows
        for (seed, name), rows in single.rows.items():
            assert told.errors[seed, name] == pytest.approx(rows.std(ddof=1) / len(rows) ** 0.5, rel=1e-4)
    (ours,), (theirs,) = (comparison.paired("local") for comparison in (here, there))
    assert ours["noise"] == theirs["noise"] == "rows"
    assert theirs["difference"] == pytest.approx(ours["difference"], abs=1e-6)
    assert theirs["high"] - theirs["low"] > ours["high"] - ours["low"]
    assert "beyond the chance of other rows of these clients" in notes(there)[0]


def test_sites_that_hide_rows_tell_neither_and_the_answer_says_so() -> None:
    """Accuracies do leave such sites, with noise, and the number of rows, from which their error follows."""
    hidden = carried_out("fedavg", True, HIDING, "accuracy")
    assert hidden.naive("naive")
    assert not hidden.threshold_scores
    reasons = {failure["kind"]: failure["reason"] for failure in hidden.failures}
    assert "'threshold_scores' has none that noise can hide" in reasons["threshold_scores"]
    both = Comparison([hidden, carried_out("local", True, HIDING, "accuracy")])
    assert [row["noise"] for row in both.paired("local")] == ["rows"]
    assert both.scores["local"].sizes == [40, 40, 40]


def test_whoever_tells_no_standard_error_is_named() -> None:
    refusing = {"queries": ["evaluate"]}
    both = Comparison([carried_out(recipe, True, json.dumps(refusing)) for recipe in ("local", "fedavg")])
    assert [row["noise"] for row in both.paired("local")] == ["clients"]
    assert notes(both)[1] == (
        "What other rows of these clients would change is not known of auc: north, south and west have no standard "
        "error of it, as it takes more rows, or the site tells none."
    )
