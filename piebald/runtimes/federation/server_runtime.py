"""The server's end of the seam (`contracts.Runtime`): tasks go to sites, results come back, the clock is real.

A site has a task when it said so, and its result counts once, whatever is sent twice.  Finished training stays
at the site until a checkpoint holds it, so a server that dies and is resumed asks again and is given the same.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from piebald.client_work import ClientWork
from piebald.contracts import SERVER_ID, Checkpoint, Clients, Result, SumRequest, Task, Update
from piebald.errors import SettingError
from piebald.parameters import nbytes
from piebald.runtimes.engines.choose import make_engine
from piebald.runtimes.engines.engine import Engine
from piebald.runtimes.engines.serving import serve
from piebald.runtimes.engines.stack import ClientStack
from piebald.runtimes.federation import provisioning
from piebald.runtimes.federation.federation_settings import Federation
from piebald.runtimes.federation.flare_link import SERVER, Link
from piebald.runtimes.federation.local_federation import LocalFederation
from piebald.runtimes.federation.member_list import Member, OpenTask, names_of, sites_of
from piebald.runtimes.federation.messages import (
    PIECE,
    PROTOCOL,
    Hello,
    Piece,
    Refused,
    Welcome,
    Wish,
    Word,
    decode,
    encode,
)
from piebald.runtimes.federation.run_terms import terms
from piebald.runtimes.federation.wire_format import digest, pack_task, pieces, unpack_update
from piebald.version import __version__

_TICK = 0.25  # seconds between looks at who is silent
_ROOM = 1 << 20  # bytes that a result may have beside its vectors
_VECTORS = 8  # whole models' worth of vectors that a result may bring
_WAIT = 20.0  # seconds for a site to answer

log = logging.getLogger("piebald.federation")


class FederationServer:
    """A running federation.

    Args:
        settings: how long to wait for whom.
        work: what all parties work on.
        clients: their names, and what the server has of its own.
        local: the sites on this machine, or None where they come from elsewhere.
    """

    def __init__(self, settings: Federation, work: ClientWork, clients: Clients, local: LocalFederation | None) -> None:
        self.settings, self.work, self.federation, self._local = settings, work, clients, local
        credentials = provisioning.read(local.server if local is not None else Path(str(settings.credentials)))
        self.credentials, sites = credentials, sites_of(credentials, clients)
        self._members = [Member(name) for name in sites]
        self._number = {member.name: number for number, member in enumerate(self._members)}
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._arrived: deque[Result] = deque()
        self._epoch, self._run = secrets.token_hex(8), secrets.token_hex(8)
        self._began, self._before = time.monotonic(), 0.0
        self._now = 0.0
        self._horizon = self._restored = self._version = 0
        self._handed: dict[int, int] = {}  # training handed out since the last checkpoint: its client
        self._captured: dict[int, int] = {}  # training in a checkpoint that may not be written yet
        self._asked = self._gathered = self._closing = self._dismissed = False
        self._seen: list[int] = []
        self._engine: Engine | None = None
        self._terms = terms(work, settings.experiment or {}, names_of(clients), sites, clients.classes)
        self._digest = digest(self._terms)
        self._link = Link(
            SERVER, ("0.0.0.0", credentials.port), credentials.folder, self._number.__contains__, log.warning
        )
        for topic, kind, handler in (
            ("hello", Hello, self._hear),
            ("terms", Wish, self._tell),
            ("result", Piece, self._receive),
        ):
            self._link.on(topic, kind, handler)  # type: ignore[arg-type]
        self._threads = [threading.Thread(target=self._carry, args=(member,), daemon=True) for member in self._members]
        self._threads.append(threading.Thread(target=self._watch, daemon=True))
        self._open_door()

    def _open_door(self) -> None:
        self._link.start()
        for thread in self._threads:
            thread.start()
        if self._local is not None:
            self._local.open()

    # -- the seam

    def submit(self, tasks: Sequence[Task], sum_request: SumRequest | None = None) -> None:
        """See `contracts.Runtime`.  Updates are never summed before they arrive."""
        self._gather()
        with self._news:
            for task in tasks:
                self._version = max(self._version, task.version)
                one = OpenTask(task, self._clock())
                if task.client == SERVER_ID:
                    self._arrived.append(self._arrival(one, self._serve_centre(task), None))
                    continue
                if one.trains:
                    self._horizon = max(self._horizon, task.id)
                self._members[task.client].open[task.id] = one
            self._news.notify_all()

    def next(self, until: float = float("inf")) -> Result | None:
        """See `contracts.Runtime`."""
        self._gather()
        with self._news:
            while True:
                if self._arrived:
                    result = self._arrived.popleft()
                    self._now = max(self._now, result.time)
                    if result.task.query is None:
                        self._handed[result.task.id] = result.task.client
                    return result
                if self._clock() >= until:
                    self._now = max(self._now, until)
                    return None
                if until == float("inf") and not any(member.open for member in self._members):
                    here = self._here()
                    if here != self._seen:  # somebody came or went, so there may be somebody to ask
                        self._now = self._clock()
                        return None
                    if len(here) == len(self._members):
                        return None
                self._news.wait(min(_TICK, max(until - self._clock(), 0.0)))

    def clients(self) -> Sequence[int]:
        """See `contracts.Runtime`."""
        self._gather()
        with self._lock:
            self._seen = self._here()
            return list(self._seen)

    def now(self) -> float:
        return self._now

    def state(self) -> Checkpoint:
        """The clock, and what is under way; results that came meanwhile stay at their sites until they are in a
        checkpoint.
        """
        with self._lock:
            # that this is asked means that the checkpoint before has been written: what it held is safe
            self._captured, self._handed = dict(self._handed), {}
            under_way = [[one.task.id, one.sent] for member in self._members for one in member.open.values()]
            under_way += [[a.task.id, a.sent] for a in self._arrived if a.task.query is None]
            values = {"run": self._run, "now": self._clock(), "horizon": self._horizon, "open": sorted(under_way)}
            return Checkpoint({}, values)

    def restore(self, checkpoint: Checkpoint, tasks: Mapping[int, Task]) -> None:
        """Take up what `state` gave."""
        values = checkpoint.values
        with self._news:
            self._run, self._before, self._began = str(values["run"]), float(values["now"]), time.monotonic()
            self._now = self._before
            self._horizon = self._restored = int(values["horizon"])
            for id, sent in values["open"]:
                self._members[tasks[id].client].open[id] = OpenTask(tasks[id], float(sent))

    def dismiss(self) -> None:
        """The run has ended well: everything is safe, and sites may leave."""
        with self._lock:
            self._handed, self._captured, self._dismissed = {}, {}, True
            told = time.monotonic()
        until = told + self.settings.silence
        while time.monotonic() < until:
            with self._lock:
                here = [member for member in self._members if member.silent() < self.settings.silence]
                met = len(here) == len(self._members) or told - self._began > self.settings.silence
                if met and all(member.heard is not None and member.heard > told for member in here):
                    return
            time.sleep(0.02)

    def close(self) -> None:
        with self._news:
            closed, self._closing = self._closing, True
            self._news.notify_all()
        if closed:
            return
        self._link.stop()
        if self._local is not None:
            self._local.close()
        self._note()

    # -- time and presence

    def _clock(self) -> float:
        return self._before + time.monotonic() - self._began

    def _here(self) -> list[int]:
        found = (
            number for number, member in enumerate(self._members) if member.ready(self._digest, self.settings.silence)
        )
        return list(found)

    def _gather(self) -> None:
        """Wait until enough sites are there to begin; from then on sites come and go."""
        self._asked = True
        if self._gathered:
            return
        wanted = min(self.settings.wait_for or len(self._members), len(self._members))
        patience = self.settings.patience if self.settings.wait_for is None else float("inf")
        until, told = time.monotonic() + patience, time.monotonic() + 5
        with self._news:
            while len(here := self._here()) < wanted and not (here and time.monotonic() > until):
                if time.monotonic() > told:
                    told = float("inf")
                    missing = [member.name for number, member in enumerate(self._members) if number not in here]
                    log.warning("waiting for %s", ", ".join(missing))
                if self._local is not None:
                    self._local.check()
                self._check_refused(wanted)
                self._news.wait(_TICK)
            self._gathered, self._now = True, self._clock()

    def _check_refused(self, wanted: int) -> None:
        """Stop where so many sites refuse that there will never be enough."""
        refusing = [member for member in self._members if member.refused]
        if len(self._members) - len(refusing) < wanted:
            one = refusing[0]
            raise SettingError(
                f"{len(refusing)} of {len(self._members)} sites do not take part, {one.name}: {one.refused}"
            )

    def _watch(self) -> None:
        """The watching thread: nobody waits for ever for a site that is gone."""
        while not self._closing:
            with self._news:
                for member in self._members:
                    for one in list(member.open.values()):
                        if self._gathered and (why := self._given_up(member, one)):
                            self._end(member, one, None, why)
            self._note()
            time.sleep(1.0)

    def _given_up(self, member: Member, one: OpenTask) -> str | None:
        """Why a task is not waited for any longer, or None."""
        patience = self.settings.patience if one.trains else self.settings.silence
        if min(member.silent(), time.monotonic() - self._began) > patience:
            return f"silent for more than {patience:g} seconds"
        longest = self.settings.longest
        if longest is not None and self._clock() - one.sent > longest:
            return f"took more than {longest:g} seconds"
        return None

    def _note(self) -> None:
        """Write down how it stands, for `piebald status`."""
        with self._lock:
            sites = [
                member.table(self._version)
                | {"received": self._link.received[member.name], "sent": self._link.sent[member.name]}
                for member in self._members
            ]
            status = {
                "party": SERVER,
                "version": __version__,
                "run": self._run,
                "commits": self._version,
                "sites": sites,
            }
            status["over"] = self._dismissed
        provisioning.private(self.credentials.folder / "status.json", json.dumps(status), lasting=False)

    # -- what sites say

    def _hear(self, origin: str, hello: Hello, body: memoryview) -> bytes:
        member, number = self._members[self._number[origin]], self._number[origin]
        with self._news:
            if member.hear(hello, self._misfit(hello)):
                if member.refused:
                    log.warning("%s does not take part: %s", origin, member.refused)
                self._news.notify_all()
            mine = {id for id, one in member.open.items() if one.trains}
            mine |= {id for book in (self._handed, self._captured) for id, client in book.items() if client == number}
            mine |= {a.task.id for a in self._arrived if a.task.client == number}
            welcome = Welcome(
                version=__version__,
                run=self._run if self._ready() else "",
                epoch=self._epoch,
                terms=self._digest,
                restored=self._restored,
                horizon=self._horizon,
                unsafe=sorted(mine),
                over=self._dismissed,
            )
        return encode(welcome)

    def _ready(self) -> bool:
        """A run that is taken up has its own number from `restore` on, so none is told before the server asks."""
        return self._asked or self._dismissed

    @staticmethod
    def _misfit(hello: Hello) -> str:
        if hello.protocol != PROTOCOL or hello.version != __version__:
            return f"it has Piebald {hello.version}, the server {__version__}: install the same on both"
        return hello.refused

    def _tell(self, origin: str, wish: Wish, body: memoryview) -> bytes:
        piece = Piece(
            run=self._run, epoch=self._epoch, id=0, trains=False, start=wish.start, size=len(self._terms),
            digest=self._digest,
        )  # fmt: skip
        return encode(piece, pieces(self._terms, wish.start))

    def _receive(self, origin: str, piece: Piece, data: memoryview) -> bytes:
        """A piece of a result."""
        member = self._members[self._number[origin]]
        with self._news:
            one = member.open.get(piece.id)
            ours = (piece.run, piece.epoch) == (self._run, self._epoch)
            if not ours or one is None or one.trains != piece.trains:
                member.late += piece.start == 0
                return encode(Word(word="known"))
            try:
                word, body = member.assembly.take(piece, data, _ROOM + 4 * _VECTORS * self.work.layout.size)
                if body is not None:
                    self._end(member, one, *unpack_update(body))
            except Refused as error:  # waiting for something better would be in vain
                self._link.report(f"{origin} sent {error}")
                self._end(member, one, None, f"sent {error}"[:300])
                word = Word(word="refused")
        return encode(word)

    def _end(self, member: Member, one: OpenTask, update: Update | None, failure: str | None) -> None:
        """An task is over; the first word counts."""
        del member.open[one.task.id]
        member.finished += update is not None
        member.version = one.task.version
        self._arrived.append(self._arrival(one, update, failure))
        self._news.notify_all()

    def _arrival(self, one: OpenTask, update: Update | None, failure: str | None) -> Result:
        free = one.task.free
        down = 0 if free else nbytes(one.task.vectors)
        up = 0 if free or update is None else update.nbytes
        return Result(one.task, update, one.sent, self._clock(), down, up, failure)

    # -- what sites are told

    def _carry(self, member: Member) -> None:
        """A site's own thread: it brings tasks there."""
        while not self._closing:
            with self._news:
                one = member.to_push() if member.ready(self._digest, self.settings.silence) else None
                if one is None:
                    self._news.wait(1.0)
                    continue
                incarnation = member.hello.incarnation if member.hello else ""
            if self._push(member, one):
                with self._lock:
                    one.pushed, one.at = incarnation, time.monotonic()
            else:
                time.sleep(0.2)

    def _push(self, member: Member, one: OpenTask) -> bool:
        """Bring one task; whether the site has it now."""
        body = pack_task(one.task)
        piece = Piece(
            run=self._run, epoch=self._epoch, id=one.task.id, trains=one.trains, start=0, size=len(body),
            digest=digest(body),
        )  # fmt: skip
        start = again = 0
        while again < 3 and one.task.id in member.open and not self._closing:
            head = piece.model_copy(update={"start": start})
            answer = self._link.request(member.name, "work", head, pieces(body, start), timeout=_WAIT)
            if answer is None:
                return False
            try:
                word = decode(Word, answer)[0].word
            except Refused as error:
                self._link.report(f"{member.name} answered with {error}")
                return False
            if word == "go on":
                start += PIECE
            elif word == "again":
                start, again = 0, again + 1
            elif word == "refused":
                with self._news:
                    if one.task.id in member.open:
                        self._end(member, one, None, "refused by the site, whose log says why")
                return True
            else:
                return word in ("done", "known")
        return False

    # -- the server's own rows

    def _serve_centre(self, task: Task) -> Update:
        if self._engine is None:
            self._engine = make_engine("sequential", self.work, self.federation, torch.device("cpu"), False)
        model = task.vectors["model"]
        stack = ClientStack([SERVER_ID], [task.version], [task.rng_version], [0], [model], {}, {}, task.query)
        return serve(self._engine, stack).update(0)
