"""Rows dealt like cards: every client sees the same mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from piebald.partition.base import Partition
from piebald.partition.lists import Numbered
from piebald.partition.split import Ints

if TYPE_CHECKING:
    from piebald.data.dataset import DataSet


class Iid(Partition):
    """Shuffled rows in equal portions (within one row), the IID partition of McMahan et al. 2017, section 3.

    Attributes:
        clients: how many.
    """

    clients: int = Field(ge=1)

    def deal(self, data: DataSet, rows: Ints) -> tuple[Ints, Sequence[str]]:
        """The client of each row [n], and names."""
        self.check_room(self.clients, rows)
        client = np.empty(len(rows), dtype=np.int64)
        client[self._dice("deal").permutation(len(rows))] = np.arange(len(rows)) % self.clients
        return client, Numbered(self.clients)
