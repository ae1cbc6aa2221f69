"""Writes to a disk that may be full or read-only for a while: they are tried again, and a line of the log says so."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

PAUSE = 2.0  # seconds between two attempts

log = logging.getLogger("piebald.federation")


class Ended(Exception):
    """The process ends, so that a write is not tried again."""


class DiskWrites:
    """Tries writes to a party's folder, each again until it succeeds.  Threads may share it.

    What a write is for is its name: the log says once that it fails, and once that it succeeds again.

    Args:
        folder: the folder.
        over: set when the process ends.
    """

    def __init__(self, folder: Path, over: threading.Event) -> None:
        self._folder, self._over = folder, over
        self._lock = threading.Lock()
        self._failing: dict[str, str] = {}

    @property
    def trouble(self) -> str:
        """Why something cannot be written now, "" where nothing fails."""
        with self._lock:
            reasons = sorted({*self._failing.values()})
        return f"{self._folder} cannot be written ({', '.join(reasons)}): make room, or mend it" if reasons else ""

    def attempt(self, name: str, write: Callable[[], object]) -> bool:
        """Try a write once; returns whether it succeeded."""
        try:
            write()
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            with self._lock:
                known, self._failing[name] = self._failing.get(name), why
            if known != why:
                about = {"event": "disk", "folder": str(self._folder), "what": name, "why": why, "pause": PAUSE}
                log.error(
                    "%(what)s cannot be written to %(folder)s (%(why)s): make room, or mend it; it is tried again "
                    "every %(pause)g seconds", about,
                )  # fmt: skip
            return False
        with self._lock:
            failed = self._failing.pop(name, None)
        if failed is not None:
            about = {"event": "disk", "folder": str(self._folder), "what": name}
            log.info("%(what)s is written to %(folder)s again", about)
        return True

    def insist(self, name: str, write: Callable[[], object]) -> None:
        """Try a write until it succeeds.

        Raises:
            Ended: the process ends first.
        """
        while not self.attempt(name, write):
            if self._over.wait(PAUSE):
                raise Ended
