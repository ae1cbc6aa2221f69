"""A line of the log whenever nothing was logged for a while, so that what is waited for can always be read there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

EVERY = 20.0  # seconds; a line may come later by what blocks the thread, and no 30 pass without one
_TICK = 1.0  # seconds between two looks at the clock

log = logging.getLogger("piebald.federation")


class Heartbeat(logging.Filter):
    """Logs what is waited for when the log has been silent.

    It sees the federation's records as a filter of their logger, and lets them all pass: a handler would keep Python
    from printing warnings where nobody has set up a log.

    Args:
        waits_for: says what is waited for, "" for nothing; called in a thread of its own.
        every: seconds of silence before a line.
        clock: the clock, in seconds.
    """

    def __init__(
        self, waits_for: Callable[[], str], every: float = EVERY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._waits_for, self._every, self._clock = waits_for, every, clock
        self._last = clock()
        self._over = threading.Event()

    def filter(self, record: logging.LogRecord) -> bool:
        """Note that something was logged."""
        self._last = self._clock()
        return True

    def beat(self) -> None:
        """Log what is waited for, if nothing was logged for long enough."""
        if self._clock() - self._last < self._every:
            return
        if what := self._waits_for():
            log.info("%(waits)s", {"event": "waiting", "waits": what})
        self._last = self._clock()

    def start(self) -> None:
        """Begin to watch the log."""
        log.addFilter(self)
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """End.  May be called twice."""
        self._over.set()
        log.removeFilter(self)

    def _run(self) -> None:
        while not self._over.wait(_TICK):
            try:
                self.beat()
            except Exception:  # what cannot be described stops nothing
                log.debug("the heartbeat failed", exc_info=True)
