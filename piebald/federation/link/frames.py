"""Frames of a connection: requests, replies, and a last word (docs/reference/protocol.md).

    opening   b"piebald" and the version of the framing (1 byte), once in each direction
    frame     length of the rest (4 bytes), kind (1), number (8), length of the topic (1), topic, message

Who sent a frame is the name in the certificate of the connection; no frame claims a name.  A frame that claims to be
longer than any message ends its connection.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum

from piebald.core.plain_text import printable
from piebald.federation.credentials.revocation import name_in
from piebald.federation.link.tls import QUIET, RECORD, SharedSocket
from piebald.federation.link.wire_format import LONGEST, PIECE, WINDOW, Refused

FRAMING = 1  # version of the opening and of the head of a frame
FRAME = LONGEST + (1 << 16)  # bytes of a frame, at most; a message a little too long is dropped, and no more
_MAGIC = b"piebald"
# "<": little-endian and without padding on every machine
_HEAD = struct.Struct("<IBQB")
_LENGTH = 4  # bytes of the length, which does not count itself
_LAST_WORD = 2.0  # seconds in which the other end can read why the connection ends
_ANSWERS = 2 * WINDOW // PIECE  # that wait: no honest end has more pieces under way, and none of them is longer
_REASON = 300  # characters of a reason, at most


class FrameKind(IntEnum):
    """What a frame is."""

    REQUEST = 1
    REPLY = 2  # with the number of its request
    FAREWELL = 3  # the last frame: its message says why the sender ends the connection


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that has arrived.

    Attributes:
        kind: what it is.
        number: the number of a request, which its reply carries as well.
        topic: the topic of a request.
        message: its bytes.
    """

    kind: FrameKind
    number: int
    topic: str
    message: memoryview

    def __len__(self) -> int:
        """Bytes of its message."""
        return len(self.message)


def encode_frame(kind: FrameKind, number: int, topic: str, message: bytes | memoryview) -> bytes:
    """Return the bytes of a frame.

    Examples:
        >>> frame = decode_frame(bytearray(encode_frame(FrameKind.REQUEST, 7, "hello", b"bytes")))
        >>> frame.kind.name, frame.number, frame.topic, bytes(frame.message)
        ('REQUEST', 7, 'hello', b'bytes')
    """
    name = topic.encode("ascii")
    length = _HEAD.size - _LENGTH + len(name) + len(message)
    return b"".join((_HEAD.pack(length, kind, number, len(name)), name, message))


def decode_frame(data: bytearray) -> Frame:
    """Return the frame in these bytes.

    Raises:
        Refused: they are none.
    """
    if len(data) < _HEAD.size:
        raise Refused("a frame without a whole head")
    _, kind, number, name = _HEAD.unpack_from(data)
    # the ValueError of `FrameKind` would end the connection without a reason, a Refused is told to the other end
    if kind not in set(FrameKind):
        raise Refused(f"a frame of kind {kind}, which is not used here")
    start = _HEAD.size + name
    topic = bytes(data[_HEAD.size : start])
    # a slice past the end is short without an error
    if len(topic) < name or not topic.isascii():
        raise Refused("a frame without a whole topic")
    # a view: the message, often a piece of a model, is not copied again
    return Frame(FrameKind(kind), number, topic.decode("ascii"), memoryview(data)[start:])


class Connection(SharedSocket):
    """One connection to a party, over which several threads send frames while one reads.

    Attributes:
        name: the name in the other end's certificate.
        address: where it connected from, or the address that was connected to; "" where it has gone already.
        farewell: why the other end has ended it, "" as long as it has not.
        ended: whether this end has ended it: what still arrives is not handled.
    """

    farewell, address = "", ""
    ended = _is_greeted = _is_answering = False  # greeted: whether the opening was sent

    def share(self, patience: float, ends: bool = False) -> None:
        super().share(patience, ends)
        self._sending, self._answers, self._room = threading.Lock(), deque[tuple[int, bytes]](), threading.Condition()
        self.name = printable(name_in(self.certificate), 64) if self.certificate else ""
        with suppress(OSError):
            self.address = str(self.getpeername()[0])

    @property
    def expires(self) -> str:
        """When the other end's certificate expires, as a date."""
        return f"{datetime.fromtimestamp(ssl.cert_time_to_seconds(self.certificate['notAfter']), UTC):%Y-%m-%d}"

    def open(self) -> None:
        """Exchange the openings.

        Raises:
            OSError: the connection has ended.
            Refused: the other end speaks another protocol, or another version of it.
        """
        with self._sending:
            # sent before the other's is read, at both ends, so that neither waits for the other
            self._greet(QUIET)
        opening = bytearray()
        if not receive(self.recv, opening, len(_MAGIC) + 1):
            raise OSError("the connection was closed by the other end")
        if not opening.startswith(_MAGIC):
            raise Refused("bytes of another protocol than Piebald's")
        if opening[-1] != FRAMING:
            raise Refused(
                f"version {opening[-1]} of Piebald's framing, where this end speaks version {FRAMING}: "
                "install one version of Piebald at both ends"
            )

    def send_frame(self, kind: FrameKind, number: int, topic: str, message: bytes | memoryview) -> bool:
        """Send a frame, however long it takes while the network takes bytes; return whether it took all of it."""
        # outside the lock, since this copies the message while other threads may send
        frame = encode_frame(kind, number, topic, message)
        with self._sending:
            # nothing may follow a farewell
            if self.ended:
                return False
            try:
                self.sendall(frame, seconds=QUIET)
            except (OSError, ValueError):  # a frame that was sent in part leaves the connection unusable
                super().close()
                return False
        return True

    def answer(self, number: int, message: bytes) -> None:
        """Reply to a request; the network is waited for in a thread of its own, since the other end may wait as well.

        A member that sends and does not read what it is answered has `_ANSWERS` that wait, and nothing more of it is
        read until it does.
        """
        with self._room:
            # no time limit of its own: `send_frame` gives up after `QUIET`, and then the queue empties at once
            self._room.wait_for(lambda: len(self._answers) < _ANSWERS)
            self._answers.append((number, message))
            # one thread at a time keeps the order of the answers, and an idle connection costs none
            if self._is_answering:
                return
            self._is_answering = True
        threading.Thread(target=self._send_answers, name="answers", daemon=True).start()

    def _send_answers(self) -> None:
        while True:
            with self._room:
                if not self._answers:
                    # under the lock, so that `answer` finds either a thread that will take its message or none
                    self._is_answering = False
                    return
                number, message = self._answers.popleft()
                self._room.notify()
            # outside the lock: while the network is slow, requests are still read and answered
            self.send_frame(FrameKind.REPLY, number, "", message)

    def read_frame(self) -> Frame | None:
        """Return the next frame, None where the connection has ended.

        Raises:
            OSError: the connection broke, or nothing came for too long.
            Refused: the other end sent what is no frame.
        """
        data = bytearray()
        if not receive(self.recv, data, _LENGTH):
            return None
        length = int.from_bytes(data, "little")
        if not _HEAD.size - _LENGTH <= length <= FRAME:
            raise Refused(f"a frame that claims {length:,} bytes, where at most {FRAME:,} are allowed")
        if not receive(self.recv, data, _LENGTH + length):
            return None
        frame = decode_frame(data)
        if frame.kind is FrameKind.FAREWELL:
            # a character has at most 4 bytes in UTF-8; the text is the other end's, and goes to this end's terminal
            self.farewell = printable(bytes(frame.message[: 4 * _REASON]).decode("utf-8", "replace"), _REASON)
            return None
        return frame

    def end(self, reason: str) -> None:
        """Tell the other end why the connection ends, and close it once that was read, or some time has passed."""
        # first of all, so that no thread sends a frame behind the farewell
        self.ended = True
        until = time.monotonic() + _LAST_WORD
        with suppress(OSError, ValueError):
            if self._sending.acquire(timeout=_LAST_WORD / 2):  # else it does not read, so it reads no reason either
                try:
                    # without an opening the other end would take the reason for another protocol
                    self._greet(_LAST_WORD / 2)
                    word = encode_frame(FrameKind.FAREWELL, 0, "", reason[:_REASON].encode())
                    self.sendall(word, seconds=_LAST_WORD / 2)
                    # the other end sees the end of the stream and closes, which ends the loop below before its time
                    self.shutdown(socket.SHUT_WR)
                finally:
                    self._sending.release()
                # bytes that were not read when a connection is closed would take the last word with them
                while (rest := until - time.monotonic()) > 0 and self.recv(RECORD, seconds=rest):
                    pass
        super().close()

    def close(self) -> None:
        """Close it, unless `end` is about to."""
        # the thread that reads closes when it returns, while another may still be sending the last word
        if not self.ended:
            super().close()

    def _greet(self, seconds: float) -> None:
        if not self._is_greeted:
            self.sendall(_MAGIC + bytes([FRAMING]), seconds=seconds)
            self._is_greeted = True


def receive(recv: Callable[[int], bytes], frame: bytearray, length: int) -> bool:
    """Append to a frame until it has its length, and return whether it got there before the connection ended.

    Memory is taken for what has arrived, never for what is announced.
    """
    while len(frame) < length:
        piece = recv(min(RECORD, length - len(frame)))
        if not piece:
            return False
        frame += piece
    return True
