"""Pieces of long bodies, put together by their receiver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from piebald.core.stored_vectors import LARGE, NamelessFile
from piebald.federation.link.wire_format import Body, StoredBody, new_digest
from piebald.federation.link.wire_messages import PIECE, WINDOW, Piece, Refused, Reply

_AHEAD = 256  # pieces ahead of what is there: as many of the shortest that are sent, but for the last, are a window


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
        except OSError:
            self.drop()
            raise
        if self._there < piece.size:
            return self._reply("go on"), None
        reply, body, body_digest = self._reply("done"), self._body, self._hash.hexdigest()
        self.drop()
        if body_digest != piece.digest:
            raise Refused("a body that does not match its digest")
        return reply, body

    def _add(self, start: int, data: bytes | memoryview) -> None:
        if start > self._there:
            room = WINDOW - sum(map(len, self._ahead.values()))
            if start <= self._there + WINDOW and len(data) <= room and len(self._ahead) < _AHEAD:
                self._ahead[start] = bytes(data)
            return
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
        return Reply(status=status, digest=self._first.digest, received=self._there)


def _body_of(piece: Piece) -> tuple[str, int, int, str]:
    """Return the values by which a piece's body is known."""
    return piece.run, piece.id, piece.size, piece.digest


def piece_at(body: bytes | Body, start: int, length: int = PIECE) -> memoryview:
    """Return the piece of a body that begins at an offset."""
    return (memoryview(body) if isinstance(body, bytes) else body)[start : start + length]
