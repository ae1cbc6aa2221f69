"""Clients as a search sees them: without their test rows, or with a part of their training rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from piebald.contracts import Clients, HasServerRows, InMemory, Rows, RowsAtSites, Split
from piebald.core.errors import SettingError
from piebald.core.randomness import generator, key
from piebald.data.clients.convert import class_numbers, count_classes
from piebald.data.partition.split import Ints, hold_out
from piebald.runs.adaptation.held_out import ClientSubset, PooledClientSubset

VALIDATION = 0.2  # share of the training rows that is held out where clients have no validation rows
_FEWEST_ROWS = 2  # of a client in a part of the rows


class ChosenRows(ClientSubset):
    """All clients, each with some of its rows."""

    def __init__(self, clients: Clients) -> None:
        super().__init__(clients, range(len(clients)))

    def chosen(self, client: int, split: Split) -> tuple[Split, Ints | None]:
        """Return the split that the rows of a split are taken from, and their positions in it, None for all."""
        raise NotImplementedError

    def rows(self, client: int, split: Split) -> Rows:
        """See `contracts.Clients`."""
        source, positions = self.chosen(client, split)
        rows = super().rows(client, source)
        return rows if positions is None else rows[positions]

    def size(self, client: int, split: Split) -> int | None:
        """See `contracts.Clients`."""
        source, positions = self.chosen(client, split)
        return super().size(client, source) if positions is None else len(positions)

    def counts(self, client: int, split: Split) -> list[int] | None:
        """See `contracts.Clients`."""
        if self.classes is None:
            return None
        label = class_numbers(self.rows(client, split).y)
        return None if label is None else count_classes(label, len(self.classes)).tolist()


class PooledChosenRows(ChosenRows, PooledClientSubset):
    """Chosen rows of clients whose rows are in one pool, which engines index (`contracts.InMemory`)."""

    def indices(self, client: int, split: Split) -> NDArray[np.int64]:
        """See `contracts.InMemory`."""
        source, positions = self.chosen(client, split)
        indices = super().indices(client, source)
        return indices if positions is None else indices[positions]


class WithoutTestRows(ChosenRows):
    """All clients, none with test rows, so that nothing can be chosen by them.

    Where no client has validation rows, a share of each one's training rows is held out for validation.

    Attributes:
        held_out: whether rows are held out.
        test: whether test rows are there after all, for the one check after the choice.
    """

    def __init__(self, clients: Clients, held_out: bool, test: bool = False) -> None:
        super().__init__(clients)
        # the common test set is test rows as well
        self.common = clients.common if test else None
        self.held_out, self.test = held_out, test
        self._parts: dict[int, tuple[Ints, Ints]] = {}

    @property
    def server_rows(self) -> Rows | None:
        """See `contracts.HasServerRows`."""
        return self._clients.server_rows if isinstance(self._clients, HasServerRows) else None

    def chosen(self, client: int, split: Split) -> tuple[Split, Ints | None]:
        """See `ChosenRows`."""
        if split == "test" and not self.test:
            # no positions of the training rows: reading the test split of the clients underneath would fetch it
            return "train", np.zeros(0, dtype=np.int64)
        if split == "test" or not self.held_out:
            return split, None
        if client not in self._parts:
            rows = ClientSubset.rows(self, client, "train")
            # the key has no seed: all runs of a search are judged by the same rows
            out = hold_out(np.full(len(rows), client), VALIDATION, key("choosing"), class_numbers(rows.y))
            self._parts[client] = (np.flatnonzero(~out), np.flatnonzero(out))
        return "train", self._parts[client][split == "validation"]

    def opened(self) -> WithoutTestRows:
        """Return the same clients with their test rows."""
        return type(self)(self._clients, self.held_out, test=True)


class PooledWithoutTestRows(WithoutTestRows, PooledChosenRows):
    """Clients without test rows whose rows are in one pool."""


class PartOfRows(ChosenRows):
    """All clients, each with a share of its training rows; a smaller share is part of a larger one."""

    def __init__(self, clients: Clients, share: float) -> None:
        super().__init__(clients)
        self.share = share
        self._parts: dict[int, Ints] = {}

    def chosen(self, client: int, split: Split) -> tuple[Split, Ints | None]:
        """See `ChosenRows`."""
        if split != "train":
            return split, None
        if client not in self._parts:
            rows = ClientSubset.size(self, client, "train") or 0
            # a prefix of one order: a smaller share is part of a larger one, and its curve grows by rows alone
            order = generator("half of the rows", client).permutation(rows)
            # sorted, so that rows keep the order of their client, as those of other runs do
            self._parts[client] = np.sort(order[: max(_FEWEST_ROWS, int(rows * self.share))])
        return split, self._parts[client]


class PooledPartOfRows(PartOfRows, PooledChosenRows):
    """A part of the rows of clients whose rows are in one pool."""


def without_test_rows(clients: Clients) -> WithoutTestRows:
    """Return clients whose test rows cannot be reached.

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
