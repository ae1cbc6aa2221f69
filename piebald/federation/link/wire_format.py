"""Messages between the server and its sites, and the tasks and updates in them: declared, checked, never unpickled.

Tasks and updates are JSON values and safetensors, with declared names, sizes and types.  A message consists of the
length of its head (4 bytes), the head (JSON with the fields of one of these classes), and a body of raw bytes.  A long
body is sent in pieces, see `Piece`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import struct
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, Any, NewType, NoReturn, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from piebald.contracts import MOST_ROWS, Query, ResultForm, Task, Update
from piebald.contracts.component import build
from piebald.core.errors import PiebaldError
from piebald.core.parameters import nbytes
from piebald.core.plain_text import printable
from piebald.core.tensor_store import NamelessFile, Place, StoredVectors, raw, tensor_in
from piebald.privacy.secure_aggregation.key_queries import KeyQuery
from piebald.version import __version__

# Of messages and of what terms mean.  Ends with the same number take part with one another, whatever their releases:
# what a release adds with a higher minor number may be left out, and has a default.
PROTOCOL, MINOR = 7, 0
PIECE = 1 << 17  # bytes of a body in one message, at most: a hello may have to wait for one on a slow link
WINDOW = 32 * PIECE  # bytes of a body that are sent before the receiver has confirmed the first of them
HEAD = 1 << 20  # bytes of a head, at most
LONGEST = PIECE + HEAD + 64  # bytes of a message, at most
MOST_IDS = 10_000

# what a reader of JSON that computes in doubles holds exactly
Id = Annotated[int, Field(ge=0, lt=1 << 53)]
Counted = Annotated[int, Field(ge=-1, lt=1 << 53)]  # the last training task of a site whose update counted, -1 unknown
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")]  # a digest or a random number, in hexadecimal
ShortText = Annotated[str, Field(max_length=300), AfterValidator(printable)]  # it ends up in logs, tables, terminals
VersionText = Annotated[str, Field(max_length=40), AfterValidator(printable)]
Rows = Annotated[int, Field(ge=-1, lt=1 << 53)]  # -1 where it is not disclosed


class Leaving(Enum):
    """What leaves a site.

    Attributes:
        title: the name under which the site's owner reads of it, see `site.gate`.
        about: what it tells.
        when: when it leaves.
    """

    PRESENCE = "presence", "that it runs, its versions, terms and tasks, and its work in fixed words", "every second"
    REFUSAL = "refusal", "why it takes no part", "until the server offers other terms"
    ROW_NUMBERS = "row numbers", "how many rows of each split it has", "once it has accepted terms"
    UPDATE = "update", "the change of the shared parameters, and other vectors of the trainer", "after training"
    COUNTS = "counts", "how many rows an update or an answer is about, and how many steps were taken", "in each result"
    LOSS = "loss", "training loss, other numbers of the trainer, and the sum of its rows' weights", "after training"
    ANSWER = "answer", "scores, sums, counts and names that a question asks for", "when it is asked"
    KEYS = "keys", "keys, shares, signatures, and its weight to a quarter of a doubling", "with masked sums"
    FAILURE = "failure", "that a task has no result, and why", "instead of a result"
    SIZES = "sizes", "lengths, offsets and digests of what is sent, which follow from what it holds", "in each message"
    TIMES = "times", "when messages come, and so how long work takes; no duration is sent", "always"
    IDENTITY = "identity", "its certificate, its address, and why it ends a connection", "with each connection"

    def __init__(self, title: str, about: str, when: str) -> None:
        self.title, self.about, self.when = title, about, when


class Refused(PiebaldError):
    """A message that does not have the declared form; the receiver drops it and reports it once."""


class Message(BaseModel):
    """The head of a message."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Release(Message):
    """The head of a message that a site may send: each field is annotated with what leaves the site in it."""

    @classmethod
    def __pydantic_init_subclass__(cls, **settings: Any) -> None:
        super().__pydantic_init_subclass__(**settings)
        for name, field in cls.model_fields.items():
            if not any(isinstance(mark, Leaving) for mark in field.metadata):
                raise TypeError(f"{cls.__name__}.{name} would leave sites undeclared: annotate it with a `Leaving`")

    @classmethod
    def leaving(cls) -> dict[str, Leaving]:
        """Return what leaves the site in each field."""
        fields = cls.model_fields.items()
        return {name: next(mark for mark in field.metadata if isinstance(mark, Leaving)) for name, field in fields}


class Needs(BaseModel):
    """What an experiment takes of each of its sites while it runs.

    Attributes:
        gpus: graphics cards.
        gigabytes: of memory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: int = Field(default=0, ge=0, le=1024)
    gigabytes: float = Field(default=0.0, ge=0, le=1e6)


class Hello(Release):
    """Heartbeat of a site, sent about once a second.

    Attributes:
        protocol, version: numbers of this protocol and of the release.
        incarnation: random number of this process.
        run: the run that `held` refers to.
        ready: digest of the terms that the site has accepted, "" while it has accepted none.
        refused: why the site does not accept the server's terms, "" where it does.
        pending: whether the terms wait for a person at the site.
        held: training tasks that the site has, unfinished or not yet saved by the server.
        rows, validation_rows, test_rows: numbers of its rows, -1 where they are not disclosed.  No result may speak of
            more rows than these.
        doing: what keeps it from its other work for long, such as reading its rows, "" where nothing does.
        jobs, gpus, gigabytes: how many runs it takes part in at once, and what it has for all of them together.
    """

    protocol: Annotated[int, Field(ge=0, lt=1 << 31), Leaving.PRESENCE]
    version: Annotated[VersionText, Leaving.PRESENCE]
    incarnation: Annotated[Hex, Leaving.PRESENCE]
    run: Annotated[Hex, Leaving.PRESENCE] = ""
    ready: Annotated[Hex, Leaving.PRESENCE] = ""
    refused: Annotated[ShortText, Leaving.REFUSAL] = ""
    pending: Annotated[bool, Leaving.PRESENCE] = False
    held: Annotated[list[Id], Field(max_length=MOST_IDS), Leaving.PRESENCE] = []
    rows: Annotated[Rows, Leaving.ROW_NUMBERS] = -1
    validation_rows: Annotated[Rows, Leaving.ROW_NUMBERS] = -1
    test_rows: Annotated[Rows, Leaving.ROW_NUMBERS] = -1
    doing: Annotated[ShortText, Leaving.PRESENCE] = ""
    jobs: Annotated[int, Field(ge=1, le=1024), Leaving.PRESENCE] = 1
    gpus: Annotated[int, Field(ge=0, le=1024), Leaving.PRESENCE] = 0
    gigabytes: Annotated[float, Field(ge=0, le=1e6), Leaving.PRESENCE] = 0.0


class Welcome(Message):
    """The server's answer to a hello.

    Attributes:
        version: version of the server's Piebald.
        run: the run, "" while there is none.
        epoch: random number of the server's process.
        terms: digest of the run's terms.
        restored: highest id of a training task in the checkpoint that this process resumed from, 0 for none.
        last_id: highest id of a training task so far.
        unsaved: ids of this site's training tasks, up to `last_id`, that are not in a checkpoint yet.
        counted: the last of this site's training tasks whose update counted, 0 before the first: what it trained for
            later ones, which are under way no longer, was given up.  -1 where the server does not say.
        over: whether the run has ended, so that the site may leave.
        state, ends: what the server does, and what would end that state.
        step: server steps made.
        sites, ready: how many sites the run has, and how many of them can be sent tasks.
        you: how the server sees the site that it answers.
    """

    version: VersionText
    run: Hex
    epoch: Hex
    terms: Hex
    restored: Id = 0
    last_id: Id = 0
    unsaved: Annotated[list[Id], Field(max_length=MOST_IDS)] = []
    counted: Counted = -1
    over: bool = False
    state: ShortText = ""
    ends: ShortText = ""
    step: Id = 0
    sites: Id = 0
    ready: Id = 0
    you: ShortText = ""


class Piece(Release):
    """A piece of a body: of a task for a site, a result for the server, or the terms of a run.

    Attributes:
        run: the run it belongs to.
        epoch: the server process that sent it or is to receive it; pieces for an earlier process are not accepted.
        id: id of the task, 0 for terms.
        trains: whether the task is a training task.
        start: offset of its first byte.
        size: bytes of the whole body.
        digest: BLAKE2b digest of the whole body, 32 bytes in hexadecimal.
        counted: of a training task, see `Welcome`: the client's state before the task is that after this one.
    """

    run: Annotated[Hex, Leaving.PRESENCE]
    epoch: Annotated[Hex, Leaving.PRESENCE]
    id: Annotated[Id, Leaving.PRESENCE]
    trains: Annotated[bool, Leaving.PRESENCE]
    start: Annotated[Id, Leaving.SIZES]
    size: Annotated[Id, Leaving.SIZES]
    digest: Annotated[Hex, Leaving.SIZES]
    counted: Annotated[Counted, Leaving.PRESENCE] = -1


class CheckRequest(Release):
    """Question of a site that only looks: it does not take part by asking.

    Attributes:
        version: version of its Piebald.
    """

    version: Annotated[VersionText, Leaving.PRESENCE]


class CheckReply(Message):
    """Answer to it.

    Attributes:
        protocol, version: numbers of the server's protocol and of its release.
        time: the server's clock, in seconds since the epoch.
        terms: digest of the run's terms, "" while there is none.
    """

    protocol: Annotated[int, Field(ge=0, lt=1 << 31)] = 5  # the last one whose servers did not say it
    version: VersionText
    time: Annotated[float, Field(ge=0, lt=1e11)]
    terms: Hex


class TermsRequest(Release):
    """Request of a site for a piece of the run's terms."""

    start: Annotated[Id, Leaving.SIZES]


class Reply(Release):
    """Reply to a piece.

    Attributes:
        status: "go on" (send the next piece), "done" (the body is complete), "known" (it was received before),
            "not wanted" (not now), "again" (send from the first byte that is not there), or "refused" (do not send it
            again).
        received: bytes of the body that are there, from the first one on without a gap.
    """

    status: Annotated[str, Field(pattern="^(go on|done|known|not wanted|again|refused)$"), Leaving.PRESENCE]
    received: Annotated[Id, Leaving.SIZES] = 0


SAME_PROTOCOL = "install releases with the same protocol"


def release(other: Hello | CheckReply | None = None) -> str:
    """Return the release of another end, or this one, with the number of its protocol, for messages."""
    version, protocol = (__version__, PROTOCOL) if other is None else (other.version, other.protocol)
    return f"Piebald {version} with protocol {protocol}"


SomeMessage = TypeVar("SomeMessage", bound=Message)


def encode(head: Message, body: bytes | memoryview = b"") -> bytes:
    """Encode a message.

    Examples:
        >>> head, body = decode(Reply, encode(Reply(status="done", received=5), b"bytes"))
        >>> head.status, head.received, bytes(body)
        ('done', 5, b'bytes')
    """
    text = head.model_dump_json().encode()
    return b"".join((struct.pack("<I", len(text)), text, body))


def decode(kind: type[SomeMessage], data: bytes | bytearray | memoryview | None) -> tuple[SomeMessage, memoryview]:
    """Decode a message into its head and body.

    Raises:
        Refused: it is not of this kind, or it is too long.
    """
    whole = memoryview(data or b"")
    if len(whole) > LONGEST:
        raise Refused(f"a message of {len(whole):,} bytes, where at most {LONGEST:,} are allowed")
    # a message without a length is refused as one that claims too much
    length = struct.unpack_from("<I", whole)[0] if len(whole) >= 4 else HEAD + 1
    if length > HEAD or 4 + length > len(whole):
        raise Refused("a message without a whole head")
    try:
        return without_unknown(kind, bytes(whole[4 : 4 + length])), whole[4 + length :]
    except ValidationError as error:
        # the field and the kind of error: the value is the sender's text, of any length
        first = error.errors()[0]
        field = ".".join(str(name) for name in first["loc"]) or "its head"
        raise Refused(f"a message that is no {kind.__name__.lower()}: {field}: {first['type']}") from None


def without_unknown(kind: type[SomeMessage], text: bytes) -> SomeMessage:
    """Return a head from JSON, without fields that this release does not know.

    Raises:
        ValidationError: it is not of this kind.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        if all(one["type"] != "extra_forbidden" for one in error.errors()):
            raise
        known = {name: value for name, value in json.loads(text).items() if name in kind.model_fields}
        return kind.model_validate_json(json.dumps(known))


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
