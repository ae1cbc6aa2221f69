"""Messages between the server and its sites: declared fields, checked, never unpickled.

A message consists of the length of its head (4 bytes), the head (JSON with the fields of one of these classes), and a
body of raw bytes.  A long body is sent in pieces, see `Piece`.
"""

from __future__ import annotations

import json
import struct
from enum import Enum
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from piebald.core.errors import PiebaldError
from piebald.core.plain_text import printable
from piebald.version import __version__

# Of messages and of what terms mean.  Ends with the same number take part with one another, whatever their releases:
# what a release adds with a higher minor number may be left out, and has a default.
PROTOCOL, MINOR = 6, 2
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
