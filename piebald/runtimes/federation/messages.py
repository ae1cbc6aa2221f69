"""What server and sites say to one another: declared fields, checked, never unpickled.

A message is the length of its head (4 bytes), the head (JSON with the fields of one of these classes), and a body of
raw bytes.  A long body travels in pieces, see `Piece`.
"""

from __future__ import annotations

import struct
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from piebald.errors import PiebaldError

PROTOCOL = 1
PIECE = 4 << 20  # bytes of a body that travel in one message
HEAD = 1 << 20  # bytes of a head
LONGEST = PIECE + HEAD + 64  # bytes of a message
MOST_IDS = 10_000

Id = Annotated[int, Field(ge=0, lt=1 << 53)]
Mark = Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")]  # a digest or a random number, in hexadecimal
Words = Annotated[str, Field(max_length=300)]


class Refused(PiebaldError):
    """A message that is not what was declared; whoever receives it drops it and says so once."""


class Message(BaseModel):
    """The head of a message."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Hello(Message):
    """A site says, about once a second, that it is there.

    Attributes:
        protocol, version: of this protocol and of Piebald.
        incarnation: a random number of this process.
        run: of the run that `held` is about.
        ready: digest of the terms it works under, "" while it has none.
        refused: why it does not work under the server's terms, "" where it does.
        held: training it has got and the server has not safe yet.
        rows: of its training part, -1 where that is not told.
    """

    protocol: int
    version: Annotated[str, Field(max_length=40)]
    incarnation: Mark
    run: Mark = ""
    ready: Mark = ""
    refused: Words = ""
    held: Annotated[list[Id], Field(max_length=MOST_IDS)] = []
    rows: Annotated[int, Field(ge=-1)] = -1


class Welcome(Message):
    """The server's answer to a hello.

    Attributes:
        version: of the server's Piebald.
        run: the run, "" while there is none.
        epoch: a random number of the server's process.
        terms: digest of the terms of the run.
        restored: the highest training id that the checkpoint knew which this process took up, 0 for none.
        horizon: the highest training id so far.
        unsafe: this site's training of at most `horizon` that no checkpoint holds yet.
        over: the run has ended, so the site may leave.
    """

    version: Annotated[str, Field(max_length=40)]
    run: Mark
    epoch: Mark
    terms: Mark
    restored: Id = 0
    horizon: Id = 0
    unsafe: Annotated[list[Id], Field(max_length=MOST_IDS)] = []
    over: bool = False


class Piece(Message):
    """A piece of a body: a task on its way down, a result on its way up, or the terms of a run.

    Attributes:
        run: the run it belongs to.
        epoch: of the server's process that it is from or for; what was meant for an earlier one is not taken.
        id: of the task, 0 for terms.
        trains: whether it is about training.
        start: the byte it begins at.
        size: bytes of the whole body.
        digest: BLAKE2b of the whole body, 16 bytes in hexadecimal.
    """

    run: Mark
    epoch: Mark
    id: Id
    trains: bool
    start: Annotated[int, Field(ge=0)]
    size: Annotated[int, Field(ge=0)]
    digest: Mark


class Wish(Message):
    """A site asks for a piece of the terms."""

    start: Annotated[int, Field(ge=0)]


class Word(Message):
    """The answer to a piece: "go on", "done", "known" (it was there before), "not wanted", "again" from the start,
    or "refused" for good.
    """

    word: Annotated[str, Field(pattern="^(go on|done|known|not wanted|again|refused)$")]


SomeMessage = TypeVar("SomeMessage", bound=Message)


def encode(head: Message, body: bytes | memoryview = b"") -> bytes:
    """A message."""
    text = head.model_dump_json().encode()
    return b"".join((struct.pack("<I", len(text)), text, body))


def decode(kind: type[SomeMessage], data: bytes | bytearray | memoryview | None) -> tuple[SomeMessage, memoryview]:
    """Head and body of a message.

    Raises:
        Refused: it is not of this kind, or too long.
    """
    whole = memoryview(data or b"")
    if len(whole) > LONGEST:
        raise Refused(f"a message of {len(whole):,} bytes, where at most {LONGEST:,} are allowed")
    length = struct.unpack_from("<I", whole)[0] if len(whole) >= 4 else HEAD + 1
    if length > HEAD or 4 + length > len(whole):
        raise Refused("a message without a whole head")
    try:
        return kind.model_validate_json(bytes(whole[4 : 4 + length])), whole[4 + length :]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(word) for word in first["loc"]) or "its head"
        raise Refused(f"a message that is no {kind.__name__.lower()}: {where}: {first['type']}") from None
