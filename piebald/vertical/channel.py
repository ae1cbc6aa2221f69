"""Channels that carry frames between two threads, or between two processes over a socket.

A channel sends whole frames and never waits for the other side to read them, so both parties may send at once.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress

from piebald.vertical.party_messages import HEADER, PartyEnded, body_length

SLOWEST = 8_000  # bytes a second: while a frame arrives faster than that, the other party is not silent
GONE = "the other party is gone: its process ended or the connection broke"


class Channel(ABC):
    """One end of a connection between two parties.

    Attributes:
        sent: number of bytes sent so far.
        received: number of bytes received so far.
    """

    def __init__(self) -> None:
        self.sent = self.received = 0

    @abstractmethod
    def send(self, frame: bytes) -> None:
        """Send a frame without waiting until it is read."""

    @abstractmethod
    def receive(self, most: int, timeout: float) -> bytes:
        """Wait for the next frame.

        Args:
            most: largest number of bytes allowed after the header.
            timeout: seconds to wait; bytes that arrive at a fair rate extend them.

        Raises:
            PartyEnded: the other side is gone, or silent for too long.
            MessageFault: the bytes are not a frame, or the frame is too long.
        """

    @abstractmethod
    def close(self) -> None:
        """Send all waiting frames and end the connection.  May be called twice."""


class InMemoryChannel(Channel):
    """Channel between two threads of one process; `pair` makes both ends."""

    def __init__(self, inbox: queue.Queue[bytes | None], outbox: queue.Queue[bytes | None]) -> None:
        super().__init__()
        self._inbox, self._outbox = inbox, outbox

    @classmethod
    def pair(cls) -> tuple[InMemoryChannel, InMemoryChannel]:
        """Return the two ends of one connection."""
        to_first: queue.Queue[bytes | None] = queue.Queue()
        to_second: queue.Queue[bytes | None] = queue.Queue()
        return cls(to_first, to_second), cls(to_second, to_first)

    def send(self, frame: bytes) -> None:
        self.sent += len(frame)
        self._outbox.put(frame)

    def receive(self, most: int, timeout: float) -> bytes:
        try:
            frame = self._inbox.get(timeout=timeout)
        except queue.Empty:
            raise PartyEnded(f"the other party was silent for {timeout:g} seconds") from None
        if frame is None:
            raise PartyEnded(GONE)
        # the same refusals as over a socket, so that both kinds of runs behave alike
        body_length(frame[: HEADER.size], most)
        self.received += len(frame)
        return frame

    def close(self) -> None:
        self._outbox.put(None)


class SocketChannel(Channel):
    """Channel between two processes, over a connected socket."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._socket = connection
        # a writer of its own, so that no party waits for the other one to read: both may send at once
        self._waiting: queue.Queue[bytes | None] = queue.Queue()
        self._writer = threading.Thread(target=self._write, name="transfer writer", daemon=True)
        self._writer.start()

    def _write(self) -> None:
        while (frame := self._waiting.get()) is not None:
            try:
                self._put(frame)
            except OSError:  # the reader will notice
                return

    def send(self, frame: bytes) -> None:
        self.sent += len(frame)
        self._waiting.put(frame)

    def receive(self, most: int, timeout: float) -> bytes:
        until = time.monotonic() + timeout
        head = self._read(HEADER.size, until, timeout)
        body = self._read(body_length(head, most), until, timeout)
        self.received += len(head) + len(body)
        return head + body

    def _read(self, count: int, until: float, timeout: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                # a MB at a time, so that memory grows with what has come and not with what a header claims; a timeout
                # of 0 would make the socket non-blocking
                piece = self._take(min(count - len(data), 1 << 20), max(until - time.monotonic(), 0.001))
            except TimeoutError:
                raise PartyEnded(f"the other party was silent for {timeout:g} seconds") from None
            except OSError:
                raise PartyEnded(GONE) from None
            if not piece:
                if data:
                    raise PartyEnded(f"{GONE} in the middle of a message")
                raise PartyEnded(GONE)
            data += piece
            until += len(piece) / SLOWEST  # a slow link takes its time; a trickle does not
        return bytes(data)

    def _put(self, frame: bytes) -> None:
        """Send all of a frame."""
        self._socket.sendall(frame)

    def _take(self, most: int, seconds: float) -> bytes:
        """Receive some bytes; none when the other side has ended."""
        self._socket.settimeout(seconds)
        return self._socket.recv(most)

    def close(self) -> None:
        self._waiting.put(None)
        # frames that wait are sent first, but a partner that does not read must not hold this process
        self._writer.join(timeout=5)
        with suppress(OSError):  # the other side may have gone first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
