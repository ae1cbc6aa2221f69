"""The experiments of a queue, each in a process of its own: what crashes, hangs or waits keeps no other from its turn.

This process holds the port, and passes each connection of a site on to the process of the run that it is for.

A run that needs more than a site had when it was heard last waits in the queue.  So somebody must hear of a site that
was started again with more, also where nothing else is at work (`IdleSites`).
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from piebald.core.errors import SettingError
from piebald.core.files import read_json
from piebald.federation.credentials.provisioning import Credentials
from piebald.federation.credentials.slots import FOLDER, MOST, protocol_of, slot_folder
from piebald.federation.hub.settings import Federation
from piebald.federation.link.messaging import SERVER, Link, Unwelcome
from piebald.federation.link.tls import LISTENS, Listener
from piebald.federation.link.wire_format import PROTOCOL, CheckReply, CheckRequest, Hello, Needs, encode
from piebald.federation.operate.experiment_queue import ExperimentQueue, Queued
from piebald.federation.operate.remote import Desk
from piebald.federation.operate.status import give_sign, lives, running_process
from piebald.federation.site.claims import Jobs
from piebald.settings.toml_document import Document
from piebald.storage import lease
from piebald.storage.lease import Lease
from piebald.storage.lock import heed_stop
from piebald.storage.run_folder import refuse_occupied
from piebald.version import __version__


class IdleSites:
    """Hears sites, and answers with no word: what a server says of its run is for the process of a run to say.

    So their connections stay open, each hello keeps its own alive, and they end when a run begins (`Link.pass_on`).

    Args:
        server: the server's credentials.
        begun: returns whether a run listens by now.

    Attributes:
        link: takes their connections, as `rest` of another link.
        rows: what each has said last, as in a server's status.
    """

    def __init__(self, server: Credentials, begun: Callable[[], bool]) -> None:
        self.rows, self._begun = dict[str, dict[str, Any]](), begun
        address = "", server.port
        self.link = Link(SERVER, address, server.folder, lambda name: name in server.sites(), log.warning)
        self.link.on("hello", Hello, self._on_hello)
        self.link.on("check", CheckRequest, self._on_check)

    def _on_hello(self, origin: str, hello: Hello, body: memoryview) -> bytes:
        if self._begun():  # it came when the run began, and would wait here for ever
            raise Unwelcome("a run has begun")
        row = {"jobs": hello.jobs, "gpus": hello.gpus, "gigabytes": hello.gigabytes}
        self.rows[origin] = {"site": origin, "heard": time.time(), **row}
        return b""

    def _on_check(self, origin: str, request: CheckRequest, body: memoryview) -> bytes:
        return encode(CheckReply(protocol=PROTOCOL, version=__version__, time=time.time(), terms=""))


LOOK = 0.5  # seconds between two looks at the queue
LEFT = 120.0  # seconds for which a lock may outlive its process on a shared disk
_ENDING = 60.0  # seconds that a process has to end
_ENDS = 0.1  # seconds between two looks whether it has
_HANGS = 60.0  # seconds without a sign of life of a process, after which it is ended
_LIVES = b"."  # a sign of life
_STARTS = 3  # of a process that lost its device, at most
_IDLE = ("waiting for", "stalled")  # beginnings of the states in which a run makes room for others

log = logging.getLogger("piebald.federation")


@dataclass(slots=True)
class Job:
    """An experiment that a process works on.

    Attributes:
        entry: the experiment.
        process: its process.
        door: over which it is passed the connections of its sites.
        needs: what it takes of each site.
        sites: the sites that it may ask, None for all.
        patience: seconds that it may wait or stand still while others could run.
        sign: when its process gave its last sign of life, on the monotonic clock.
        ends: why it is being ended: "" while it is not, "stopped", "aside", or "hangs".
    """

    entry: Queued
    process: subprocess.Popen[bytes]
    door: socket.socket
    needs: Needs
    sites: list[str] | None
    patience: float
    sign: float = field(default_factory=time.monotonic)
    ends: str = ""


class JobProcesses:
    """Starts the experiments of a queue in their turn, as many at once as the sites allow.

    Args:
        server: the server's credentials.
        queue: its queue.
        words: options of the process of an experiment, by its slot.
        held: the lease of the credentials, which it keeps alive.
    """

    def __init__(
        self, server: Credentials, queue: ExperimentQueue, words: Callable[[int], list[str]], held: Lease
    ) -> None:
        self._server, self._queue, self._words, self._lease = server, queue, words, held
        self._jobs: dict[int, Job] = {}  # by slot
        self._lost: dict[int, int] = {}  # how often the process of an experiment has ended without a word
        self._waits = False
        self._desk = Desk(server, queue)
        self._idle = IdleSites(server, lambda: self._desk.link.passes_on(protocol_of(0)))
        self._desk.link.start(rest=self._idle.link)

    def serve(self) -> None:
        """Take experiments for ever.

        Raises:
            SettingError: the disk is full, so that the next one would fail as well.
        """
        while True:
            lives(self._server.folder)
            self._lease.beat()
            heed_stop()
            for slot, job in list(self._jobs.items()):
                self._look_at(slot, job)
            self._start_those_that_fit()
            if 0 not in self._jobs:
                # the status does not change meanwhile, and a check of health would take the process for ill
                give_sign(self._server.folder)
            if not self._jobs and not self._waits:
                log.info("the queue is empty: waiting for piebald queue add %s", self._server.folder)
            self._waits = not self._jobs
            select.select([job.door for job in self._jobs.values() if not job.ends], [], [], LOOK)

    def close(self) -> None:
        """End all processes; their experiments go on when a server is started again."""
        self._desk.link.stop()
        self._idle.link.stop()
        for job in self._jobs.values():
            job.process.terminate()
        until = time.monotonic() + _ENDING
        for job in self._jobs.values():
            while job.process.poll() is None and time.monotonic() < until:
                self._lease.beat()
                time.sleep(_ENDS)
            job.process.kill()
            job.process.wait()

    # -- those that run

    def _look_at(self, slot: int, job: Job) -> None:
        """End an experiment that somebody has stopped, or that stands in the way, and record one that has ended."""
        with suppress(BlockingIOError, ConnectionError):  # it says nothing, or has ended and left connections unread
            said = job.door.recv(64, socket.MSG_DONTWAIT)
            job.sign = time.monotonic()
            if words := said.replace(_LIVES, b""):
                self._desk.link.pass_on(protocol_of(slot), job.door if words[-1:] == LISTENS else None)
        if (code := job.process.poll()) is not None:
            self._desk.link.pass_on(protocol_of(slot), None)
            job.door.close()
            del self._jobs[slot]
            return self._settle(job, code)
        if job.ends:
            return None
        if self._queue.stop_wanted(job.entry):
            job.ends = "stopped"
        elif (silent := time.monotonic() - job.sign) > _HANGS:
            log.error("the process of experiment %d hangs: no sign of life for %.0f s", job.entry.number, silent)
            job.ends = "hangs"
            job.process.kill()  # it does not hear anything milder
        elif self._stands_still(slot, job) and any(
            entry.number not in self._numbers() and entry.priority >= job.entry.priority
            for entry in self._queue.in_turn()
        ):
            job.ends = "aside"
        if job.ends:
            job.process.terminate()
            threading.Timer(_ENDING, job.process.kill).start()
        return None

    def _settle(self, job: Job, code: int) -> None:
        """Record how an experiment has ended."""
        entry, number = self._queue.entry(job.entry.number), job.entry.number
        fields = {"event": "experiment", "number": number, "why": "", "state": entry.state}
        if entry.state == "running" and code == 2 and not job.ends:
            raise SettingError(f"experiment {number} cannot go on, and the next one could not begin: see above")
        if lost := entry.state == "running" and job.ends in ("", "hangs"):
            self._lost[number] = self._lost.get(number, 0) + 1
        how = "hung and was killed" if job.ends else f"ended with code {code}"
        if lost and self._lost[number] >= _STARTS:
            why = f"its process was lost {_STARTS} times: the last one {how}; the server's log says more"
            entry = self._queue.change(entry, state="failed", why=why)
        elif lost and not job.ends:
            log.error("the process of experiment %d has %s, and is started again", number, how)
            return
        elif entry.state == "running" and job.ends == "stopped":
            entry = self._queue.change(entry, state="stopped")
        elif entry.state == "running":
            entry = self._queue.change(entry, state="waiting", set_aside=entry.set_aside + 1)
        fields |= {"state": entry.state, "why": entry.why}
        sentence = "experiment %(number)d: %(why)s" if entry.why else "experiment %(number)d of the queue is %(state)s"
        if aside := entry.state == "waiting":
            sentence = "experiment %(number)d makes room for others, and goes on later"
        log.log(logging.WARNING if entry.why or aside else logging.INFO, sentence, fields)

    def _stands_still(self, slot: int, job: Job) -> bool:
        """Return whether a run has waited for sites, or not moved, for longer than its patience."""
        activity = _written(slot_folder(self._server.folder, slot)).get("activity") or {}
        since = float(activity.get("since") or 0.0)
        if since < _seconds(job.entry.started):  # the slot's last process wrote it: this one is still loading
            return False
        return str(activity.get("state")).startswith(_IDLE) and time.time() - since > job.patience

    def _numbers(self) -> set[int]:
        return {job.entry.number for job in self._jobs.values()}

    # -- those that wait

    def _start_those_that_fit(self) -> None:
        """Start experiments in their turn; one that does not fit now is not overtaken by those of less priority."""
        least: int | None = None
        for entry in self._queue.in_turn():
            if entry.number in self._numbers() or (least is not None and entry.priority < least):
                continue
            if self._queue.stop_wanted(entry):  # while no server was there
                self._queue.change(entry, state="stopped")
                continue
            try:
                runtime, sites = _about(entry)
                if not entry.begun:
                    refuse_occupied(Path(entry.out))
                slot, why = self._slot_for(entry, runtime.needs, sites)
            except Exception as error:
                self._queue.change(entry, state="failed", why=str(error))
                continue
            if slot is not None:
                self._start(slot, entry, runtime, sites)
            elif self._jobs:
                least = entry.priority if least is None else least
            elif why != entry.why:  # until a site says that it has more
                self._queue.change(entry, why=why)

    def _slot_for(self, entry: Queued, needs: Needs, sites: list[str] | None) -> tuple[int | None, str]:
        """Return a free slot in which an experiment fits beside those that run; or None, and why there is none now."""
        free = [slot for slot in range(MOST) if slot not in self._jobs]
        if entry.begun and entry.slot is not None:  # its run folder names the credentials of that slot
            free = [slot for slot in free if slot == entry.slot]
        said, at_once = self._capacities(), MOST
        for site in self._server.sites() if sites is None else sites:
            beside = [job.needs for job in self._jobs.values() if job.sites is None or site in job.sites]
            if site not in said and beside:  # before it is heard, a run alone may need anything
                return None, f"{site} has not said yet what it has"
            has = said.get(site)
            if has is not None and (why := has.reject_reason(needs, beside)):
                return None, f"{site}: {why}"
            at_once = min(at_once, 1 if has is None else has.at_once)
        return next((slot for slot in free if slot < at_once), None), f"its sites take part in {at_once} at once"

    def _capacities(self) -> dict[str, Jobs]:
        """Return what sites have said of themselves last, by site."""
        folders = [self._server.folder, *(self._server.folder / FOLDER).glob("[0-9]*")]
        rows = [row for folder in folders for row in _written(folder).get("sites") or () if row.get("jobs") is not None]
        rows = sorted([*rows, *self._idle.rows.values()], key=lambda row: row.get("heard") or 0.0)
        has = {str(row["site"]): row for row in rows}  # the last one of each
        return {
            site: Jobs(at_once=min(row["jobs"], MOST), gpus=row["gpus"], gigabytes=row["gigabytes"])
            for site, row in has.items()
        }

    def _start(self, slot: int, entry: Queued, runtime: Federation, sites: list[str] | None) -> None:
        fields = {"event": "experiment", "number": entry.number, "experiment": entry.label, "run": entry.out}
        log.info("experiment %(number)d of the queue: %(experiment)s, to %(run)s", fields)
        slot_folder(self._server.folder, slot)
        entry = self._queue.change(entry, state="running", slot=slot, why="")
        door, theirs = socket.socketpair()
        words = ["server", str(self._server.folder), "--job", *map(str, (entry.number, theirs.fileno(), lease.token()))]
        folder = self._queue.folder / "empty"  # no name in settings finds anything there
        folder.mkdir(mode=0o700, exist_ok=True)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "piebald.cli", *words, *self._words(slot)], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, cwd=folder if entry.by else None, start_new_session=True,
            )  # fmt: skip
        self._jobs[slot] = Job(entry, process, door, runtime.needs, sites, runtime.patience)


def _about(entry: Queued) -> tuple[Federation, list[str] | None]:
    """Return the runtime of an experiment, and the sites that it may ask, None for all."""
    values = Document(entry.experiment, f"experiment {entry.number} of the queue").values
    runtime = {name: value for name, value in (values.get("runtime") or {}).items() if name in Federation.model_fields}
    clients = (values.get("partition") or {}).get("clients")
    return Federation(**runtime), [str(name) for name in clients] if isinstance(clients, list) else None


def _written(folder: Path) -> Mapping[str, Any]:
    try:
        values = read_json(folder / "status.json")
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp() if moment else 0.0


def await_writer(folder: Path) -> None:
    """Wait until no process has the lock of a run folder: one whose server was killed may outlive it for a moment."""
    until = time.monotonic() + LEFT
    while running_process(folder) is not None and time.monotonic() < until:
        time.sleep(LOOK)


# ------------------------------------------------------------------------------------------------ in the other process


def take_connections(door: int) -> None:
    """Take connections over a file that another process passes them on through, in place of listening."""
    Listener.passed = socket.socket(fileno=door)


def end_with_parent() -> None:
    """End this process as a kill would, once the one that started it has gone, and give it signs of life until then."""
    parent, door = os.getppid(), Listener.passed
    assert door is not None

    def watch() -> None:
        while os.getppid() == parent:
            with suppress(OSError):  # it is looked at again
                lease.check()  # also while it writes nothing
            with suppress(OSError):  # nobody reads it at the moment
                door.send(_LIVES, socket.MSG_DONTWAIT)
            time.sleep(LOOK)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()
