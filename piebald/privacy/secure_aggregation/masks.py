"""Keys and masks: agreement by X25519, one key from another, boxes for one reader, and the masks' numbers.

Every secret of a client in one round is derived from one root of 32 random bytes, so that it can say the same
thing twice and never two things.  The primitives are those of `cryptography`.

The clients of one round of secure aggregation and their neighbours, computed alike by server and clients.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from torch import Tensor

from piebald.contracts import MASKING, SumDemands
from piebald.core.errors import Declined
from piebald.privacy.secure_aggregation.security import SECURITY, exposure, quorum

KEY = 32  # bytes of a key
TAG = 16  # bytes that a box is longer than what is in it
_PIECE = 1 << 16  # numbers handled at a time, so that what a piece needs stays in the processor's cache

Words = str | bytes | int
MEMBERS, KEYS, CONTEXT = MASKING + "members", MASKING + "keys", MASKING + "context"

Neighbours = Mapping[int, tuple[int, ...]]


def derive(secret: bytes, *words: Words, length: int = KEY) -> bytes:
    """Bytes that belong to a secret and these words alone (SHAKE256 over both, each with its length)."""
    digest = hashlib.shake_256()
    for word in (b"piebald secure aggregation", secret, *words):
        plain = word.encode() if isinstance(word, str) else str(word).encode() if isinstance(word, int) else word
        digest.update(struct.pack("<Q", len(plain)) + plain)
    return digest.digest(length)


def private_key(root: bytes, purpose: str) -> bytes:
    """The private key that a root gives for a purpose."""
    return derive(root, "key", purpose)


def public_key(private: bytes) -> bytes:
    """The public key that belongs to a private one, 32 bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def is_public_key(theirs: bytes) -> bool:
    """Return whether keys can be agreed on with a public key; with a point of low order nobody can."""
    try:
        agree(bytes(KEY), theirs)
    except Declined:
        return False
    return True


def agree(private: bytes, theirs: bytes, *words: Words) -> bytes:
    """The 32 bytes that both sides come to (X25519, RFC 7748), for these words.

    Raises:
        Declined: the other key is none.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError:  # a point of low order: everybody would know what comes out
        raise Declined("a public key in the list is no key") from None
    return derive(shared, *words)


def encrypt_box(key: bytes, text: bytes) -> bytes:
    """Text that only who has the key can read or change.  A key masks one text: the nonce is always 0."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), text, None)


def decrypt_box(key: bytes, box: bytes) -> bytes:
    """Return what is in a box.

    Raises:
        Declined: it was made with another key, or changed.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), box, None)
    except InvalidTag:
        raise Declined("a share was changed on its way, or made for another list of clients") from None


def add_masks(vector: np.ndarray[Any, Any], plus: Sequence[bytes], minus: Sequence[bytes]) -> None:
    """Add the masks of some seeds to a vector of unsigned numbers and take those of others away, in place.

    A mask is the key stream of AES-256 in counter mode under its seed, read as numbers of the vector's type; arithmetic
    wraps around.  A seed is used for one mask only.
    """
    streams = [key_stream(seed) for seed in (*plus, *minus)]
    width = vector.dtype.itemsize
    zeros = bytes(min(len(vector), _PIECE) * width)
    for start in range(0, len(vector), _PIECE):
        piece = vector[start : start + _PIECE]
        text = memoryview(zeros)[: len(piece) * width]
        for place, stream in enumerate(streams):
            mask = np.frombuffer(stream.update(text), vector.dtype)
            if place < len(plus):
                piece += mask
            else:
                piece -= mask


def key_stream(seed: bytes) -> CipherContext:
    """Return what turns zeros into the key stream of AES-256 in counter mode under a seed of 32 bytes."""
    return Cipher(algorithms.AES256(seed), modes.CTR(bytes(16))).encryptor()


def round_stochastically(numbers: np.ndarray[Any, Any], seed: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Round up with the probability of the fraction, so that sums of many numbers stay right.

    Rounding to the nearest makes a bias of many small numbers: 0.3 of a thousand clients would add up to 0.

    Args:
        numbers: float64 [n], below 2^62 in absolute value.
        seed: 32 bytes; its key stream says which way each number goes, so the same seed rounds the same way again.
    """
    stream, rounded = key_stream(seed), np.empty(len(numbers), np.int64)
    for start in range(0, len(numbers), _PIECE):
        piece = numbers[start : start + _PIECE]
        bits = np.frombuffer(stream.update(bytes(8 * len(piece))), dtype="<u8") >> np.uint64(11)
        below = np.floor(piece)
        rounded[start : start + _PIECE] = below.astype(np.int64) + (bits.astype(np.float64) * 2.0**-53 < piece - below)
    return rounded


@dataclass(frozen=True, slots=True)
class MaskingGraph:
    """Clients with their public keys.

    Neighbours mask pairwise and hold shares of one another's keys.  With k neighbours the clients lie on a ring, in an
    order that follows from all their keys, and each has k / 2 on either side (a Harary graph; Bell et al. 2020,
    SecAgg+).  Every client gets the whole list, and all that is derived has its digest in it, so clients who were
    given different lists do not understand one another.

    Attributes:
        members: client numbers, increasing.
        keys: of each, 64 bytes: the public key of its masks, then that of its boxes.
        threshold: how many shares open a mask, more than half of those there are.
        ring: the clients in the order of the ring.
        neighbours: of each client, increasing.
        context: digest of the list and the settings.
    """

    members: tuple[int, ...]
    keys: Mapping[int, bytes]
    threshold: int
    ring: tuple[int, ...]
    neighbours: Neighbours
    context: bytes

    @classmethod
    def of(
        cls, members: Sequence[int], keys: Sequence[bytes], threshold: float, k: int | None, settings: str
    ) -> MaskingGraph:
        """The graph of these clients.

        Args:
            members: increasing client numbers.
            keys: of each, 64 bytes.
            threshold: a number of shares, or a share of them.
            k: neighbours of each client, even; None for all others.
            settings: what else all must agree on.

        Raises:
            Declined: it is no list, or too short for the threshold.
        """
        if sorted({*members}) != list(members) or len(keys) != len(members) or {*map(len, keys)} != {2 * KEY}:
            raise Declined("the list of clients is no list of different clients with a key each")
        holders = len(members) if k is None else min(k + 1, len(members))
        needed = threshold if isinstance(threshold, int) else math.ceil(round(threshold * holders, 9))
        if not 2 <= needed <= holders or 2 * needed <= holders:
            raise Declined(
                f"{len(members)} clients are no graph for a threshold of {needed}: it takes at least 2, at least that "
                "many, and less than twice that many who hold shares of a key"
            )
        context = derive(b"".join(keys), "graph", settings, needed, *members)
        ring, neighbours = _ring(tuple(members), holders, context)
        return cls(tuple(members), dict(zip(members, keys, strict=True)), needed, ring, neighbours, context)

    @property
    def holders_each(self) -> int:
        """The number of hold shares of a client's keys: its neighbours and itself."""
        return len(self.neighbours[self.members[0]]) + 1

    @property
    def complete(self) -> bool:
        """True if all are neighbours of all."""
        return self.holders_each == len(self.members)

    @property
    def quorum(self) -> int:
        """The number of clients must sign one list of survivors: the same share of them as of a key's shares."""
        return quorum(len(self.members), self.holders_each, self.threshold)

    def holders(self, client: int) -> tuple[int, ...]:
        """Return who has shares of a client's keys: its neighbours and itself, increasing."""
        return tuple(sorted((*self.neighbours[client], client)))

    def place(self, client: int) -> int:
        """The x of a client's shares."""
        return self.members.index(client) + 1

    def vectors(self) -> dict[str, Tensor]:
        """The list as it travels."""
        return {MEMBERS: numbers(self.members), KEYS: rows([self.keys[client] for client in self.members], 2 * KEY)}

    def check_survivors(self, survivors: Collection[int], least: int) -> None:
        """Refuse a list of survivors whose sum must not be opened.

        Each of them needs `threshold` survivors among those who hold its shares, and together they must not fall into
        parts that share no mask: the sum of each part could be read.  On a ring, parts are cut off where all of k / 2
        places in a row are missing, twice.

        Args:
            survivors: whose masked updates arrived.
            least: so many there must be at least; the quorum is demanded in any case.

        Raises:
            Declined: it is not of these clients, or too short, or leaves parts.
        """
        present = {*survivors}
        if not present <= {*self.members}:
            raise Declined("the list of survivors is not of this sum")
        needed = max(self.quorum, self.threshold, least)
        if len(present) < needed:
            raise Declined(f"{len(present)} of {len(self.members)} clients arrived, it takes {needed}")
        if self.complete:
            return
        reach = self.holders_each // 2
        on_ring = np.array([client in present for client in self.ring])
        sums = np.concatenate(([0], np.cumsum(np.concatenate((on_ring[-reach:], on_ring, on_ring[:reach])))))
        near = int((sums[2 * reach + 1 :] - sums[: -2 * reach - 1])[on_ring].min())
        if near < self.threshold:
            raise Declined(f"of those who hold shares of one client {near} arrived, it takes {self.threshold}")
        places = np.flatnonzero(on_ring)
        gaps = np.diff(np.append(places, places[0] + len(self.ring))) - 1
        if int((gaps >= reach).sum()) > 1:
            raise Declined("those who arrived fall into parts that share no mask")


@lru_cache(maxsize=8)
def _ring(members: tuple[int, ...], holders: int, context: bytes) -> tuple[tuple[int, ...], Neighbours]:
    """The ring, and each client's neighbours on it; kept, since all clients of a simulation ask for the same one."""
    if holders == len(members):
        return members, {client: tuple(member for member in members if member != client) for client in members}
    ring = tuple(sorted(members, key=lambda client: derive(context, "ring", client)))
    reach = (holders - 1) // 2
    return ring, {
        client: tuple(sorted(ring[(place + step) % len(ring)] for step in range(-reach, reach + 1) if step))
        for place, client in enumerate(ring)
    }


# ------------------------------------------------------------------------------------------ bytes as tensors, and back


def rows(texts: Sequence[bytes], length: int) -> Tensor:
    """Texts of one length as a uint8 tensor [n, length]."""
    return torch.frombuffer(bytearray(b"".join(texts)) or bytearray(1), dtype=torch.uint8)[: len(texts) * length].view(
        -1, length
    )


def texts(tensor: Tensor | None, length: int) -> list[bytes]:
    """The rows of a uint8 tensor [n, length].

    Raises:
        Declined: it is something else.
    """
    if tensor is None or tensor.dtype != torch.uint8 or tensor.dim() != 2 or tensor.shape[1] != length:
        raise Declined(f"what should be rows of {length} bytes is something else")
    return [row.tobytes() for row in tensor.contiguous().numpy()]


def numbers(clients: Sequence[int]) -> Tensor:
    """Client numbers as an int64 tensor."""
    return torch.tensor(list(clients), dtype=torch.int64)


def clients_in(tensor: Tensor | None) -> list[int]:
    """Increasing client numbers from a tensor.

    Raises:
        Declined: it is something else.
    """
    numbers: Any = None if tensor is None or tensor.dtype != torch.int64 or tensor.dim() != 1 else tensor.tolist()
    if numbers is None or sorted({*numbers}) != numbers or (numbers and numbers[0] < 0):
        raise Declined("what should be increasing client numbers is something else")
    return list(map(int, numbers))


def demands_reject_reason(graph: MaskingGraph, demands: SumDemands) -> str | None:
    """The reason why a client takes no part in a sum over this graph, or None."""
    clients, holders, shares = len(graph.members), graph.holders_each, graph.threshold
    if shares < round(demands.threshold * holders, 9):
        return (
            f"{shares} of {holders} shares open a mask, this site demands a share of {demands.threshold:.3g}: raise "
            "secure_aggregation's threshold"
        )
    if not graph.complete and demands.neighbours is not None and holders - 1 < demands.neighbours:
        return (
            f"clients have {holders - 1} neighbours, this site demands {demands.neighbours}: raise "
            "secure_aggregation's neighbours"
        )
    bad = math.floor(demands.colluding * clients)
    sure = 2 * graph.quorum - clients > bad and shares > bad
    if sure and (graph.complete or exposure(clients, holders - 1, shares, bad) <= 2.0**-SECURITY):
        return None
    return (
        f"{bad} of {clients} clients that collude could open an update with {holders - 1} neighbours and a threshold "
        f"of {shares}: raise them, or leave neighbours out"
    )
