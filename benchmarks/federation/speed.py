"""Seconds of a task, updates a second, and memory, over real connections on this machine."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from shared.measured import megabytes

from piebald.contracts import Task
from piebald.experiments.file import ExperimentSettings
from piebald.experiments.run_settings import RunSettings
from piebald.federation import Federation
from piebald.federation.hub.server_runtime import FederationServer
from piebald.federation.site.policy import Policy
from piebald.federation.site.task_runner import SiteClient, TaskRunner
from piebald.methods.client_work import ClientWork
from piebald.runs.prepare import prepare

SIZES = {"tiny": [16], "4 MB": [970, 970], "200 MB": [7000, 7000]}  # widths of the hidden layers
REPEATS = {"tiny": 50, "4 MB": 30, "200 MB": 5}
CROWDS = (2, 4, 8, 16)


def settings(hidden: list[int], sites: int) -> ExperimentSettings:
    """One optimiser step on ten rows, so that it takes little but the network."""
    table = {
        "data": {"name": "digits"},
        "model": {"name": "mlp", "hidden": hidden},
        "partition": {"kind": "iid", "clients": sites, "limit": 100 * sites},
        "recipe": {"name": "fedavg", "lr": 0.01, "batch": 10, "batches": "exact", "steps": 1},
        "runtime": {"kind": "federation"},
    }
    return ExperimentSettings.of_table(table, "the benchmark's settings")


def opened(made: ExperimentSettings, folder: Path) -> tuple[Any, FederationServer]:
    """A federation that is ready."""
    plan = made.plan()
    where = plan.runtime
    assert isinstance(where, Federation)
    options = RunSettings(runtime=where.model_copy(update={"folder": str(folder / "federation")}))
    ready = prepare(next(iter(plan.recipes.values())), plan.clients, plan.model, options)
    runtime = ready.runtime.open(ready.work, ready.clients)
    assert isinstance(runtime, FederationServer)
    return ready, runtime


def latency(size: str) -> dict[str, Any]:
    """Seconds from handing over a task to having its update, one site."""
    with tempfile.TemporaryDirectory() as place:
        ready, runtime = opened(settings(SIZES[size], 1), Path(place))
        try:
            model = ready.work.initial[: ready.work.layout.shared]
            spent = []
            for turn in range(REPEATS[size] + 1):
                began = time.perf_counter()
                runtime.submit([Task(turn + 1, 0, turn, {"model": model})])
                result = runtime.next()
                assert result is not None
                assert result.update is not None, result.failure
                spent.append(time.perf_counter() - began)
                runtime.state()  # as after a round: the site may drop earlier results
            assert runtime.local is not None
            (site,) = runtime.local.processes
            return {
                "size": size,
                "megabytes": model.numel() * 4 / 1e6,
                "median": statistics.median(spent[1:]),
                "longest": max(spent[1:]),
                "step": step(ready.work, ready.clients),
                "server": megabytes("VmHWM"),
                "site": megabytes("VmHWM", site.pid),
            }
        finally:
            runtime.close()


def step(work: ClientWork, clients: Any) -> float:
    """Seconds of the same task without the network."""
    runner = TaskRunner(SiteClient(work, clients, 0), Policy(), "cpu")
    vectors = {"model": work.initial[: work.layout.shared]}
    spent = []
    for turn in range(4):
        began = time.perf_counter()
        runner.serve(Task(1, 0, turn, vectors), None)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[1:])


def updates(sites: int, seconds: float = 10.0) -> dict[str, Any]:
    """Updates a second where every site gets its next task as soon as its update is there."""
    with tempfile.TemporaryDirectory() as place:
        ready, runtime = opened(settings(SIZES["tiny"], sites), Path(place))
        try:
            model = ready.work.initial[: ready.work.layout.shared]
            runtime.submit([Task(number + 1, number, 0, {"model": model}) for number in range(sites)])
            count, began = 0, time.perf_counter()
            while time.perf_counter() - began < seconds:
                result = runtime.next()
                assert result is not None
                count += 1
                if count % sites == 0:
                    runtime.state()
                runtime.submit([Task(sites + count, result.task.client, count, {"model": model})])
            return {"sites": sites, "updates": count / (time.perf_counter() - began)}
        finally:
            runtime.close()
