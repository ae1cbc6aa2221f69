"""Non-IID(x): every client holds x classes, and classes are held by several clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from piebald.partition.base import Partition, spread
from piebald.partition.lists import Numbered
from piebald.partition.split import Ints

if TYPE_CHECKING:
    from numpy.random import Generator

    from piebald.data.dataset import DataSet


class NonIid(Partition):
    """Every client holds exactly `classes_each` classes (HDAFL's Non-IID(x), Yang, Beliard, Rossi 2020).

    Which classes is drawn such that each class has the same number of holders (within one); a class's rows are dealt
    evenly over its holders.

    Attributes:
        clients: how many.
        classes_each: classes of each client.
    """

    clients: int = Field(ge=1)
    classes_each: int = Field(ge=1)

    def deal(self, data: DataSet, rows: Ints) -> tuple[Ints, Sequence[str]]:
        """The client of each row [n], and names."""
        label, classes = self.class_labels(data, rows)
        if self.classes_each > classes:
            raise self.refuse(
                f"classes_each must be at most the {classes} classes of {data.name}, got {self.classes_each}"
            )
        if self.clients * self.classes_each < classes:
            raise self.refuse(
                f"{self.clients} clients of {self.classes_each} classes cannot hold the {classes} classes of "
                f"{data.name}: raise clients or classes_each"
            )
        dice = self._dice("deal")
        held = _draw(self.clients, self.classes_each, classes, dice)
        order = np.argsort(held.ravel(), kind="stable")
        cuts = np.searchsorted(held.ravel()[order], np.arange(1, classes))
        holders = np.split(order // self.classes_each, cuts)
        for number, (members, count) in enumerate(zip(holders, np.bincount(label, minlength=classes), strict=True)):
            if len(members) > count:
                raise self.refuse(
                    f"class number {number} has {count} rows for its {len(members)} holders: "
                    f"lower clients or classes_each" + ("" if self.limit is None else ", or raise limit")
                )
        return spread(label, holders, dice), Numbered(self.clients)


def _draw(clients: int, each: int, classes: int, dice: Generator) -> Ints:
    """Distinct classes for each client [clients, each], every class equally often (within one).

    Clients take the next `each` cards of a shuffled deck of all classes, which starts over when it is used up; a deck
    is shuffled anew when its end falls between two clients, so no client sees two decks.
    """
    block = classes // np.gcd(classes, each)  # clients from one shuffling to the next
    decks = np.argsort(dice.random((-(-clients // block), classes)), axis=1)
    client = np.arange(clients)[:, None]
    card = (client % block * each + np.arange(each)) % classes
    drawn: Ints = decks[client // block, card]
    return drawn
