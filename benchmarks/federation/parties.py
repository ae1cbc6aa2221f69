"""Processes that can be disturbed: sites, a server, and the wire between them."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import piebald
from piebald.experiments.file import ExperimentSettings
from piebald.federation.credentials import provisioning
from piebald.federation.hub.local_federation import free_port
from piebald.storage.store import RunStore

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


class Wire:
    """Carries bytes between sites and the server, until it is cut; then new connections are carried again."""

    def __init__(self, port: int) -> None:
        self._target, self._open = port, set[socket.socket]()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            self._open |= {near, far}
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
            self._open.discard(end)

    def cut(self) -> None:
        """Break every connection, in the middle of whatever is on its way."""
        for end in list(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Parties:
    """A federation of processes on this machine, over a wire that can be cut."""

    def __init__(self, folder: Path, made: ExperimentSettings, sites: int = 3) -> None:
        self.folder, self.out = folder, folder / "run"
        self.names = [f"site-{number + 1}" for number in range(sites)]
        port = free_port()
        provisioning.provision(
            provisioning.Description(host="127.0.0.1", port=port, sites=self.names), folder / "credentials"
        )
        self.wire = Wire(port)
        for name in self.names:
            credentials = folder / "credentials" / name / "credentials.json"
            credentials.write_text(json.dumps(json.loads(credentials.read_text()) | {"port": self.wire.port}))
        (folder / "experiment.toml").write_text(made.text())
        self.sites = {name: self.site(name) for name in self.names}
        self.server = self.spawn("server", str(folder / "credentials" / "server"), str(folder / "experiment.toml"))

    def site(self, name: str) -> subprocess.Popen[bytes]:
        """Start a site."""
        return self.spawn("client", str(self.folder / "credentials" / name), "--stay")

    def spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a process of the command line, whose words are in a log, each line behind the process's number."""
        more = ["--out", str(self.out)] if arguments[0] == "server" else []
        command = [sys.executable, "-m", "piebald.cli", *arguments, *more]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=ENVIRONMENT
        )
        log = self.folder / f"{arguments[0]}.log"
        threading.Thread(target=_written, args=(process, log), daemon=True).start()
        return process

    def resume(self) -> None:
        """Take the run up again."""
        self.server = self.spawn("resume", str(self.out))

    def version(self) -> int:
        """Rounds so far."""
        if not (self.out / "run.db").exists():
            return 0
        with RunStore.open_read_only(self.out) as store:
            return store.version

    def close(self) -> None:
        """End everything."""
        for process in (self.server, *self.sites.values()):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def _written(process: subprocess.Popen[bytes], log: Path) -> None:
    """Write what a process says to its log, also while it may write no file itself."""
    assert process.stdout is not None
    with process.stdout as words, log.open("ab", buffering=0) as file:
        for line in words:
            file.write(b"%d: %s" % (process.pid, line))


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process without a warning."""
    process.kill()
    process.wait()


def site_killed(parties: Parties, rng: random.Random) -> None:
    """A site is killed and starts again at once."""
    name = rng.choice(parties.names)
    kill(parties.sites[name])
    parties.sites[name] = parties.site(name)


def site_away(parties: Parties, rng: random.Random) -> None:
    """A site is killed and comes back ten seconds later."""
    name = rng.choice(parties.names)
    kill(parties.sites[name])
    time.sleep(10)
    parties.sites[name] = parties.site(name)


def site_frozen(parties: Parties, rng: random.Random) -> None:
    """A site hangs for eight seconds, longer than the limit for silence."""
    process = parties.sites[rng.choice(parties.names)]
    process.send_signal(signal.SIGSTOP)
    time.sleep(8)
    process.send_signal(signal.SIGCONT)


def server_killed(parties: Parties, rng: random.Random) -> None:
    """The server is killed and resumed at once; sites stay."""
    kill(parties.server)
    parties.resume()


def both_killed(parties: Parties, rng: random.Random) -> None:
    """The server and a site are killed and start again at once."""
    kill(parties.server)
    site_killed(parties, rng)
    parties.resume()


def wire_cut(parties: Parties, rng: random.Random) -> None:
    """All connections break; new ones can be made at once."""
    parties.wire.cut()


FAULTS: dict[str, Callable[[Parties, random.Random], None]] = {
    fault.__name__: fault for fault in (site_killed, site_away, site_frozen, server_killed, both_killed, wire_cut)
}


def experiment(**more: Any) -> ExperimentSettings:
    """HDAFL with momentum that clients keep: client states must change once in each round."""
    recipe = {"name": "hdafl", "lr": 0.05, "batch": 10, "epochs": 20, "momentum": 0.5, "keep_momentum": True}
    table = {
        "rounds": 100_000,
        "seed": 1,
        "data": {"name": "digits"},
        "model": {"name": "mlp"},
        "partition": {"kind": "dirichlet", "clients": 3, "alpha": 0.5, "limit": 300},
        "recipe": recipe,
        "measure": "none",
        "evaluate": {"every": 0},
    }
    return ExperimentSettings.of_table(table | more, "the benchmark's settings")


PATIENCE = 300  # seconds for a run to go on after a fault


def disturb(name: str, times: int, seed: int = 0) -> dict[str, Any]:
    """Cause a fault several times in one run, and compare the run with an undisturbed one."""
    rng, fault, recoveries = random.Random(seed), FAULTS[name], []
    with tempfile.TemporaryDirectory() as place:
        run = Parties(Path(place), experiment())
        try:
            wait_for_round(run, 1)
            for _ in range(times):
                before = run.version()
                wait_for_round(run, before + 1)
                time.sleep(rng.uniform(0, 0.5))
                fault(run, rng)
                began, at = time.monotonic(), run.version()
                wait_for_round(run, at + 1)
                recoveries.append(time.monotonic() - began)
            kill(run.server)
            return {"fault": name, "times": times, **compare(run), **summary(recoveries)}
        finally:
            run.close()


def wait_for_round(run: Parties, version: int) -> None:
    """Wait until the run has made so many rounds."""
    until = time.monotonic() + PATIENCE
    while run.version() < version:
        if time.monotonic() > until:
            raise RuntimeError(f"no round in {PATIENCE} seconds: {(run.folder / 'server.log').read_text()[-2000:]}")
        time.sleep(0.01)


def compare(run: Parties) -> dict[str, Any]:
    """The disturbed run beside a simulated one of as many rounds."""
    with RunStore.open_read_only(run.out) as store:
        version = store.version
        found = store.last_checkpoint()
        assert found is not None
        version, checkpoint = found
        model = next(t for name, t in checkpoint.tensors.items() if name.startswith("cluster/0/model"))
        counted = store.query("SELECT version, client FROM result WHERE status = 'ok' AND version <= ?", version)
    plan = experiment(rounds=version).plan()
    recipe = next(iter(plan.recipes.values()))
    simulated = piebald.run(
        recipe, plan.clients, plan.model, rounds=version, seed=1, evaluate_every=0, measure="none",
        runtime={"kind": "simulator", "engine": "sequential", "workers": 0}, out=run.folder / "simulated",
    )  # fmt: skip
    due = {(number, client) for number in range(1, version + 1) for client in range(3)}
    there = [(row["version"], row["client"]) for row in counted]
    return {
        "rounds": version,
        "lost": len(due - set(there)),
        "twice": len(there) - len(set(there)),
        "apart": float((model - simulated.cluster_models[0]).abs().max()),
    }


def summary(recoveries: list[float]) -> dict[str, float]:
    """Seconds from the end of the fault to the next round with all sites."""
    return {
        "median": statistics.median(recoveries),
        "longest": max(recoveries),
    }
