"""Serialization of tasks and updates: JSON values and safetensors, with declared names, sizes and types."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import struct
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NewType, NoReturn

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from piebald.contracts import MOST_ROWS, Query, ResultForm, Task, Update
from piebald.contracts.component import build
from piebald.core.parameters import nbytes
from piebald.core.tensor_store import NamelessFile, Place, StoredVectors, raw, tensor_in
from piebald.federation.link.wire_messages import HEAD, Id, Leaving, Refused, Release, ShortText
from piebald.privacy.secure_aggregation.key_queries import KeyQuery

MOST_TENSORS = 64
MOST_METRICS = 256
DIGEST = 32  # bytes of a digest
_NAME = re.compile(r"[A-Za-z0-9_./-]{1,80}")
_TYPES = {  # of tensors that are unpacked
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8,
}  # fmt: skip
_NAMES = {kind: name for name, kind in _TYPES.items()} | {torch.bool: "BOOL", torch.int16: "I16", torch.int8: "I8"}

ResultBody = NewType("ResultBody", bytes)  # of a result that has passed the gate of a site
_Count = Annotated[int, Field(ge=0, le=MOST_ROWS)]
_Metric = Annotated[str, Field(pattern=f"^{_NAME.pattern}$")]


class _Head(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _TaskHead(_Head):
    """A task without its vectors."""

    id: Id
    client: _Count
    version: _Count
    attempt: _Count
    committed: Id
    query: dict[str, Any] | None


class ResultHead(Release):
    """An update without its vectors, or the reason why there is none."""

    examples: Annotated[_Count, Leaving.COUNTS]
    steps: Annotated[_Count, Leaving.COUNTS]
    metrics: Annotated[dict[_Metric, float], Field(max_length=MOST_METRICS), Leaving.LOSS]
    nbytes: Annotated[Id, Leaving.SIZES]
    failure: Annotated[ShortText | None, Leaving.FAILURE] = None


def new_digest() -> Any:
    """A digest of bytes that come one after another, see `digest`."""
    return hashlib.blake2b(digest_size=DIGEST)


def digest(body: bytes | bytearray | memoryview) -> str:
    """The digest of a body: 256 bits, so that nobody can make two terms of which a person approves one."""
    hasher = new_digest()
    hasher.update(body)
    return str(hasher.hexdigest())


class Body:
    """A body whose larger part, its tensors, lies where they lie: many sites are sent one model, which is there once.

    Args:
        values: JSON values.
        tensors: named tensors, which must not change while the body is needed.
    """

    def __init__(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        text = json.dumps(values).encode()
        text += b" " * (-(4 + len(text)) % 8)  # so that numbers can be used where they lie
        head, raws = _tensor_head(tensors)
        first = b"".join((struct.pack("<I", len(text)), text, struct.pack("<Q", len(head)), head))
        self._parts = [memoryview(first), *(part for part in raws if len(part))]
        self._edges = [0, *itertools.accumulate(map(len, self._parts))]

    def __len__(self) -> int:
        return self._edges[-1]

    def __getitem__(self, part: slice) -> memoryview:
        start, stop, _ = part.indices(len(self))
        pieces = [
            part[max(start - edge, 0) : stop - edge]
            # not strict: the last edge is the end, where no part begins
            for part, edge in zip(self._parts, self._edges, strict=False)
            if edge < stop and edge + len(part) > start
        ]
        # within one tensor no byte is copied; only the few pieces across an edge are joined
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def __bytes__(self) -> bytes:
        return b"".join(self._parts)

    def digest(self) -> str:
        """The digest of the whole."""
        hasher = new_digest()
        for part in self._parts:
            hasher.update(part)
        return str(hasher.hexdigest())


def file_of(tensors: Mapping[str, Tensor | bytes], metadata: Mapping[str, str]) -> list[memoryview]:
    """A file of safetensors as the pieces that it consists of; the numbers, and bytes in place of some, are not
    copied.
    """
    head, raws = _tensor_head(tensors, {"__metadata__": dict(metadata)})
    return [memoryview(struct.pack("<Q", len(head)) + head), *raws]


def _tensor_head(
    tensors: Mapping[str, Tensor | bytes], more: Mapping[str, Any] | None = None
) -> tuple[bytes, list[memoryview]]:
    """The head of tensors as safetensors has it, and their bytes in its order."""

    def width(name: str) -> int:
        tensor = tensors[name]
        return tensor.element_size() if isinstance(tensor, Tensor) else 1

    # wide elements first keeps every tensor aligned; then by name, so that equal tensors give equal bytes
    entries, raws, start = dict(more or {}), list[memoryview](), 0
    for name in sorted(tensors, key=lambda name: (-width(name), name)):
        tensor = tensors[name]
        raws.append(raw(tensor) if isinstance(tensor, Tensor) else memoryview(tensor))
        kind, shape = (
            (_NAMES[tensor.dtype], list(tensor.shape)) if isinstance(tensor, Tensor) else ("U8", [len(tensor)])
        )
        stop = start + len(raws[-1])
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    # padded as by safetensors, so that the data begin at a multiple of 8
    return text + b" " * (-len(text) % 8), raws


class StoredBody:
    """A body in a nameless file, which lives as long as the body or one of its vectors is in use.

    Args:
        file: an empty file.
    """

    def __init__(self, file: NamelessFile) -> None:
        self._file, self._size = file, 0

    def __len__(self) -> int:
        return self._size

    def extend(self, data: bytes | memoryview) -> None:
        """Append bytes.

        Raises:
            OSError: the disk is full.
        """
        self._file.write(data)
        self._size += len(data)

    def read(self, start: int, stop: int) -> bytes:
        """Return some of its bytes, as far as they are there."""
        content = bytearray(max(min(stop, self._size) - start, 0))
        self._file.read_into(memoryview(content), start)
        return bytes(content)

    def vectors(self, places: Mapping[str, Place]) -> StoredVectors:
        """Return the vectors that lie in it."""
        return StoredVectors(self._file, places)


def pack(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Serialize JSON values and named tensors into one body."""
    return bytes(Body(values, tensors))


def unpack(body: bytes | bytearray | memoryview | StoredBody) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Deserialize a body made by `pack`; the tensors of a stored one stay where they are.

    Raises:
        Refused: the body has another form.
    """
    try:
        text, head, start = _heads(body)
        values = json.loads(text, parse_constant=_no_constant)
        places = _places(head, start, len(body))
        tensors: Mapping[str, Tensor]
        tensors = (
            body.vectors(places)
            if isinstance(body, StoredBody)
            else {name: tensor_in(body, place) for name, place in places.items()}
        )
    # RecursionError: JSON that is nested deeply. Whatever it is, the message ends and the server does not
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise Refused(f"a body that cannot be read: {type(error).__name__}") from None
    if not isinstance(values, dict) or len(tensors) > MOST_TENSORS:
        raise Refused(f"a body of {len(tensors)} tensors, where at most {MOST_TENSORS} are allowed, or without values")
    if bad_name := next((name for name in tensors if not _NAME.fullmatch(name)), None):
        raise Refused(f"a tensor called {bad_name[:80]!r}")
    return values, tensors


def _heads(body: bytes | bytearray | memoryview | StoredBody) -> tuple[bytes, bytes, int]:
    """Return a body's values and the head of its tensors, as text, and where the tensors begin.

    Raises:
        Refused: it is cut off.
    """
    read = body.read if isinstance(body, StoredBody) else lambda start, stop: bytes(memoryview(body)[start:stop])
    # a length that is cut off reads as the longest there is, which is refused below
    (length,) = struct.unpack("<I", read(0, 4).ljust(4, b"\xff"))
    # a stored body is larger than what may be read into memory, where the others are already
    if 4 + length > len(body) or (isinstance(body, StoredBody) and length > HEAD):
        raise Refused("a body that is cut off")
    (size,) = struct.unpack("<Q", read(4 + length, 12 + length).ljust(8, b"\xff"))
    if not size <= min(HEAD, len(body) - 12 - length):
        raise Refused("tensors without a whole head")
    return read(4, 4 + length), read(12 + length, 12 + length + size), 12 + length + size


def _places(head: bytes, start: int, end: int) -> dict[str, Place]:
    """Return the places of tensors, which lie one behind the other without gaps, as in safetensors.

    Types that cannot be unpacked or computed with are refused: float8, complex, packed ones.

    Raises:
        Refused: the head says something else.
    """
    places, spans = dict[str, Place](), list[tuple[int, int]]()
    for name, entry in dict(json.loads(head, parse_constant=_no_constant)).items():
        if name == "__metadata__":
            continue
        if (kind := _TYPES.get(str(entry["dtype"]))) is None:
            raise Refused(f"a tensor of type {str(entry['dtype'])[:20]!r}")
        shape, (first, last) = entry["shape"], entry["data_offsets"]
        # `type`, as True is an int to `isinstance`; 2**53 bounds the sizes that are computed from them
        if not all(type(number) is int and 0 <= number < 1 << 53 for number in (*shape, first, last)):
            raise Refused("a tensor whose shape is invalid")
        places[name] = Place(kind, tuple(shape), start + first)
        if places[name].nbytes != last - first:
            raise Refused("a tensor of another length than its shape has")
        spans.append((first, last))
    # overlaps would let a short body claim much memory, and bytes in gaps would escape every check
    spans.sort()
    edges = [0, *(last for _, last in spans)]
    if [first for first, _ in spans] != edges[:-1] or start + edges[-1] != end:
        raise Refused("tensors with gaps between them")
    return places


def _no_constant(name: str) -> NoReturn:
    raise Refused(f"{name}, which JSON does not allow")


def contents(body: bytes | bytearray | memoryview | StoredBody) -> dict[str, Any]:
    """Return what a result carries: shapes of tensors, names of numbers, and the reason why there is none.

    Raises:
        ValidationError: it has a field that `ResultHead` does not declare.
    """
    text, tensor_head, _ = _heads(body)
    head = ResultHead.model_validate_json(text)
    tensors = {name: entry["shape"] for name, entry in json.loads(tensor_head).items() if name != "__metadata__"}
    return {"tensors": tensors, "numbers": sorted(head.metrics), "failure": head.failure}


def _task_values(task: Task) -> dict[str, Any]:
    fields = {name: getattr(task, name) for name in ("id", "client", "version", "attempt", "committed")}
    return {**fields, "query": None if task.query is None else task.query.table()}


def task_body(task: Task) -> Body:
    """Serialize a task, whose vectors stay where they are."""
    return Body(_task_values(task), task.vectors)


def unpack_task(body: bytes | bytearray | memoryview | StoredBody) -> Task:
    """Deserialize a task.

    Raises:
        Refused: the body holds no task.
    """
    values, tensors = unpack(body)
    try:
        head = _TaskHead.model_validate(_known(_TaskHead, values))
        query = None if head.query is None else build("query", head.query)
    except (ValidationError, ValueError) as error:
        raise Refused(f"a task that cannot be read: {str(error)[:200]}") from None
    assert query is None or isinstance(query, Query)
    if "model" not in tensors and not isinstance(query, KeyQuery):
        raise Refused("a task without a model")
    return Task(head.id, head.client, head.version, tensors, query, False, head.attempt, head.committed)


def _known(kind: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without those that a later release added."""
    return {name: value for name, value in values.items() if name in kind.model_fields}


def pack_update(update: Update | None, failure: str | None) -> bytes:
    """Serialize the outcome of a task: an update, or the reason why there is none."""
    if update is None:
        update = Update({}, 0, 0, {})
    numbers = {"examples": update.examples, "steps": update.steps, "nbytes": update.nbytes}
    return pack({**numbers, "metrics": dict(update.metrics), "failure": failure}, update.vectors)


def unpack_update(
    body: bytes | bytearray | memoryview | StoredBody,
    form: ResultForm | None = None,
    decompress: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Update | None, str | None]:
    """Deserialize the outcome of a task: an update and None, or None and the reason.

    The norm of the update is computed here, from its vector.

    Args:
        body: what came.
        form: what the result may hold.
        decompress: makes the change of a packed one, or raises a ValueError; None where changes are not packed.

    Raises:
        Refused: the body holds no result, or one of another form.
    """
    values, tensors = unpack(body)
    try:
        head = ResultHead.model_validate(_known(ResultHead, values))
    except ValidationError as error:
        # only names of fields are repeated; that of a metric is the sender's text
        first = error.errors()[0]
        field = next((str(name) for name in first["loc"] if name in ResultHead.model_fields), "its head")
        raise Refused(f"a result that cannot be read: {field}: {first['type']}") from None
    if head.failure is not None:
        return None, head.failure
    near = dict(tensors)  # in memory while they are looked at
    bytes_received = nbytes(near)
    if decompress is not None and "model" in near:
        try:
            near["model"] = decompress(near["model"])
        except ValueError as error:
            raise Refused(f"an update that cannot be unpacked ({error})") from None
        tensors = near
    if form is not None and (reason := form.reject_reason(near, head.examples, head.steps, head.metrics)):
        raise Refused(f"a result of another form ({reason})")
    # never the sender's own number: clipping and filters rely on it
    norm = _norm(near.get("model"))
    return Update(tensors, head.examples, head.steps, head.metrics, norm, None, min(head.nbytes, bytes_received)), None


def _norm(change: Tensor | None) -> float:
    """Return the Euclidean length of a change, along the same axis as at the client, so that it is the same number."""
    if change is None or not change.dtype.is_floating_point:
        return 0.0
    return float(torch.linalg.vector_norm(change.reshape(1, -1), dim=1).item())
