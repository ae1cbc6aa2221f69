"""Real sites in processes of their own, real connections on loopback; the server is this process or another one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import piebald
from piebald.core.references import USERS
from piebald.experiments.file import ExperimentSettings
from piebald.federation.credentials import provisioning
from piebald.federation.hub.local_federation import free_port
from piebald.storage.store import RunStore
from tests import processes

SITES = ["site-1", "site-2", "site-3"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def provisioned(folder: Path, sites: list[str] = SITES, name: str = "test", port: int = 0) -> Path:
    """Credentials in a folder."""
    described = provisioning.Description(name=name, host="127.0.0.1", port=port or free_port(), days=2, sites=sites)
    provisioning.provision(described, folder)
    return folder


def settings(recipe: dict[str, Any], **more: Any) -> ExperimentSettings:
    """A small experiment that three sites can carry out in a moment."""
    table: dict[str, Any] = {
        "rounds": 3,
        "seed": 1,
        "data": {"name": "digits"},
        "model": {"name": "mlp"},
        "partition": {"kind": "dirichlet", "clients": 3, "alpha": 0.5, "validation": 0.1, "limit": 300},
        "recipe": {"lr": 0.1, "batch": 10} | recipe,
    }
    return ExperimentSettings.of_table(table | more, "the test's settings", USERS)


def carry_out(
    made: ExperimentSettings, out: Path | None = None, start_from: Path | None = None, **runtime: Any
) -> piebald.Run:
    """Run an experiment, by default on the simulator."""
    kind = {"kind": "federation", **runtime} if runtime else {"kind": "simulator", "engine": "sequential", "workers": 0}
    made = ExperimentSettings.of_table(made.table() | {"runtime": kind}, "the test's settings", USERS)
    plan = made.plan()
    recipe = next(iter(plan.recipes.values()))
    return piebald.run(
        recipe,
        plan.clients,
        plan.model,
        rounds=made.rounds,
        stop=plan.stop,
        seed=made.seed,
        runtime=plan.runtime,
        out=out,
        start_from=start_from,
        evaluate_every=made.evaluate.every,
        settings=made.table(),
    )


class Sites:
    """Site processes, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *options: str) -> None:
        """Start one; it stays for further runs."""
        with (self.folder / name / "log.txt").open("ab") as log:
            self.running[name] = processes.Popen(
                processes.command("client", self.folder / name, "--stay", *options),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=ENVIRONMENT,
            )  # fmt: skip

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        """End one, by default without a warning."""
        process = self.running.pop(name)
        process.send_signal(how)
        process.wait(20)

    def log(self, name: str) -> str:
        """What one has said."""
        return (self.folder / name / "log.txt").read_text(errors="replace")

    def close(self) -> None:
        for name in list(self.running):
            self.kill(name)


class Server:
    """A server process over one run folder, which can be killed and resumed."""

    def __init__(self, made: ExperimentSettings, credentials: Path, out: Path, *options: str) -> None:
        self.out, self.log = out, out.with_suffix(".log")
        file = out.with_suffix(".toml")
        file.write_text(made.text())
        self.process = self._start("server", str(credentials), str(file), "--out", str(out), *options)

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return processes.Popen(processes.command(*arguments), stdout=log, stderr=log, env=ENVIRONMENT)

    def kill_and_resume(self) -> None:
        """Kill it without a warning, and take the run up again."""
        self.process.kill()
        self.process.wait()
        self.process = self._start("resume", str(self.out))

    def close(self) -> None:
        """End it, if it has not ended."""
        self.process.kill()
        self.process.wait()

    def version(self) -> int:
        """Rounds so far."""
        if not (self.out / "run.db").exists():
            return 0
        with RunStore.open_read_only(self.out) as store:
            return store.version

    def over(self) -> bool:
        """Whether it has ended; with success, or the test fails."""
        code = self.process.poll()
        assert code in (None, 0), self.log.read_text()
        return code == 0


@pytest.fixture(scope="session")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    """Three sites that are there for all tests of a session."""
    made = Sites(provisioned(tmp_path_factory.mktemp("credentials")))
    for name in SITES:
        made.start(name)
    yield made
    made.close()


def until(true: Callable[[], Any], seconds: float = 300.0) -> Any:
    """Wait until something is true, and hand it back."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)
    return found
