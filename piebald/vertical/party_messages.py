"""Messages between two parties: declared in advance, checked for length before they are read, never pickled.

A frame is a header (magic, kind, sender, session, sequence number, length), the message's parts, each after its length,
and a hash over everything.  The session id comes from both parties' nonces, so frames of an earlier run or of another
connection are refused; sequence numbers refuse replayed frames, and the sender refuses a party's own frames that are
sent back to it.  The connection proves who sent a frame; the tag finds damage.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from enum import IntEnum

from piebald.core.errors import RuntimeFault
from piebald.vertical.encryption.backend import InvalidMessage, MessageLength

MAGIC = b"PBT2"
HEADER = struct.Struct("<4sBB16sQQ")
TAG = 16


class MessageKind(IntEnum):
    """Kinds of messages, in the order of a run; their parts are declared where they are used.

    HELLO       version, role, digest of the settings, nonce, steps that can be resumed
    KEY         the owner's announcement
    STATISTICS  an encrypted matrix for each product
    MASKED      a masked product for each
    DECRYPTED   a decrypted, still masked product for each
    WATCH       one number for each term: the target's part of the losses, and in reply the losses
    HANDOVER    the source's translator, and its share of positives
    DONE        nothing
    ABORT       a reason
    POINTS      points of a party's own keys, see `key_matching`
    RETURNED    the other party's points under this party's scalar, too
    NEAR        which spellings that both have belong to one key, see `spelling`
    """

    HELLO = 1
    KEY = 2
    STATISTICS = 3
    MASKED = 4
    DECRYPTED = 5
    WATCH = 6
    HANDOVER = 7
    DONE = 8
    ABORT = 9
    POINTS = 10
    RETURNED = 11
    NEAR = 12


class EndReason(IntEnum):
    """Reason why a party ends a run.  Only this number is sent, no text, so nothing can leak with it."""

    BROKEN = 1
    MESSAGE = 2
    SETTINGS = 3
    INTERRUPTED = 4

    @property
    def text(self) -> str:
        """The reason in words, for the other party."""
        return {
            EndReason.BROKEN: "an error occurred there; see its own message",
            EndReason.MESSAGE: "it refused a message of this party as damaged, replayed or made under another key",
            EndReason.SETTINGS: "its settings differ from this party's",
            EndReason.INTERRUPTED: "its user interrupted it",
        }[self]


class MessageFault(InvalidMessage):
    """A message that does not match its declaration."""


class PartyEnded(RuntimeFault):
    """The other party ended the run, or is gone, so that it need not be notified."""


def limit(lengths: Sequence[MessageLength]) -> int:
    """Return the largest number of bytes of a message with these parts, without its header."""
    # 8 bytes before each part are its length
    return sum(8 + length.most for length in lengths)


def pack_frame(kind: MessageKind, sender: int, session: bytes, number: int, parts: Sequence[bytes]) -> bytes:
    """Return a message as a frame; the sender is 0 for the source and 1 for the target."""
    body = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    head = HEADER.pack(MAGIC, kind, sender, session, number, len(body))
    return head + body + _tag(head + body)


def body_length(head: bytes, most: int) -> int:
    """Return the number of bytes that follow a header, including the tag.

    Raises:
        MessageFault: it is not a header, or announces more bytes than the expected message may have.
    """
    if len(head) != HEADER.size or head[:4] != MAGIC:
        raise MessageFault("the other party sent no message of this protocol: check the address on both sides")
    length = int(HEADER.unpack(head)[-1])
    if length > most:
        raise MessageFault(f"the other party's message claims {length:,} bytes where at most {most:,} are allowed")
    return length + TAG


def unpack_frame(
    frame: bytes, kind: MessageKind, sender: int | None, session: bytes, number: int, lengths: Sequence[MessageLength]
) -> list[bytes]:
    """Return the parts of a frame.

    Args:
        frame: the whole frame.
        kind: kind of the expected message.
        sender: the party that must have sent it: 0 for the source, 1 for the target, None for either.
        session: session id of this run.
        number: number of messages received before.
        lengths: lengths of its parts.

    Raises:
        MessageFault: it is damaged, replayed, from another session, or not the expected message.
        PartyEnded: the other party ended the run.
    """
    head, body, tag = frame[: HEADER.size], frame[HEADER.size : -TAG], frame[-TAG:]
    magic, sent_kind, sent_by, sent_session, sent_number, length = (
        # a frame that is too short must fail on its magic number, not in struct
        HEADER.unpack(head) if len(head) == HEADER.size else (b"", 0, 0, b"", 0, 0)
    )
    # the tag comes first: nothing else of a frame is believed before it fits
    if magic != MAGIC or len(body) != length or tag != _tag(head + body):
        raise MessageFault("a message of the other party is damaged or cut off")
    if sender is not None and sent_by != sender:
        raise MessageFault(f"this party's own {_kind_name(sent_kind)} message, or one in its name, was sent back to it")
    if sent_session != session:
        raise MessageFault("a message of the other party belongs to another session: it is replayed or misdirected")
    if sent_number != number:
        raise MessageFault(
            f"message {sent_number} of the other party came where message {number} must: it is replayed or lost"
        )
    if sent_kind == MessageKind.ABORT:
        raise PartyEnded(f"the other party ended the run: {_reason(body)}")
    if sent_kind != kind:
        name = _kind_name(sent_kind)
        raise MessageFault(f"the other party sent message kind {sent_kind} ({name}) where {kind.name} must come")
    return _parts(body, kind, lengths)


def _parts(body: bytes, kind: MessageKind, lengths: Sequence[MessageLength]) -> list[bytes]:
    parts: list[bytes] = []
    place = 0
    for length in lengths:
        size = struct.unpack_from("<Q", body, place)[0] if place + 8 <= len(body) else -1
        place += 8
        if size < 0 or size > length.most or (length.exact and size != length.most) or place + size > len(body):
            raise MessageFault(f"part {len(parts) + 1} of the other party's {kind.name} message has the wrong length")
        parts.append(body[place : place + size])
        place += size
    if place != len(body):
        raise MessageFault(f"the other party's {kind.name} message has more parts than the {len(lengths)} declared")
    return parts


def _kind_name(number: int) -> str:
    return next((kind.name for kind in MessageKind if kind == number), "unknown")


def _reason(body: bytes) -> str:
    try:
        return EndReason(body[-1]).text
    except (ValueError, IndexError):
        return "it gave no reason"


def _tag(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=TAG).digest()
