"""Containers for very many clients: their names, and the row numbers of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, overload

import numpy as np

from piebald.core.arguments import checked_class
from piebald.core.errors import SettingError, UnknownClient, shown
from piebald.data.partition.split import Bools, Ints


class Numbered(Sequence[str]):
    """The default names of clients, "0", "1", ..., made on demand so that a million names need no memory."""

    def __init__(self, count: int) -> None:
        self._range = range(count)

    def __len__(self) -> int:
        return len(self._range)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...
    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        numbers = self._range[place]
        return str(numbers) if isinstance(numbers, int) else [str(number) for number in numbers]


def check_client(client: int, count: int) -> None:
    """Refuse a value that is not the number of one of `count` clients."""
    # True is an int, and would be client 1
    if type(client) is not int and (isinstance(client, bool) or not isinstance(client, int | np.integer)):
        raise SettingError(f"client must be a whole number, got {shown(client)}")
    if not 0 <= client < count:
        raise UnknownClient(f"there is no client {shown(client)}: they are numbered from 0 to {count - 1}")


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """A list of row numbers for each client, in two arrays: client c has `values[starts[c]:starts[c + 1]]`."""

    values: Ints
    starts: Ints

    @classmethod
    def of(cls, client: Ints, count: int, values: Ints | None = None) -> Self:
        """Lists from the client [n] of each row; rows keep their order within a client, and client -1 is dropped.

        Args:
            client: client numbers in range(-1, count).
            count: number of clients.
            values: the rows' numbers [n], by default 0, 1, ...
        """
        order = np.argsort(client, kind="stable")  # stable, so that rows keep their order within a client
        # rows of nobody (-1) are sorted before all others
        order = order[np.count_nonzero(client < 0) :]
        starts = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(np.bincount(client[order], minlength=count), out=starts[1:])
        return cls(order if values is None else values[order], starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, client: int) -> Ints:
        check_client(client, len(self))
        return self.values[self.starts[client] : self.starts[client + 1]]

    @property
    def sizes(self) -> Ints:
        """Number of rows of each client."""
        return np.diff(self.starts)

    @property
    def clients(self) -> Ints:
        """The client of each value, non-decreasing; it is not to be written to."""
        if len(self) == 1:
            return np.broadcast_to(np.int64(0), self.values.shape)  # without memory for each row
        return np.repeat(np.arange(len(self)), self.sizes)

    def where(self, mask: Bools) -> Lists:
        """Return these lists, restricted to values where the mask [n] is true."""
        kept = np.flatnonzero(mask)
        return Lists(self.values[kept], np.searchsorted(kept, self.starts))  # a list starts after those kept before it
