"""Long bodies in pieces: sending them so that a link is full and a break costs little, and fetching a run's terms.

A body that fits into one small message is one request.  A longer one is sent in pieces, without waiting for a reply
to each: the receiver confirms them by receipts, and up to `WINDOW` bytes are under way.  When the connection has
broken, or the body was begun by an earlier call, the sender asks how much is there and goes on from that byte.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from piebald.federation.link.messaging import Link
from piebald.federation.link.pieces import Assembly, piece_at
from piebald.federation.link.wire_format import Body, digest
from piebald.federation.link.wire_messages import PIECE, WINDOW, Piece, Refused, Reply, TermsRequest, decode

TERMS = 16 << 20  # bytes of a run's terms, at most
WAIT = 20.0  # seconds to wait for any progress of a transfer
SMALL = 1 << 16  # bytes of a body that is sent as one request, and of the first pieces of a longer one
_LEAST = 1 << 14  # bytes of a piece on a slow link
_PIECE_TIME = 0.5  # seconds that a piece should take: a hello may have to wait for one
_TICK = 0.2  # seconds between two looks at the connection
_ANSWER = 3.0  # seconds after which the question how much is there is asked again
_TRIES = 3  # requests for a piece of the terms without an answer
_OVER = ("done", "known", "not wanted", "refused")


def send_body(
    link: Link,
    target: str,
    topic: str,
    head: Piece,
    body: bytes | Body,
    *,
    timeout: float,
    wanted: Callable[[], bool] = lambda: True,
    confirmed: Callable[[int], None] = lambda _: None,
) -> str | None:
    """Send a body.

    Args:
        link: the connection.
        target: name of the receiver.
        topic: topic of the messages.
        head: the head of the first piece.
        body: the whole body.
        timeout: seconds without any progress after which it is given up: on a slow link, a transfer takes its time.
        wanted: asked again and again, whether to go on.
        confirmed: called with the number of bytes that are there, whenever there are more.

    Returns:
        The status of the receiver's last reply ("done", "known", "not wanted" or "refused"), None where the body was
        not received.
    """
    if len(body) > SMALL:
        return _Sending(link, target, topic, head, body, confirmed).run(timeout, wanted)
    if not wanted():
        return None
    answer = link.request(target, topic, head, piece_at(body, 0), timeout=timeout)
    if answer is None:
        return None
    try:
        status = decode(Reply, answer)[0].status
    except Refused as error:
        link.report(f"{target} answered with {error}")
        return None
    return status if status in _OVER else None


class _Sending:
    """A long body on its way; see `send_body`."""

    def __init__(
        self, link: Link, target: str, topic: str, head: Piece, body: bytes | Body, confirmed: Callable[[int], None]
    ) -> None:
        self._link, self._target, self._topic, self._head, self._body = link, target, topic, head, body
        self._confirmed = confirmed
        self._changed = threading.Condition()  # guards what follows
        self._window = WINDOW  # bytes that may be under way
        self._there = self._sent = 0  # bytes that are confirmed, and that were sent
        self._status: str | None = None  # how it ended, None while it has not
        self._asking, self._questions = False, 0  # how much is there; and questions without an answer
        self._moved = time.monotonic()  # when a piece was taken by the network, or confirmed
        self._rate, self._counted = 0.0, (0, self._moved)  # bytes a second that were confirmed lately

    def run(self, timeout: float, wanted: Callable[[], bool]) -> str | None:
        """Send until the receiver has all of it, or does not answer any longer."""
        with self._link.receipts(self._target, self._head.digest, self._take):
            connection = self._link.connection(self._target)
            ask, broke_at = False, 0
            if len(self._body) > WINDOW:  # it may have been begun before; nothing waits for the answer
                self._ask(wait=False)
            while self._status is None and wanted() and time.monotonic() - self._moved < timeout:
                if (now := self._link.connection(self._target)) != connection:
                    connection, ask = now, True  # what was under way is lost
                    if self._there == broke_at:  # and that was all of it: have less under way
                        self._window = max(self._window // 2, SMALL)
                    broke_at = self._there
                ask = not (self._ask() if ask else self._go_on())
        return self._status if self._status in _OVER else None

    def _ask(self, wait: bool = True) -> bool:
        """Ask how much is there, and return whether an answer came soon, where it is waited for."""
        with self._changed:
            self._asking = wait
            self._questions += 1
        if not self._tell(0, memoryview(b"")):
            return False
        if not wait:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._asking or self._status is not None, _ANSWER)

    def _go_on(self) -> bool:
        """Send a piece, or wait for receipts where enough is under way; return whether the connection is there."""
        with self._changed:
            start = self._sent
            if start >= min(self._there + self._window, len(self._body)):
                self._changed.wait(_TICK)
                return True
            length = SMALL if not self._rate else min(max(int(self._rate * _PIECE_TIME), _LEAST), PIECE)
        data = piece_at(self._body, start, length)
        if not self._tell(start, data):
            return False
        with self._changed:
            self._moved = time.monotonic()
            self._sent = max(self._sent, start + len(data))
        return True

    def _tell(self, start: int, data: memoryview) -> bool:
        head = self._head.model_copy(update={"start": start})
        if self._link.tell(self._target, self._topic, head, data):
            return True
        time.sleep(_TICK)  # nobody is there
        return False

    def _take(self, reply: Reply) -> None:
        """Take a receipt."""
        with self._changed:
            grows = self._there < reply.received <= len(self._body)
            if reply.status in _OVER:
                self._status = reply.status
            elif reply.status == "again" and self._questions == 0:
                self._status = "again"  # the receiver is not ready for it
            elif self._asking and reply.status == "again":  # nothing is under way, so this is all there is
                self._asking = False
                self._there = self._sent = min(reply.received, len(self._body))
                self._counted = self._there, time.monotonic()
            elif grows:
                self._count(reply.received)
            self._questions -= reply.status == "again"
            self._changed.notify_all()
        if grows:
            self._confirmed(reply.received)

    def _count(self, confirmed: int) -> None:
        """Record how many bytes are confirmed now."""
        now = self._moved = time.monotonic()
        self._there, self._sent = confirmed, max(self._sent, confirmed)
        if now - self._counted[1] > _TICK:
            self._rate = (confirmed - self._counted[0]) / (now - self._counted[1])
            self._counted = confirmed, now


def fetch_terms(
    link: Link, server: str, known_by: str, *, timeout: float, wanted: Callable[[], bool] = lambda: True
) -> bytearray | None:
    """Fetch the terms of a run.

    Args:
        link: the connection.
        server: name of the server.
        known_by: digest of the terms.
        timeout: seconds to wait for each reply.
        wanted: asked before each piece, whether to go on.

    Returns:
        The terms, None where they did not come, or are others than those of the digest.
    """
    assembly, received, tries = Assembly(), 0, 0
    while wanted() and tries < _TRIES:
        answer = link.request(server, "terms", TermsRequest(start=received), timeout=timeout)
        if answer is None:
            tries += 1
            continue
        try:
            piece, data = decode(Piece, answer)
            reply, body = assembly.take(piece, data, TERMS)
        except Refused as error:
            link.report(f"the server sent {error}")
            return None
        if isinstance(body, bytearray):
            return body if digest(body) == known_by else None
        if reply.received <= received:
            return None
        received, tries = reply.received, 0
    return None
