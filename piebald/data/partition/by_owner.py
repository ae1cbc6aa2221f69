"""Natural clients: the people, places or recordings that the rows come from."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from piebald.core.errors import unknown
from piebald.data.clients.lists import Numbered
from piebald.data.clients.pooled_clients import PooledClients, warn_of_codings
from piebald.data.partition.partition import NOBODY, Partition
from piebald.data.partition.split import Ints, SplitSettings

if TYPE_CHECKING:
    from piebald.data.sets.dataset import DataSet, Owners


def by_only_owner(data: DataSet) -> ByOwner | None:
    """The partition of rows that come with owners of one kind alone, or None."""
    return ByOwner(owner=next(iter(data.owners))) if len(data.owners) == 1 else None


class ByOwner(Partition):
    """One client for each owner, or owners merged into `clients` of nearly equal size.

    Where the published test rows belong to other owners (as in MNIST), clients hold out a share of their
    own rows and the published test part stays `common`.  `limit` keeps every owner in proportion.

    Attributes:
        owner: name of the owners in the data set: "writer", "subject", "capture", ...
        clients: number of clients, or None for one client per owner.
        clients_each: clients that share the rows of each owner, such as devices of a domain (DistFL, section 5.1.2).

    Examples:
        >>> import torch
        >>> import piebald as pb
        >>> writers = pb.data.Owners.of(torch.tensor([3, 3, 8, 8, 8]).numpy())
        >>> notes = pb.data.DataSet("notes", torch.zeros(5, 2), torch.rand(5), owners={"writer": writers})
        >>> pb.partition.ByOwner(owner="writer").split(notes).names
        ['3', '8']
    """

    scatters: ClassVar[bool] = False

    owner: str
    clients: int | None = Field(default=None, ge=1)
    clients_each: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _check_each(self) -> Self:
        if self.clients is not None and self.clients_each > 1:
            raise ValueError(
                f"clients = {self.clients} merges owners, clients_each = {self.clients_each} divides: leave one out"
            )
        return self

    def split(self, data: DataSet, division: SplitSettings | None = None) -> PooledClients:
        """See `Partition.split`; a warning says where owners seem to code classes in different ways."""
        clients = super().split(data, division)
        if self.clients is None:
            warn_of_codings(clients, data.target)
        return clients

    def deal(self, data: DataSet, rows: Ints) -> tuple[Ints, Sequence[str]]:
        """The client of each row [n], and names."""
        owners = self._owners(data)
        present, code, held = np.unique(owners.codes[rows], return_inverse=True, return_counts=True)
        if self.clients_each > 1:
            return code * self.clients_each + self._parts(code), [
                f"{owners.names[n]} {i + 1}" for n in present for i in range(self.clients_each)
            ]
        if self.clients is None:
            return code, [owners.names[number] for number in present]
        # an owner is never divided here, so some client would have no row
        if self.clients > len(present):
            raise self.refuse(
                f"{self.clients} clients need as many of the {len(present)} {self.owner}s of {data.name}: lower clients"
                + ("" if self.limit is None else " or raise limit")
            )
        return self._merge_owners(held, self.clients)[code], Numbered(self.clients)

    def follow(self, data: DataSet, train: Ints, client: Ints, test: Ints) -> Ints | None:
        """The client of each published test row [m], or None where no test row belongs to an owner that trains."""
        codes = self._owners(data).codes
        client_of = np.full(int(codes.max()) + 1, NOBODY)
        # where an owner has several clients any of them is kept, which is enough to compute the first one below
        client_of[codes[train]] = client
        holder = client_of[codes[test]]
        if self.clients_each > 1:
            first = holder - holder % self.clients_each  # of the owner's clients
            holder = np.where(holder == NOBODY, NOBODY, first + self._parts(codes[test]))
        return holder if (holder != NOBODY).any() else None

    def holds_out_first(self, data: DataSet) -> bool:
        """Return whether test rows are held out before the others are dealt: where an owner's groups are divided."""
        # a group may be divided between an owner's clients, one of which would test on what another trains on
        return data.groups is not None and self.clients_each > 1

    def strata(self, data: DataSet) -> Ints:
        """The owner of each row."""
        return self._owners(data).codes

    def _owners(self, data: DataSet) -> Owners:
        if self.owner not in data.owners:
            raise unknown(f"owner in {data.name} called", self.owner, data.owners)
        return data.owners[self.owner]

    def _parts(self, code: Ints) -> Ints:
        """The part of each row [n] among the equal parts of its owner's rows."""
        held = np.bincount(code)
        shuffled = self.generator("divide").permutation(len(code))
        order = shuffled[np.argsort(code[shuffled], kind="stable")]  # owner by owner
        place = np.empty(len(code), dtype=np.int64)
        # the rank of a row within its owner: its place less the place where the owner begins
        place[order] = np.arange(len(code)) - np.repeat(np.cumsum(held) - held, held)
        return place % self.clients_each

    def _merge_owners(self, held: Ints, clients: int) -> Ints:
        """The client of each owner: the largest owners first, each to the client with the fewest rows so far."""
        shuffled = self.generator("deal").permutation(len(held))
        # a tie goes to the lowest number, so the result does not depend on how the heap is arranged
        heap = [(0, client) for client in range(clients)]
        client_of = np.empty(len(held), dtype=np.int64)
        # The longest-processing-time rule: at most a third above the smallest possible maximum (Graham 1969).
        for owner in shuffled[np.argsort(-held[shuffled], kind="stable")]:
            rows, client = heap[0]
            client_of[owner] = client
            heapq.heapreplace(heap, (rows + int(held[owner]), client))
        return client_of
