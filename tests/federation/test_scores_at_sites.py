"""What sites tell for the report besides means: scores at their own thresholds, and standard errors by rows."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import piebald
from piebald.contracts import MOST_REMEMBERED
from piebald.core.errors import SettingError
from piebald.core.references import USERS
from piebald.experiments.file import ExperimentSettings
from piebald.federation.site.client_store import FILE, RowMemory
from piebald.report.comparison import Comparison
from piebald.report.findings import at_thresholds, notes, without_answer_of_all
from piebald.report.verdict import compared

from .conftest import Sites, carry_out, settings
from .in_process import in_process

NAMES = ["north", "south", "west"]
HERE = __name__
HIDING = '{"least_rows": 2}'
FEW = '{"least_rows": 1}'  # sites whose owners want no rules of disclosure
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


def stays() -> dict[str, Any]:
    """Days of patients at the three hospitals, most at the last one; some are negative, and some equal."""
    rows: dict[str, Any] = {}
    for place, name in enumerate(NAMES):
        draw = np.random.default_rng(place)
        days = (draw.normal(7.3 * place - 3, 4, (60 * (place + 1), 1)) * 4).round() / 4
        x = draw.normal(size=(len(days), 4)).astype(np.float32)
        days = days.astype(np.float32)
        rows[name] = {"train": (x[:-20], days[:-20]), "test": (x[-20:], days[-20:])}
    return rows


@functools.cache
def carried_out(
    recipe: str,
    at_sites: bool,
    policy: str = "{}",
    metric: str = "auc",
    seed: int = 1,
    memory: str = "",
    threshold: str = "f1",
) -> piebald.Run:
    evaluate = {"metrics": [metric], "threshold": threshold}
    return run_on({"source": f"{HERE}:hospitals"}, SITES, evaluate, recipe, at_sites, policy, seed, memory)


def run_on(
    data: dict[str, Any],
    partition: dict[str, Any],
    evaluate: dict[str, Any],
    recipe: str,
    at_sites: bool,
    policy: str = "{}",
    seed: int = 1,
    memory: str = "",
    **options: Any,
) -> piebald.Run:
    fields = {"partition": partition} if at_sites else {"data": data}
    table: dict[str, Any] = {
        "seed": seed,
        "plugins": [HERE],
        "model": {"name": "logistic"},
        "recipe": {"name": recipe, "lr": 0.3},
    }
    table["evaluate"] = evaluate
    table |= {name: value for name, value in options.items() if name == "loss"}
    given = ExperimentSettings.of_table(table | fields, "the test's settings", USERS)
    plan = given.plan()
    allowed: dict[str, Any] = {"plugins": [HERE]} | json.loads(policy)
    sites = in_process(given, at_once=False, memory=memory, data=data, policy=allowed)
    runtime = sites if at_sites else piebald.Simulator(engine="sequential", workers=0)
    options |= {"rounds": 3, "seed": seed, **evaluate}
    (made,) = plan.recipes.values()
    return piebald.run(made, plan.clients, plan.model, runtime=runtime, **options)


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize("criterion", ["f1", "sensitivity=0.9"])
def test_one_threshold_for_all_sites_is_that_of_the_simulator(criterion: str) -> None:
    """Also west is scored, whose validation rows are of one class; counts are what a site tells only by name."""
    naming = json.dumps({"queries": ["evaluate", "threshold_counts"], "least_rows": 1})
    here, there = (
        carried_out("fedavg", at, naming if at else "{}", threshold=f"pooled {criterion}") for at in (False, True)
    )
    expected = here.at_thresholds(criterion, pooled=True)
    assert expected["threshold"].nunique() == 1
    assert list(expected.index) == NAMES
    told = there.at_thresholds(criterion, pooled=True)
    assert list(told.index) == NAMES
    for table in (told, pandas.DataFrame(here.threshold_scores).T):
        assert table.to_numpy() == pytest.approx(expected.iloc[:, 2:].to_numpy(), abs=1e-6)
    for run in (here, there):  # the run at the server knows it as well
        assert run.threshold(criterion, pooled=True) == expected["threshold"].iloc[0]
        assert run.usual_criterion("west") == f"pooled {criterion}"
    said = at_thresholds(Comparison([there]))
    assert said.startswith(f"At the threshold for {criterion} on all clients' validation rows, fedavg has ")
    for policy, reason in (({}, "only if its policy names it"), ({"least_rows": 2}, "is about fewer than the 2 rows")):
        named = json.dumps({**policy, "queries": ["evaluate", "threshold_counts"]} if policy else policy)
        silent = carried_out("fedavg", True, named, threshold="pooled f1")
        assert not silent.threshold_scores
        assert reason in next(row["reason"] for row in silent.failures if row["kind"] == "threshold_counts")


def test_what_sites_were_not_asked_they_do_not_tell() -> None:
    for asked in (
        {"criterion": "accuracy"},
        {"criterion": "f1", "pooled": True},
        {"criterion": "f1", "split": "train"},
    ):
        with pytest.raises(SettingError, match="tell scores only by the threshold of the run's \\[evaluate\\], 'f1'"):
            carried_out("fedavg", True).at_thresholds(**{"criterion": "f1"} | asked)


@pytest.mark.full
@pytest.mark.parametrize(
    ("metric", "seeds"),
    [
        ("accuracy", (1, 2)), ("auc", (1,)), ("brier", (1, 2)),
        *(pytest.param(metric, seeds, marks=pytest.mark.long)
          for metric, seeds in (("accuracy", (1,)), ("accuracy", (1, 2, 3)), ("auc", (1, 2, 3)),
                                ("brier", (1,)), ("brier", (1, 2, 3)))),
    ],
)  # fmt: skip
def test_the_verdict_of_sites_is_that_of_the_simulator(metric: str, seeds: tuple[int, ...], tmp_path: Path) -> None:
    """Sites remember which rows earlier runs were right on, and tell how far those of two runs coincide."""
    here, there = (
        Comparison([
            carried_out(recipe, at_sites, metric=metric, seed=seed, memory=str(tmp_path) if at_sites else "")
            for recipe in ("local", "fedavg", "ditto") for seed in seeds
        ])
        for at_sites in (False, True)
    )  # fmt: skip
    assert not any(table.rows for table in there.scores.values())
    for base in here.labels:
        for ours, theirs in zip(here.paired(base), there.paired(base), strict=True):
            assert ours["noise"] == theirs["noise"] == "rows"
            for name in ("difference", "low", "high", "p"):
                assert theirs[name] == pytest.approx(ours[name], rel=1e-3, abs=1e-6)
    assert here.verdict is not None
    leader, naive = here.verdict.leader, "the most frequent class"
    ours, theirs = (compared(made.scores[leader], made.naive[naive]) for made in (here, there))
    assert ours is not None
    assert theirs is not None
    assert (theirs.mean, theirs.low, theirs.p) == pytest.approx((ours.mean, ours.low, ours.p), rel=1e-3)
    assert there.verdict is not None
    # but for what is sent, which sites measure, and for numbers, which are compared above
    said, expected = (
        re.sub(r"[\d.]+", "", verdict.sentence().partition("local sends")[0])
        for verdict in (there.verdict, here.verdict)
    )
    assert said == expected


@pytest.mark.parametrize("loss", ["l1", "regression"])
def test_the_typical_value_of_all_sites_is_that_of_the_simulator(loss: str) -> None:
    """By sums and numbers of rows a mean, and by counts between edges a median."""
    data, partition = {"source": f"{HERE}:stays"}, {"kind": "sites", "clients": NAMES, "inputs": [4]}
    here, there = (
        Comparison([run_on(data, partition, {}, "fedavg", at, FEW if at else "{}", loss=loss)]) for at in (False, True)
    )
    for name in ("the typical value", "all clients' typical value"):
        assert there.naive[name].values == pytest.approx(here.naive[name].values, rel=1e-4)
        told, expected = there.naive[name].errors, here.naive[name].rows
        assert [told[key] for key in told] == pytest.approx(
            [expected[key].std(ddof=1) / len(expected[key]) ** 0.5 for key in told], rel=1e-3
        )
    assert not without_answer_of_all(there)
    refusing = '{"queries": ["evaluate", "naive_scores"]}'
    silent = Comparison([run_on(data, partition, {}, "fedavg", True, refusing, loss=loss)])
    assert list(silent.naive) == ["the typical value"]
    assert without_answer_of_all(silent).startswith("Always all clients' typical value is not compared: what sites")
    assert not silent.runs[0].failures


@pytest.mark.full
def test_site_processes_remember_earlier_runs(sites: Sites) -> None:
    recipes = [{"name": "local"}, {"name": "fedavg"}]
    here = Comparison([carry_out(settings(recipe)) for recipe in recipes])
    there = Comparison([carry_out(settings(recipe), credentials=str(sites.folder / "server")) for recipe in recipes])
    (ours,), (theirs,) = here.paired("local"), there.paired("local")
    assert ours["noise"] == theirs["noise"] == "rows"
    assert [theirs[name] for name in ("low", "high", "p")] == pytest.approx(
        [ours[name] for name in ("low", "high", "p")], rel=1e-3
    )
    assert all((sites.folder / name / "state" / FILE).is_file() for name in sites.running)


def test_sites_tell_nothing_of_earlier_runs_on_other_rows_or_that_were_forgotten(tmp_path: Path) -> None:
    memory = RowMemory(tmp_path / "state" / FILE)
    values = {"rows": torch.tensor([0.0, 1.0, 1.0])}
    first, _ = memory.remember("a", "run 1", values)
    again, held = RowMemory(tmp_path / "state" / FILE).remember("a", "run 1", values)
    assert (again, list(held)) == (first, [first["rows"]])  # what was asked twice is one and the same
    changed, held = memory.remember("a", "run 1", {"rows": torch.tensor([1.0, 1.0, 1.0])})
    assert list(held) == [changed["rows"]] != [first["rows"]]  # in place of what the run had before
    _, held = memory.remember("b", "run 2", values)
    assert changed["rows"] not in held
    for run in range(MOST_REMEMBERED):
        _, held = memory.remember("a", f"run {run + 3}", {"rows": torch.rand(3)})
    assert len(held) == MOST_REMEMBERED
    assert changed["rows"] not in held
    (tmp_path / "state" / FILE).write_text("no tensors")
    assert len(RowMemory(tmp_path / "state" / FILE).remember("a", "run 1", values)[1]) == 1
    assert (tmp_path / "state" / FILE).stat().st_mode & 0o077 == 0


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
def test_sites_that_hide_rows_tell_no_covariance(tmp_path: Path) -> None:
    """It counts the rows that two models are both right on, which noise on each accuracy would not hide."""
    sent = {}
    for number, policy in enumerate(("{}", HIDING)):
        (memory := tmp_path / str(number)).mkdir()
        runs = [carried_out(recipe, True, policy, "accuracy", memory=str(memory)) for recipe in ("local", "fedavg")]
        metrics = {row["metric"].partition("/")[0] for run in runs for row in run.row_scores if row["model"] == "rows"}
        sent[policy] = metrics & {"covariance", "earlier", "standard_error"}
    assert sent == {"{}": {"covariance", "earlier", "standard_error"}, HIDING: set()}


@pytest.mark.full
def test_whoever_tells_no_standard_error_is_named() -> None:
    refusing = {"queries": ["evaluate"]}
    both = Comparison([carried_out(recipe, True, json.dumps(refusing)) for recipe in ("local", "fedavg")])
    assert [row["noise"] for row in both.paired("local")] == ["clients"]
    assert notes(both)[1] == (
        "What other rows of these clients would change is not known of auc: north, south and west have no standard "
        "error of it, as it takes more rows, or the site tells none."
    )
