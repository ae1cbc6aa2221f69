"""A site chooses its model after its run, from its own files, and nothing about it leaves the site."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import piebald
from piebald.contracts import Task
from piebald.core.errors import SettingError
from piebald.experiments.file import ExperimentSettings
from piebald.experiments.run_settings import RunSettings
from piebald.federation.credentials import provisioning
from piebald.federation.hub.run_terms import RunTerms, terms
from piebald.federation.link.wire_format import Piece, Reply, Welcome, digest, encode, task_body
from piebald.federation.site import site_choice
from piebald.federation.site.client_runtime import FederationClient
from piebald.federation.site.client_store import ClientStore, FinishedTask
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_process import SiteSettings, SiteWork
from piebald.federation.site.site_rows import SiteClient
from piebald.federation.site.task_runner import TaskRunner
from piebald.methods.choice import BestForEach, KnnPer
from piebald.methods.queries import Evaluate
from piebald.runs.prepare import PreparedRun, prepare

from .conftest import SITES, Sites, provisioned, settings

RUN, TERMS = "ab", "cd"
ROWS = {"kind": "dirichlet", "clients": 3, "alpha": 0.5, "validation": 0.2, "limit": 300}
NOISY = {"kind": "gaussian", "clip": 1.0, "noise": 1.0, "where": "client"}


CHOSEN = site_choice.record_file(BestForEach())


def described(recipe: Mapping[str, Any], keep: str = "best_for_each") -> ExperimentSettings:
    return settings(dict(recipe), partition=ROWS, keep=keep, runtime={"kind": "federation"})


def planned(recipe: Mapping[str, Any], keep: str = "best_for_each") -> PreparedRun:
    plan = described(recipe, keep).plan()
    return prepare(next(iter(plan.recipes.values())), plan.clients, plan.model, RunSettings(seed=1, keep=keep))  # type: ignore[arg-type]


class Wire:
    """A link that records all that would leave the site, and never has an answer."""

    def __init__(self, *_: Any) -> None:
        self.left: list[Any] = []
        self.sent: dict[str, int] = {"server": 0}
        self.received: dict[str, int] = {"server": 0}
        self.peers: dict[str, Any] = {}
        self.trouble = ""

    def on(self, *_: Any) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...

    def request(self, *message: Any, **_: Any) -> None:
        self.left.append(message)

    def send(self, *message: Any) -> Future[memoryview]:
        self.left.append(message)
        reply = Future[memoryview]()
        reply.set_result(memoryview(encode(Reply(status="again"))))
        return reply

    def report(self, sentence: str) -> None:
        raise AssertionError(sentence)


def site(folder: Path, plan: PreparedRun, policy: Policy | None = None) -> FederationClient:
    """A site that has agreed to a run's terms; its threads do not run."""
    credentials = provisioning.read(folder / "site-1")
    rebuild = SiteWork(credentials, SiteSettings(), folder, local=True)
    made = FederationClient(credentials, rebuild, policy=policy or Policy(), make_link=Wire)  # type: ignore[arg-type]
    made.session.begin_run(RUN)
    made.session.welcome = welcome()
    runner = TaskRunner(SiteClient(plan.work, plan.clients, 0), policy or Policy(), "cpu")
    table = described(plan.recipe.fields | {"name": plan.recipe.name}).table()
    made._terms = terms(plan.work, table, list(plan.clients.names), SITES, plan.clients.classes)
    made.session.accept_terms(TERMS, runner, {}, "")
    return made


def welcome(**more: Any) -> Welcome:
    return Welcome(**{"version": "0", "run": RUN, "epoch": "aa", "terms": TERMS, "last_id": 9} | more)


def bring(made: FederationClient, task: Task) -> None:
    body = bytes(task_body(task))
    trains = task.query is None
    piece = Piece(run=RUN, epoch="aa", id=task.id, trains=trains, start=0, size=len(body), digest=digest(body))
    made._on_task_piece("server", piece, memoryview(body))


def trained(made: FederationClient, id: int, version: int) -> None:
    """The site trains for a task, and the server has saved the result."""
    assert made.session.runner is not None
    shared = made.session.runner.work.layout.shared
    bring(made, Task(id, 0, version, {"model": made.session.runner.work.initial[:shared]}))
    found = made.session.start_training(id)
    assert found is not None
    update, _, state = made._trained(found[1])
    assert update is not None
    made.session.finish_training(*found, b"result", state, update.steps)


def leaving(made: FederationClient) -> tuple[Any, ...]:
    """All that has left the site, its next hello, and what it has to deliver."""
    wire: Any = made._link
    return list(wire.left), made.session.hello("0a"), made.session.next_delivery(), made.session.status()


CANDIDATES = {
    "best_for_each": {"global", "cluster", "fine_tuned", "mixed", "local"},
    "knn_per": {"cluster", "neighbours"},
}


@pytest.mark.parametrize("case", ["plain", "noise", "policy", "neighbours"])
def test_the_choice_leaves_nothing_and_says_nothing(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "piebald.federation.site.client_runtime.BEAT", 600.0
    )  # no hello that it is at work, on any machine
    folder = provisioned(tmp_path / "credentials")
    keep = "knn_per" if case == "neighbours" else "best_for_each"
    plan = planned({"name": "fedavg"} | ({"transforms": [NOISY]} if case == "noise" else {}), keep)
    policy = Policy(queries=[], splits=[]) if case == "policy" else Policy()
    made = site(folder, plan, policy)
    trained(made, 1, 0)
    trained(made, 2, 1)
    model = plan.work.initial[: plan.work.layout.shared]
    bring(made, Task(3, 0, 2, {"model": model, "global": model * 2}, Evaluate()))
    made._on_welcome(welcome())  # the server has all results
    before = leaving(made)
    made._on_welcome(welcome(over=True))
    assert leaving(made) == before
    assert before[0] == []
    name = f"{keep.replace('_', '-')}.json"
    record = json.loads((folder / "site-1" / name).read_text())
    assert set(record["candidates"]) == CANDIDATES[keep]
    assert record["version"] == 2
    assert (folder / "site-1" / "model.safetensors").exists()
    for kept in (name, "model.safetensors"):
        assert os.stat(folder / "site-1" / kept).st_mode & 0o077 == 0
    assert site_choice.pending_choices(folder / "site-1" / "state") == []


def test_a_site_that_is_stopped_meanwhile_chooses_when_it_starts_again(tmp_path: Path, monkeypatch: Any) -> None:
    plan, found = planned({"name": "ditto"}), []
    for stopped in (False, True):
        folder = provisioned(tmp_path / f"stopped-{stopped}")
        made = site(folder, plan)
        trained(made, 1, 0)
        bring(made, Task(3, 0, 1, {"model": plan.work.initial + 0.01}, Evaluate()))
        if stopped:
            with monkeypatch.context() as patched:
                patched.setattr(TaskRunner, "choose", _interrupted)
                with pytest.raises(KeyboardInterrupt):
                    made._on_welcome(welcome(over=True))
            assert not (folder / "site-1" / "model.safetensors").exists()
            again = FederationClient(made.credentials, made._prepare, policy=Policy(), make_link=Wire)  # type: ignore[arg-type]
            again.stop()
            again.run()
        else:
            made._on_welcome(welcome(over=True))
        record = json.loads((folder / "site-1" / CHOSEN).read_text())
        found.append((record, load_file(folder / "site-1" / "model.safetensors")))
    (record, model), (record_again, model_again) = found
    assert record == record_again
    assert set(record["candidates"]) == {"global", "personal", "fine_tuned", "mixed", "local"}
    assert all(torch.equal(model[name], model_again[name]) for name in model)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "policy", [Policy(), Policy(queries=["best_for_each", "knn_per"], splits=["train", "validation", "test"])]
)
def test_no_server_gets_the_answer(policy: Policy) -> None:
    plan = planned({"name": "fedavg"})
    runner = TaskRunner(SiteClient(plan.work, plan.clients, 0), policy, "cpu")
    for query in (BestForEach(tasks=("0",), passes=(1,)), KnnPer()):
        update, reason, _ = runner.serve(Task(1, 0, 0, {"model": plan.work.initial}, query), None)
        assert update is None
        assert reason == f"{query.kind!r} is what a site asks itself, and no server gets its answer"


def test_a_server_cannot_let_a_site_choose_by_another_query() -> None:
    plan = planned({"name": "fedavg"})
    made = json.loads(terms(plan.work, {}, ["a"], ["a"]))
    assert RunTerms.read(made).choice_query() == plan.work.choice == BestForEach()
    assert RunTerms.read(made | {"choice": None}).choice_query() is None
    with pytest.raises(SettingError, match="choose its model by 'evaluate', which chooses no model"):
        RunTerms.read(made | {"choice": {"kind": "evaluate"}}).choice_query()


def test_a_site_knows_its_tasks_after_a_restart(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "run")
    for id in (1, 2, 4):
        state = None if id == 2 else {}
        store.finish(
            FinishedTask(id, "d", "aa", 1, rng_version=f"{id}.1" if id == 4 else str(id), steps=id), b"r", state
        )
    assert store.trained == [("1", 1), ("4.1", 4)]
    store.confirm(1)
    assert ClientStore(tmp_path / "run").trained == [("1", 1), ("4.1", 4)]
    store.discard(4)  # the resumed server went another way
    assert ClientStore(tmp_path / "run").trained == [("1", 1)]


@pytest.mark.full
@pytest.mark.parametrize("recipe", [{"name": "hdafl"}, {"name": "ifca", "k": 2}], ids=lambda recipe: recipe["name"])
def test_sites_choose_as_the_simulator_does(recipe: dict[str, Any], sites: Sites) -> None:
    simulated = _run(recipe, "best_for_each")
    real = _run(recipe, "best_for_each", credentials=str(sites.folder / "server"))
    plain = _run(recipe, "last", credentials=str(sites.folder / "server"))
    assert [(row["kind"], row["bytes_up"]) for row in real.results] == [
        (row["kind"], row["bytes_up"]) for row in plain.results
    ]
    assert real.choices == []
    assert real.scores == plain.scores
    for client, expected in enumerate(simulated.choices):
        record = _record(sites, client)
        assert record["chosen"] == expected["chosen"]
        for name, scores in expected["candidates"].items():
            assert record["candidates"][name]["loss"] == pytest.approx(scores["loss"], abs=1e-3)
        with pytest.raises(SettingError, match="chooses its model at its site, which does not send it"):
            real.model(client)


def _run(recipe: dict[str, Any], keep: str, **runtime: Any) -> Any:
    kind = {"kind": "federation", **runtime} if runtime else {"kind": "simulator", "engine": "sequential", "workers": 0}
    plan = settings(recipe, partition=ROWS, keep=keep, runtime=kind)
    made = plan.plan()
    return piebald.run(
        next(iter(made.recipes.values())), made.clients, made.model, rounds=3, seed=1, runtime=made.runtime,
        keep=keep, settings=plan.table(),
    )  # type: ignore[arg-type]  # fmt: skip


def _record(sites: Sites, client: int) -> dict[str, Any]:
    from .conftest import until

    path = sites.folder / SITES[client] / CHOSEN
    left = sites.folder / SITES[client] / "state"
    until(lambda: path.exists() and not site_choice.pending_choices(left))
    return json.loads(path.read_text())  # type: ignore[no-any-return]


@pytest.mark.long
def test_sites_on_this_machine_have_chosen_when_the_run_returns(tmp_path: Path) -> None:
    made = described({"name": "fedavg"})
    plan = made.plan()
    run = piebald.run(
        next(iter(plan.recipes.values())), plan.clients, plan.model, rounds=1, seed=1,
        runtime={"kind": "federation", "folder": str(tmp_path / "sites"), "experiment": made.table()},
        keep="best_for_each", settings=made.table(),
    )  # fmt: skip
    assert run.choices == []
    for name in SITES:
        assert json.loads((tmp_path / "sites" / name / CHOSEN).read_text())["rows"] == 20
        assert site_choice.pending_choices(tmp_path / "sites" / name / "state") == []
