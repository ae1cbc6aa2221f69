"""Frames of connections, on their way to the threads that handle them.

A member that sends and does not read what it is answered holds the few threads of its own connection, each of which
waits to answer it, and nothing more of it is read.  Where a hundred members send their results at once, these wait in
the network for room, and not in memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sized
from typing import Any, Generic, TypeVar

from piebald.federation.link.wire_messages import WINDOW

F = TypeVar("F", bound=Sized)

THREADS = 4  # that handle frames of one connection at a time
MOST_BYTES = 2 * WINDOW  # of frames that wait: no honest end has more under way, since pieces need receipts
MOST_FRAMES = 1000  # that wait: small ones take memory, too
ALL_BYTES = 2 * MOST_BYTES  # of frames of all connections


class FrameRoom:
    """Memory for the frames of all connections of a party, from when they are read until they are handled.

    Args:
        most: bytes.
    """

    def __init__(self, most: int = ALL_BYTES) -> None:
        self._most, self._taken = most, 0
        self._asking: dict[FrameQueue[Any], None] = {}  # those that were turned away, in order
        self._lock = threading.Lock()

    def take(self, who: FrameQueue[Any], size: int, always: bool) -> bool:
        """Take room, and return whether there was enough; else `who` is woken when there may be.

        Args:
            who: the queue of a connection.
            size: bytes.
            always: whether to take it in any case.
        """
        with self._lock:
            fits = always or self._taken + size <= self._most
            if fits:
                self._taken += size
                self._asking.pop(who, None)
            else:
                self._asking[who] = None
            return fits

    def give(self, size: int) -> None:
        """Give room back."""
        with self._lock:
            self._taken -= size
            first = next(iter(self._asking), None)
            if first is not None:
                del self._asking[first]
        if first is not None:
            first.wake()


class FrameQueue(Generic[F]):
    """Hands the frames of a connection to a few threads, and takes no more while many wait.

    Args:
        handle: handles a frame; it raises nothing.
        room: what the connections of a party have together.  A queue without a frame of its own in it always gets room
            for one, so that nobody who fills it keeps the others out.
    """

    def __init__(self, handle: Callable[[F], None], room: FrameRoom) -> None:
        self._handle, self._room = handle, room
        self._waiting = deque[F]()
        self._bytes, self._threads, self._over = 0, 0, False
        self._held = 0  # frames that wait or are being handled
        self._changed = threading.Condition()

    def put(self, frame: F) -> None:
        """Have a frame handled; meanwhile this waits where too many are waiting, so that nothing more is read."""
        with self._changed:
            while not self._over and (self._full() or not self._room.take(self, len(frame), not self._held)):
                self._changed.wait()
            if self._over:
                return
            self._waiting.append(frame)
            self._bytes += len(frame)
            self._held += 1
            if self._threads == THREADS:
                return
            self._threads += 1
        threading.Thread(target=self._work, name="frames", daemon=True).start()

    def end(self) -> None:
        """Drop what waits; whoever waits in `put` goes on."""
        with self._changed:
            self._over, dropped, self._bytes = True, self._bytes, 0
            self._held -= len(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        self._room.give(dropped)

    def wake(self) -> None:
        """Have whoever waits in `put` look again."""
        with self._changed:
            self._changed.notify_all()

    def _full(self) -> bool:
        return self._bytes >= MOST_BYTES or len(self._waiting) >= MOST_FRAMES

    def _work(self) -> None:
        while (frame := self._next()) is not None:
            try:
                self._handle(frame)
            finally:
                with self._changed:
                    self._held -= 1
                    self._changed.notify_all()
                self._room.give(len(frame))

    def _next(self) -> F | None:
        with self._changed:
            if not self._waiting:
                self._threads -= 1
                return None
            frame = self._waiting.popleft()
            self._bytes -= len(frame)
            self._changed.notify_all()
            return frame
