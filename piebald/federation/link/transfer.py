"""Long bodies in pieces: sending them so that a link is full and a break costs little, and putting them together.

Each piece is a request, and up to `WINDOW` bytes are under way before the reply to the first of them.  When the
connection has broken, or the body may have been begun by an earlier call, the sender asks how much is there and goes on
from that byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from piebald.core.tensor_store import LARGE, NamelessFile
from piebald.federation.link.messaging import Link
from piebald.federation.link.wire_format import (
    PIECE,
    WINDOW,
    Body,
    Piece,
    Refused,
    Reply,
    StoredBody,
    TermsRequest,
    decode,
    digest,
    new_digest,
)

TERMS = 16 << 20  # bytes of a run's terms, at most
WAIT = 20.0  # seconds to wait for any progress of a transfer
_LEAST = 1 << 14  # bytes that are under way where a connection breaks again and again
_AHEAD = WINDOW // _LEAST  # pieces ahead of what is there: as many of the shortest are a window
_TICK = 0.2  # seconds between two looks at what is wanted, and before a connection is tried again
_ANSWER = 3.0  # seconds after which the question how much is there is asked again
_TRIES = 3  # requests for a piece of the terms without an answer


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
    sending = _Sending(link, target, topic, head, body, confirmed)
    if len(body) > WINDOW:  # it may have been begun before
        sending.ask()
    while sending.status is None and wanted() and time.monotonic() - sending.moved < timeout:
        sending.go_on()
    return None if sending.status == "again" else sending.status


class _Sending:
    """A body on its way, see `send_body`.

    Attributes:
        status: how it ended, None while it has not; "again" where the receiver is not ready for it.
        moved: when a piece was taken by the network, or confirmed.
    """

    def __init__(
        self, link: Link, target: str, topic: str, head: Piece, body: bytes | Body, confirmed: Callable[[int], None]
    ) -> None:
        self._link, self._target, self._topic, self._head, self._body = link, target, topic, head, body
        self._confirmed, self._window = confirmed, WINDOW
        self._there = self._sent = 0  # bytes that are confirmed, and that were sent
        self._broken_at = -1  # bytes that were confirmed when a connection broke last
        self._asked = 0.0  # when the question how much is there was sent, 0 where none waits for an answer
        self._replies = SimpleQueue[Future[memoryview]]()
        self.status: str | None = None
        self.moved = time.monotonic()

    def ask(self) -> None:
        """Ask how much is there; replies to earlier pieces are not looked at any more."""
        if self._there == self._broken_at and self._sent > self._there:  # all that was under way is lost, again
            # a link that breaks under load gets something through with less under way: from 4 MiB down to 16 KiB
            self._window = max(self._window // 4, _LEAST)
        self._broken_at, self._sent, self._asked = self._there, self._there, time.monotonic()
        # replies to earlier pieces still go to the old queue, which nobody reads
        self._replies = SimpleQueue()
        self._send(0, memoryview(b""))

    def go_on(self) -> None:
        """Send a piece, or wait for a reply where enough is under way."""
        is_full = self._asked > 0 or self._sent >= min(self._there + self._window, len(self._body))
        if not is_full:
            # a single piece may not exceed a window that has become shorter than `PIECE`
            data = piece_at(self._body, self._sent, min(PIECE, self._window))
            self._send(self._sent, data)
            self._sent, self.moved = self._sent + len(data), time.monotonic()
        try:
            # does not wait while there is room, as a pause for replies would leave the link idle
            reply = self._replies.get(is_full, _TICK)
        except Empty:
            # a receiver that drops a message sends no reply at all (`messaging.serve`)
            if self._asked and time.monotonic() - self._asked > _ANSWER:
                self.ask()
            return
        if not reply.cancelled():
            return self._take(reply.result())
        time.sleep(_TICK)  # the connection has ended
        self.ask()

    def _send(self, start: int, data: memoryview) -> None:
        head = self._head.model_copy(update={"start": start})
        self._link.send(self._target, self._topic, head, data).add_done_callback(self._replies.put)

    def _take(self, message: memoryview) -> None:
        """Take a reply."""
        try:
            reply = decode(Reply, message)[0]
        except Refused as error:
            self.status = "again"
            return self._link.report(f"{self._target} answered with {error}")
        # the receiver may claim anything, and an offset past the end would leave nothing to send
        there = min(reply.received, len(self._body))
        grows = there > self._there
        # the answer to `ask`; to a piece, "again" says that the receiver is not ready, which ends this attempt
        if self._asked and reply.status == "again":
            self._there = self._sent = there
            self._asked = 0.0
        elif reply.status != "go on":
            self.status = reply.status
        elif grows:
            self._there = there
        if grows:
            self.moved = time.monotonic()
            self._confirmed(there)


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
            reply, body = assembly.take(*decode(Piece, answer), TERMS)
        except Refused as error:
            link.report(f"the server sent {error}")
            return None
        if isinstance(body, bytearray):
            # the assembly has compared with the digest that the pieces name, which need not be the one asked for
            return body if digest(body) == known_by else None
        # a server that repeats a piece would keep this loop running for ever
        if reply.received <= received:
            return None
        received, tries = reply.received, 0
    return None


class Assembly:
    """Assembles a body from its pieces, one body after another.

    Pieces may arrive twice, and in another order than they were sent.  What has arrived stays when a connection
    breaks, so that the sender goes on where it broke; it ends with `drop`, or when another body comes.  Memory grows as
    pieces arrive, it is never allocated for a claimed size, and pieces far ahead of what is there are not kept.

    Args:
        folder: where bodies of more than `LARGE` bytes are written as they come, without a name; None keeps all of them
            in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._first: Piece | None = None
        self._begin(None)

    def _begin(self, piece: Piece | None) -> None:
        """Begin with the body of a piece, or with none."""
        self._ahead: dict[int, bytes] = {}
        self._hash: Any = None if piece is None else new_digest()  # a server has thousands of assemblies
        self._there = 0
        self._body: bytearray | StoredBody = bytearray()
        if piece is not None and self._folder is not None and piece.size > LARGE:
            self._body = StoredBody(NamelessFile(self._folder))
        self._first = piece

    def __len__(self) -> int:
        """Bytes of memory that it takes."""
        return (0 if isinstance(self._body, StoredBody) else len(self._body)) + sum(map(len, self._ahead.values()))

    def drop(self, id: int | None = None) -> None:
        """Drop what has arrived, of the body with this id or of any."""
        if self._first is not None and id in (None, self._first.id):
            self._begin(None)

    def take(self, piece: Piece, data: memoryview, most: int) -> tuple[Reply, bytearray | StoredBody | None]:
        """Add a piece, and return the reply to it; the last one also returns the body.

        A piece without bytes asks how much is there; the reply to it is "again".

        Raises:
            Refused: the body is longer than `most`, or damaged.
            OSError: it cannot be written; the body begins again.
        """
        if piece.size > most:
            raise Refused(f"a body of {piece.size:,} bytes, where at most {most:,} are allowed")
        if self._first is None or _body_of(piece) != _body_of(self._first):
            self._begin(piece)
        if not len(data):
            return self._reply("again"), None
        if len(data) > PIECE:
            self.drop()
            raise Refused(f"a piece of more than {PIECE:,} bytes")
        if piece.start + len(data) > piece.size:
            self.drop()
            raise Refused("more bytes than declared")
        try:
            self._add(piece.start, data)
        # a part of the piece may be on the disk, after which offset and digest no longer agree
        except OSError:
            self.drop()
            raise
        if self._there < piece.size:
            return self._reply("go on"), None
        # dropped before it is compared: a damaged body would count as complete, and could not be sent again
        reply, body, body_digest = self._reply("done"), self._body, self._hash.hexdigest()
        self.drop()
        if body_digest != piece.digest:
            raise Refused("a body that does not match its digest")
        return reply, body

    def _add(self, start: int, data: bytes | memoryview) -> None:
        if start > self._there:
            # an honest sender has at most a window under way; what exceeds it is dropped without an answer of its own
            room = WINDOW - sum(map(len, self._ahead.values()))
            if start <= self._there + WINDOW and len(data) <= room and len(self._ahead) < _AHEAD:
                self._ahead[start] = bytes(data)
            return
        # pieces overlap where a sender goes on with shorter ones; of one that is there already, nothing is left
        self._append(data[self._there - start :])
        while self._ahead and (first := min(self._ahead)) <= self._there:
            late = self._ahead.pop(first)
            self._append(late[self._there - first :])

    def _append(self, data: bytes | memoryview) -> None:
        self._body.extend(data)
        self._hash.update(data)
        self._there += len(data)

    def _reply(self, status: str) -> Reply:
        assert self._first is not None
        return Reply(status=status, received=self._there)


def _body_of(piece: Piece) -> tuple[str, int, int, str]:
    """Return the values by which a piece's body is known."""
    return piece.run, piece.id, piece.size, piece.digest


def piece_at(body: bytes | Body, start: int, length: int = PIECE) -> memoryview:
    """Return the piece of a body that begins at an offset."""
    return (memoryview(body) if isinstance(body, bytes) else body)[start : start + length]
