"""What the server knows of each site."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from piebald.contracts import Clients, Task
from piebald.errors import SettingError
from piebald.runtimes.federation.flare_link import SERVER
from piebald.runtimes.federation.messages import Hello
from piebald.runtimes.federation.provisioning import Credentials
from piebald.runtimes.federation.wire_format import Assembly


@dataclass(slots=True, eq=False)
class OpenTask:
    """An task under way.

    Attributes:
        sent: seconds of the run's clock.
        pushed: incarnation of the site that has it, "" while none does.
        at: when it was pushed, on the machine's monotonic clock.
    """

    task: Task
    sent: float
    pushed: str = ""
    at: float = 0.0

    @property
    def trains(self) -> bool:
        return self.task.query is None


@dataclass(slots=True, eq=False)
class Member:
    """One site.

    Attributes:
        heard: when it last said hello, on the monotonic clock; None before the first time.
        hello: what it said then.
        open: tasks under way, by number.
        refused: why it does not take part, "" where it does.
        late: results that came twice, or too late to count.
    """

    name: str
    heard: float | None = None
    seen: float | None = None
    hello: Hello | None = None
    open: dict[int, OpenTask] = field(default_factory=dict)
    refused: str = ""
    late: int = 0
    finished: int = 0
    version: int | None = None
    assembly: Assembly = field(default_factory=Assembly)

    def silent(self) -> float:
        """Seconds since it was heard."""
        return float("inf") if self.heard is None else time.monotonic() - self.heard

    def ready(self, terms: str, silence: float) -> bool:
        """Whether it can be asked."""
        return self.hello is not None and self.silent() < silence and self.hello.ready == terms and not self.refused

    def hear(self, hello: Hello, refused: str) -> bool:
        """Take a hello; whether anything changed but the time."""
        before = (self.hello.incarnation, self.hello.ready, self.refused) if self.hello else None
        self.hello, self.heard, self.seen, self.refused = hello, time.monotonic(), time.time(), refused
        return before != (hello.incarnation, hello.ready, refused)

    def to_push(self) -> OpenTask | None:
        """The next task that the site does not have."""
        if self.hello is None:
            return None
        for one in self.open.values():
            if one.pushed != self.hello.incarnation:
                return one
            lost = one.trains and one.task.id not in self.hello.held
            if lost and self.heard is not None and self.heard > one.at + 5:  # it started anew on its own account
                return one
        return None

    def table(self, now: int) -> dict[str, Any]:
        """How it stands, as plain values; `now` is the newest version."""
        return {
            "site": self.name,
            "heard": self.seen,
            "version": self.hello.version if self.hello else None,
            "refused": self.refused or None,
            "rows": self.hello.rows if self.hello and self.hello.rows >= 0 else None,
            "working": sorted(self.open),
            "finished": self.finished,
            "staleness": None if self.version is None else now - self.version,
            "late": self.late,
        }


def names_of(clients: Clients) -> list[str]:
    """The clients' names."""
    return [str(clients.names[number]) for number in range(len(clients))]


def sites_of(credentials: Credentials, clients: Clients) -> list[str]:
    """The site of each client: the one of its name where all have theirs, else by order."""
    sites, names = credentials.sites(), names_of(clients)
    if credentials.party != SERVER:
        raise SettingError(
            f"{credentials.folder} is the credentials of {credentials.party}: the server needs the credentials of the server"
        )
    if set(names) <= set(sites):
        return names
    if len(sites) < len(names):
        raise SettingError(
            f"the experiment has {len(names)} clients, the credentials in {credentials.folder} knows {len(sites)} sites: "
            "provision one site for each client"
        )
    return sites[: len(names)]
