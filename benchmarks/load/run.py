"""Many sites, and months in an hour: python benchmarks/load/run.py PART [options]; writes results.json and RESULTS.md.

Parts: `crowd` (many sites in one federation), `registered` (many on the list, one in a hundred there), `chaos` (kills,
restarts, joins, leaves, renewals and partitions), `soak` (that, with full disks, clocks that are set and bad links,
over two experiments of the server's queue).
"""

from __future__ import annotations

import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

sys.path.extend([str(Path(__file__).parents[1] / "networks"), str(Path(__file__).parents[1])])

from bad_link import GOOD, BadLink, Conditions
from shared.markdown import table
from shared.options import reader
from shared.stored import texts
from threads import provisioned

from piebald.core.errors import PiebaldError
from piebald.experiments.file import ExperimentSettings
from piebald.federation.credentials import audit, provisioning
from piebald.federation.operate.audit_check import check_log
from piebald.federation.operate.experiment_queue import ExperimentQueue
from piebald.federation.operate.status import status_values
from piebald.storage.store import RunStore

FOLDER = Path(__file__).parent
TEXTS = texts(FOLDER / "page.md")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
PROCESSES = 2  # of sites
PATIENCE = 900  # seconds to wait for what must happen


class Crowd:
    """A server in a process of its own, and sites in a few others, behind a proxy.

    Args:
        folder: a folder for all files.
        registered: sites on the server's list.
        present: how many of them are there.
        hidden: widths of the model's hidden layers.
        experiments: how many wait in the server's queue; 0 for one without a queue.
        flags: more settings of the federation.
    """

    def __init__(
        self, folder: Path, registered: int, present: int, hidden: list[int], experiments: int = 0, **flags: Any
    ) -> None:
        self.folder, self.names = folder, provisioned(folder / "credentials", present)
        self.runs = [folder / (f"run-{number + 1}" if experiments else "run") for number in range(experiments or 1)]
        self.out, self._queued, self.credentials = self.runs[0], bool(experiments), folder / "credentials" / "server"
        self.rows = _rows(folder / "rows.npz")
        _register(folder / "credentials" / "server", registered)
        port = provisioning.read(folder / "credentials" / "server").port
        self.link = BadLink(("127.0.0.1", port))
        table = {
            "rounds": 1_000_000,
            "model": {"name": "mlp", "hidden": hidden},
            "partition": {"kind": "sites", "clients": "any", "inputs": [64], "classes": [str(n) for n in range(10)]},
            "recipe": {"name": "fedavg", "lr": 0.01, "batch": 10, "steps": 1},
            "evaluate": {"every": 0},
            "runtime": {"kind": "federation", "wait_for": present, **flags},
        }
        (folder / "experiment.toml").write_text(ExperimentSettings.of_table(table, "the benchmark's settings").text())
        for run in self.runs if experiments else ():
            text = ExperimentSettings.of_table(table, "the benchmark's settings").text()
            ExperimentQueue(self.credentials).add("fedavg", text, run)
        self.server = self._served()
        here = self.names[:present]
        self.groups = [here[number::PROCESSES] for number in range(min(PROCESSES, present))]
        self.sites = [self._sites(group) for group in self.groups]

    def _served(self) -> subprocess.Popen[bytes]:
        """Start the server, or start it again."""
        arguments = ["server", str(self.credentials)]
        if not self._queued:
            more = [str(self.folder / "experiment.toml"), "--out", str(self.out)]
            arguments = ["resume", str(self.out)] if (self.out / "run.db").exists() else [*arguments, *more]
        with (self.folder / "server.log").open("ab") as log:
            command = [sys.executable, str(FOLDER / "stepped.py"), str(self.clock("server")), *arguments]
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=ENVIRONMENT)

    def clock(self, party: str | int) -> Path:
        """The file by which a process's wall clock is set (`stepped.py`)."""
        return self.folder / f"clock-{party}"

    def _sites(self, names: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "sites.log").open("ab") as log:
            clock = self.clock(names[0])
            places = [str(clock), str(self.folder / "credentials"), str(self.rows), str(self.link.port)]
            command = [sys.executable, str(FOLDER / "sites.py"), *places, *names]
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=ENVIRONMENT)

    def tell(self, group: int, command: str, name: str) -> None:
        """Stop or start one site."""
        pipe = self.sites[group].stdin
        assert pipe is not None
        pipe.write(f"{command} {name}\n".encode())
        pipe.flush()

    def kill_group(self, group: int) -> None:
        """Kill a process of sites, and start it again."""
        _end(self.sites[group])
        self.sites[group] = self._sites(self.groups[group])

    def kill_server(self) -> None:
        """Kill the server, and take the run up again."""
        _end(self.server)
        self.server = self._served()

    def fill_disk(self, group: int | None, seconds: float) -> None:
        """Let a process of sites, or the server (None), write no file for a while; start it again if that ends it."""
        process, until = self.server if group is None else self.sites[group], time.monotonic() + seconds
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        if process.poll() is None:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        elif group is None:
            self.server = self._served()
        else:
            self.sites[group] = self._sites(self.groups[group])

    def next_experiment(self) -> None:
        """Have the experiment that runs stopped, so that the queue's next one begins."""
        ExperimentQueue(self.credentials).ask_to_stop(self.runs.index(self.out) + 1)
        self.out = self.runs[self.runs.index(self.out) + 1]

    def version(self) -> int:
        """Steps that are recorded."""
        if not (self.out / "run.db").exists():
            return 0
        with RunStore.open_read_only(self.out) as store:
            return store.version

    def wait_for(self, version: int) -> None:
        """Wait until so many steps are recorded."""
        until = time.monotonic() + PATIENCE
        while self.version() < version:
            if self.server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"no step {version}: {(self.folder / 'server.log').read_text()[-3000:]}")
            time.sleep(0.1)

    def counted(self, run: Path | None = None) -> list[tuple[int, int]]:
        """The version and the client of every update that counts in a run, by default the present one."""
        run = run or self.out
        if not (run / "run.db").exists():
            return []
        sql = "SELECT version, client FROM result WHERE status = 'ok' AND kind = 'train'"
        with RunStore.open_read_only(run) as store:
            return [(row["version"], row["client"]) for row in store.query(sql)]

    def close(self) -> None:
        """End everything."""
        for process in (self.server, *self.sites):
            _end(process)
        self.link.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and close the pipe to it."""
    process.kill()
    process.wait()
    if process.stdin is not None:
        with suppress(BrokenPipeError):  # of a command that it did not read any more
            process.stdin.close()


def _rows(path: Path) -> Path:
    """Twenty rows of noise, which are all that a site has."""
    rng = np.random.default_rng(0)
    np.savez(path, x=rng.normal(size=(20, 64)).astype(np.float32), y=np.arange(20) % 10)
    return path


def _register(server: Path, sites: int) -> None:
    """Have the server know so many sites; those that are never there need no credentials of their own."""
    (server / "sites.json").write_text(json.dumps([f"site-{number + 1}" for number in range(sites)]))


def of_process(pid: int) -> dict[str, float]:
    """Memory (MB; peak and now), threads and files of a process."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    sizes = {name: int(lines[key].split()[0]) / 1000 for name, key in (("peak", "VmHWM"), ("memory", "VmRSS"))}
    return {**sizes, "threads": int(lines["Threads"]), "files": len(os.listdir(f"/proc/{pid}/fd"))}


def crowd(registered: int, present: int, hidden: list[int], steps: int) -> dict[str, Any]:
    """Steps of a synchronous run with many sites: seconds, and what the server takes beyond a server of one site."""
    found = {}
    for sites in (1, present):
        with tempfile.TemporaryDirectory() as place:
            made = Crowd(Path(place), registered if sites == present else 1, sites, hidden, silence=60.0)
            try:
                began = time.monotonic()
                made.wait_for(1)
                gathered, at = time.monotonic() - began, time.monotonic()
                made.wait_for(1 + steps)
                spent = (time.monotonic() - at) / steps
                found[sites] = of_process(made.server.pid) | {"gathered": gathered, "step": spent}
            finally:
                made.close()
    model = 4 * sum(a * b + b for a, b in zip([64, *hidden], [*hidden, 10], strict=True)) / 1e6
    more = found[present]["peak"] - found[1]["peak"]
    goal = 4 * model + present
    return {"registered": registered, "present": present, "model": model, **found[present], "more": more, "goal": goal}


EVENTS = ("server killed", "sites killed", "leave", "join", "partition", "reset", "half open", "renewal")
SOAK = (*EVENTS, "bad link", "server clock set", "sites' clock set", "server disk full", "sites' disk full")
BAD = Conditions(round_trip=0.3, jitter=0.1, rate=200_000.0, reset_every=100_000)


def chaos(minutes: float, sites: int, experiments: int = 0, seed: int = 0) -> dict[str, Any]:
    """Disturb a run again and again, then let it come to rest; see `wrong_after` for what must hold then.

    Args:
        minutes: how long.
        sites: how many.
        experiments: of the server's queue, each of which gets its part of the time, for the events of `SOAK`; 0 for one
            without a queue, and those of `EVENTS`.
        seed: of the events.
    """
    rng, happened, memory, states = random.Random(seed), Counter[str](), list[float](), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        flags = {"silence": 5.0, "patience": 20.0, "task_timeout": 60.0, "wait_for": max(sites // 2, 1)}
        made = Crowd(Path(place), sites, sites, [16], experiments, **flags)
        away: dict[str, int] = {}
        try:
            made.wait_for(3)
            made.link.reset()  # all sites come back at once, as they will again and again
            calm, calm_sites = _calm(made), _sites_memory(made)
            began, committed, gone = time.monotonic(), made.counted(), list[str]()
            while (share := (time.monotonic() - began) / (60 * minutes)) < 1:
                if made.out != made.runs[min(int(share * len(made.runs)), len(made.runs) - 1)]:
                    made.next_experiment()
                    happened["next experiment"] += 1
                    committed = []
                event = rng.choice(SOAK if experiments else EVENTS)
                _happen(made, event, rng, away)
                happened[event] += 1
                version = made.version()
                counted = made.counted()
                gone += [event] * bool(set(committed) - set(counted))
                committed = counted
                states[str(status_values(made.credentials)["state"]).split()[0]] += 1
                made.wait_for(version + 2)
                memory.append(of_process(made.server.pid)["memory"])
            for name, group in away.items():
                made.tell(group, "start", name)
            made.link.conditions = GOOD
            at_rest = _calm(made, calm)
            rest_sites = _sites_memory(made)
            parts = made.credentials.rglob("*.part")  # but for what it is writing now
            leftover = sorted(one.name for one in parts if f".{made.server.pid}." not in one.name)
        finally:
            made.close()
        logs = _faults_of_logs(made)
        counted_of = [made.counted(run) for run in made.runs]
    steps = [{version for version, _ in counted} for counted in counted_of]
    return {
        "minutes": minutes, "sites": sites, "events": dict(happened), "experiments": experiments,
        "steps": sum(max(one, default=0) for one in steps), "lost after": gone,
        "twice": sum(len(counted) - len(set(counted)) for counted in counted_of),
        "without": sum(max(one, default=0) - len(one) for one in steps), "before": calm, "after": at_rest,
        "memory": memory, "logs": logs, "leftover": leftover, "states": dict(states),
        "memory of sites": [calm_sites, rest_sites],
    }  # fmt: skip


def _sites_memory(made: Crowd) -> float:
    """Memory of the processes of sites, in MB."""
    return sum(of_process(process.pid)["memory"] for process in made.sites)


def wrong_after(one: dict[str, Any]) -> list[str]:
    """What does not hold after `chaos`, in sentences; nothing where all is well.

    Threads may be more by the one that answers over a connection, for each site.  Files and memory are those of the
    beginning.
    """
    before, after, memory = one["before"], one["after"], one["memory"]
    half = len(memory) // 2
    found = [*one["logs"], *(f"the file {name} was left" for name in one["leftover"])]
    found += [f"updates that had counted were gone after: {event}" for event in one["lost after"]]
    if one["twice"]:
        found.append(f"{one['twice']} updates counted twice")
    if after["threads"] > before["threads"] + one["sites"]:
        found.append(f"{after['threads']:.0f} threads are left of {before['threads']:.0f}")
    if after["files"] > before["files"] + 2:
        found.append(f"{after['files']:.0f} files are open, {before['files']:.0f} were")
    if half and max(mean(memory[half:]), after["memory"]) > 1.05 * max(mean(memory[:half]), before["memory"]):
        found.append(f"memory grew from {before['memory']:.0f} MB to {max(after['memory'], *memory[half:]):.0f} MB")
    return found


def _faults_of_logs(made: Crowd) -> list[str]:
    """Audit logs whose chains do not hold, and results that the server received and a site's log does not know."""
    credentials, found = made.folder / "credentials", list[str]()
    server = credentials / "server" / audit.FILE
    for name in made.names:
        path = credentials / name / audit.FILE
        try:
            audit.verify(path)
            found += audit.missing(path, server)[:1]
        except PiebaldError as error:
            found.append(str(error))
    for run in made.runs:
        try:
            check_log(run)
        except PiebaldError as error:
            found.append(str(error))
    return found


def _happen(made: Crowd, event: str, rng: random.Random, away: dict[str, int]) -> None:
    group = rng.randrange(len(made.sites))
    name = rng.choice(made.groups[group])
    actions: dict[str, Callable[[], Any]] = {
        "server killed": made.kill_server,
        "sites killed": lambda: made.kill_group(group),
        "partition": lambda: (made.link.partition(), time.sleep(rng.uniform(1, 12)), made.link.heal()),
        "reset": made.link.reset,
        "half open": made.link.half_open,
        "renewal": lambda: _renew(made, name),
        "bad link": lambda: (setattr(made.link, "conditions", BAD), made.wait_for(made.version() + 1)),
        "server clock set": lambda: _set_clock(made.clock("server"), rng),
        "sites' clock set": lambda: _set_clock(made.clock(made.groups[group][0]), rng),
        "server disk full": lambda: made.fill_disk(None, rng.uniform(2, 10)),
        "sites' disk full": lambda: made.fill_disk(group, rng.uniform(2, 10)),
    }
    made.link.conditions = GOOD
    if event == "sites killed":
        for one in [one for one, where in away.items() if where == group]:
            del away[one]
    if event == "leave" and len(away) < len(made.names) // 2 and name not in away:
        away[name] = group
        made.tell(group, "stop", name)
    elif event == "join" and away:
        back = rng.choice(sorted(away))
        made.tell(away.pop(back), "start", back)
    elif event in actions:
        actions[event]()


def _set_clock(clock: Path, rng: random.Random) -> None:
    """Step a wall clock to up to two hours before or after the time."""
    clock.write_text(f"{rng.uniform(-7200, 7200):.0f}")


def _renew(made: Crowd, name: str) -> None:
    """A new certificate for a site, while it runs."""
    port = provisioning.read(made.folder / "credentials" / "server").port
    described = provisioning.Description(name="bench", host="127.0.0.1", port=port, days=30, sites=made.names)
    provisioning.renew(described, made.folder / "credentials", [name])


def _calm(made: Crowd, as_before: dict[str, float] | None = None) -> dict[str, float]:
    """The server's process when all sites are there and steps are made; the least of some looks.

    Args:
        made: the federation.
        as_before: what it was once; it is looked at for three minutes, in which connections that were forgotten end.
    """
    made.wait_for(made.version() + 3)
    looks, until = list[dict[str, float]](), time.monotonic() + 180
    while len(looks) < 5 or (as_before and looks[-1]["files"] > as_before["files"] and time.monotonic() < until):
        time.sleep(1)
        looks.append(of_process(made.server.pid))
    return {name: min(look[name] for look in looks[-5:]) for name in looks[0]}


def main() -> None:
    """Measure a part."""
    parser = reader(
        __doc__, sites=200, registered=10_000, steps=3, minutes=60.0, hidden=[470, 470], out=FOLDER
    )  # `--minutes` is how long `chaos` or `soak` goes on, `--registered` is for the part of this name
    parser.add_argument("part", choices=("crowd", "registered", "chaos", "soak", "page"))
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)  # before an hour is spent
    kept = chosen.out / "results.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    if chosen.part == "crowd":
        found[f"crowd {chosen.sites}"] = crowd(chosen.sites, chosen.sites, chosen.hidden, chosen.steps)
    elif chosen.part == "registered":
        there = max(chosen.registered // 100, 1)
        found[f"registered {chosen.registered}"] = crowd(chosen.registered, there, chosen.hidden, chosen.steps)
    wrong = list[str]()
    if chosen.part in ("chaos", "soak"):
        experiments = 2 if chosen.part == "soak" else 0
        disturbed = chaos(chosen.minutes, min(chosen.sites, 24), experiments)
        found[f"{chosen.part} {chosen.minutes:g}"], wrong = disturbed, wrong_after(disturbed)
    kept.write_text(json.dumps(found, indent=1) + "\n")
    (chosen.out / "RESULTS.md").write_text(page(found))
    if wrong:
        raise SystemExit("; ".join(wrong))


def page(found: dict[str, Any]) -> str:
    """RESULTS.md."""
    facts = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    parts = [TEXTS["head"].format(processes=PROCESSES, **facts)]
    crowds = [one for name, one in found.items() if not name.startswith(("chaos", "soak"))]
    parts.append(_crowds(crowds) if crowds else "`crowd` and `registered` have not been measured yet.\n")
    parts += [_chaos(one) for name, one in found.items() if name.startswith(("chaos", "soak"))]
    return "\n".join(parts)


def _crowds(crowds: list[dict[str, Any]]) -> str:
    heads = ["registered", "there", "model MB", "s to gather", "s a step", "server MB", "beyond one site MB", "goal MB",
             "threads", "files"]  # fmt: skip
    rows = [
        [f"{one['registered']:,}", one["present"], f"{one['model']:.2f}", f"{one['gathered']:.0f}",
         f"{one['step']:.1f}", *(f"{one[name]:.0f}" for name in ("peak", "more", "goal", "threads", "files"))]
        for one in crowds
    ]  # fmt: skip
    notes = "".join(f"\n{one['note']}\n" for one in crowds if "note" in one)
    return f"{TEXTS['crowd']}\n{table(heads, rows, '---')}\n{notes}"


def _chaos(one: dict[str, Any]) -> str:
    before, after, memory = one["before"], one["after"], one["memory"]
    half = len(memory) // 2
    halves = [sum(part) / max(len(part), 1) for part in (memory[:half], memory[half:])]
    checked = ""
    if "logs" in one:
        checked = f"audit logs whose chain does not hold, or in which a result is missing: {len(one['logs'])}; "
        checked += f"unfinished files left at the server: {len(one['leftover'])}; "
    if states := one.get("states"):
        told = ", ".join(f"{count} x {state}" for state, count in sorted(states.items()))
        checked += f"what `piebald status` said right after an event: {told}; "
        checked += "memory of all sites' processes {:.0f} MB before, {:.0f} MB after; ".format(*one["memory of sites"])
    text = TEXTS["chaos"].format(**one | {
        "queued": f", {one['experiments']} experiments one after another" if one.get("experiments") else "",
        "events": ", ".join(f"{count} x {event}" for event, count in sorted(one["events"].items())),
        "lost": len(one["lost after"]), "checked": checked,
    })  # fmt: skip
    heads = ["the server's process", "at the beginning", "at the end, undisturbed again"]
    rows = [[name, f"{before[name]:.0f}", f"{after[name]:.0f}"] for name in ("threads", "files", "memory")]
    end = "Memory after each event: {:.0f} MB on average in the first half, {:.0f} MB in the second.\n".format(*halves)
    note = f"\n{one['note']}\n" if "note" in one else ""
    return f"{text}\n{table(heads, rows, '---')}\n\n{end}{note}"


if __name__ == "__main__":
    main()
