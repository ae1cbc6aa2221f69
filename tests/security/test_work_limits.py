"""What a server may make a site do: absurd terms are refused before anything is built, long tasks end.

Before, a site built whatever the terms described: `layers = 10**6` or `hidden = [10**9]` took its memory, and
`epochs = 10**9` its time.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from piebald import models
from piebald.contracts import Task
from piebald.core.errors import Declined, SettingError
from piebald.federation.credentials import provisioning
from piebald.federation.hub.run_terms import RunTerms, terms
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_process import SiteSettings, SiteWork
from piebald.federation.site.site_rows import SiteClient
from piebald.federation.site.task_runner import TaskRunner
from piebald.federation.site.work_limits import TaskWatch, WorkLimits
from piebald.inference.queries.trees import TreesQuery
from piebald.inference.trees.client_rows import Grower
from piebald.inference.trees.forest import Forest, TreeSettings
from tests.federation.conftest import SITES, provisioned, settings

from .server_entry import prepared

Change = Callable[[dict[str, Any]], None]


def some_terms() -> dict[str, Any]:
    """The terms of a small run, as a site receives them."""
    plan, _ = prepared(json.dumps({"name": "fedavg"}))
    experiment = settings({"name": "fedavg"}, model={"name": "mlp", "hidden": [4]}).table()
    body = terms(plan.work, experiment, SITES, SITES, plan.clients.classes)
    return json.loads(body)  # type: ignore[no-any-return]


def training(name: str, value: Any) -> Change:
    return lambda terms: terms["training"].__setitem__(name, value)


def model(**fields: Any) -> Change:
    return lambda terms: terms["experiment"].__setitem__("model", {"name": "mlp", **fields})


ABSURD: dict[str, tuple[Change, str]] = {
    "epochs": (training("epochs", 10**9), "epochs are 1,000,000,000, this site allows at most 1,000"),
    "epochs with 400 digits": (training("epochs", 10**400), "out of the range that this site works with"),
    "steps": (training("steps", 10**9), "steps are 1,000,000,000"),
    "learning rate": (training("lr", 1e308), "out of the range that this site works with"),
    "a large learning rate": (training("lr", 1e6), "lr are 1,000,000.0"),
    "batch": (training("batch", 10**12), "batch are 1,000,000,000,000"),
    "no number": (training("lr", float("nan")), "out of the range that this site works with"),
    "many layers": (model(hidden=[64] * 10**4), "more than 2,000 tensors"),
    "a wide layer": (model(hidden=[10**9]), "1,000,000,000 parameters allowed"),
    "a wide layer that fits 64 bits": (model(hidden=[10**18]), "out of the range that this site works with"),
    "a claimed layout": (lambda terms: terms["layout"].append(["x", [10**6, 10**6]]), "parameters, this site allows"),
    "a negative layout": (lambda terms: terms["layout"].append(["x", [-5]]), "this site does not work with a model of"),
    "input": (lambda terms: terms.__setitem__("shape", [10**6, 10**6]), "gigabytes at least"),
    "clients": (
        lambda terms: terms["experiment"]["partition"].__setitem__("clients", 10**9),
        "clients, this site works",
    ),
    "grid": (
        lambda terms: terms["experiment"].__setitem__("grid", {f"recipe.{n}": [1] * 100 for n in range(9)}),
        "too many combinations",
    ),
}


@pytest.mark.parametrize(("change", "says"), ABSURD.values(), ids=ABSURD)
def test_absurd_terms_are_refused_before_anything_is_built(change: Change, says: str, tmp_path: Path) -> None:
    values = some_terms()
    change(values)
    credentials = provisioning.read(provisioned(tmp_path) / "site-1")
    tracemalloc.start()
    try:
        with pytest.raises(SettingError, match=says):
            SiteWork(credentials, SiteSettings(), tmp_path)(values)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20  # bytes, of which the terms themselves take some
    finally:
        tracemalloc.stop()


def test_ordinary_terms_are_accepted() -> None:
    assert WorkLimits().terms_reject_reason(RunTerms.read(some_terms())) is None


def test_a_site_sets_limits_of_its_own() -> None:
    values = RunTerms.read(some_terms())
    size = sum(math.prod(shape) for _, shape in values.layout)
    assert "this site allows 10" in str(WorkLimits(parameters=10).terms_reject_reason(values))
    assert WorkLimits(parameters=size).terms_reject_reason(values) is None
    assert "gigabytes" in str(WorkLimits(gigabytes=1e-6).terms_reject_reason(values))
    assert "more steps on this site's rows than the 5 that it allows" in str(WorkLimits(steps=5).steps_reject_reason(6))


@pytest.mark.parametrize("name", ["mlp", "small_cnn", "resnet18", "vgg11", "gated_cnn"])
def test_parameters_are_counted_without_memory_for_them(name: str) -> None:
    built = sum(parameter.numel() for parameter in models.build_model(name, (3, 32, 32), 10).parameters())
    assert models.count_parameters(name, (3, 32, 32), 10, built) == built
    with pytest.raises(SettingError, match="more than"):
        models.count_parameters(name, (3, 32, 32), 10, built - 1)


def test_a_task_that_takes_too_long_ends_without_a_result() -> None:
    plan, _ = prepared(json.dumps({"name": "fedavg"}))
    policy = Policy(work=WorkLimits(seconds=1e-9))
    runner = TaskRunner(SiteClient(plan.work, plan.clients, 0), policy, "cpu", 0)
    update, failure, state = runner.serve(Task(1, 0, 0, {"model": plan.work.initial}), None)
    assert (update, state) == (None, None)
    assert failure is not None
    assert failure.startswith("Declined")


def busy(seconds: float) -> None:
    """What computes in Python, and keeps every error."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            sum(range(1000))
        except Exception:
            continue


@pytest.mark.full
def test_whatever_computes_is_ended() -> None:
    """Before, only what ran the model looked at the time."""
    watch = TaskWatch(WorkLimits(seconds=0.2))
    began = time.monotonic()
    with pytest.raises(Declined, match=r"longer than the 0\.2 seconds"):
        watch.run(lambda: busy(60))
    assert time.monotonic() - began < 30
    busy(0.3)  # nothing is raised any more
    assert watch.run(lambda: 5) == 5
    assert watch.run(lambda: busy(0.3), tasks=100) is None


@pytest.mark.full
def test_a_tracer_goes_on_after_a_task() -> None:
    """Before, each task asked the interpreter to take an error back, and a process that is traced stood still."""
    program = (
        "import sys\n"
        "from piebald.core.errors import Declined\n"
        "from piebald.federation.site.work_limits import TaskWatch, WorkLimits\n"
        "sys.settrace(lambda *_: None)\n"
        "print(TaskWatch(WorkLimits(seconds=60)).run(lambda: 5))\n"
        "try:\n"
        "    TaskWatch(WorkLimits(seconds=0.1)).run(lambda: [sum(range(1000)) for _ in range(10**9)])\n"
        "except Declined:\n"
        "    print((lambda: 6)())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["5", "6"], done.stderr


def test_a_task_that_takes_too_much_memory_ends() -> None:
    def grow() -> None:
        held = []
        while True:
            held.append(torch.ones(1 << 22))  # 16 MB

    with pytest.raises(Declined, match=r"more than the 0\.2 gigabytes of memory"):
        TaskWatch(WorkLimits(gigabytes=0.2)).run(grow)


@pytest.mark.full
def test_what_ends_while_it_is_ended_leaves_no_error_behind() -> None:
    """The time is up at about the moment at which the work is done, again and again."""
    for _ in range(200):
        with suppress(Declined):
            TaskWatch(WorkLimits(seconds=2e-3)).run(lambda: busy(2e-3))
        sum(range(10))


def test_boosting_at_a_site_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, 1,500 rounds went to their end, whatever `seconds` said."""
    pytest.importorskip("xgboost", reason="needs the extra: pip install '.[trees]'")
    rounds, grow = list[Forest](), Grower.grow
    monkeypatch.setattr(Grower, "grow", lambda *values: rounds.append(grow(*values)) or rounds[-1])
    plan, _ = prepared(json.dumps({"name": "fedavg"}))
    policy = Policy(queries=["trees"], work=WorkLimits(seconds=0.5))
    runner = TaskRunner(SiteClient(plan.work, plan.clients, 0), policy, "cpu")
    query = TreesQuery(ask="alone", boosting=TreeSettings(rounds=2000, max_depth=6), objective="multiclass", classes=10)
    update, failure, _ = runner.serve(Task(1, 0, 0, {"model": plan.work.initial}, query), None)
    assert (update, failure) == (None, "Declined at the site, whose log says more")
    assert len(rounds) < 2000
    bounded = TaskRunner(
        SiteClient(plan.work, plan.clients, 0), Policy(queries=["trees"], work=WorkLimits(steps=1999)), "cpu"
    )
    _, refused, _ = bounded.serve(Task(1, 0, 0, {"model": plan.work.initial}, query), None)
    assert "more steps on this site's rows than the 1,999 that it allows" in str(refused)
