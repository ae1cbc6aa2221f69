"""Disjoint classes: no two groups of clients have a class in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from piebald.data.clients.lists import Numbered
from piebald.data.partition.partition import Partition, spread
from piebald.data.partition.split import Ints

if TYPE_CHECKING:
    from piebald.data.sets.dataset import DataSet


class Disjoint(Partition):
    """Each group of `shared_by` neighbouring clients holds `classes_each` classes that no other group has.

    With `shared_by` above 1 these are the types of DistFL: clients of a type hold the same classes, and types have none
    in common.

    The classes of each group are drawn at random; a class's rows are dealt evenly inside its group.  Classes that are
    left over (if groups x classes_each is less than the number of classes) have no holder and are not in `common`.

    Attributes:
        clients: number of clients, a multiple of `shared_by`.
        classes_each: number of classes of each client.
        shared_by: number of clients that hold the same classes.

    Examples:
        >>> import piebald as pb
        >>> clients = pb.partition.Disjoint(clients=5, classes_each=2).split(pb.data.digits())
        >>> holders = [sum(clients.counts(client, "train")[digit] > 0 for client in range(5)) for digit in range(10)]
        >>> max(holders)
        1
    """

    clients: int = Field(ge=1)
    classes_each: int = Field(ge=1)
    shared_by: int = Field(default=1, ge=1)

    def deal(self, data: DataSet, rows: Ints) -> tuple[Ints, Sequence[str]]:
        """The client of each row [n] (`NOBODY` for classes left over), and names."""
        label, classes = self.class_labels(data, rows)
        groups, extra = divmod(self.clients, self.shared_by)
        if extra:
            raise self.refuse(
                f"clients must be a multiple of shared_by = {self.shared_by}, got {self.clients}: "
                f"use {self.clients + self.shared_by - extra} clients"
            )
        if groups * self.classes_each > classes:
            raise self.refuse(
                f"{groups} groups of {self.classes_each} classes need {groups * self.classes_each} classes "
                f"but {data.name} has {classes}: lower clients or classes_each, or raise shared_by"
            )
        rng = self.generator("deal")
        # the number after the last group stands for none
        group = np.full(classes, groups)
        group[rng.permutation(classes)[: groups * self.classes_each]] = (
            np.arange(groups * self.classes_each) // self.classes_each
        )
        members = np.arange(self.clients).reshape(groups, self.shared_by)
        nobody = np.zeros(0, dtype=np.int64)
        holders = [members[number] if number < groups else nobody for number in group]
        return spread(label, holders, rng), Numbered(self.clients)
