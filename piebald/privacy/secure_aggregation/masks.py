"""Keys, masks, and who masks with whom: the members of a sum, that they are alike, and their neighbours.

Keys are agreed on by X25519 and derived from one another; boxes are for one reader.  Every secret of a client in one
round is derived from one root of 32 random bytes, so that it can say the same thing twice and never two things.  The
primitives are those of `cryptography`.

Members of a sum are alike: what one of them contributes follows from terms that name no client.  Masks hide one
contribution among others of its size.  Terms may be the same for all members, to the byte, and still say of single
clients that they train with another rate, send next to nothing, or hold all of their rows back: then the sum is the
contribution of those who are left.

The clients of one round and their neighbours are computed alike by server and clients (`MaskingGraph`).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from torch import Tensor

from piebald.contracts import MASKING, Component, SumDemands
from piebald.core.errors import Declined
from piebald.methods.training.base import Trainer
from piebald.privacy.secure_aggregation.security import SECURITY, exposure, quorum

KEY = 32  # bytes of a key
TAG = 16  # bytes that a box is longer than what is in it
_PIECE = 1 << 16  # numbers handled at a time, so that what a piece needs stays in the processor's cache

Words = str | bytes | int


def derive(secret: bytes, *words: Words, length: int = KEY) -> bytes:
    """Bytes that belong to a secret and these words alone (SHAKE256 over both, each with its length)."""
    digest = hashlib.shake_256()
    for word in (b"piebald secure aggregation", secret, *words):
        plain = word.encode() if isinstance(word, str) else str(word).encode() if isinstance(word, int) else word
        # with lengths, so that the words "ab", "c" and "a", "bc" give different keys
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
        # any private key will do: X25519 makes each a multiple of 8, so a point of low order always gives zeros
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
    # hashed with its purpose: the boxes of both directions between two clients have one X25519 output
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
    # all streams run in step, so each piece of the vector is in cache while every mask is added: one pass over memory
    streams = [key_stream(seed) for seed in (*plus, *minus)]
    width = vector.dtype.itemsize
    zeros = bytes(min(len(vector), _PIECE) * width)
    for start in range(0, len(vector), _PIECE):
        piece = vector[start : start + _PIECE]
        text = memoryview(zeros)[: len(piece) * width]
        for index, stream in enumerate(streams):
            mask = np.frombuffer(stream.update(text), vector.dtype)
            if index < len(plus):
                piece += mask
            else:
                piece -= mask


def key_stream(seed: bytes) -> CipherContext:
    """Return what turns zeros into the key stream of AES-256 in counter mode under a seed of 32 bytes."""
    # the counter may begin at 0 each time, since a seed gives one stream only
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
        # the top 53 bits times 2^-53 are exact in float64 and never reach 1; all 64 could be rounded up to it
        bits = np.frombuffer(stream.update(bytes(8 * len(piece))), dtype="<u8") >> np.uint64(11)
        # the fraction above the floor, also for negative numbers: truncation would round them towards 0
        below = np.floor(piece)
        rounded[start : start + _PIECE] = below.astype(np.int64) + (bits.astype(np.float64) * 2.0**-53 < piece - below)
    return rounded


# Settings of single clients, by number, name or pattern, wherever they stand.
CLIENT_FIELDS = frozenset(
    {"by_number", "by_site", "changes", "clients", "harmonised", "hold_out", "lacks", "shares", "test_only"}
)
_ALL_SITES = "experiment.partition.clients"  # the list of those who take part, which says nothing of any of them
_OF_OTHER_RUNS = {"recipes", "grid", "tune", "advise"}


def unlike_reason(
    training: Component, tables: Mapping[str, Any], experiment: Mapping[str, Any], works: Iterable[object]
) -> str | None:
    """Return why the members of a sum under masks would not all do the same, or None.

    Args:
        training: the trainer.
        tables: whatever else determines contributions, as plain values by the name of its setting.
        experiment: the experiment's settings, as plain values; empty where there are none.
        works: for each client, what is left of all this for that client alone.
    """
    settings = {key: value for key, value in experiment.items() if key not in _OF_OTHER_RUNS}
    named = next(_named_clients({"training": training.table(), **tables, "experiment": settings}), None)
    if named is not None:
        return (
            f"secure_aggregation hides contributions that are alike, and {named} says something of single clients: "
            "leave it out, or drop secure_aggregation"
        )
    if training.overrides(Trainer.own_models) or len({*works}) > 1:
        return (
            "secure_aggregation hides contributions that are alike, and here clients have models, inputs or settings "
            "of their own: give all of them the same, or drop secure_aggregation"
        )
    return None


def _named_clients(value: Any, path: str = "") -> Iterator[str]:
    """The settings of single clients in plain values, each by its path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            place = f"{path}.{key}" if path else str(key)
            # a number says how many clients there are
            says = isinstance(inner, Mapping | list | tuple | str) and len(inner) > 0
            if key in CLIENT_FIELDS and says and place != _ALL_SITES:
                yield place.removeprefix("experiment.")
            else:
                yield from _named_clients(inner, place)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _named_clients(inner, f"{path}[{number}]")


MEMBERS, KEYS, CONTEXT = MASKING + "members", MASKING + "keys", MASKING + "context"
SIZES, ABOUT = MASKING + "sizes", MASKING + "about"
SIZE = 2  # bytes of one


Neighbours = Mapping[int, tuple[int, ...]]


@runtime_checkable
class MasksOverGraph(Protocol):
    """A masking transform whose clients agree on keys with their neighbours in a graph; `SecureAggregation` is one."""

    @property
    def least(self) -> int:
        """Of how many clients a sum may be opened at least."""

    @property
    def neighbours(self) -> int | None:
        """With how many others a client masks, None for all of them."""

    def graph(self, members: Sequence[int], keys: Sequence[bytes], sizes: Sequence[int], about: bytes) -> MaskingGraph:
        """The graph of these clients, see `MaskingGraph.of`."""

    def size(self, rows: float, questions: bool) -> int:
        """What a client with so many rows announces that it counts."""

    def balanced(self, sizes: Mapping[int, int]) -> list[int]:
        """The clients, of those of these sizes, who may answer a question together."""

    def unbalanced_reason(self, graph: MaskingGraph) -> str | None:
        """Return why answers of these members are not added up, or None."""


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
        sizes: what each announces that it counts, see `transform.size_of`.
        about: digest of the sum, see `key_queries.round_digest`.
    """

    members: tuple[int, ...]
    keys: Mapping[int, bytes]
    threshold: int
    ring: tuple[int, ...]
    neighbours: Neighbours
    context: bytes
    sizes: Mapping[int, int]
    about: bytes

    @classmethod
    def of(
        cls, members: Sequence[int], keys: Sequence[bytes], threshold: float, k: int | None, settings: str,
        sizes: Sequence[int] = (), about: bytes = bytes(KEY),
    ) -> MaskingGraph:  # fmt: skip
        """The graph of these clients.

        Args:
            members: increasing client numbers.
            keys: of each, 64 bytes.
            threshold: a number of shares, or a share of them.
            k: neighbours of each client, even; None for all others.
            settings: what else all must agree on.
            sizes, about: see `MaskingGraph`; by default all count 1.

        Raises:
            Declined: it is no list, or too short for the threshold.
        """
        if sorted({*members}) != list(members) or len(keys) != len(members) or {*map(len, keys)} != {2 * KEY}:
            raise Declined("the list of clients is no list of different clients with a key each")
        holders, needed = shares_needed(len(members), threshold, k)
        # more than half, or one half of the holders could open a client's seed and the other half its key
        if not 2 <= needed <= holders or 2 * needed <= holders:
            raise Declined(
                f"{len(members)} clients are no graph for a threshold of {needed}: it takes at least 2, at least that "
                "many, and less than twice that many who hold shares of a key"
            )
        size_of = dict(zip(members, sizes or [0] * len(members), strict=False))
        if len(size_of) != len(members) or (sizes and len(sizes) != len(members)):
            raise Declined("the list of clients does not say what each of them counts")
        context = derive(b"".join(keys), "graph", settings, needed, about, *members, *size_of.values())
        ring, neighbours = _ring(tuple(members), holders, context)
        named = dict(zip(members, keys, strict=True))
        return cls(tuple(members), named, needed, ring, neighbours, context, size_of, about)

    @property
    def holders_each(self) -> int:
        """The number of clients that hold shares of a client's keys: its neighbours and itself."""
        return len(self.neighbours[self.members[0]]) + 1

    @property
    def complete(self) -> bool:
        """True if all are neighbours of all."""
        return self.holders_each == len(self.members)

    @property
    def quorum(self) -> int:
        """The number of clients that must sign one list of survivors: the same share of them as of a key's shares."""
        return quorum(len(self.members), self.holders_each, self.threshold)

    def fewest(self, least: int) -> int:
        """Return how many clients must arrive before a sum is opened, where `least` are demanded in any case."""
        return max(self.quorum, self.threshold, least)

    def holders(self, client: int) -> tuple[int, ...]:
        """Return who has shares of a client's keys: its neighbours and itself, increasing."""
        return tuple(sorted((*self.neighbours[client], client)))

    def place(self, client: int) -> int:
        """The x of a client's shares."""
        return self.members.index(client) + 1

    def vectors(self) -> dict[str, Tensor]:
        """The list as it travels."""
        return {
            MEMBERS: numbers(self.members),
            KEYS: rows([self.keys[client] for client in self.members], 2 * KEY),
            SIZES: packed_sizes([self.sizes[client] for client in self.members]),
            ABOUT: rows([self.about], KEY),
        }

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
        needed = self.fewest(least)
        if len(present) < needed:
            raise Declined(f"{len(present)} of {len(self.members)} clients arrived, it takes {needed}")
        if self.complete:
            return
        reach = self.holders_each // 2
        on_ring = np.array([client in present for client in self.ring])
        # both ends of the ring are repeated, so one cumulative sum counts all neighbourhoods, in time linear in clients
        sums = np.concatenate(([0], np.cumsum(np.concatenate((on_ring[-reach:], on_ring, on_ring[:reach])))))
        near = int((sums[2 * reach + 1 :] - sums[: -2 * reach - 1])[on_ring].min())
        if near < self.threshold:
            raise Declined(f"of those who hold shares of one client {near} arrived, it takes {self.threshold}")
        places = np.flatnonzero(on_ring)
        gaps = np.diff(np.append(places, places[0] + len(self.ring))) - 1
        # one gap only opens the ring into a line that still hangs together; it takes two to cut off a part
        if int((gaps >= reach).sum()) > 1:
            raise Declined("those who arrived fall into parts that share no mask")


def shares_needed(clients: int, threshold: float, neighbours: int | None) -> tuple[int, int]:
    """Return how many of so many clients hold shares of one's keys, and how many shares open a mask.

    Args:
        clients: n.
        threshold: a number of shares, or a share of them.
        neighbours: of each client; None for all others.
    """
    holders = clients if neighbours is None else min(neighbours + 1, clients)
    # rounded before ceil: 0.56 * 25 is 14.000000000000002 in floating point, which ceil would make 15
    return holders, threshold if isinstance(threshold, int) else math.ceil(round(threshold * holders, 9))


@lru_cache(maxsize=8)
def _ring(members: tuple[int, ...], holders: int, context: bytes) -> tuple[tuple[int, ...], Neighbours]:
    """The ring, and each client's neighbours on it; kept, since all clients of a simulation ask for the same one."""
    if holders == len(members):
        return members, {client: tuple(member for member in members if member != client) for client in members}
    ring = tuple(sorted(members, key=lambda client: derive(context, "ring", client)))
    reach = (holders - 1) // 2
    return ring, {
        client: tuple(sorted(ring[(index + step) % len(ring)] for step in range(-reach, reach + 1) if step))
        for index, client in enumerate(ring)
    }


def rows(texts: Sequence[bytes], length: int) -> Tensor:
    """Texts of one length as a uint8 tensor [n, length]."""
    # torch warns of memory that is read-only and refuses an empty buffer, hence a byte that the slice drops again
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


def packed_sizes(sizes: Sequence[int]) -> Tensor:
    """Sizes of members (`transform.size_of`) as a uint8 tensor [n, 2]."""
    return rows([size.to_bytes(SIZE, signed=True) for size in sizes], SIZE)


def sizes_in(tensor: Tensor | None) -> list[int]:
    """The sizes in such a tensor.

    Raises:
        Declined: it is something else.
    """
    return [int.from_bytes(text, signed=True) for text in texts(tensor, SIZE)]


def numbers(clients: Sequence[int]) -> Tensor:
    """Client numbers as an int64 tensor."""
    return torch.tensor(list(clients), dtype=torch.int64)


def clients_in(tensor: Tensor | None) -> list[int]:
    """Increasing client numbers from a tensor.

    Raises:
        Declined: it is something else.
    """
    numbers: Any = None if tensor is None or tensor.dtype != torch.int64 or tensor.dim() != 1 else tensor.tolist()
    # each once: a client that is listed twice would count twice towards a threshold
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
    # two lists that both have a quorum share 2 q - n signers, who must be more than those that collude
    sure = 2 * graph.quorum - clients > bad and shares > bad
    if sure and (graph.complete or exposure(clients, holders - 1, shares, bad) <= 2.0**-SECURITY):
        return None
    return (
        f"{bad} of {clients} clients that collude could open an update with {holders - 1} neighbours and a threshold "
        f"of {shares}: raise them, or leave neighbours out"
    )
