"""The sites of a federation, as the server knows them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from piebald.contracts import Clients, Split, Task
from piebald.core.errors import SettingError, unknown
from piebald.federation.credentials.provisioning import Credentials
from piebald.federation.link.messaging import SERVER
from piebald.federation.link.transfer import Assembly
from piebald.federation.link.wire_format import Hello

CHANCES = 3  # tasks that a site may let pass while it is present
_LINES, _LINE_EVERY = 100, 10.0  # lines of the log about what a site says: at once, and seconds for each further one
SLOWEST = 8_000  # bytes a second: while a transfer is faster than that, its time is not counted against the site


@dataclass(slots=True, eq=False)
class OpenTask:
    """A task under way.

    Attributes:
        task: the task.
        sent: when it was submitted, in seconds of the run's clock.
        delivered_to: incarnation of the site process that has it, "" while none does.
        delivered_at: when it was delivered, on the machine's monotonic clock.
        confirmed: bytes of the task that the site has.
        received: bytes of its result that the server has.
        moved: when either of them grew last, on the monotonic clock.
        transfer_time: seconds that its transfers took so far, as far as they were faster than `SLOWEST`.
    """

    task: Task
    sent: float
    delivered_to: str = ""
    delivered_at: float = 0.0
    confirmed: int = 0
    received: int = 0
    moved: float = 0.0
    transfer_time: float = 0.0

    @property
    def trains(self) -> bool:
        return self.task.query is None

    def confirm(self, there: int) -> None:
        """Record how much of the task the site has."""
        self._spend(there - self.confirmed)
        self.confirmed = max(self.confirmed, there)

    def receive(self, there: int) -> None:
        """Record how much of its result the server has."""
        self._spend(there - self.received)
        self.received = max(self.received, there)

    def _spend(self, more: int) -> None:
        """Count bytes that have arrived."""
        if more > 0:
            now = time.monotonic()
            # before the first bytes `moved` is 0, so that their number alone bounds what they may have taken
            self.transfer_time += min(now - self.moved, more / SLOWEST)
            self.moved = now


@dataclass(slots=True, eq=False)
class Member:
    """One site.

    Attributes:
        name: the site's name.
        heard: time of its last hello on the monotonic clock, None before the first.
        seen: the same as seconds since the epoch.
        hello: its last hello.
        open: tasks under way, by id.
        refused: why it does not take part, "" where it does.
        expired: whether that is since its certificate has expired, as the server alone has found out.
        late: number of results that arrived twice, or too late to count.
        finished: number of results that brought an update.
        counted: the last training task whose update counted, 0 before the first, -1 where that is not known.
        version: version of the global model that its last finished task started from.
        assembly: the result that is arriving.
        rows: how many rows of each split the site stated when it joined, None before.
        owed: tasks that were given up while the site was present; it gets no others until it has delivered them.
        overdue: how many tasks were given up in this way.
        refusals: how many of its results were refused, since they had another form.
        seconds: how long its last training task took, from when it was submitted.
        missed: whether its silence was logged.
        sending: whether a thread sends it its tasks.
        unready: when it was last seen unready for tasks after it was ready, on the monotonic clock, None while it is
            ready.
        belongs: whether rounds wait for it: from when it is first ready for tasks until it is absent for long.
        absent: why rounds went on without it when that was logged last, "" where they wait for it.
        rival: another process with its credentials that was turned away, "" for none.
        busy: since when something keeps it from tasks (`Hello.doing`), on the monotonic clock, None while nothing does.
        told: when that was logged last.
        lines: lines about what it says, less those that time has made room for; and when there was the last one.
    """

    name: str
    heard: float | None = None
    seen: float | None = None
    hello: Hello | None = None
    open: dict[int, OpenTask] = field(default_factory=dict)
    refused: str = ""
    expired: bool = False
    late: int = 0
    finished: int = 0
    counted: int = 0
    version: int | None = None
    assembly: Assembly = field(default_factory=Assembly)
    rows: dict[Split, int] | None = None
    owed: set[int] = field(default_factory=set)
    overdue: int = 0
    refusals: int = 0
    seconds: float | None = None
    missed: bool = False
    sending: bool = False
    unready: float | None = None
    belongs: bool = False
    absent: str = ""
    rival: str = ""
    busy: float | None = None
    told: float = 0.0
    lines: tuple[float, float] = (0.0, 0.0)

    def worth_a_line(self) -> bool:
        """Return whether something new of it is logged: a site that says so with each hello would fill the disk."""
        now = time.monotonic()
        lines = max(0.0, self.lines[0] - (now - self.lines[1]) / _LINE_EVERY)
        # bounded, so that a site is heard again soon after a flood of lines, however long that was
        self.lines = min(lines + 1, _LINES + 1.0), now
        return lines < _LINES

    def sign(self) -> None:
        """Record a sign of life that is no hello: on a slow link hellos wait behind the pieces of a result."""
        # only a hello makes a site present, since it alone says under which terms
        if self.heard is not None:
            self.heard, self.seen = time.monotonic(), time.time()

    def unready_for(self, terms: str, silence: float) -> float:
        """Return the seconds since it was last seen ready for tasks."""
        if self.ready(terms, silence):
            self.unready = None
            return 0.0
        self.unready = self.unready or time.monotonic()
        return time.monotonic() - self.unready

    def silent(self) -> float:
        """Return the seconds since its last hello."""
        return float("inf") if self.heard is None else time.monotonic() - self.heard

    def ready(self, terms: str, silence: float) -> bool:
        """Return whether tasks can be sent to it under these terms."""
        here = self.hello is not None and self.silent() < silence and self.hello.ready == terms
        return here and not self.refused and not self.owed

    def presence(self, terms: str, silence: float) -> str:
        """Return its state: "not heard", "silent", "refuses", "joining", "owes" (a result) or "ready"."""
        if self.heard is None or self.hello is None:
            return "not heard"
        if self.silent() >= silence:
            return "silent"
        if self.refused:
            return "refuses"
        if self.hello.ready != terms:
            return "joining"
        return "owes" if self.owed else "ready"

    def doing(self) -> str:
        """Return the work that keeps it from tasks, and its duration, "" where it names none."""
        if self.hello is None or self.busy is None:
            return ""
        return f"{self.hello.doing} for {time.monotonic() - self.busy:.0f} s"

    def owe(self, id: int) -> None:
        """Record that a task was given up while the site was present."""
        self.owed.add(id)
        self.overdue += 1

    def settle(self, id: int) -> None:
        """Record that a result came; one that was given up is no longer owed, unless that has happened too often."""
        if self.overdue < CHANCES:
            self.owed.discard(id)

    @property
    def refuses_for_good(self) -> bool:
        """Whether it does not take part, and not only until its certificate is renewed."""
        return bool(self.refused) and not self.expired

    def hear(self, hello: Hello, refused: str) -> bool:
        """Record a hello, and return whether anything other than the time has changed."""
        before = (self.hello.incarnation, self.hello.ready, self.refused) if self.hello else None
        if self.is_other(hello):
            # a process that was started anew, and does not have what the one before was given, owes nothing
            self.owed.intersection_update(hello.held)
        if hello.doing != (self.hello.doing if self.hello else ""):
            self.busy, self.told = time.monotonic() if hello.doing else None, 0.0
        self.hello, self.heard, self.seen, self.refused = hello, time.monotonic(), time.time(), refused
        return before != (hello.incarnation, hello.ready, refused)

    def is_other(self, hello: Hello) -> bool:
        """Return whether a hello comes from another process than the one before."""
        return self.hello is None or self.hello.incarnation != hello.incarnation

    def next_delivery(self) -> OpenTask | None:
        """Return the next task to deliver, one that the site does not have, or None."""
        if self.hello is None:
            return None
        for open_task in self.open.values():
            if open_task.delivered_to != self.hello.incarnation:
                return open_task
            lost = open_task.trains and open_task.task.id not in self.hello.held
            # a hello that was under way when the task arrived does not list it yet, hence the seconds
            if lost and self.heard is not None and self.heard > open_task.delivered_at + 5:  # the site lost it
                return open_task
        return None

    def table(self, version: int) -> dict[str, Any]:
        """Return its status as plain values; `version` is the newest version of the global model."""
        return {
            "site": self.name,
            "heard": self.seen,
            "version": self.hello.version if self.hello else None,
            "refused": self.refused or None,
            "rows": self.hello.rows if self.hello and self.hello.rows >= 0 else None,
            "working": sorted(self.open),
            "finished": self.finished,
            "staleness": None if self.version is None else version - self.version,
            "late": self.late,
            "refusals": self.refusals,
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "jobs": self.hello.jobs if self.hello else None,
            "gpus": self.hello.gpus if self.hello else None,
            "gigabytes": self.hello.gigabytes if self.hello else None,
        }


def stated_rows(hello: Hello) -> dict[Split, int]:
    """Return the rows of each split that a site states; 0 where it states none, as later claims need a basis."""
    counts = (hello.rows, hello.validation_rows, hello.test_rows)
    train, validation, test = (max(count, 0) for count in counts)
    return {"train": train, "validation": validation, "test": test}


def client_names(clients: Clients) -> list[str]:
    """The names of all clients."""
    return [str(clients.names[number]) for number in range(len(clients))]


def sites_of(credentials: Credentials, clients: Clients) -> list[str]:
    """The site of each client: by name where each client has a site of its name, else by order."""
    sites, names = credentials.sites(), client_names(clients)
    if credentials.party != SERVER:
        raise SettingError(
            f"{credentials.folder} holds the credentials of {credentials.party}: the server needs the credentials of "
            "the server"
        )
    if set(names) <= set(sites):
        return names
    if len(sites) < len(names):
        raise SettingError(
            f"the experiment has {len(names)} clients, the credentials in {credentials.folder} list {len(sites)} "
            "sites: provision one site for each client"
        )
    lost = [name for name in names if name not in sites]
    if 0 < len(lost) < len(names):
        # by order, names would be mixed up
        raise unknown(f"site in {credentials.folder} for the client", lost[0], sites)
    return sites[: len(names)]
