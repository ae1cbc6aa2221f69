"""AskedSites answer questions about statistics where their policy says so, and hostile answers are refused."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from piebald.cli import main
from piebald.contracts import Update
from piebald.core.errors import PiebaldError
from piebald.data.partition.leakage import SPLITS
from piebald.experiments.file import ExperimentSettings
from piebald.inference.columns import statistics_request
from piebald.inference.pooled_statistics import FederatedStatistics
from piebald.inference.statistics_at_sites import statistics, statistics_at_sites

from .sites import Change, InProcess, Policy, plan

ALLOWED = Policy(queries=["statistics"], least_rows=1)
PLAN = plan()
POOLED = np.concatenate([PLAN.clients.rows(k, "train").x.double().numpy() for k in range(3)])  # type: ignore[union-attr]


def asked(runtime: InProcess, **wanted: Any) -> FederatedStatistics:
    made = statistics_request(wanted.pop("quantiles", (0.1, 0.5)), wanted.pop("bins", None), wanted, False)
    return statistics_at_sites(runtime, PLAN.work, PLAN.clients, made, say=lambda line: None)  # type: ignore[arg-type]


def test_sites_give_the_statistics_of_their_pooled_rows() -> None:
    found = asked(InProcess(PLAN, [ALLOWED] * 3))
    for place, name in enumerate(("x0", "x1")):
        one = found.numbers[name]
        assert one.mean == pytest.approx(POOLED[:, place].mean(), rel=1e-14)
        assert one.variance == pytest.approx(POOLED[:, place].var(ddof=1), rel=1e-14)
        assert list(one.quantiles.values()) == np.quantile(POOLED[:, place], (0.1, 0.5)).tolist()
    labels = torch.cat([PLAN.clients.rows(k, "train").y for k in range(3)])  # type: ignore[misc]
    assert list(found.texts["target"].counts.values()) == torch.bincount(labels).tolist()
    assert found.rows == [len(PLAN.clients.rows(k, "train")) for k in range(3)]


def test_a_site_that_does_not_name_the_question_is_left_out() -> None:
    found = asked(InProcess(PLAN, [ALLOWED, Policy(), Policy(queries=["evaluate"], least_rows=1)]), quantiles=())
    assert found.clients == ["a"]
    with pytest.raises(PiebaldError, match=r"no site answers .*only if its policy names it"):
        asked(InProcess(PLAN, [Policy()] * 3))


def test_rows_that_a_policy_closes_stay_closed() -> None:
    closed = Policy(queries=["statistics"], splits=["test"])
    with pytest.raises(PiebaldError, match="no queries that depend on its train rows"):
        asked(InProcess(PLAN, [closed] * 3))


def test_the_log_of_a_site_names_the_column_that_few_rows_decide(caplog: pytest.LogCaptureFixture) -> None:
    """The server is told no column: which one it is may tell of rows."""
    runtime = InProcess(PLAN, [Policy(queries=["statistics"], least_rows=5)] * 3)
    found = asked(runtime, quantiles=(0.5,))
    assert not found.numbers["x0"].quantiles  # each is the value of a row
    assert re.search(r"task \d+: too few rows contribute to a sum, or .*; column (1|'x0')", caplog.text)
    assert not any(b"column" in body for body in runtime.bodies)


def test_small_numbers_of_rows_stay_at_the_site() -> None:
    careful = Policy(queries=["statistics"], least_rows=5)
    bounds: dict[str, Any] = {"x0": (-50, 50), "x1": (-50, 50), "target": (-50, 50)}
    runtime = InProcess(PLAN, [careful] * 3)
    found = asked(runtime, bins=2, **bounds)  # all counts are 0, or at least 5
    assert runtime.questions == 2
    assert sum(found.numbers["x0"].counts) == len(POOLED)
    assert abs(found.numbers["x0"].quantiles[0.5] - np.median(POOLED[:, 0])) <= found.numbers["x0"].quantile_error
    with pytest.raises(PiebaldError, match="too few rows contribute"):
        asked(InProcess(PLAN, [careful] * 3), bins=60, **bounds)
    with pytest.raises(PiebaldError, match="too few rows contribute"):
        asked(InProcess(PLAN, [Policy(queries=["statistics"], least_rows=40)] * 3), quantiles=())


def test_the_difference_of_two_answers_is_not_told() -> None:
    """Two thresholds on both sides of one number, each about many rows."""
    careful = Policy(queries=["statistics"], least_rows=5)
    runtime = InProcess(PLAN, [careful] * 3)
    bounds: dict[str, Any] = {"x0": (-50, 50), "x1": (-50, 50), "target": (-50, 50)}
    asked(runtime, bins=2, **bounds)
    asked(runtime, bins=2, **bounds)  # the same tells nothing new
    with pytest.raises(
        PiebaldError, match="answered 1 questions 'statistics: counts' about its rows, in all runs together"
    ):
        asked(runtime, bins=2, **{**bounds, "x0": (-49.9, 50)})


def told(name: str, change: Callable[[torch.Tensor], Any]) -> Change:
    def changed(update: Update) -> Update:
        if name not in update.vectors:
            return update
        vector = update.vectors[name].clone()
        return dataclasses.replace(update, vectors={**update.vectors, name: change(vector)})

    return changed


def put(place: Any, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(vector: torch.Tensor) -> torch.Tensor:
        vector[place] = value
        return vector

    return change


@pytest.mark.parametrize(
    "change",
    [
        told("moments", put((0, 0), 1e9)),
        told("moments", put((0, 0), -1.0)),
        told("moments", put((1, 0), 0.5)),
        told("moments", put((0, 0), 3.0)),  # does not add up to its rows
        told("moments", put((3, 0), float("nan"))),
        told("moments", put((3, 0), float("inf"))),
        told("moments", put((4, 0), -1.0)),
        told("moments", lambda vector: vector.float()),
        told("moments", lambda vector: vector[:, :1]),
        told("moments", lambda vector: torch.zeros(5, 100_000, dtype=torch.float64)),
        lambda update: dataclasses.replace(update, vectors={}),
        lambda update: dataclasses.replace(update, examples=10**9),
        lambda update: dataclasses.replace(update, metrics={"loss": 1.0}),
        lambda update: dataclasses.replace(update, vectors={**update.vectors, "more": torch.zeros(3)}),
    ],
)  # fmt: skip
def test_hostile_moments_do_not_count(change: Change) -> None:
    found = asked(InProcess(PLAN, [ALLOWED] * 3, change), quantiles=())
    assert found.clients == ["b", "c"]
    assert found.rows == [len(PLAN.clients.rows(k, "train")) for k in (1, 2)]


@pytest.mark.parametrize(
    "change",
    [told("counts", put((0, 0), 1e9)), told("counts", put((0, 0), -1.0)), told("counts", put((0, 0), 0.5)),
     told("counts", lambda vector: vector * 0 + torch.arange(vector.shape[1], 0, -1))],
)  # fmt: skip
def test_hostile_counts_end_the_question(change: Change) -> None:
    with pytest.raises(PiebaldError, match="a answered the first question and not the next one"):
        asked(InProcess(PLAN, [ALLOWED] * 3, change), quantiles=(0.5,))


@pytest.mark.long
def test_three_sites_over_connections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Means and counts to the bit, without the quantiles that sites with a floor keep, sums under masks, sums with
    noise, and constants of standardise that a run of the same federation takes.
    """
    rng = np.random.default_rng(4)
    frame = pandas.DataFrame(
        {"site": ["a", "b", "c"] * 120, "age": rng.normal(50, 9, 360), "ward": rng.choice(["red", "blue"], 360)}
    )
    frame.loc[::2, "age"] = None  # of each site more than its floor has them, and more than its floor has none
    frame["y"] = (frame.age > 50).astype(int)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    file = tmp_path / "file.toml"
    file.write_text(
        f"data = {{ source = {json.dumps(str(tmp_path / 'rows.csv'))}, client = 'site', target = 'y', features = "
        "['age', 'ward'] }\nmodel = { name = 'logistic' }\nrounds = 1\nrecipe = { name = 'fedavg' }\n"
    )
    assert main(["statistics", str(file), "--runtime", "federation", "--json"]) == 0
    sites = json.loads(capsys.readouterr().out)
    clients = ExperimentSettings.load(file).source_clients()
    here = statistics(clients, quantiles=()).plain()
    assert sites["columns"] == here["columns"]
    assert sites["rows"] == [len(clients.rows(k, SPLITS[0])) for k in range(3)]
    for hidden in (["--secure"], ["--epsilon", "5", "--delta", "1e-6"]):
        bounded = ["--bounds", "age=0:100", "--bins", "2", "--runtime", "federation", "--json"]
        assert main(["statistics", str(file), *bounded, *hidden]) == 0
        told = json.loads(capsys.readouterr().out)
        off = 1e-6 if hidden == ["--secure"] else 9 * told["noise"]
        assert abs(told["columns"]["age"]["present"] - sites["columns"]["age"]["present"]) <= off
        assert sum(told["columns"]["target"]["counts"].values()) == pytest.approx(sum(sites["rows"]), abs=2 * off)
        assert told["rows"] is None
    constants = ["--set", 'data.standardise="federated"', "--out", str(tmp_path / "run"), "--quiet"]
    assert main(["up", str(file), "--local", "3", *constants]) == 0
