"""Serialization of tasks and updates: JSON values and safetensors, with declared names, sizes and types."""

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
from piebald.runtimes.federation.messages import PIECE, Id, Piece, Refused, Reply, ShortText

MOST_TENSORS = 64
MOST_METRICS = 256
_NAME = re.compile(r"[A-Za-z0-9_./-]{1,80}")


class _Head(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _TaskHead(_Head):
    """A task without its vectors."""

    id: Id
    client: int = Field(ge=0)
    version: int = Field(ge=0)
    attempt: int = Field(ge=0)
    committed: int = Field(ge=0)
    query: dict[str, Any] | None


class _ResultHead(_Head):
    """An update without its vectors, or the reason why there is none."""

    examples: int = Field(ge=0)
    steps: int = Field(ge=0)
    metrics: dict[str, float] = Field(max_length=MOST_METRICS)
    norm: float
    nbytes: int = Field(ge=0)
    failure: ShortText | None = None


def digest(body: bytes | bytearray | memoryview) -> str:
    """The digest of a body."""
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def pack(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Serialize JSON values and named tensors into one body."""
    text = json.dumps(values).encode()
    # a copy of each: safetensors refuses tensors that share memory, and vectors are often views of one vector
    blob = save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()})
    return b"".join((struct.pack("<I", len(text)), text, blob))


def unpack(body: bytes | bytearray | memoryview) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Deserialize a body made by `pack`.

    Raises:
        Refused: the body has another form.
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
        raise Refused(f"a body of {len(tensors)} tensors, where at most {MOST_TENSORS} are allowed, or without values")
    if odd := next((name for name in tensors if not _NAME.fullmatch(name)), None):
        raise Refused(f"a tensor called {odd[:80]!r}")
    return values, tensors


def pack_task(task: Task) -> bytes:
    """Serialize a task."""
    fields = {name: getattr(task, name) for name in ("id", "client", "version", "attempt", "committed")}
    query = None if task.query is None else task.query.table()
    return pack({**fields, "query": query}, task.vectors)


def unpack_task(body: bytes | bytearray | memoryview) -> Task:
    """Deserialize a task.

    Raises:
        Refused: the body holds no task.
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
    return Task(head.id, head.client, head.version, tensors, query, False, head.attempt, head.committed)


def pack_update(update: Update | None, failure: str | None) -> bytes:
    """Serialize the outcome of a task: an update, or the reason why there is none."""
    if update is None:
        update = Update({}, 0, 0, {})
    # JSON has no numbers that are not finite: such a metric is left out, and a norm of -1 stands for NaN
    metrics = {name: value for name, value in update.metrics.items() if math.isfinite(value)}
    norm = update.norm if math.isfinite(update.norm) else -1.0
    head = _ResultHead(
        examples=update.examples, steps=update.steps, metrics=metrics, norm=norm, nbytes=update.nbytes, failure=failure
    )
    return pack(head.model_dump(), update.vectors)


def unpack_update(body: bytes | bytearray | memoryview) -> tuple[Update | None, str | None]:
    """Deserialize the outcome of a task: an update and None, or None and the reason.

    Raises:
        Refused: the body holds no result.
    """
    values, tensors = unpack(body)
    try:
        head = _ResultHead.model_validate(values)
    except ValidationError as error:
        raise Refused(f"a result that cannot be read: {error.errors()[0]['type']}") from None
    if head.failure is not None:
        return None, head.failure
    norm = head.norm if head.norm >= 0 else math.nan
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return Update(tensors, head.examples, head.steps, head.metrics, norm, None, min(head.nbytes, nbytes)), None


class Assembly:
    """Assembles a body from its pieces, one body after another.

    Memory grows as pieces arrive; it is never allocated for a claimed size.
    """

    def __init__(self) -> None:
        self._first: Piece | None = None
        self._body = bytearray()

    def take(self, piece: Piece, data: memoryview, most: int) -> tuple[Reply, bytearray | None]:
        """Add a piece, and return the reply to it; the last piece also returns the body.

        Raises:
            Refused: the body is longer than `most`, or damaged.
        """
        if piece.size > most:
            raise Refused(f"a body of {piece.size:,} bytes, where at most {most:,} are allowed")
        if piece.start == 0:
            self._first, self._body = piece, bytearray()
        known = self._first
        if known is None or (piece.run, piece.id, piece.size, piece.digest) != (
            known.run, known.id, known.size, known.digest,
        ):  # fmt: skip
            return Reply(status="again"), None
        if piece.start + len(data) == len(self._body) and len(data):  # received before, and the reply was lost
            return Reply(status="go on"), None
        if piece.start != len(self._body):
            return Reply(status="again"), None
        self._body += data
        if len(self._body) > piece.size:
            self._first = None
            raise Refused("more bytes than declared")
        if len(self._body) < piece.size:
            return Reply(status="go on"), None
        body, self._first, self._body = self._body, None, bytearray()
        if digest(body) != piece.digest:
            raise Refused("a body that does not match its digest")
        return Reply(status="done"), body


def piece_at(body: bytes, start: int) -> memoryview:
    """The piece of a body that begins at an offset."""
    return memoryview(body)[start : start + PIECE]
