"""Label skew: class shares of clients drawn from a Dirichlet distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from piebald.partition.lists import Numbered
from piebald.partition.partition import NOBODY, Partition
from piebald.partition.sizes import AnySizes
from piebald.partition.split import Ints

if TYPE_CHECKING:
    from numpy.random import Generator

    from piebald.data.dataset import DataSet

TINY = np.finfo(np.float64).tiny


class Dirichlet(Partition):
    """Clients of equal size whose class shares q ~ Dirichlet(alpha * K * p), after Hsu, Qi, Brown 2019, section 3.

    K is the number of classes and p their shares in the data set; with balanced classes this is the Dirichlet(alpha,
    ..., alpha) of most of the literature (the paper's alpha is K times this one).  Every row has one holder: if
    clients want more rows of a class than there are, random ones of them draw another class from their shares, so no
    client is served last.  With few clients, class shares cannot be as extreme as a tiny alpha demands.

    Attributes:
        clients: number of clients.
        sizes: number of rows of each client; by default they differ by at most one row.
        alpha: concentration, above 0; 0.1 gives a few classes per client, 100 nearly equal shares.
        least: smallest number of rows of a client; the partition is refused if a client would get fewer.
    """

    clients: int = Field(ge=1)
    alpha: float = Field(gt=0, le=1e6)
    least: int = Field(default=1, ge=1)
    sizes: AnySizes | None = None

    def deal(self, data: DataSet, rows: Ints) -> tuple[Ints, Sequence[str]]:
        """The client of each row [n], and names."""
        label, classes = self.class_labels(data, rows)
        self.check_room(self.clients, rows, self.least)
        rng = self._rng("deal")
        stock = np.bincount(label, minlength=classes)
        present = np.flatnonzero(stock)  # a Dirichlet parameter must be above 0
        shares = stock[present] / len(rows)
        mixture = rng.dirichlet(self.alpha * len(present) * shares, size=self.clients)
        # A client's slots are the rows it will get; the first clients get the odd rows, in random order.
        if self.sizes is None:
            slots = rng.permutation(self.clients)[np.arange(len(rows)) % self.clients]
        else:
            counts = self.sizes.counts(self.clients, len(rows), rng)
            if counts.min() < self.least:
                raise self.refuse(f"sizes give a client {counts.min()} rows, below least = {self.least}: lower least")
            slots = np.repeat(np.arange(self.clients), counts)
        drawn = present[_fill(slots, mixture, stock[present], rng)]
        # Slots and rows are matched by class; rows of a class beyond its slots (explicit sizes) get no client.
        slots = slots[_by_class(drawn, rng)]
        order, served = _by_class(label, rng), np.bincount(drawn, minlength=classes)
        start = np.cumsum(stock) - stock
        client = np.full(len(rows), NOBODY)
        client[order[np.arange(len(order)) - start[label[order]] < served[label[order]]]] = slots
        return client, Numbered(self.clients)


def _by_class(label: Ints, rng: Generator) -> Ints:
    """An order [n] that sorts by class and shuffles inside each."""
    shuffled = rng.permutation(len(label))
    return shuffled[np.argsort(label[shuffled], kind="stable")]


def _fill(slots: Ints, mixture: NDArray[np.float64], stock: Ints, rng: Generator) -> Ints:
    """A class for each slot, drawn from its client's class shares; each class exactly as often as it has rows.

    Each pass draws for all open slots from the classes that still have rows; a class that is drawn too often is given
    to a random choice of these slots and closed.  So each pass closes a class or is the last: at most K passes.

    Args:
        slots: the client of each slot [n].
        mixture: class shares of each client [clients, K].
        stock: rows of each class [K], n in all.
        rng: random generator of all draws.
    """
    drawn = np.empty(len(slots), dtype=np.int64)
    left = stock.copy()
    unfilled = np.arange(len(slots))
    while len(unfilled):
        open_classes = np.flatnonzero(left)
        wish = mixture[:, open_classes]
        total = wish.sum(1, keepdims=True)
        # A second choice may be many orders of magnitude smaller than the first, so only exact zeros count as zero.
        fallback = left[open_classes] / left.sum()
        wish = np.where(total > TINY, wish / np.maximum(total, TINY), fallback)
        # One sorted line for all clients: client c's cumulated shares lie in (c, c + 1], so one search serves
        # all draws.
        line = (np.minimum(np.cumsum(wish, axis=1), 1.0) + np.arange(len(wish))[:, None]).ravel()
        line[len(open_classes) - 1 :: len(open_classes)] = np.arange(1, len(wish) + 1)
        owner = slots[unfilled]
        found = np.searchsorted(line, owner + rng.random(len(owner)), side="right")
        pick = np.minimum(found - owner * len(open_classes), len(open_classes) - 1)
        order = _by_class(pick, rng)
        wanted = np.bincount(pick, minlength=len(open_classes))
        start = np.cumsum(wanted) - wanted
        place = np.arange(len(order)) - start[pick[order]]
        served = order[place < left[open_classes][pick[order]]]
        drawn[unfilled[served]] = open_classes[pick[served]]
        left[open_classes] -= np.bincount(pick[served], minlength=len(open_classes))
        unfilled = np.delete(unfilled, served)
    return drawn
