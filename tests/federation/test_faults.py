"""Processes are killed at random moments; the run ends with the model of one that nobody disturbed."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from piebald import experiment
from piebald.report.store import RunStore
from piebald.settings import Settings

from .conftest import ENVIRONMENT, SITES, Sites, carry_out, provisioned, settings, until

ROUNDS = 6


class Server:
    """A server process over one run folder, which can be killed and resumed."""

    def __init__(self, made: Settings, kit: Path, out: Path) -> None:
        self.out, self.log = out, out.with_suffix(".log")
        file = out.with_suffix(".toml")
        file.write_text(made.text())
        self.process = self._start("server", str(kit), str(file), "--out", str(out))

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "piebald.cli", *words], stdout=log, stderr=log, env=ENVIRONMENT
            )

    def kill_and_resume(self) -> None:
        """Kill it without a warning, and take the run up again."""
        self.process.kill()
        self.process.wait()
        self.process = self._start("resume", str(self.out))

    def version(self) -> int:
        """Commits so far."""
        if not (self.out / "run.db").exists():
            return 0
        with RunStore.open_read_only(self.out) as store:
            return store.version

    def over(self) -> bool:
        """Whether it has ended; with success, or the test fails."""
        code = self.process.poll()
        assert code in (None, 0), self.log.read_text()
        return code == 0


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Sites]:
    """Three sites of this test alone."""
    made = Sites(provisioned(tmp_path / "kits"))
    for name in SITES:
        made.start(name)
    yield made
    made.close()


@pytest.mark.parametrize("seed", [0])
def test_kills_at_random_change_nothing(seed: int, crowd: Sites, tmp_path: Path) -> None:
    """HDAFL with momentum: what sites remember must move on exactly once for each commit."""
    recipe = {"name": "hdafl", "epochs": 40, "momentum": 0.5, "keep_momentum": True}
    made = settings(recipe, rounds=ROUNDS, evaluate={"every": 0})
    undisturbed = carry_out(made, tmp_path / "simulated")
    server = Server(made, crowd.folder / "server", tmp_path / "run")
    dice = random.Random(seed)
    for victim in ("site", "server", "site", "server"):
        now = server.version()
        until(lambda now=now: server.version() > now or server.over())
        time.sleep(dice.uniform(0, 0.4))
        if server.over():
            break
        if victim == "server":
            server.kill_and_resume()
        else:
            name = dice.choice(SITES)
            crowd.kill(name)
            crowd.start(name)
    until(server.over, 60)
    assert_same_run(undisturbed, server.out, crowd)


def assert_same_run(simulated: experiment.Run, out: Path, crowd: Sites) -> None:
    """The same community model, the same private numbers at the sites, and one update from each client a commit."""
    real = experiment.opened(out)
    torch.testing.assert_close(real.groups[0], simulated.groups[0], atol=1e-4, rtol=1e-4)
    trained = [(row["version"], row["client"]) for row in real.arrivals if row["status"] == "ok"]
    assert trained == [(version, client) for version in range(1, ROUNDS + 1) for client in range(3)]
    for client, name in enumerate(SITES):
        (state,) = (folder for folder in (crowd.folder / name / "state").iterdir() if folder.is_dir())
        until(lambda state=state: not list(state.glob("done-*")))
        kept = load_file(state / "memory.safetensors")
        remembered = simulated._store.memory(client)
        assert kept.keys() == remembered.keys()
        for part, numbers in remembered.items():
            torch.testing.assert_close(kept[part], numbers, atol=1e-4, rtol=1e-4)


def test_a_site_joins_late_and_another_is_gone_for_good(tmp_path: Path) -> None:
    crowd = Sites(provisioned(tmp_path / "kits"))
    crowd.start("site-1")
    crowd.start("site-2")
    try:
        made = settings({"name": "fedasync", "epochs": 20}, rounds=60)
        flags = {"kind": "federation", "wait_for": 2, "patience": 4.0, "silence": 2.0}
        made = Settings.of_table(made.table() | {"runtime": flags, "evaluate": {"every": 0}}, "the test's settings")
        server = Server(made, crowd.folder / "server", tmp_path / "run")
        until(lambda: server.version() >= 3)
        crowd.start("site-3")
        crowd.kill("site-2")
        until(server.over, 90)
    finally:
        crowd.close()
    run = experiment.opened(server.out)
    assert {row["client"] for row in run.arrivals if row["status"] == "ok"} == {0, 1, 2}
    lost = [row for row in run.arrivals if row["status"] == "lost"]
    assert all(row["client"] == 1 and "silent" in row["reason"] for row in lost)
    assert len(lost) <= 1
