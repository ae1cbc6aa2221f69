"""Clients that are held out of a run until its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from piebald.contracts import Clients, InMemory, Rows, Split
from piebald.core.errors import SettingError, unknown
from piebald.contracts.data import column_names, lacked_inputs, public_rows_of
from piebald.core.pytree import Tree
from piebald.data.partition.split import unseen_numbers
from piebald.data.partition.split_settings import division_of


class ClientSubset:
    """A subset of clients, numbered from 0.

    Args:
        clients: all clients.
        chosen: the numbers of those in the subset.
    """

    def __init__(self, clients: Clients, chosen: Sequence[int]) -> None:
        self._clients, self._chosen = clients, list(chosen)
        self.names = [clients.names[number] for number in self._chosen]
        self.classes, self.common, self.division = clients.classes, clients.common, division_of(clients)
        self.features, self.target = column_names(clients)

    def __len__(self) -> int:
        return len(self._chosen)

    @property
    def public_rows(self) -> Rows | None:
        """See `contracts.HasPublicRows`."""
        return public_rows_of(self._clients)

    def lacks(self, client: int) -> frozenset[str]:
        """See `contracts.data.LacksInputs`."""
        return lacked_inputs(self._clients, self._chosen[client])

    def rows(self, client: int, split: Split) -> Rows:
        """See `contracts.Clients`."""
        return self._clients.rows(self._chosen[client], split)

    def size(self, client: int, split: Split) -> int | None:
        """See `contracts.Clients`."""
        return self._clients.size(self._chosen[client], split)

    def counts(self, client: int, split: Split) -> Sequence[int] | None:
        """See `contracts.Clients`."""
        return self._clients.counts(self._chosen[client], split)


class PooledClientSubset(ClientSubset):
    """A subset of clients whose rows are in one pool, which engines index (`contracts.InMemory`)."""

    @property
    def x(self) -> Tree:
        """Inputs of the whole pool."""
        return self.pool().x

    @property
    def y(self) -> Tree:
        """Targets of the whole pool."""
        return self.pool().y

    def in_memory(self) -> bool:
        """See `contracts.InMemory`."""
        return self._pooled().in_memory()

    def pool(self) -> Rows:
        """All rows, also those of clients that were not chosen."""
        return self._pooled().pool()

    def indices(self, client: int, split: Split) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The row numbers of one split of one client."""
        return self._pooled().indices(self._chosen[client], split)

    def _pooled(self) -> InMemory:
        assert isinstance(self._clients, InMemory)
        return self._clients


def hold_out(clients: Clients, unseen: float | Sequence[str], seed: int) -> tuple[Clients, Clients | None]:
    """Divide clients into those that take part and those that stay unseen until the end, or None.

    Args:
        clients: all clients.
        unseen: a number of clients, or a share of them below 1, or their names.
        seed: of the choice.

    Raises:
        SettingError: no client would take part, `unseen` is not a number, or a client that is held out has no rows to
            be adapted with.
    """
    held_out = unseen_numbers(clients.names, unseen, seed)
    if not held_out:
        return clients, None
    taking_part = [client for client in range(len(clients)) if client not in held_out]
    pooled = isinstance(clients, InMemory) and clients.in_memory()
    subset = PooledClientSubset if pooled else ClientSubset
    return subset(clients, taking_part), subset(clients, sorted(held_out))


def check_newcomers(newcomers: Clients) -> None:
    """Refuse clients that are held out and cannot be adapted to, before a whole run trains without them.

    Raises:
        SettingError: one of them has no validation rows.
    """
    for client, name in enumerate(newcomers.names):
        if newcomers.size(client, "validation") == 0:
            raise SettingError(
                f"unseen holds out the client {name!r}, which needs validation rows to be adapted and has none: give "
                "[split] validation = 0.1"
            )
