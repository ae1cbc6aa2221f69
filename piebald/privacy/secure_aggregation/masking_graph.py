"""The clients of a round of secure aggregation and their neighbours, computed alike by server and clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piebald.contracts import MASKING
from piebald.errors import Declined
from piebald.privacy.secure_aggregation.masks import KEY, derive

MEMBERS, KEYS, CONTEXT = MASKING + "members", MASKING + "keys", MASKING + "context"


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
        neighbours: of each client, increasing.
        context: digest of the list and the settings.
    """

    members: tuple[int, ...]
    keys: Mapping[int, bytes]
    threshold: int
    neighbours: Mapping[int, tuple[int, ...]]
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
        wanted = threshold if isinstance(threshold, int) else math.ceil(round(threshold * holders, 9))
        if not 2 <= wanted <= holders or 2 * wanted <= holders:
            raise Declined(
                f"{len(members)} clients are no graph for a threshold of {wanted}: it takes at least 2, at least that "
                "many, and less than twice that many who hold shares of a key"
            )
        context = derive(b"".join(keys), "graph", settings, wanted, *members)
        return cls(
            tuple(members),
            dict(zip(members, keys, strict=True)),
            wanted,
            _neighbours(members, holders, context),
            context,
        )

    def holders(self, client: int) -> tuple[int, ...]:
        """Who has shares of a client's keys: its neighbours and itself, increasing."""
        return tuple(sorted((*self.neighbours[client], client)))

    def place(self, client: int) -> int:
        """The x of a client's shares."""
        return self.members.index(client) + 1

    def vectors(self) -> dict[str, Tensor]:
        """The list as it travels."""
        return {MEMBERS: numbers(self.members), KEYS: rows([self.keys[client] for client in self.members], 2 * KEY)}


def _neighbours(members: Sequence[int], holders: int, context: bytes) -> dict[int, tuple[int, ...]]:
    if holders == len(members):
        return {client: tuple(one for one in members if one != client) for client in members}
    ring = sorted(members, key=lambda client: derive(context, "ring", client))
    reach = (holders - 1) // 2
    return {
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
    found: Any = None if tensor is None or tensor.dtype != torch.int64 or tensor.dim() != 1 else tensor.tolist()
    if found is None or sorted({*found}) != found or (found and found[0] < 0):
        raise Declined("what should be increasing client numbers is something else")
    return list(map(int, found))
