"""Serialization of tasks and updates: JSON values and safetensors, with declared names, sizes and types."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NoReturn

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from piebald.component import build
from piebald.contracts import MOST_ROWS, Query, ResultForm, Task, Update
from piebald.privacy.secure_aggregation.key_queries import KeyQuery
from piebald.runtimes.federation.wire_messages import HEAD, Id, Refused, ShortText

MOST_TENSORS = 64
MOST_METRICS = 256
DIGEST = 32  # bytes of a digest
_NAME = re.compile(r"[A-Za-z0-9_./-]{1,80}")
_TYPES = {"F64", "F32", "F16", "BF16", "I64", "I32", "U8"}  # types of tensors that are unpacked

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


class _ResultHead(_Head):
    """An update without its vectors, or the reason why there is none."""

    examples: _Count
    steps: _Count
    metrics: dict[_Metric, float] = Field(max_length=MOST_METRICS)
    nbytes: Id
    failure: ShortText | None = None


def digest(body: bytes | bytearray | memoryview) -> str:
    """The digest of a body: 256 bits, so that nobody can make two terms of which a person approves one."""
    return hashlib.blake2b(body, digest_size=DIGEST).hexdigest()


@dataclass(frozen=True, slots=True)
class Body:
    """A body of which the larger part, its tensors, may be shared with other bodies."""

    values: bytes
    tensors: bytes

    def __len__(self) -> int:
        return len(self.values) + len(self.tensors)

    def __getitem__(self, part: slice) -> memoryview:
        start, stop, _ = part.indices(len(self))
        edge = len(self.values)
        if start >= edge:
            return memoryview(self.tensors)[start - edge : stop - edge]
        return memoryview(self.values[start:stop] + self.tensors[: max(stop - edge, 0)])

    def digest(self) -> str:
        """The digest of the whole."""
        made = hashlib.blake2b(self.values, digest_size=DIGEST)
        made.update(self.tensors)
        return made.hexdigest()


def _packed_values(values: Mapping[str, Any]) -> bytes:
    text = json.dumps(values).encode()
    return struct.pack("<I", len(text)) + text


def _packed_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    # a copy of each: safetensors refuses tensors that share memory, and vectors are often views of one vector
    return save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()})


def pack(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Serialize JSON values and named tensors into one body."""
    return _packed_values(values) + _packed_tensors(tensors)


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
        values = json.loads(bytes(whole[4 : 4 + length]), parse_constant=_no_constant)
        blob = bytes(whole[4 + length :])
        _check_types(blob)
        tensors = load(blob)
    except (ValueError, RecursionError, SafetensorError, KeyError, TypeError) as error:
        raise Refused(f"a body that cannot be read: {type(error).__name__}") from None
    if not isinstance(values, dict) or len(tensors) > MOST_TENSORS:
        raise Refused(f"a body of {len(tensors)} tensors, where at most {MOST_TENSORS} are allowed, or without values")
    if odd := next((name for name in tensors if not _NAME.fullmatch(name)), None):
        raise Refused(f"a tensor called {odd[:80]!r}")
    return values, tensors


def _no_constant(name: str) -> NoReturn:
    raise Refused(f"{name}, which is no number in JSON")


def _check_types(blob: bytes) -> None:
    """Refuse types of tensors that cannot be unpacked or computed with: float8, complex, packed ones.

    The library refuses what contradicts itself, but meets an unknown type only while it unpacks, with various errors.
    """
    size = struct.unpack_from("<Q", blob)[0] if len(blob) >= 8 else HEAD + 1
    if not size <= min(HEAD, len(blob) - 8):
        raise Refused("tensors without a whole head")
    for name, about in dict(json.loads(blob[8 : 8 + size], parse_constant=_no_constant)).items():
        if name != "__metadata__" and about["dtype"] not in _TYPES:
            raise Refused(f"a tensor of type {str(about['dtype'])[:20]!r}")


def contents(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """What a result that `unpack_update` takes carries: shapes of tensors, names of numbers, and why there is none."""
    whole = memoryview(body)
    (length,) = struct.unpack_from("<I", whole)
    values = json.loads(bytes(whole[4 : 4 + length]))
    (size,) = struct.unpack_from("<Q", whole, 4 + length)
    head = json.loads(bytes(whole[12 + length : 12 + length + size]))
    tensors = {name: about["shape"] for name, about in head.items() if name != "__metadata__"}
    return {"tensors": tensors, "numbers": sorted(values["metrics"]), "failure": values["failure"]}


def _task_values(task: Task) -> dict[str, Any]:
    fields = {name: getattr(task, name) for name in ("id", "client", "version", "attempt", "committed")}
    return {**fields, "query": None if task.query is None else task.query.table()}


def pack_task(task: Task) -> bytes:
    """Serialize a task."""
    return pack(_task_values(task), task.vectors)


class TaskPacker:
    """Serializes tasks, and the model that many of them bring once: else a server would hold a copy for each site."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: deque[tuple[int, dict[str, Tensor], bytes]] = deque(maxlen=2)  # by version and tensors

    def pack(self, task: Task) -> Body:
        """Serialize a task."""
        return Body(_packed_values(_task_values(task)), self._tensors(task))

    def _tensors(self, task: Task) -> bytes:
        with self._lock:
            for version, vectors, packed in self._last:
                same = version == task.version and vectors.keys() == task.vectors.keys()
                if same and all(vectors[name] is tensor for name, tensor in task.vectors.items()):
                    return packed
            made = _packed_tensors(task.vectors)
            self._last.append((task.version, dict(task.vectors), made))
            return made


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
    # JSON has no numbers that are not finite, so such a metric is left out
    metrics = {name: value for name, value in update.metrics.items() if math.isfinite(value)}
    values = {"examples": update.examples, "steps": update.steps, "metrics": metrics, "nbytes": update.nbytes}
    return pack({**values, "failure": failure}, update.vectors)


def unpack_update(
    body: bytes | bytearray | memoryview,
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
        head = _ResultHead.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = next((str(name) for name in first["loc"] if name in _ResultHead.model_fields), "its head")
        raise Refused(f"a result that cannot be read: {where}: {first['type']}") from None
    if head.failure is not None:
        return None, head.failure
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if decompress is not None and "model" in tensors:
        try:
            tensors["model"] = decompress(tensors["model"])
        except ValueError as error:
            raise Refused(f"an update that cannot be unpacked ({error})") from None
    update = Update(tensors, head.examples, head.steps, head.metrics, 0.0, None, min(head.nbytes, nbytes))
    if form is not None and (reason := form.reject_reason(tensors, head.examples, head.steps, head.metrics)):
        raise Refused(f"a result of another form ({reason})")
    return replace(update, norm=_norm(tensors.get("model"))), None


def _norm(change: Tensor | None) -> float:
    """The Euclidean length of a change, along the same axis as at the client, so that it is the same number."""
    if change is None or not change.dtype.is_floating_point:
        return 0.0
    return float(torch.linalg.vector_norm(change.reshape(1, -1), dim=1).item())
