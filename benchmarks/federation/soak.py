"""A federation that is disturbed without a pause: python benchmarks/federation/soak.py --minutes 60

Sites and server are killed, stopped for seconds, left without free descriptors or without room on their disk, doubled
by a second process, and their clocks jump, at random.  Afterwards the run is repeated in this process with the same
attendance, which the disturbed run has recorded: whoever took part in a step takes part in it again.  Each step must be
the same, bit by bit: the length and the weight of each update, which follow from the model before and from the state of
its site.  Writes soak.json beside this file, or to --out; fails where a step differs, an update counts twice, the run
stops moving, or an audit log's chain is broken.

--recipe scaffold   with state at sites and at the server (default); a site whose result came too late goes back to its
                    state before that training
--seed 0            of the disturbances
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import parties
import torch
from parties import Parties, kill

import piebald
from piebald.cli import main as piebald_command
from piebald.contracts import Clients, Result, Task
from piebald.core.references import USERS
from piebald.experiments.file import ExperimentSettings
from piebald.methods.client_work import ClientWork
from piebald.report.tables import History
from piebald.runtimes.simulation.simulation import Simulation

HERE = Path(__file__).parent
SITES = 4
_COMPARED = ("norm", "weight", "examples")  # of each update; its loss leaves a site with four digits
_STUCK = 300.0  # seconds without two rounds after which a disturbance has stopped the run
CLOCK = """\
import os, time
_real = time.time
def _shifted():
    try:
        with open(os.environ["SOAK_CLOCK"]) as file:
            return _real() + float(file.read() or 0)
    except (OSError, ValueError):
        return _real()
time.time = _shifted
"""


def experiment(recipe: str) -> ExperimentSettings:
    """A run that does not end by itself, whose rounds take a moment."""
    table = {
        "rounds": 1_000_000, "seed": 5, "data": {"name": "digits"}, "model": {"name": "mlp"},
        "recipe": {"name": recipe, "lr": 0.05, "epochs": 2, "batch": 16}, "evaluate": {"every": 0},
        "partition": {"kind": "dirichlet", "clients": SITES, "alpha": 0.5, "limit": 1200},
        "runtime": {"kind": "federation", "wait_for": 2, "patience": 4.0, "silence": 2.0, "task_timeout": 30.0},
    }  # fmt: skip
    return ExperimentSettings.of_table(table, "the soak", USERS)


class Soak:
    """Disturbs a federation."""

    def __init__(self, folder: Path, made: ExperimentSettings, seed: int) -> None:
        (folder / "clock").mkdir()
        (folder / "clock" / "sitecustomize.py").write_text(CLOCK)
        parties.ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(
            [str(folder / "clock"), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        parties.ENVIRONMENT["SOAK_CLOCK"] = str(folder / "seconds")
        self.folder, self.random, self.done = folder, random.Random(seed), Counter[str]()
        self.here = Parties(folder, made, SITES)

    def go_on(self, minutes: float) -> None:
        """Disturb it for so long, and leave it in peace at the end until all sites are back."""
        self._moves_on("the start")
        until = time.monotonic() + 60 * minutes
        kinds = [self.kill_site, self.kill_server, self.stop_site, self.stop_server, self.cut, self.double,
                 self.no_descriptors, self.no_room, self.jump]  # fmt: skip
        while time.monotonic() < until:
            self._start_again()
            kind = self.random.choices(kinds, [3, 2, 3, 1, 2, 1, 2, 2, 2])[0]
            self.done[kind.__name__] += 1
            kind()
            self._moves_on(kind.__name__)
            time.sleep(self.random.uniform(0, 2))
        self._start_again()
        self._moves_on("the end")
        self.here.server.send_signal(signal.SIGTERM)
        self.here.server.wait(60)

    def _start_again(self) -> None:
        """Start what has ended by itself, as a service would, and say with which words it ended."""
        if self.here.server.poll() is not None:
            self._ended("the server", self.here.server, self._server_log())
            self.here.resume()
        for name, process in self.here.sites.items():
            if process.poll() is not None:
                self._ended("a site", process, self.folder / "client.log")
                self.here.sites[name] = self.here.site(name)

    def _ended(self, who: str, process: subprocess.Popen[bytes], log: Path) -> None:
        code = process.returncode
        self.done[f"of them {who} ended with code {code}, and was started"] += 1
        own = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(f"{process.pid}: ")]
        print(f"{who} has ended with code {code}:", *own[-12:], sep="\n", file=sys.stderr, flush=True)

    def _server_log(self) -> Path:
        """The log of its processes, the last of which was started by `resume` once there was one."""
        return next(log for log in (self.folder / "resume.log", self.folder / "server.log") if log.exists())

    def _moves_on(self, after: str) -> None:
        """Wait until two more rounds are made: no disturbance stops the run."""
        version, end = self.here.version(), time.monotonic() + _STUCK
        while self.here.version() < version + 2:
            if self.here.server.poll() is not None and after == "no_room":
                self._start_again()  # a server that cannot record a step ends, and may do so after its disk had room
            elif self.here.server.poll() is not None:
                last = "\n".join(self._server_log().read_text().splitlines()[-30:])
                raise SystemExit(f"the server has ended after {after}:\n{last}")
            if time.monotonic() > end:
                raise SystemExit(f"no two rounds after {after}: {self.folder}")
            time.sleep(0.1)

    def _site(self) -> str:
        return self.random.choice(self.here.names)

    def kill_site(self) -> None:
        """One, away for up to ten seconds."""
        name = self._site()
        kill(self.here.sites[name])
        time.sleep(self.random.uniform(0, 10))
        self.here.sites[name] = self.here.site(name)

    def kill_server(self) -> None:
        """And resume its run."""
        kill(self.here.server)
        time.sleep(self.random.uniform(0, 3))
        self.here.resume()

    def stop_site(self) -> None:
        """For some seconds, shorter or longer than the server's patience."""
        self._stopped(self.here.sites[self._site()].pid, self.random.uniform(0.5, 10))

    def stop_server(self) -> None:
        """For some seconds."""
        self._stopped(self.here.server.pid, self.random.uniform(0.5, 6))

    @staticmethod
    def _stopped(process: int, seconds: float) -> None:
        os.kill(process, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(process, signal.SIGCONT)

    def cut(self) -> None:
        """Cut all connections, in the middle of whatever is on its way."""
        self.here.wire.cut()

    def double(self) -> None:
        """Start a second process with a copy of a site's credentials."""
        name = self._site()
        twin = self.folder / "twin"
        shutil.rmtree(twin, ignore_errors=True)
        with suppress(shutil.Error):  # of a file that its site has deleted meanwhile
            shutil.copytree(self.folder / "credentials" / name, twin)
        process = self.here.spawn("client", str(twin), "--stay")
        time.sleep(self.random.uniform(2, 8))
        kill(process)

    def no_descriptors(self) -> None:
        """Leave a process no free descriptor for some seconds."""
        process = self.random.choice([self.here.server, *self.here.sites.values()]).pid
        _, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
        resource.prlimit(process, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{process}/fd")), hard))
        time.sleep(self.random.uniform(1, 6))
        with suppress(ProcessLookupError):  # it has ended by itself, see `_start_again`
            resource.prlimit(process, resource.RLIMIT_NOFILE, (hard, hard))

    def no_room(self) -> None:
        """Let a process write no file for some seconds, as on a full disk; a server that ends is resumed.

        The system refuses each write of it (RLIMIT_FSIZE), with an error of its own: no file is too small.
        """
        process = self.random.choice([self.here.server, *self.here.sites.values()])
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, hard))
        until = time.monotonic() + self.random.uniform(1, 6)
        while time.monotonic() < until and process.poll() is None:
            time.sleep(0.1)
        if process.poll() is None:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
            with suppress(subprocess.TimeoutExpired):  # it goes on
                process.wait(3)
        if process.poll() is not None and process is self.here.server:
            self.done["of them the server ended, and was resumed"] += 1
            self.here.resume()

    def jump(self) -> None:
        """Have all clocks (`time.time`) jump, by up to a day."""
        (self.folder / "seconds").write_text(str(self.random.uniform(-86_400, 86_400)))


class SameAttendance(piebald.Simulator):
    """A calm run in this process, in which each step has the clients that it had before.

    Attributes:
        attendance: the clients of each step, from the first on.
    """

    attendance: list[list[int]]

    def open(self, work: ClientWork, clients: Clients) -> Simulation:
        """See `RuntimeSettings`."""
        simulation, attendance = super().open(work, clients), self.attendance
        submit, take, step, sent = simulation.submit, simulation.next, [0], set[int]()

        def submitting(tasks: Sequence[Task], *more: Any) -> None:
            sent.update(task.id for task in tasks if task.query is None)
            submit(tasks, *more)

        def taking(*until: float) -> Result | None:
            result = take(*until)
            if result is not None and result.task.id in sent:
                sent.discard(result.task.id)
                step[0] = result.task.version + (not sent)  # all are there, so the next step begins
            return result

        simulation.submit, simulation.next = submitting, taking  # type: ignore[method-assign]
        simulation.clients = lambda: attendance[step[0]] if step[0] < len(attendance) else []  # type: ignore[method-assign]
        return simulation


def compared(out: Path, made: ExperimentSettings) -> dict[str, Any]:
    """Repeat a run with its attendance, and count the steps that differ."""
    disturbed = History(out)  # it was stopped, and not finished
    rows = [row for row in disturbed.results if row["kind"] == "train"]
    steps = len(disturbed.rounds)
    came = [[row for row in rows if row["version"] == step and row["status"] == "ok"] for step in range(1, steps + 1)]
    attendance = [sorted(row["client"] for row in step) for step in came]
    runtime = SameAttendance(engine="sequential", workers=0, attendance=attendance)
    calm_settings = ExperimentSettings.of_table(made.table() | {"runtime": {"kind": "simulator"}}, "calm", USERS)
    plan = calm_settings.plan()
    calm = piebald.run(
        next(iter(plan.recipes.values())), plan.clients, plan.model, rounds=steps, seed=made.seed, runtime=runtime,
        evaluate_every=0, settings=calm_settings.table(),
    )  # fmt: skip
    theirs = {(row["version"], row["client"]): row for row in calm.results if row["status"] == "ok"}
    differ = {
        row["version"]
        for row in rows
        if row["status"] == "ok"
        and [row[name] for name in _COMPARED]
        != [theirs.get((row["version"], row["client"]), {}).get(name) for name in _COMPARED]
    }
    counts = Counter((row["version"], row["client"]) for step in came for row in step)
    twice = [key for key, count in counts.items() if count > 1]
    absent = Counter(disturbed.names[row["client"]] for row in rows if row["status"] == "absent")
    return {
        "steps": steps,
        "steps that differ": len(differ),
        "first that differs": min(differ, default=None),
        "updates counted twice": len(twice),
        "updates": sum(map(len, attendance)),
        "steps without all sites": sum(len(step) < SITES for step in attendance),
        "absent": dict(absent),
        "other failures": dict(Counter(row["reason"] for row in rows if row["status"] not in ("ok", "absent"))),
    }


def main() -> None:
    """Disturb, compare, and write down what was found."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--minutes", type=float, default=60.0)
    words.add_argument("--recipe", default="scaffold")
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--out", type=Path, default=HERE / "soak.json")
    given = words.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder, made = Path(temporary), experiment(given.recipe)
        soak = Soak(folder, made, given.seed)
        try:
            soak.go_on(given.minutes)
        except SystemExit as error:
            print(error, (folder / "server.log").read_text()[-3000:], (folder / "client.log").read_text()[-3000:])
            raise
        finally:
            soak.here.close()
        credentials = [folder / "credentials" / name for name in ("server", *soak.here.names)]
        broken = [path.name for path in credentials if piebald_command(["audit", str(path)]) not in (None, 0)]
        found = {"minutes": given.minutes, "recipe": given.recipe, "sites": SITES, "disturbances": dict(soak.done)}
        found |= compared(soak.here.out, made) | {"audit logs that do not hold": broken}
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    if found["steps that differ"] or found["updates counted twice"] or broken:
        sys.exit("the disturbed run is not the calm one with the same attendance")


if __name__ == "__main__":
    main()
