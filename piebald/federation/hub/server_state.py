"""Tasks and results of a running federation, as the server's threads share them."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from piebald.contracts import Checkpoint, Result, Task, Update
from piebald.core.parameters import nbytes
from piebald.federation.hub.member_list import Member, OpenTask, stated_rows
from piebald.federation.link.supervision import Supervision
from piebald.federation.link.transfer import Assembly
from piebald.federation.link.wire_format import Hello, Welcome
from piebald.version import __version__

log = logging.getLogger("piebald.federation")

_NAMED = 5  # sites that one line names, at most
_STALLED = 60.0  # seconds without any progress of work that is under way, at least, after which a run is stalled
_SLOWER = 3.0  # times the longest training task so far after which it is
_FAILURES = 3  # training tasks that failed in a row, and one of each site, after which a run is failing


@dataclass(frozen=True, slots=True)
class Activity:
    """What a running server does.

    Attributes:
        state: "waiting for" and the names of sites, "training", "stalled", "failing", "stopped" or "finished".
        ends: what would end that state.
    """

    state: str
    ends: str = ""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits to the server's patience; see `Federation` for the fields.

    Attributes:
        wait_for: number of sites without which no round begins or ends; "all" for every site; None waits at first for
            all that do not refuse, or for one after `patience`.
        patience: seconds of silence, or of not being ready, after which no round waits for a site.
        silence: seconds of silence after which a site is not sent anything until it is heard again.
        task_timeout: seconds that a task may take at a site that is present.
    """

    wait_for: int | Literal["all"] | None
    patience: float
    silence: float
    task_timeout: float


class FederationState:
    """State of a federation's server.

    A training task stays at its site until a checkpoint holds its result, so this records which ones are not saved yet.

    Args:
        sites: the site of each client, by number.
        terms: digest of the run's terms.
        timeouts: how long to wait for sites.
        cut: a task as it travels, see `ClientWork.cut`.
        folder: where long results are kept that have come, see `transfer.Assembly`.

    Attributes:
        lock: guards all that is here.
        changed: notified where a thread may be waiting for a change; it holds `lock`.
        members: the sites, by client number.
        number: the client number of each site, by name.
        run, epoch: random numbers of the run and of this process.
        version: the newest version of the global model.
        now: the time of the runtime, in seconds of the run's clock.
        started: whether the server loop has begun, so that a resumed run has its own number again.
        dismissed: whether the run has ended.
        closing: whether the server is being stopped.
        threads: its threads, none of which ends unseen.
    """

    def __init__(
        self, sites: Sequence[str], terms: str, timeouts: Timeouts, cut: Callable[[Task], Task] = lambda task: task,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.members = [Member(name, assembly=Assembly(folder)) for name in sites]
        self.number = {member.name: number for number, member in enumerate(self.members)}
        self.threads = Supervision(self._ends_within, self._notify)
        self.terms, self.timeouts, self._cut = terms, timeouts, cut
        self.epoch, self.run = secrets.token_hex(8), secrets.token_hex(8)
        self.version, self.now = 0, 0.0
        self.started = self.dismissed = self.closing = False
        self.began = self._opened = time.monotonic()
        self._moved = self.began  # when the work that is under way moved last
        self._failed = 0  # training tasks that failed, without a result in between
        self._activity = Activity(""), time.time()  # and since when it is so
        self._ready = 0  # sites that could be sent tasks then
        self._before = 0.0  # seconds of the run's clock before this process began
        self._arrived: deque[Result] = deque()
        self._last_id = self._restored = 0
        self._returned: dict[int, int] = {}  # training tasks returned by `next` since the last checkpoint: their client
        self._captured: dict[int, int] = {}  # training tasks in a checkpoint that may not be written yet

    def _ends_within(self, seconds: float) -> bool:
        """Wait for so many seconds, and return whether the server is being stopped."""
        with self.changed:
            return self.changed.wait_for(lambda: self.closing, seconds)

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def clock(self) -> float:
        """Seconds of the run's clock."""
        return self._before + time.monotonic() - self.began

    def begin(self) -> None:
        """Start the run's clock: waiting for the sites to come is no part of the run."""
        self.began = time.monotonic()
        self.now = self.clock()

    def ready_clients(self) -> list[int]:
        """Return the clients whose sites can be sent tasks."""
        silence = self.timeouts.silence
        return [number for number, member in enumerate(self.members) if member.ready(self.terms, silence)]

    def absence(self, member: Member) -> str:
        """Return why no round waits for a site, "" where it belongs to the run.

        It belongs from when it is first ready for tasks, or a resumed run had it; and again when it is ready after it
        was absent.  How long it has been silent counts, and not whether it was asked meanwhile.
        """
        patience, silence = self.timeouts.patience, self.timeouts.silence
        seconds = member.unready_for(self.terms, silence)
        unready = member.unready is not None  # and not by the seconds, which are 0 when it was just found to be
        reason = ""
        if member.refused:
            reason = f"does not take part: {member.refused}"
        elif member.owed:
            reason = "still owes the result of an earlier task"
        elif unready and member.heard is None and not member.belongs:
            reason = "not heard yet"
        # a resumed server has heard nobody yet: silence counts from its own start at the earliest
        elif min(member.silent(), time.monotonic() - self._opened) > patience:
            reason = f"silent for more than {patience:g} seconds"
        elif seconds > patience or (unready and not member.belongs):
            reason = member.doing() or f"not ready for {seconds:.0f} seconds"
        member.belongs = not reason
        return reason

    def belonging(self) -> list[int]:
        """Return the clients whose sites rounds wait for, wherever they are now."""
        return [number for number, member in enumerate(self.members) if not self.absence(member)]

    def waits_for(self, gathered: bool) -> str:
        """Return what the server waits for, in words, "" where its run has ended.

        Args:
            gathered: true once the run has begun.
        """
        with self.lock:
            if self.closing:
                return ""
            if self.dismissed:
                return "the run is over: waiting until the sites know"
            missing = [member for member in self.members if not member.ready(self.terms, self.timeouts.silence)]
            working = [member for member in self.members if member.open]
            if not gathered:
                return f"waiting for {_listed(map(_presence, missing))}" if missing else "waiting for sites"
            if working:
                return f"waiting for {_listed(_work(member, self.clock()) for member in working)}"
            if missing and len(missing) == len(self.members):
                return f"no site is present: waiting for {_listed(map(_presence, missing))}"
            return f"the server is at work on step {self.version + 1}"

    def activity(self, gathered: bool) -> dict[str, Any]:
        """Return what the server does, since when (in seconds since the epoch), and what would end it.

        Args:
            gathered: true once the run has begun.
        """
        with self.lock:
            now, self._ready = self._activity_now(gathered), len(self.ready_clients())
            if now.state != self._activity[0].state:
                # the first state is no change
                if self._activity[0].state:
                    told = {"event": "state", "state": now.state, "ends": f" until {now.ends}" if now.ends else ""}
                    log.info("state: %(state)s%(ends)s", told)
                self._activity = now, time.time()
            return {"state": now.state, "since": self._activity[1], "ends": now.ends or None}

    def _activity_now(self, gathered: bool) -> Activity:
        if self.closing or self.dismissed:
            return Activity("finished" if self.dismissed else "stopped")
        silence = self.timeouts.silence
        missing = [member for member in self.members if not member.ready(self.terms, silence)]
        working = [member for member in self.members if member.open]
        if gathered and self._failed >= max(_FAILURES, len(self.members)):
            return Activity("failing", f"a task succeeds: the last {self._failed} failed, see the log")
        if not gathered or (not working and len(missing) == len(self.members)):
            return _waiting(missing) if missing else Activity("training", "the first step begins")
        if working and all(member in missing for member in working):
            return _waiting(working, f", or {self.timeouts.patience:g} s pass without a word of them")
        moved = max([self._moved, *(open_task.moved for member in working for open_task in member.open.values())])
        longest = max((member.seconds or 0.0 for member in self.members), default=0.0)
        if working and time.monotonic() - moved > max(_STALLED, _SLOWER * longest):
            names = _listed(member.name for member in working)
            return Activity(
                "stalled", f"{names} deliver, or {self.timeouts.task_timeout:g} s pass since they were asked"
            )
        return Activity("training", "the last step is made")

    # -- tasks and results

    def add(self, task: Task) -> None:
        """Add a task for a site."""
        self._moved = time.monotonic()
        if task.query is None:
            self._last_id = max(self._last_id, task.id)
        self.members[task.client].open[task.id] = OpenTask(task, self.clock())

    def end_task(
        self, member: Member, one: OpenTask, update: Update | None, failure: str | None, refused: bool = False
    ) -> None:
        """End a task with its first outcome; `refused` where what came is no result."""
        del member.open[one.task.id]
        member.assembly.drop(one.task.id)
        member.finished += update is not None
        member.refusals += refused
        if one.trains and update is not None:
            member.seconds = self.clock() - one.sent
        member.version = one.task.version
        self.add_result(one, update, failure, refused)
        self.changed.notify_all()

    def add_result(self, one: OpenTask, update: Update | None, failure: str | None, refused: bool = False) -> None:
        """Add the outcome of a task."""
        # a question that a site's rules leave open is no failure: they may leave open each one of a sound run
        self._moved, self._failed = time.monotonic(), 0 if update is not None else self._failed + one.trains
        free = one.task.free
        down = 0 if free else nbytes(self._cut(one.task).vectors)
        up = 0 if free or update is None else update.nbytes
        self._arrived.append(Result(one.task, update, one.sent, self.clock(), down, up, failure, refused))

    def pop_result(self) -> Result | None:
        """Return the next result, or None where none has arrived."""
        if not self._arrived:
            return None
        result = self._arrived.popleft()
        self.now = max(self.now, result.time)
        if result.task.query is None:
            self._returned[result.task.id] = result.task.client
            if result.update is not None:
                self.members[result.task.client].counted = result.task.id
        return result

    # -- hellos

    def take_hello(self, member: Member, hello: Hello, refused: str) -> Welcome:
        """Record a hello, and return the answer to it."""
        if member.hear(hello, refused):
            self.changed.notify_all()
        if member.rows is None and hello.ready == self.terms and not refused:
            member.rows = stated_rows(hello)
        activity, silence = self._activity[0], self.timeouts.silence
        return Welcome(
            state=activity.state[:300],
            ends=activity.ends[:300],
            step=self.version,
            sites=len(self.members),
            ready=self._ready,
            you=(member.absent or member.presence(self.terms, silence))[:300],
            version=__version__,
            run=self.run if self.started or self.dismissed else "",
            epoch=self.epoch,
            terms=self.terms,
            restored=self._restored,
            last_id=self._last_id,
            unsaved=self._unsaved(member),
            counted=member.counted,
            over=self.dismissed,
        )

    def _unsaved(self, member: Member) -> list[int]:
        """Return the training tasks of a site that no checkpoint holds for certain."""
        number = self.number[member.name]
        ids = {id for id, open_task in member.open.items() if open_task.trains}
        ids |= {id for tasks in (self._returned, self._captured) for id, client in tasks.items() if client == number}
        return sorted(ids | {result.task.id for result in self._arrived if result.task.client == number})

    # -- checkpoints

    def checkpoint(self) -> Checkpoint:
        """Return the clock and the tasks under way.

        Results that have arrived meanwhile count as under way: they stay at their sites until a checkpoint holds them.
        """
        # a new checkpoint means that the one before has been written, so that what it held is saved
        self._captured, self._returned = dict(self._returned), {}
        under_way = [
            [open_task.task.id, open_task.sent] for member in self.members for open_task in member.open.values()
        ]
        under_way += [[result.task.id, result.sent] for result in self._arrived if result.task.query is None]
        values = {"run": self.run, "now": self.clock(), "last_id": self._last_id, "open": sorted(under_way)}
        values["rows"] = [member.rows for member in self.members]
        values["belong"] = [member.belongs for member in self.members]
        values["counted"] = [member.counted for member in self.members]
        return Checkpoint({}, values)

    def restore(self, checkpoint: Checkpoint, tasks: Mapping[int, Task]) -> None:
        """Continue from a checkpoint."""
        values = checkpoint.values
        self.run, self._before, self.began = str(values["run"]), float(values["now"]), time.monotonic()
        self.now = self._before
        self._last_id = self._restored = int(values["last_id"])
        for member, rows in zip(self.members, values.get("rows", ()), strict=False):
            member.rows = rows
        for member, belongs in zip(self.members, values.get("belong", ()), strict=False):
            member.belongs = belongs
        for member in self.members:
            member.counted = -1  # where an older release has written the checkpoint
        for member, counted in zip(self.members, values.get("counted", ()), strict=False):
            member.counted = int(counted)
        for id, sent in values["open"]:
            self.members[tasks[id].client].open[id] = OpenTask(tasks[id], float(sent))

    def dismiss(self) -> None:
        """Record that the run has ended and all of it is saved."""
        self._returned, self._captured, self.dismissed = {}, {}, True

    def status(self) -> dict[str, Any]:
        """Return the federation's status as plain values, without its sites."""
        return {"version": __version__, "run": self.run, "steps": self.version, "over": self.dismissed}


def _waiting(members: Sequence[Member], or_else: str = "") -> Activity:
    """Return that these sites are waited for, and what each of them lacks."""
    approve = [member.name for member in members if member.hello is not None and member.hello.pending]
    refuse = [member.name for member in members if member.refused]
    hear = [member.name for member in members if member.name not in (*approve, *refuse)]
    ends = [f"{_listed(hear)} {'is' if len(hear) == 1 else 'are'} heard"] if hear else []
    ends += [f"somebody at {_listed(approve)} approves the experiment"] if approve else []
    ends += [f"{_listed(refuse)} no longer refuses: see its log"] if refuse else []
    return Activity(f"waiting for {_listed(member.name for member in members)}", " and ".join(ends) + or_else)


def _word(member: Member) -> str:
    return "not heard yet" if member.heard is None else f"last word {member.silent():.0f} s ago"


def _doing(member: Member) -> str:
    """Return the work that keeps a site from its tasks, to be followed by other words."""
    return f"{doing}, " if (doing := member.doing()) else ""


def _presence(member: Member) -> str:
    """Return a site that is missing, and the reason, in words."""
    if member.hello is not None and member.hello.pending and not member.refused:
        return f"{member.name} (waits until somebody there approves the experiment, {_word(member)})"
    if member.refused:
        return f"{member.name} (refuses: {member.refused})"
    return f"{member.name} ({_doing(member)}{_word(member)})"


def _work(member: Member, now: float) -> str:
    """Return a site that has work, and the work, in words."""
    open_task = next(iter(member.open.values()))
    work = f"task {open_task.task.id} of" if open_task.trains else "an answer for"
    work += f" step {open_task.task.version + 1} for {now - open_task.sent:.0f} s"
    return f"{member.name} ({work}, {_doing(member)}{_word(member)})"


def _listed(descriptions: Iterable[str]) -> str:
    names = list(descriptions)
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
