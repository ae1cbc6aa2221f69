"""The clients of one round of secure aggregation and their neighbours, computed alike by server and clients."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from piebald.contracts import MASKING, SumDemands
from piebald.core.errors import Declined
from piebald.privacy.secure_aggregation.masks import KEY, derive
from piebald.privacy.secure_aggregation.security import SECURITY, exposure, quorum

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

    def size(self, rows: int, questions: bool) -> int:
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
        sizes: what each announces that it counts, see `sizes.size_of`.
        about: digest of the sum, see `key_material.round_digest`.
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
        client: tuple(sorted(ring[(place + step) % len(ring)] for step in range(-reach, reach + 1) if step))
        for place, client in enumerate(ring)
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
    """Sizes of members (`sizes.size_of`) as a uint8 tensor [n, 2]."""
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
