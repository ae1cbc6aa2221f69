"""IID: rows dealt at random, so that all clients have the same distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from piebald.data.clients.lists import Numbered
from piebald.data.partition.partition import NOBODY, Partition, Sizes
from piebald.data.partition.split import Ints

if TYPE_CHECKING:
    from piebald.data.sets.dataset import DataSet


class Iid(Partition):
    """Shuffled rows in equal portions (within one row), the IID partition of McMahan et al. 2017, section 3.

    Attributes:
        clients: number of clients.
        sizes: number of rows of each client; equal by default.

    Examples:
        >>> import piebald as pb
        >>> pb.partition.Iid(clients=4).split(pb.data.digits())
        <4 clients: 1437 train, 0 validation, 360 test rows of [1, 8, 8], 10 classes>
    """

    clients: int = Field(ge=1)
    sizes: Sizes | None = None

    def deal(self, data: DataSet, rows: Ints) -> tuple[Ints, Sequence[str]]:
        """The client of each row [n], and names."""
        self.check_room(self.clients, rows)
        rng = self.generator("deal")
        client = np.full(len(rows), NOBODY)
        shuffled = rng.permutation(len(rows))
        if self.sizes is None:
            client[shuffled] = np.arange(len(rows)) % self.clients
        else:
            # explicit sizes may be fewer rows than there are: the rest stays with nobody
            holder = np.repeat(np.arange(self.clients), self.sizes.counts(self.clients, len(rows), rng))
            client[shuffled[: len(holder)]] = holder
        return client, Numbered(self.clients)
