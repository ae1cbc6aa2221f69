"""What crosses a link, and how long it takes."""

from __future__ import annotations

import threading
import time
from typing import Any

from bad_link import BadLink
from links import Link

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
