"""A site divides its own rows as the run's [split] says, to the same rows as in a simulation; it may refuse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import piebald
from piebald.contracts import Task
from piebald.core.errors import SettingError
from piebald.data.clients.data_source import RunRows
from piebald.data.partition.split import SplitSettings
from piebald.experiments.file import ExperimentSettings
from piebald.experiments.run_settings import RunSettings
from piebald.federation.credentials import provisioning
from piebald.federation.hub.run_terms import terms
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_process import SiteSettings, SiteWork
from piebald.federation.site.site_rows import SPLITS, SiteClient, SiteSource, own_rows
from piebald.federation.site.task_runner import TaskRunner
from piebald.methods.queries import Evaluate
from piebald.privacy.ledger import RowLedger
from piebald.runs.prepare import prepare

from .conftest import provisioned

NAMES = ["east", "north", "south"]
COLUMNS = {"target": "ill", "features": ["a", "b"]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Visits of patients at three hospitals, in one table and in one of each hospital."""
    folder, rng = tmp_path_factory.mktemp("rows"), np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(180, 2)), columns=["a", "b"])
    frame["hospital"] = np.array(NAMES)[np.arange(180) // 5 % 3]
    frame["patient"], frame["day"] = np.arange(180) // 5, rng.permutation(180)
    frame["ill"] = np.where(rng.random(180) < 0.4, "yes", "no")
    frame.to_csv(folder / "all.csv", index=False)
    for name in NAMES:
        frame[frame.hospital == name].drop(columns="hospital").to_csv(folder / f"{name}.csv", index=False)
    return folder


@pytest.mark.parametrize(
    "rule",
    [
        {"group": "patient", "test": 0.3, "validation": 0.2},
        {"group": "patient", "folds": 3, "fold": 2, "validation": 0.25},
        {"order": "day", "test": 7},
        {"group": ["hospital", "patient"], "stratify": False},
        {"hold_out": ["north"], "group": "patient", "validation": 2},
        {"test_only": ["south"], "seed": 5},
    ],
)
def test_each_site_has_the_rows_of_a_simulation(place: Path, rule: Mapping[str, Any]) -> None:
    split = SplitSettings(**rule)
    simulated = piebald.clients_from(str(place / "all.csv"), client="hospital", split=split, prepare="none", **COLUMNS)
    for number, name in enumerate(NAMES):
        run = RunRows(["no", "yes"], columns={"client": "hospital", **COLUMNS}, split=split)
        own = own_rows(SiteSource(source=f"{name}.csv"), place, name, run, NAMES, number)
        for part in SPLITS:
            here, there = own.rows(number, part), simulated.rows(number, part)
            assert len(here) == len(there)
            if name not in [*split.held_out, *split.test_only]:  # whose rows come in another order
                assert torch.equal(here.x, there.x)
                assert torch.equal(here.y, there.y)


def test_sizes_that_a_site_states_count_and_others_are_the_runs(place: Path) -> None:
    run = RunRows(["no", "yes"], columns=COLUMNS, split=SplitSettings(order="day", test=0.5, validation=0.2))
    open_source, stated = SiteSource(source="east.csv"), SiteSource(source="east.csv", test=0.1)
    sizes = [
        [own_rows(source, place, "east", run, NAMES).size(0, part) for part in SPLITS]
        for source in (open_source, stated)
    ]
    assert sizes == [[18, 12, 30], [42, 12, 6]]


def test_a_site_may_refuse_that_a_run_divides_its_rows(place: Path, tmp_path: Path) -> None:
    same: dict[str, Any] = {"model": {"name": "logistic"}, "recipe": {"name": "fedavg"}, "split": {"group": "patient"}}
    here = {"source": str(place / "all.csv"), "client": "hospital", **COLUMNS}
    plan = ExperimentSettings.of_table(same | {"data": here}, "the test's settings").plan()
    ready = prepare(next(iter(plan.recipes.values())), plan.clients, plan.model, RunSettings(rounds=1))
    sites = {"kind": "sites", "clients": NAMES, "inputs": [2], "classes": ["no", "yes"]}
    values = json.loads(
        terms(
            ready.work, same | {"partition": sites, "data": COLUMNS | {"name": "digits"}}, NAMES, NAMES, ["no", "yes"]
        )
    )
    credentials = provisioning.read(provisioned(tmp_path / "credentials", NAMES) / "north")
    data = {"source": "north.csv", **COLUMNS}
    made = SiteWork(credentials, SiteSettings.model_validate({"data": data}), place)(values)
    assert [made.clients.size(1, part) for part in SPLITS] == [50, 0, 10]
    assert SiteWork(credentials, SiteSettings.model_validate({"data": data, "policy": {"accept_split": True}}), place)(
        values
    )
    refuses = SiteSettings.model_validate({"data": data, "policy": {"accept_split": False}})
    with pytest.raises(SettingError, match=r"takes part in no run whose terms have \[split\]"):
        SiteWork(credentials, refuses, place)(values)


@pytest.mark.parametrize(
    ("policy", "refused"),
    [
        ({}, False),
        ({"secure_aggregation": 3}, True),
        ({"clip": 1.0}, True),
        ({"clip": 1.0, "accept_split": True}, False),
    ],
)
def test_rows_that_a_policy_protects_are_divided_by_no_run_unless_it_says_so(
    place: Path, policy: Mapping[str, Any], refused: bool
) -> None:
    """Else a second run with another [split] could score the rows that the first one trained on."""
    clients = piebald.clients_from(str(place / "all.csv"), client="hospital", split={"test": 0.5}, **COLUMNS)
    work = prepare("fedavg", clients, piebald.models.build_model("logistic", (2,), 2), RunSettings(rounds=1)).work
    reason = Policy.model_validate(policy).split_reject_reason(work)
    assert (reason is not None) == refused
    assert reason is None or "accept_split = true" in reason


def test_scores_of_rows_that_a_run_has_chosen_otherwise_are_another_question(place: Path, tmp_path: Path) -> None:
    """Else a server could compare scores of the last seven rows with those of the last eight for nothing."""
    counts = []
    for tests in (7, 8, 7):
        clients = piebald.clients_from(
            str(place / "all.csv"), client="hospital", split={"order": "day", "test": tests}, **COLUMNS
        )
        model = piebald.models.build_model("logistic", (2,), 2)
        work = prepare("fedavg", clients, model, RunSettings(rounds=1)).work
        records = np.arange(1, 9, dtype=np.uint64)  # the site's rows are the same ones in each run
        ledger = RowLedger(records, [tmp_path], "east")
        runner = TaskRunner(
            SiteClient(work, clients, 0), Policy(questions={"evaluate": 5}, least_rows=1), "cpu", ledger=ledger
        )
        assert runner.serve(Task(1, 0, 0, {"model": work.initial}, Evaluate()), None)[1] is None
        counts.append(ledger.counts["evaluate"])
    assert counts == [1, 2, 2]
