"""Rounds that recipes share are trained once, and what follows from them is what training each by itself gives."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import piebald
from piebald import models, partition, recipes
from piebald.advice import Advice, advise
from piebald.advice.ensemble import EnsembleMember, Refit
from piebald.advice.tuning import Budget, shared_rounds
from piebald.advice.tuning.shared_rounds import FOLDER
from piebald.advice.tuning.space import Cost
from piebald.advice.tuning.trial_runs import TrialRuns
from piebald.data.partition import PooledClients
from piebald.methods.recipe import Recipe
from piebald.report.tables import History
from piebald.runs.run import opened
from piebald.storage.store import RunStore

SETTINGS: Mapping[str, Any] = {"lr": 0.1, "batch": 10, "epochs": 2}
KIN: Mapping[str, Recipe] = {
    "once": recipes.fine_tuned(tune_epochs=1, **SETTINGS),
    "four": recipes.fine_tuned(tune_epochs=4, **SETTINGS),
    "plain": recipes.fedavg(**SETTINGS),
}
FORK = multiprocessing.get_context("fork")
TIMES = ("time", "wall", "sent")


def clients() -> PooledClients:
    return partition.Iid(clients=4, validation=0.3, test=0.3, limit=200).split(piebald.data.digits())


def network(seed: int) -> Any:
    """With batch norm, whose buffers are no parameters."""
    return torch.nn.Sequential(torch.nn.BatchNorm2d(1), models.build_model("mlp", (1, 8, 8), 10, seed, hidden=(8,)))


def trial_runs() -> TrialRuns:
    return TrialRuns.of(KIN, clients(), network, (2, 4, 8), {})


def recorded(folder: Path) -> dict[str, Any]:
    """What a run folder says, without names and times."""
    with RunStore.open_read_only(folder) as store:
        tables: dict[str, Any] = {
            table: [{name: value for name, value in row.items() if name not in TIMES} for row in store.rows(table)]
            for table in ("step", "result", "score", "client", "measure", "note")
        }
        # before the first round only the run that trains it is scored
        tables["score"] = [row for row in tables["score"] if row["version"]]
        tables["row_score"] = [row for row in store.rows("row_score") if row["version"] == store.version]
        tables["meta"] = {k: v for k, v in store.meta.items() if k not in ("id", "created", "finished")}
        last = store.last_checkpoint()
        assert last is not None
        return {**tables, "tensors": {name: tensor.tolist() for name, tensor in last[1].tensors.items()}}


@pytest.mark.parametrize("order", [["once", "four", "plain"], ["plain", "four", "once"]])
def test_a_run_that_shares_rounds_is_the_one_that_was_trained_by_itself(order: list[str], tmp_path: Path) -> None:
    runs = trial_runs()
    # who goes first changes from rung to rung, one is dropped, and one comes in at the end
    for rung, labels in ((2, order[:2]), (4, [order[1], order[0]]), (8, [order[0], order[2]])):
        for label in labels:
            scores, cost = runs.at_rung(KIN[label], {0: tmp_path / label}, label, rung, tmp_path / FOLDER)
            own, own_cost = runs.at_rung(KIN[label], {0: tmp_path / "own" / label}, label, rung)
            assert scores.values.tolist() == own.values.tolist()
            assert (cost.rounds, cost.bytes, cost.steps) == (own_cost.rounds, own_cost.bytes, own_cost.steps)
            assert recorded(tmp_path / label) == recorded(tmp_path / "own" / label)
    for label in order:
        answers = []
        for folder in (tmp_path / label, tmp_path / "own" / label):
            with opened(folder, runs.choosing, network, recipe=KIN[label]) as run:
                answers.append(run.outputs(1, "validation")[0])
        assert torch.equal(*answers)


def test_a_run_that_was_stopped_before_it_was_scored_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, train = trial_runs(), TrialRuns.train
    runs.at_rung(KIN["plain"], {0: tmp_path / "plain"}, "plain", 4, tmp_path / FOLDER)
    runs.at_rung(KIN["once"], {0: tmp_path / "once"}, "once", 2, tmp_path / FOLDER)

    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(TrialRuns, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        runs.at_rung(KIN["once"], {0: tmp_path / "once"}, "once", 4, tmp_path / FOLDER)
    monkeypatch.setattr(TrialRuns, "train", train)
    runs.at_rung(KIN["once"], {0: tmp_path / "once"}, "once", 4, tmp_path / FOLDER)
    for rung in (2, 4):
        runs.at_rung(KIN["once"], {0: tmp_path / "own"}, "once", rung)
    assert recorded(tmp_path / "once") == recorded(tmp_path / "own")


def test_what_may_train_other_models_shares_nothing() -> None:
    runs, plain = trial_runs(), KIN["plain"]
    name = runs.shared_rounds(plain, "plain")
    assert name is not None
    assert {runs.shared_rounds(recipe, label) for label, recipe in KIN.items()} == {name}
    others = [
        recipes.make(other, lr=0.1)
        for other in ("local", "fedprox", "ditto", "fedavgm", "sync_dvw", "fedbn", "ifca", "scaffold", "hdafl")
    ]
    others.append(plain.with_(transforms=["qsgd"]))
    assert {runs.shared_rounds(recipe, "other") for recipe in others} == {None}
    for setting in ({"lr": 0.2}, {"batch": 20}, {"epochs": 1}, {"momentum": 0.5}, {"cohort": 2}):
        assert runs.shared_rounds(recipes.fine_tuned(**{**SETTINGS, **setting}), "other") not in (None, name)


def test_members_of_an_ensemble_share_rounds_on_all_rows(tmp_path: Path) -> None:
    runs, said = trial_runs(), list[str]()
    refit = Refit(runs, tmp_path, Budget.of(100), Cost(), said.append)
    for label, recipe in KIN.items():
        runner: Any = SimpleNamespace(name=label, label=label, recipe=recipe, last=SimpleNamespace(seeds=[0]))
        member = refit(EnsembleMember(label, np.ones(4), runner=runner))
        assert member is not None
        assert member.folder is not None
        runs.on_all_rows().train(recipe, tmp_path / label, label, 0, 8).close()
        assert recorded(member.folder) == recorded(tmp_path / label)
    assert (refit.cost.rounds, refit.shared.rounds) == (24, 16)
    refit.close()
    assert sorted(path.name for path in (tmp_path / "all-rows").iterdir()) == sorted(KIN)


def raced(folder: Path) -> Advice:
    return advise(
        clients(), network, rounds=4, seeds=(0, 1), families=["fine_tuned"], training={"batch": 10}, out=folder,
        more_data=False,
    )  # fmt: skip


def test_the_answer_is_that_of_a_race_that_trains_each_setting_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = raced(tmp_path / "once")
    # the record of a finished race says the same
    assert raced(tmp_path / "once").spent.rounds == once.spent.rounds
    monkeypatch.setattr(TrialRuns, "shared_rounds", lambda runs, recipe, label: None)
    twice = raced(tmp_path / "twice")
    tables, runs = [], []
    for advice, folder in ((once, tmp_path / "once"), (twice, tmp_path / "twice")):
        table = advice.plain()
        for name in ("answer", "processor_seconds", "spent", "cost"):  # which have times, or what is shared
            table.pop(name)
        table["methods"] = [{k: v for k, v in row.items() if k != "seconds"} for row in table["methods"]]
        tables.append(table)
        runs.append({})
        for database in sorted(folder.rglob("run.db")):
            with History(database.parent) as history:
                rounds, sent = history.final["rounds"], history.final["bytes_up"]
                runs[-1][database.relative_to(folder)] = rounds, sent, history.values_at(rounds)
    assert tables[0] == tables[1]
    assert runs[0] == runs[1]
    assert (once.cost.rounds, once.cost.bytes) == (twice.cost.rounds, twice.cost.bytes)
    assert once.spent.rounds < twice.spent.rounds
    assert once.spent.bytes < twice.spent.bytes


@pytest.mark.full
@pytest.mark.parametrize(
    ("owner", "what", "call"),
    [(shared_rounds, "keep", 2), (RunStore, "become", 1), (RunStore, "become", 4), (RunStore, "commit", 12)],
)
def test_a_race_that_was_killed_where_rounds_are_shared_ends_as_one_that_was_not(
    owner: Any, what: str, call: int, tmp_path: Path
) -> None:
    calls, real = [0], getattr(owner, what)

    def killed(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    def child() -> None:
        setattr(owner, what, killed)
        raced(tmp_path / "killed")

    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    again, whole = raced(tmp_path / "killed"), raced(tmp_path / "whole")
    assert (again.spent.rounds, again.spent.bytes) == (whole.spent.rounds, whole.spent.bytes)
    assert again.plain()["tested"] == whole.plain()["tested"]
    assert [row["score"] for row in again.tried] == [row["score"] for row in whole.tried]
    assert again.recommended == whole.recommended
