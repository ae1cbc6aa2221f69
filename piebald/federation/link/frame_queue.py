"""Frames of connections, on their way to the threads that handle them.

The cell layer has a hundred threads for all frames, and a queue without end before them.  A member that sends and does
not read what it is answered would hold all these threads, since each of them waits to answer it, and fill the memory.
Where a hundred members send their results at once, these would all be in memory before the first of them is handled.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from piebald.federation.link.wire_messages import WINDOW

Frame = bytes | bytearray

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
        self._asking: dict[FrameQueue, None] = {}  # those that were turned away, in order
        self._lock = threading.Lock()

    def take(self, who: FrameQueue, size: int, always: bool) -> bool:
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


class FrameQueue:
    """Hands frames to a few threads of a pool at a time, and takes no more while many wait.

    Args:
        submit: runs a function in a thread of the pool.
        handle: handles a frame.
        room: what the connections of a party have together.  A queue without a frame of its own in it always gets room
            for one, so that nobody who fills it keeps the others out.
    """

    def __init__(
        self, submit: Callable[[Callable[[], None]], object], handle: Callable[[Frame], None], room: FrameRoom
    ) -> None:
        self._submit, self._handle, self._room = submit, handle, room
        self._waiting = deque[Frame]()
        self._bytes, self._threads, self._over = 0, 0, False
        self._held = 0  # frames that wait or are being handled
        self._changed = threading.Condition()

    def put(self, frame: Frame) -> None:
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
        try:
            self._submit(self._work)
        except RuntimeError:  # the pool has been shut down
            self.end()

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

    def _next(self) -> Frame | None:
        with self._changed:
            if not self._waiting:
                self._threads -= 1
                return None
            frame = self._waiting.popleft()
            self._bytes -= len(frame)
            self._changed.notify_all()
            return frame
