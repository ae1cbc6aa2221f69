"""The links of the benchmark: how they behave, what happens to them, and which cases are measured."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any, NamedTuple

from bad_link import BadLink, Conditions

MBIT = 125_000  # bytes a second
WIDTHS = {"1 MB": [470, 470], "25 MB": [2450, 2450], "200 MB": [7000, 7000]}  # of a model's hidden layers
BASE = "10 Mbit/s, 50 ms"
RESET, STALL, FORGOTTEN = "a reset every 5 MB", "3 s standing still every 2 MB", "the connection is forgotten"


class Link(NamedTuple):
    """A link.

    Attributes:
        conditions: how it behaves.
        event: what happens to it while a model is under way, and for how many seconds.
        bare: the link without what breaks it.
    """

    conditions: Conditions
    event: tuple[str, float] | None
    bare: str


def parameters(size: str) -> int:
    """Parameters of the model of a size."""
    widths = [64, *WIDTHS[size], 10]
    return sum(one * other + other for one, other in pairwise(widths))


class Case(NamedTuple):
    """What is measured: how, over which link, and with which model."""

    kind: str
    link: str
    size: str

    @property
    def key(self) -> str:
        """Its name in results.json."""
        return "; ".join(self)

    @classmethod
    def of(cls, key: str) -> Case:
        """The case of a name."""
        kind, link, size = key.split("; ")
        return cls(kind, link, size)


def links() -> dict[str, Link]:
    """All links, by name."""
    found = {"loopback": Link(Conditions(), None, "loopback")}
    for rate in (10, 1):
        for trip in (50, 200, 600):
            name = f"{rate} Mbit/s, {trip} ms"
            found[name] = Link(Conditions(trip / 1000, trip / 10_000, rate * MBIT), None, name)
    made = found[BASE].conditions
    found[f"{BASE}, {RESET}"] = Link(made._replace(reset_every=5_000_000), None, BASE)
    found[f"{BASE}, {STALL}"] = Link(made._replace(stall_every=2_000_000, stall=3.0), None, BASE)
    for seconds in (10, 60, 600):
        found[f"{BASE}, a partition of {seconds} s"] = Link(made, ("partition", seconds), BASE)
    found[f"{BASE}, {FORGOTTEN}"] = Link(made, ("half_open", 0), BASE)
    return found


def cases() -> list[Case]:
    """All cases: those of the federation and of bare TLS, secure sums, transfers of two parties, and of others."""
    known = links()
    found = [Case(kind, name, size) for size in WIDTHS for name in known for kind in ("step", "bare") if (
        kind == "step" or known[name].bare == name
    )]  # fmt: skip
    found += [Case("masked", name, "1 MB") for name in known if name != f"{BASE}, {FORGOTTEN}"]
    found += [Case("parties", name, "small") for name in known if known[name].event is None]
    for kind in ("flower", "nvflare"):
        found += [Case(kind, name, "1 MB") for name in known if known[name].bare == name]
        found += [Case(kind, name, "25 MB") for name in known if not name.startswith("1 Mbit/s")]
    return found


QUICK = [
    Case(kind, link, size)
    for kind, link, size in (
        ("step", "loopback", "1 MB"), ("bare", "loopback", "1 MB"), ("step", BASE, "1 MB"), ("bare", BASE, "1 MB"),
        ("step", "1 Mbit/s, 200 ms", "1 MB"), ("bare", "1 Mbit/s, 200 ms", "1 MB"), ("masked", BASE, "1 MB"),
        ("parties", BASE, "small"), ("step", f"{BASE}, a partition of 10 s", "1 MB"), ("nvflare", BASE, "1 MB"),
    )
]  # fmt: skip


UNDER_WAY = 400_000  # bytes of a model that have crossed when something happens to the link


class Watched:
    """What crosses a link from now on, and how long it takes.

    Args:
        link: how the link behaves from now on, and what happens to it.
        bad: the link.
    """

    def __init__(self, link: Link, bad: BadLink) -> None:
        self._bad, self._passed, self._resets, self._opened = bad, dict(bad.passed), bad.resets, bad.opened
        bad.conditions = link.conditions
        if link.event is not None:
            threading.Thread(target=_happen, args=(bad, *link.event), daemon=True).start()
        self._began = time.monotonic()

    def found(self) -> dict[str, Any]:
        """Seconds, bytes in each direction, resets, and connections that were made anew."""
        bad, spent = self._bad, time.monotonic() - self._began
        crossed = {way: bad.passed[way] - self._passed[way] for way in bad.passed}
        again = {"resets": bad.resets - self._resets, "again": bad.opened - self._opened}
        return {"seconds": spent, **crossed, **again}


def _happen(bad: BadLink, what: str, seconds: float) -> None:
    """Let something happen to the link once a piece of the model is under way."""
    until = bad.passed["down"] + UNDER_WAY
    while bad.passed["down"] < until:
        time.sleep(0.02)
    getattr(bad, what)()
    time.sleep(seconds)
    bad.heal()
