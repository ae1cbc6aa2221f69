"""Threads that do a process's work: none of them ends unseen while the process goes on and looks healthy."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from piebald.core.errors import RuntimeFault
from piebald.core.files import os_reason

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
                if (why := os_reason(error)) != reason:
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


EVERY = 20.0  # seconds; a line may come later by what blocks the thread, and no 30 pass without one
_TICK = 1.0  # seconds between two looks at the clock


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
def repeated(say: Callable[[], object], every: float, patience: float | None = None) -> Iterator[None]:
    """Call a function again and again in a thread of its own while the block runs.

    The last call has returned when the block ends, unless it takes longer than patience.  So what the caller says next
    comes after it.

    Args:
        say: the function; it raises nothing.
        every: seconds before the first call, and between two.
        patience: seconds to wait for the last call, None until it returns.
    """
    over = threading.Event()

    def run() -> None:
        while not over.wait(every):
            say()

    thread = threading.Thread(target=run, name="repeated", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(patience)


def _log_waiting(activity: str) -> None:
    log.info("%(waits)s", {"event": "waiting", "waits": activity})
