"""Clients whose rows are those of other clients; they implement `contracts.Clients`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from piebald.contracts import Clients, HasServerRows, InMemory, Rows, RowsAtSites, Split
from piebald.contracts.data import column_names, lacked_inputs, public_rows_of
from piebald.data.partition.split import division_of


class ClientsView:
    """Other clients, or some of them, with the rows that these have; what they offer more, it offers as well.

    Args:
        clients: the other clients.
        numbers: of those in the view, in its order; all by default.
    """

    def __init__(self, clients: Clients, numbers: Sequence[int] | None = None) -> None:
        self._clients, self._numbers = clients, numbers
        self.names: Sequence[str] = clients.names if numbers is None else [clients.names[number] for number in numbers]
        self.classes, self.division = clients.classes, division_of(clients)
        self.features, self.target = column_names(clients)

    def __len__(self) -> int:
        return len(self._clients if self._numbers is None else self._numbers)

    def number(self, client: int) -> int:
        """Return the number of a client among the other clients."""
        return client if self._numbers is None else self._numbers[client]

    @property
    def elsewhere(self) -> bool:
        """True if the rows are at the sites."""
        return isinstance(self._clients, RowsAtSites) and self._clients.elsewhere

    @property
    def common(self) -> Rows | None:
        """A test set that belongs to no client, or None."""
        return self._clients.common

    @property
    def server_rows(self) -> Rows | None:
        """Rows that the server keeps for itself, or None."""
        return self._clients.server_rows if isinstance(self._clients, HasServerRows) else None

    @property
    def public_rows(self) -> Rows | None:
        """Rows that all clients have, or None."""
        return public_rows_of(self._clients)

    def lacks(self, client: int) -> frozenset[str]:
        """See `contracts.data.LacksInputs`."""
        return lacked_inputs(self._clients, self.number(client))

    def in_memory(self) -> bool:
        """Return whether the pool is in memory."""
        return isinstance(self._clients, InMemory) and self._clients.in_memory()

    def pool(self) -> Rows:
        """All rows, also those of clients that are not in the view."""
        assert isinstance(self._clients, InMemory)  # for the type checker; `in_memory` was asked
        return self._clients.pool()

    def indices(self, client: int, split: Split) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Positions in the pool of one split of one client."""
        assert isinstance(self._clients, InMemory)
        return self._clients.indices(self.number(client), split)

    def rows(self, client: int, split: Split) -> Rows:
        """The rows of one split; empty where the client has none."""
        return self._clients.rows(self.number(client), split)

    def size(self, client: int, split: Split) -> int | None:
        """Return the number of rows, or None where that is not known."""
        return self._clients.size(self.number(client), split)

    def counts(self, client: int, split: Split) -> Sequence[int] | None:
        """Rows of each class, or None where that is not known."""
        return self._clients.counts(self.number(client), split)
