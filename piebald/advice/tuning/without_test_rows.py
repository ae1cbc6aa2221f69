"""Clients as a search sees them: without their test rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from piebald.contracts import Clients, HasServerRows, InMemory, Rows, RowsAtSites, Split
from piebald.core.errors import SettingError
from piebald.core.randomness import key
from piebald.data.clients.convert import class_numbers
from piebald.data.partition.split import hold_out
from piebald.runs.adaptation.held_out import ClientSubset, PooledClientSubset

VALIDATION = 0.2  # share of the training rows that is held out where clients have no validation rows


class WithoutTestRows(ClientSubset):
    """All clients, none with test rows, so that nothing can be chosen by them.

    Where no client has validation rows, a share of each one's training rows is held out for validation.

    Attributes:
        held_out: whether rows are held out.
        test: whether test rows are there after all, for the one check after the choice.
    """

    def __init__(self, clients: Clients, held_out: bool, test: bool = False) -> None:
        super().__init__(clients, range(len(clients)))
        self.common = clients.common if test else None
        self.held_out, self.test = held_out, test
        self._parts: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    @property
    def server_rows(self) -> Rows | None:
        """See `contracts.HasServerRows`."""
        return self._clients.server_rows if isinstance(self._clients, HasServerRows) else None

    def rows(self, client: int, split: Split) -> Rows:
        """See `contracts.Clients`; there are no test rows."""
        if split == "test" and not self.test:
            train = super().rows(client, "train")
            return train[:0]
        if split == "test" or not self.held_out:
            return super().rows(client, split)
        train, positions = super().rows(client, "train"), self.positions_of(client, split)
        return train[positions]

    def size(self, client: int, split: Split) -> int | None:
        """See `contracts.Clients`."""
        if split == "test":
            return super().size(client, split) if self.test else 0
        return len(self.positions_of(client, split)) if self.held_out else super().size(client, split)

    def counts(self, client: int, split: Split) -> list[int] | None:
        """See `contracts.Clients`."""
        if self.classes is None:
            return None
        label = class_numbers(self.rows(client, split).y)
        return None if label is None else np.bincount(label, minlength=len(self.classes)).tolist()

    def opened(self) -> WithoutTestRows:
        """The same clients with their test rows."""
        return type(self)(self._clients, self.held_out, test=True)

    def positions_of(self, client: int, split: Split) -> NDArray[np.int64]:
        """Positions among a client's training rows of those that are left for training, or held out for validation."""
        if client not in self._parts:
            rows = ClientSubset.rows(self, client, "train")
            label = class_numbers(rows.y)
            out = hold_out(np.full(len(rows), client), VALIDATION, key("choosing"), label)
            self._parts[client] = (np.flatnonzero(~out), np.flatnonzero(out))
        return self._parts[client][split == "validation"]


class PooledWithoutTestRows(WithoutTestRows, PooledClientSubset):
    """Clients without test rows whose rows are in one pool, which engines index (`contracts.InMemory`)."""

    def indices(self, client: int, split: Split) -> NDArray[np.int64]:
        """See `contracts.InMemory`; there are no test rows."""
        if split == "test" and not self.test:
            return np.zeros(0, dtype=np.int64)
        if split == "test" or not self.held_out:
            return super().indices(client, split)
        return super().indices(client, "train")[self.positions_of(client, split)]


def without_test_rows(clients: Clients) -> WithoutTestRows:
    """Clients whose test rows cannot be reached.

    Raises:
        SettingError: rows are at their sites, or no client has enough rows to validate on.
    """
    if isinstance(clients, RowsAtSites) and clients.elsewhere:
        raise SettingError(
            "rows are at their sites, and choosing needs runs on this machine: choose on a simulated federation"
        )
    numbers = range(len(clients))
    held_out = not any(clients.size(client, "validation") != 0 for client in numbers)
    pooled = isinstance(clients, InMemory) and clients.in_memory()
    choosing = (PooledWithoutTestRows if pooled else WithoutTestRows)(clients, held_out)
    if held_out and not any(choosing.size(client, "validation") for client in numbers):
        raise SettingError("no client has enough rows to hold some out for validation: at least two are needed")
    return choosing
