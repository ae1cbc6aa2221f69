"""Runs that repeat bit for bit: choices by counting alone, or those that a run folder has recorded."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piebald
from piebald import recipes
from piebald.core.errors import SettingError
from piebald.core.machine import machine
from piebald.engines import engine_choice
from piebald.runtimes.simulation import simulator
from tests.fakes import classified, seeded

PROGRAM = """
import hashlib, sys, torch, piebald
sys.path.insert(0, sys.argv[1])
from tests.fakes import classified, seeded
from piebald import recipes
from torch import nn
model = seeded(lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)))
run = piebald.run(
    recipes.hdafl(lr=0.2, momentum=0.9, batch=5, private=("2*",)), classified(*range(6, 40)), model, rounds=8,
    evaluate_every=4, measure="none", runtime=piebald.Simulator(deterministic=True),
)
print({key: run.meta["runtime"][key] for key in ("engine", "stack", "workers")})
print(hashlib.sha256(run.start().numpy().tobytes()).hexdigest())
"""
BUSY = "while True: pass"


def model() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)))


def simulated(runtime: Any, **options: Any) -> piebald.Run:
    made = recipes.fedavg(lr=0.2, momentum=0.9, batch=5)
    return piebald.run(
        made, classified(*range(6, 40)), model(), rounds=3, evaluate_every=0, measure="none", runtime=runtime, **options
    )


def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: Any) -> Any:
        raise SettingError("a time was measured")  # other errors are the user's, and leave the sequential engine

    engine_choice.MEASURED.clear()  # else an earlier test's choice may be remembered
    monkeypatch.setattr(simulator, "fastest", measured)
    monkeypatch.setattr(engine_choice, "clock", measured)


@pytest.mark.long
def test_two_processes_on_a_busy_machine_end_with_equal_bits() -> None:
    """Before, engine, stack and workers were measured, so a busy machine chose otherwise, to other bits."""
    here = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": here}
    ends = []
    for others in (0, 3):
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(others)]
        try:
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM, here], env=environment, capture_output=True, text=True, check=True
            )
        finally:
            for process in busy:
                process.kill()
                process.wait()
        ends.append(done.stdout)
    assert ends[0] == ends[1]
    assert "'workers': 0" in ends[0]


def test_nothing_is_measured_where_choices_are_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, trained = classified(*range(6, 40)), model()
    from piebald.experiments.run_settings import RunSettings
    from piebald.runs.prepare import prepare

    no_clock(monkeypatch)
    made = recipes.fedavg(lr=0.2, batch=5)
    plan = prepare(made, clients, trained, RunSettings(runtime=piebald.Simulator(deterministic=True)))
    chosen = plan.meta["runtime"]
    assert (chosen["engine"], chosen["stack"], chosen["workers"]) == ("batched", 25, 0)
    with pytest.raises(SettingError, match="a time was measured"):  # so the test would notice
        prepare(made, clients, trained, RunSettings(runtime=piebald.Simulator()))


@pytest.mark.parametrize(
    ("recipe", "sizes", "expected"),
    [
        (recipes.fedavg(batch=5), (9, 8, 7), ("batched", 3)),
        (recipes.fedavg(cohort=1, batch=5), (9, 8, 7), ("sequential", 1)),  # nobody to train together with
        (recipes.fedavg(batch=5), (9,), ("sequential", 1)),
        (recipes.dp_sgd(batch=5), (9, 8, 7), ("sequential", 1)),
        (recipes.fedavg(batch=5), (0, 0, 9, 8), ("batched", 4)),
    ],
    ids=str,
)
def test_the_rule_goes_by_model_and_clients(recipe: Any, sizes: tuple[int, ...], expected: tuple[str, int]) -> None:
    run = piebald.run(
        recipe, classified(*sizes), model(), rounds=1, evaluate_every=0, measure="none",
        runtime=piebald.Simulator(deterministic=True),
    )  # fmt: skip
    assert (run.meta["runtime"]["engine"], run.meta["runtime"]["stack"]) == expected


@pytest.mark.full
def test_what_is_given_stays_as_it_is() -> None:
    run = simulated(piebald.Simulator(deterministic=True, engine="vmapped", stack=4, workers=2))
    chosen = run.meta["runtime"]
    assert (chosen["engine"], chosen["stack"], chosen["workers"]) == ("vmapped", 4, 2)


@pytest.mark.full
def test_the_number_of_workers_does_not_show_in_the_bits() -> None:
    """Not promised, since stacks are shared out among workers; but sums are in float64, so it practically holds."""
    ends = [simulated(piebald.Simulator(deterministic=True, workers=workers)).start() for workers in (0, 3)]
    assert float((ends[0] - ends[1]).abs().max()) <= 1e-6


def test_the_choice_is_recorded_and_can_be_repeated() -> None:
    """A run whose choices were measured repeats bit for bit with the choices that its folder records."""
    first = simulated(piebald.Simulator())
    recorded = first.meta["runtime"]
    assert recorded["engine"] != "auto"
    assert {"stack", "workers"} <= recorded.keys()
    again = simulated(recorded)
    assert again.meta["runtime"] == recorded
    assert again.start().equal(first.start())
    assert first.meta["machine"] == machine()
    assert set(first.meta["machine"]) == {"processor", "instructions", "threads"}
    assert first.meta["torch"] == torch.__version__


def test_a_resumed_run_says_that_the_machine_has_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from piebald.storage.store import RunStore

    simulated("simulator", out=tmp_path / "a")
    with RunStore.open(tmp_path / "a") as store:
        store.set_meta(status="stopped", machine={"processor": "another", "instructions": "none", "threads": 1})
    with caplog.at_level(logging.WARNING, "piebald"):
        piebald.resume(tmp_path / "a", classified(*range(6, 40)), model())
    assert "processor another, now" in caplog.text


def test_a_federation_has_no_such_choice() -> None:
    with pytest.raises(SettingError, match="deterministic"):
        simulated({"kind": "federation", "deterministic": True})


@pytest.mark.parametrize(
    "flags",
    [["--deterministic"], ["--deterministic", "--runtime", "simulator"], ["--set", "runtime.deterministic=true"]],
    ids=str,
)
def test_the_command_line_and_the_file_have_it_too(flags: list[str], tmp_path: Path) -> None:
    from piebald.cli import main
    from piebald.storage.store import RunStore

    out = tmp_path / "run"
    small = ["--set", "rounds=1", "--set", "partition.limit=100", "--set", "measure=none"]
    assert main(["run", "--quiet", "--out", str(out), *small, *flags]) == 0
    with RunStore.open_read_only(out) as store:
        chosen = store.meta["runtime"]
    assert (chosen["deterministic"], chosen["workers"]) == (True, 0)
