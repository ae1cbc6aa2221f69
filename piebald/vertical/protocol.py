"""A session of two parties: the handshake, the exchange of keys, and products under encryption.

hello  ->  <- hello        settings must agree; the run starts from the last step that both can resume
key    ->  <- key          each party owns a key; there is no third party
then for every step, in both directions at once:
statistics -> masked -> decrypted       constants, which need no product, are told with the statistics
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from piebald.core.errors import RuntimeFault
from piebald.vertical.channel import Channel
from piebald.vertical.encryption.backend import Backend, InvalidMessage, MessageLength, in_range
from piebald.vertical.kernels import Floats, ProductSize, ProductStatistics
from piebald.vertical.party_messages import (
    EndReason,
    MessageFault,
    MessageKind,
    PartyEnded,
    limit,
    pack_frame,
    unpack_frame,
)

VERSION = 6
Role = Literal["source", "target"]
ROLES: tuple[Role, Role] = ("source", "target")
HELLO = [MessageLength(2), MessageLength(1), MessageLength(32), MessageLength(16), MessageLength(16)]
FILE = "the same file and the same --set options"
REMEDIES = {  # by what the settings of a handshake hold
    "keys": f"{FILE}, and tables with the same keys",
    "rows": f"{FILE}, and --key to both or to neither",
    "match": "the same --kind, --learns, --floor and --country",
}
NOBODY = bytes(16)  # the session id of the first message


class SettingsDiffer(RuntimeFault):
    """The parties were started with different settings."""

    exit_code = 2


class PartySession:
    """One party's end of a connection, from the handshake to the end of the run.

    Args:
        channel: channel to the other party.
        role: role of this party.
        timeout: seconds to wait for a message.
    """

    def __init__(self, channel: Channel, role: Role, timeout: float = 600.0) -> None:
        self.channel, self.role, self.timeout = channel, role, timeout
        self._session = NOBODY
        self._sent = self._received = 0

    def send(self, kind: MessageKind, parts: Sequence[bytes]) -> None:
        """Send a message."""
        sender = ROLES.index(self.role)
        self.channel.send(pack_frame(kind, sender, self._session, self._sent, parts))
        self._sent += 1

    def receive(self, kind: MessageKind, lengths: Sequence[MessageLength]) -> list[bytes]:
        """Receive the expected message."""
        # an ABORT may come in place of a shorter message, such as DONE
        frame = self.channel.receive(max(limit(lengths), 64), self.timeout)
        # HELLO may come from either role, so that two parties of the same role get a sentence of their own
        sender = None if kind is MessageKind.HELLO else 1 - ROLES.index(self.role)
        parts = unpack_frame(frame, kind, sender, self._session, self._received, lengths)
        self._received += 1
        return parts

    @property
    def id(self) -> bytes:
        """The id of this session, from both parties' nonces."""
        return self._session

    def finish(self) -> None:
        """Wait for the other party to have all messages: the connection closes after this."""
        self.send(MessageKind.DONE, [])
        self.receive(MessageKind.DONE, [])

    @contextmanager
    def reading(self, kind: MessageKind) -> Iterator[None]:
        """Name the message in errors about what it contains."""
        try:
            yield
        except MessageFault:
            raise
        except InvalidMessage as error:
            raise MessageFault(f"the other party's {kind.name} message is refused: {error}") from None

    def handshake(
        self, settings: Mapping[str, Any], steps: tuple[int, int] = (0, 0), nonce: bytes | None = None
    ) -> int:
        """Agree on settings, and on the step to start from.

        Args:
            settings: all settings that must be the same on both sides.
            steps: the last two steps that this party can resume.
            nonce: 16 bytes, by which a session is the same again where both parties repeat it; fresh by default.

        Returns:
            The last step that both can resume.
        """
        # sorted, so that the digest does not depend on the order in which settings were written
        text = json.dumps(settings, sort_keys=True).encode()
        # of each role its own: who waits for this party's could send it back without knowing what it is of
        digests = {role: hashlib.blake2b(text, digest_size=32, person=role.encode()).digest() for role in ROLES}
        digest, expected = digests[self.role], digests["target" if self.role == "source" else "source"]
        role, nonce = bytes([ROLES.index(self.role)]), nonce or secrets.token_bytes(16)
        self.send(MessageKind.HELLO, [struct.pack("<H", VERSION), role, digest, nonce, struct.pack("<2q", *steps)])
        version, partner_role, partner_digest, partner_nonce, resumable = self.receive(MessageKind.HELLO, HELLO)
        if struct.unpack("<H", version)[0] != VERSION:
            raise SettingsDiffer(
                f"the other party speaks version {struct.unpack('<H', version)[0]} of the protocol and this one "
                f"{VERSION}: install the same Piebald on both sides"
            )
        # the sender of HELLO is not checked, so a reflected one is recognised by its nonce
        if partner_nonce == nonce:
            raise MessageFault("this party's own HELLO message was sent back to it")
        if partner_role == role:
            raise SettingsDiffer(f"both parties say they are the {self.role}: start one as the other")
        if partner_digest != expected:
            remedy = next((REMEDIES[name] for name in REMEDIES if name in settings), FILE)
            raise SettingsDiffer(f"the two parties' settings differ: give both {remedy}")
        common = set(steps) & set(struct.unpack("<2q", resumable))
        if not common:
            raise SettingsDiffer(
                f"the two parties have no checkpoint of the same step: this one goes on from step {max(steps)} and the "
                f"other one from step {max(struct.unpack('<2q', resumable))}, and none goes back to a checkpoint that "
                "was passed, since other steps in place of those would tell more about its rows: start both again, "
                "each in a new folder"
            )
        first, second = (nonce, partner_nonce) if self.role == "source" else (partner_nonce, nonce)
        # from both nonces, so that neither party alone can make a session repeat
        self._session = hashlib.blake2b(first + second, digest_size=16).digest()
        return max(common)

    @contextmanager
    def closing(self, stays: bool = False) -> Iterator[None]:
        """Close the channel at the end; after an error, first send the other party the reason as one number.

        Args:
            stays: whether the channel stays open without an error.
        """
        stays_open = False
        try:
            yield
            stays_open = stays
        # nobody is left to read a reason
        except PartyEnded:
            raise
        except (Exception, KeyboardInterrupt) as error:
            reasons = {
                KeyboardInterrupt: EndReason.INTERRUPTED,
                SettingsDiffer: EndReason.SETTINGS,
                InvalidMessage: EndReason.MESSAGE,
            }
            reason = next((reason for kind, reason in reasons.items() if isinstance(error, kind)), EndReason.BROKEN)
            self.send(MessageKind.ABORT, [bytes([reason])])
            raise
        finally:
            if not stays_open:
                self.channel.close()


class Products:
    """Products in both directions at once, of this party's statistics and of the other party's.

    Args:
        session: a session after its handshake; keys are exchanged here.
        backend: the encryption backend.
        owned: sizes of the products of this party's statistics.
        requested: sizes of the products of the other party's statistics.
        clamp: whether results outside their range are clamped, in place of an error (`in_range`).
    """

    def __init__(
        self, session: PartySession, backend: Backend, owned: Sequence[ProductSize], requested: Sequence[ProductSize],
        clamp: bool = False,
    ) -> None:  # fmt: skip
        self._session, self._backend, self._clamp = session, backend, clamp
        self.owned, self.requested = list(owned), list(requested)
        theirs, ours = ([size for size in sizes if size.inner] for sizes in (self.owned, self.requested))
        self._owner = backend.owner(theirs)
        session.send(MessageKind.KEY, [self._owner.announcement])
        (announced,) = session.receive(MessageKind.KEY, [backend.announced(ours)])
        with session.reading(MessageKind.KEY):
            self._evaluator = backend.evaluator(announced, ours)

    def exchange(
        self, statistics: Sequence[ProductStatistics], coefficients: Sequence[Floats], repeats: Sequence[int] = (),
        repeated: Sequence[int] = (),
    ) -> list[Floats]:  # fmt: skip
        """Exchange statistics for products with this party's coefficients.

        Args:
            statistics: this party's statistics, one for each of `owned`.
            coefficients: coefficients, one for each of `requested`, then one for each of `repeats`.
            repeats: numbers of products of `requested` that this party requests once more.
            repeated: numbers of products of `owned` that the other party requests once more.

        Returns:
            C S + K for each matrix of coefficients.
        """
        session, backend, lengths = self._session, self._backend, self._backend.lengths
        # both parties send before they read, in every phase: each works while the other's message is under way
        told = [
            self._owner.encrypt(part.matrix, size) if size.inner else backend.told(part.constant, size)
            for part, size in zip(statistics, self.owned, strict=True)
        ]
        session.send(MessageKind.STATISTICS, told)
        places = [*range(len(self.requested)), *repeats]
        products = [place for place in places if self.requested[place].inner]
        sizes = [self.requested[place] for place in products]
        # encoded while the other party encrypts and its message is under way
        given = [c for c, place in zip(coefficients, places, strict=True) if self.requested[place].inner]
        prepared = [self._evaluator.prepare(c, size) for c, size in zip(given, sizes, strict=True)]

        expected = [
            lengths(size)[0] if size.inner else MessageLength(8 * size.rows * size.width) for size in self.requested
        ]
        received = session.receive(MessageKind.STATISTICS, expected)
        with session.reading(MessageKind.STATISTICS):
            masked = [
                self._evaluator.multiply(received[place], ready, size)
                for place, ready, size in zip(products, prepared, sizes, strict=True)
            ]
        session.send(MessageKind.MASKED, [blob for blob, _ in masked])

        answered = [place for place in (*range(len(self.owned)), *repeated) if self.owned[place].inner]
        theirs = session.receive(MessageKind.MASKED, [lengths(self.owned[place])[1] for place in answered])
        with session.reading(MessageKind.MASKED):
            decrypted = [
                self._owner.decrypt(blob, self.owned[place], statistics[place].constant)
                for blob, place in zip(theirs, answered, strict=True)
            ]
        session.send(MessageKind.DECRYPTED, decrypted)

        ours = session.receive(MessageKind.DECRYPTED, [lengths(size)[2] for size in sizes])
        with session.reading(MessageKind.DECRYPTED):
            unmasked = (
                self._evaluator.unmask(blob, mask, size)
                for blob, (_, mask), size in zip(ours, masked, sizes, strict=True)
            )
            return [
                in_range(next(unmasked) if size.inner else backend.heard(received[place], size), size, self._clamp)
                for place, size in ((place, self.requested[place]) for place in places)
            ]


def send_numbers(session: PartySession, kind: MessageKind, numbers: Floats) -> None:
    """Send numbers without encryption that both parties may know."""
    session.send(kind, [np.asarray(numbers, dtype="<f8").tobytes()])


def receive_numbers(session: PartySession, kind: MessageKind, count: int, most: float = 1e30) -> Floats:
    """Receive numbers without encryption; each must be finite, and at most `most` in absolute value."""
    (data,) = session.receive(kind, [MessageLength(8 * count)])
    numbers = np.frombuffer(data, "<f8").astype(np.float64)
    if not np.isfinite(numbers).all():
        raise MessageFault(f"the other party's {kind.name} message holds numbers that are not finite")
    if np.any(np.abs(numbers) > most):
        raise MessageFault(f"the other party's {kind.name} message holds numbers beyond {most:g}")
    return numbers
