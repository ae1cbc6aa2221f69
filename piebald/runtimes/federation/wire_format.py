"""Tasks and updates as bytes: JSON values and safetensors, with declared names, sizes and kinds."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from piebald.component import build
from piebald.contracts import Query, Task, Update
from piebald.privacy.secure_aggregation.key_queries import KeyQuery
from piebald.runtimes.federation.messages import PIECE, Id, Piece, Refused, Word, Words

MOST_TENSORS = 64
MOST_METRICS = 256
_NAME = re.compile(r"[A-Za-z0-9_./-]{1,80}")


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _TaskHead(_Plain):
    """An task without its vectors."""

    id: Id
    client: int = Field(ge=0)
    version: int = Field(ge=0)
    turn: int = Field(ge=0)
    committed: int = Field(ge=0)
    query: dict[str, Any] | None


class _ResultHead(_Plain):
    """An update without its vectors, or why there is none."""

    examples: int = Field(ge=0)
    steps: int = Field(ge=0)
    metrics: dict[str, float] = Field(max_length=MOST_METRICS)
    norm: float
    nbytes: int = Field(ge=0)
    failure: Words | None = None


def digest(body: bytes | bytearray | memoryview) -> str:
    """What tells one body from another."""
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def pack(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """JSON values and named tensors as one body."""
    text = json.dumps(values).encode()
    # a copy of each: safetensors refuses tensors that share memory, and vectors are often views of one vector
    blob = save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()})
    return b"".join((struct.pack("<I", len(text)), text, blob))


def unpack(body: bytes | bytearray | memoryview) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `pack` was given.

    Raises:
        Refused: it is something else.
    """
    whole = memoryview(body)
    length = struct.unpack_from("<I", whole)[0] if len(whole) >= 4 else len(whole)
    if 4 + length > len(whole):
        raise Refused("a body that is cut off")
    try:
        values = json.loads(bytes(whole[4 : 4 + length]))
        tensors = load(bytes(whole[4 + length :]))
    except (ValueError, RecursionError, SafetensorError) as error:
        raise Refused(f"a body that cannot be read: {type(error).__name__}") from None
    if not isinstance(values, dict) or len(tensors) > MOST_TENSORS:
        raise Refused(f"a body of {len(tensors)} tensors, where {MOST_TENSORS} are allowed, or without values")
    if odd := next((name for name in tensors if not _NAME.fullmatch(name)), None):
        raise Refused(f"a tensor called {odd[:80]!r}")
    return values, tensors


def pack_task(task: Task) -> bytes:
    """An task on its way down."""
    fields = {name: getattr(task, name) for name in ("id", "client", "version", "turn", "committed")}
    query = None if task.query is None else task.query.table()
    return pack({**fields, "query": query}, task.vectors)


def unpack_task(body: bytes | bytearray | memoryview) -> Task:
    """A task at the site.

    Raises:
        Refused: it is none.
    """
    values, tensors = unpack(body)
    try:
        head = _TaskHead.model_validate(values)
        query = None if head.query is None else build("query", head.query)
    except (ValidationError, ValueError) as error:
        raise Refused(f"a task that cannot be read: {str(error)[:200]}") from None
    assert query is None or isinstance(query, Query)
    if "model" not in tensors and not isinstance(query, KeyQuery):
        raise Refused("a task without a model")
    return Task(head.id, head.client, head.version, tensors, query, False, head.turn, head.committed)


def pack_update(update: Update | None, failure: str | None) -> bytes:
    """What came of a task, on its way up."""
    if update is None:
        update = Update({}, 0, 0, {})
    # a number that is not finite has no place in JSON: a metric is left out, and an update of no length is refused
    metrics = {name: value for name, value in update.metrics.items() if math.isfinite(value)}
    norm = update.norm if math.isfinite(update.norm) else -1.0
    plain = _ResultHead(
        examples=update.examples, steps=update.steps, metrics=metrics, norm=norm, nbytes=update.nbytes, failure=failure
    )
    return pack(plain.model_dump(), update.vectors)


def unpack_update(body: bytes | bytearray | memoryview) -> tuple[Update | None, str | None]:
    """What came of a task, at the server.

    Raises:
        Refused: it is something else.
    """
    values, tensors = unpack(body)
    try:
        told = _ResultHead.model_validate(values)
    except ValidationError as error:
        raise Refused(f"a result that cannot be read: {error.errors()[0]['type']}") from None
    if told.failure is not None:
        return None, told.failure
    norm = told.norm if told.norm >= 0 else math.nan
    nbytes = sum(part.numel() * part.element_size() for part in tensors.values())
    return Update(tensors, told.examples, told.steps, told.metrics, norm, None, min(told.nbytes, nbytes)), None


class Assembly:
    """Puts the pieces of one body after another together.  Room is made as pieces come, never on a claim."""

    def __init__(self) -> None:
        self._first: Piece | None = None
        self._body = bytearray()

    def take(self, piece: Piece, data: memoryview, most: int) -> tuple[Word, bytearray | None]:
        """Take a piece; the body comes with the last one.

        Raises:
            Refused: it is longer than `most`, or damaged.
        """
        if piece.size > most:
            raise Refused(f"a body of {piece.size:,} bytes, where at most {most:,} are allowed")
        if piece.start == 0:
            self._first, self._body = piece, bytearray()
        known = self._first
        if known is None or (piece.run, piece.id, piece.size, piece.digest) != (
            known.run, known.id, known.size, known.digest,
        ):  # fmt: skip
            return Word(word="again"), None
        if piece.start + len(data) == len(self._body) and len(data):  # it came before, and the answer was lost
            return Word(word="go on"), None
        if piece.start != len(self._body):
            return Word(word="again"), None
        self._body += data
        if len(self._body) > piece.size:
            self._first = None
            raise Refused("more bytes than it said")
        if len(self._body) < piece.size:
            return Word(word="go on"), None
        body, self._first, self._body = self._body, None, bytearray()
        if digest(body) != piece.digest:
            raise Refused("a body that is not what its digest says")
        return Word(word="done"), body


def pieces(body: bytes, start: int) -> memoryview:
    """The piece that begins at a byte."""
    return memoryview(body)[start : start + PIECE]
