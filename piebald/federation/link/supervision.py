"""Threads that do a process's work: none of them ends unseen while the process goes on and looks healthy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from piebald.core.errors import RuntimeFault

_FIRST, _LONGEST = 0.5, 30.0  # seconds before work is tried again, after the first failure and at most

log = logging.getLogger("piebald.federation")


class Supervision:
    """Threads of a process, and the failure that ends it.

    An error of the system (`OSError`: no free descriptor, a disk that cannot be read) is said, and the work is tried
    again after a pause, each time twice as long.  Anything else is a bug, or no memory: it is logged with its
    traceback, and the process ends with it, so that its service starts it again.

    Args:
        wait: waits for so many seconds, and returns whether the process ends.
        failed: called when the process must end; `check` raises from then on.
    """

    def __init__(self, wait: Callable[[float], bool], failed: Callable[[], None]) -> None:
        self._wait, self._failed = wait, failed
        self._failure: tuple[str, Exception] | None = None

    def start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Start a thread with work to do; it may end."""
        thread = threading.Thread(target=self.steadily, args=(name, work), name=name, daemon=True)
        thread.start()
        return thread

    def steadily(self, name: str, work: Callable[[], None]) -> None:
        """Do work, and begin it again after an error of the system.

        Args:
            name: of the work, for the log.
            work: can be called again after it failed.
        """
        pause, reason = _FIRST, ""
        while True:
            try:
                work()
            except OSError as error:
                if (why := (error.strerror or str(error)).lower()) != reason:
                    fields = {"event": "thread", "what": name, "why": why}
                    log.error("%(what)s failed (%(why)s), and is tried again", fields)
                reason = why
                if self._wait(pause):
                    return
                pause = min(2 * pause, _LONGEST)
            except Exception as error:
                fields = {"event": "thread", "what": name, "why": type(error).__name__}
                log.critical("%(what)s failed (%(why)s), and this process ends", fields, exc_info=True)
                self._failure = self._failure or (name, error)
                self._failed()
                return
            else:
                return

    def check(self) -> None:
        """Raise what ended a thread.

        Raises:
            RuntimeFault: a thread has failed.
        """
        if self._failure is not None:
            name, error = self._failure
            raise RuntimeFault(f"{name} failed ({type(error).__name__}), see the log: start again") from error
