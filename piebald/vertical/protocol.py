"""A session of two parties: who they are, their keys, and products with nothing else exchanged.

hello  ->  <- hello        settings must agree; the later of the steps that both can resume is taken
key    ->  <- key          each party owns a key; there is no third party
then for every step, both ways at once:
statistics -> masked -> opened
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

from piebald.errors import RuntimeFault
from piebald.vertical.channel import Channel
from piebald.vertical.encryption.backend import Backend, Garbled, MessageLength
from piebald.vertical.kernels import Floats, MatrixShare, Size
from piebald.vertical.party_messages import EndReason, MessageFault, MessageKind, PartyEnded, limit, seal, unseal

VERSION = 1
Role = Literal["source", "target"]
ROLES: tuple[Role, Role] = ("source", "target")
HELLO = [MessageLength(2), MessageLength(1), MessageLength(32), MessageLength(16), MessageLength(16)]
NOBODY = bytes(16)  # the session of the first message


class SettingsDiffer(RuntimeFault):
    """The parties were started with different settings."""

    exit_code = 2


class PartySession:
    """One party's end of a connection, from the greeting to the farewell.

    Args:
        channel: how frames travel.
        role: which party this is.
        timeout: seconds to wait for a message.
        secret: shared by both parties, up to 64 bytes; none by default.
    """

    def __init__(self, channel: Channel, role: Role, timeout: float = 600.0, secret: bytes = b"") -> None:
        self.channel, self.role, self.timeout = channel, role, timeout
        self._secret, self._session = secret, NOBODY
        self._sent = self._received = 0

    def send(self, kind: MessageKind, parts: Sequence[bytes]) -> None:
        """Send a message."""
        self.channel.send(seal(kind, self._session, self._sent, parts, self._secret))
        self._sent += 1

    def receive(self, kind: MessageKind, lengths: Sequence[MessageLength]) -> list[bytes]:
        """The message that must come now."""
        frame = self.channel.receive(max(limit(lengths), 64), self.timeout)
        parts = unseal(frame, kind, self._session, self._received, lengths, self._secret)
        self._received += 1
        return parts

    def greet(self, settings: Mapping[str, Any], steps: tuple[int, int] = (0, 0)) -> int:
        """Agree on settings, and on the step to start from.

        Args:
            settings: all that must be the same on both sides.
            steps: the last two steps that this party has kept.

        Returns:
            The largest step that both have.
        """
        text = json.dumps(settings, sort_keys=True).encode()
        digest, nonce = hashlib.blake2b(text, digest_size=32).digest(), secrets.token_bytes(16)
        role = bytes([ROLES.index(self.role)])
        self.send(MessageKind.HELLO, [struct.pack("<H", VERSION), role, digest, nonce, struct.pack("<2q", *steps)])
        version, other, theirs, noise, kept = self.receive(MessageKind.HELLO, HELLO)
        if struct.unpack("<H", version)[0] != VERSION:
            raise SettingsDiffer(
                f"the other party speaks version {struct.unpack('<H', version)[0]} of the protocol and this one "
                f"{VERSION}: install the same Piebald on both sides"
            )
        if other == role:
            raise SettingsDiffer(f"both parties say they are the {self.role}: start one as the other")
        if theirs != digest:
            keys = ", and tables with the same keys" if "keys" in settings else ""
            raise SettingsDiffer(
                f"the two parties' settings differ: give both the same file and the same --set options{keys}"
            )
        common = set(steps) & set(struct.unpack("<2q", kept))
        if not common:
            raise SettingsDiffer(
                "the two parties kept no checkpoint of the same step: start both again, each in a new folder"
            )
        first, second = (nonce, noise) if self.role == "source" else (noise, nonce)
        self._session = hashlib.blake2b(first + second, digest_size=16).digest()
        return max(common)

    @contextmanager
    def farewell(self) -> Iterator[None]:
        """Tell the other party why this one ends, in one number, if it ends before its time."""
        try:
            yield
        except PartyEnded:
            raise
        except (Exception, KeyboardInterrupt) as error:
            known = {
                KeyboardInterrupt: EndReason.INTERRUPTED,
                SettingsDiffer: EndReason.SETTINGS,
                Garbled: EndReason.MESSAGE,
            }
            reason = next((reason for kind, reason in known.items() if isinstance(error, kind)), EndReason.BROKEN)
            self.send(MessageKind.ABORT, [bytes([reason])])
            raise
        finally:
            self.channel.close()


class Products:
    """Products both ways at once: this party owns some statistics, and asks about the other's.

    Args:
        session: a greeted session; keys are exchanged here.
        backend: the encryption.
        owned: shapes of the products of this party's statistics.
        asked: shapes of those of the other's.
    """

    def __init__(self, session: PartySession, backend: Backend, owned: Sequence[Size], asked: Sequence[Size]) -> None:
        self._session, self._backend = session, backend
        self.owned, self.asked = list(owned), list(asked)
        self._owner = backend.owner(self.owned)
        session.send(MessageKind.KEY, [self._owner.announcement])
        (announced,) = session.receive(MessageKind.KEY, [backend.announced()])
        self._evaluator = backend.evaluator(announced)

    def exchange(
        self,
        shares: Sequence[MatrixShare],
        questions: Sequence[Floats],
        repeats: Sequence[int] = (),
        repeated: Sequence[int] = (),
    ) -> list[Floats]:
        """Give one's shares, ask one's questions.

        Args:
            shares: this party's statistics, one for each of `owned`.
            questions: coefficients, one for each of `asked`, then one for each of `repeats`.
            repeats: numbers of products of `asked` that are asked once more.
            repeated: numbers of products of `owned` that the other party asks once more.

        Returns:
            C S + K for each question.
        """
        session, lengths = self._session, self._backend.lengths
        encrypted = [self._owner.encrypt(share.matrix, size) for share, size in zip(shares, self.owned, strict=True)]
        session.send(MessageKind.STATISTICS, encrypted)
        places = [*range(len(self.asked)), *repeats]
        asked = [self.asked[place] for place in places]
        prepared = [self._evaluator.prepare(c, size) for c, size in zip(questions, asked, strict=True)]

        given = session.receive(MessageKind.STATISTICS, [lengths(size)[0] for size in self.asked])
        masked = [
            self._evaluator.multiply(given[place], ready, size)
            for place, ready, size in zip(places, prepared, asked, strict=True)
        ]
        session.send(MessageKind.MASKED, [blob for blob, _ in masked])

        answered = [*range(len(self.owned)), *repeated]
        theirs = session.receive(MessageKind.MASKED, [lengths(self.owned[place])[1] for place in answered])
        opened = [
            self._owner.open(blob, self.owned[place], shares[place].constant)
            for blob, place in zip(theirs, answered, strict=True)
        ]
        session.send(MessageKind.OPENED, opened)

        ours = session.receive(MessageKind.OPENED, [lengths(size)[2] for size in asked])
        return [
            self._evaluator.unmask(blob, mask, size) for blob, (_, mask), size in zip(ours, masked, asked, strict=True)
        ]


def send_numbers(session: PartySession, kind: MessageKind, numbers: Floats) -> None:
    """Send plain numbers: those that are meant to be known to both."""
    session.send(kind, [np.asarray(numbers, dtype="<f8").tobytes()])


def receive_numbers(session: PartySession, kind: MessageKind, count: int) -> Floats:
    """Plain numbers; each must be finite."""
    (data,) = session.receive(kind, [MessageLength(8 * count)])
    numbers = np.frombuffer(data, "<f8").astype(np.float64)
    if not np.isfinite(numbers).all():
        raise MessageFault(f"the other party's {kind.name} message holds numbers that are not finite")
    return numbers
