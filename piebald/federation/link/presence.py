"""Signs of life of a site whose own thread is busy for long: it reads its rows, or fetches what a run's terms are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
