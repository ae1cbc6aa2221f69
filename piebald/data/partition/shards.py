"""Shards: rows sorted by class and cut into pieces, a few for each client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from piebald.data.clients.lists import Numbered
from piebald.data.partition.partition import Partition
from piebald.data.partition.split import Ints

if TYPE_CHECKING:
    from piebald.data.sets.dataset import DataSet


class Shards(Partition):
    """Rows sorted by class, cut into clients x shards_each equal pieces (within one row), which are dealt at random.

    The pathological partition of McMahan et al. 2017, section 3: with two shards most clients see two classes.  Inside
    a class rows come in random order.

    Attributes:
        clients: number of clients.
        shards_each: number of shards of each client.

    Examples:
        >>> import piebald as pb
        >>> clients = pb.partition.Shards(clients=10).split(pb.data.digits())
        >>> max(sum(rows > 0 for rows in clients.counts(client, "train")) for client in range(10)) <= 4
        True
    """

    clients: int = Field(ge=1)
    shards_each: int = Field(default=2, ge=1)

    def deal(self, data: DataSet, rows: Ints) -> tuple[Ints, Sequence[str]]:
        """The client of each row [n], and names."""
        label, _ = self.class_labels(data, rows)
        pieces = self.clients * self.shards_each
        if pieces > len(rows):
            advice = "" if self.limit is None else ", or raise limit"
            raise self.refuse(
                f"{self.clients} clients of {self.shards_each} shards need more than the {len(rows)} rows: "
                f"lower clients or shards_each{advice}"
            )
        rng = self.generator("deal")
        shuffled = rng.permutation(len(rows))
        # the stable sort keeps the random order inside a class
        order = shuffled[np.argsort(label[shuffled], kind="stable")]
        holder = rng.permutation(pieces) // self.shards_each
        client = np.empty(len(rows), dtype=np.int64)
        # exact in whole numbers: pieces differ by one row at most, and none is empty, since pieces <= n
        client[order] = holder[np.arange(len(rows)) * pieces // len(rows)]
        return client, Numbered(self.clients)
