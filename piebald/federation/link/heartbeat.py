"""Signs of life: a line of the log whenever nothing was logged for a while, and hellos of a site that is busy."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
        tell: takes a line, in place of the log.
        yields: whether it ends when another one begins to watch the log.
    """

    def __init__(
        self,
        waits_for: Callable[[], str],
        every: float = EVERY,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] | None = None,
        yields: bool = False,
    ) -> None:
        super().__init__()
        self._waits_for, self._every, self._clock = waits_for, every, clock
        self._tell, self._yields = tell or _log_waiting, yields
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
        if self._yields and any(isinstance(watcher, Heartbeat) and watcher is not self for watcher in log.filters):
            return self.stop()
        if activity := self._waits_for():
            self._tell(activity)
        # also where nothing is waited for, or it would be asked every second from then on
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


@contextmanager
def at_work(doing: str, tell: Callable[[str], None] | None = None, every: float = EVERY) -> Iterator[None]:
    """Log what this process is doing while the block takes long, until another heartbeat watches the log.

    Args:
        doing: what it does, in words.
        tell: takes a line, in place of the log.
        every: seconds without a line before one.
    """
    began = time.monotonic()
    beats = Heartbeat(lambda: f"{doing} for {time.monotonic() - began:.0f} s", every, tell=tell, yields=True)
    beats.start()
    try:
        yield
    finally:
        beats.stop()


@contextmanager
def repeated(say: Callable[[], object], every: float) -> Iterator[None]:
    """Call a function again and again in a thread of its own while the block runs.

    The last call has returned when the block ends, unless it takes longer than the time between two calls.  So what the
    caller says next comes after it.

    Args:
        say: the function; it raises nothing.
        every: seconds before the first call, and between two.
    """
    over = threading.Event()

    def run() -> None:
        while not over.wait(every):
            say()

    thread = threading.Thread(target=run, name="presence", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(every)


def _log_waiting(activity: str) -> None:
    log.info("%(waits)s", {"event": "waiting", "waits": activity})
