"""Partitions whose clients differ in their classes: shares of a Dirichlet distribution, shards, disjoint classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from piebald.data.clients.lists import Numbered
from piebald.data.partition.partition import NOBODY, Partition, Sizes, spread
from piebald.data.partition.split import Ints

if TYPE_CHECKING:
    from numpy.random import Generator

    from piebald.data.sets.dataset import DataSet

TINY = np.finfo(np.float64).tiny
MIN_SIZE = 10  # of NIID-Bench and of flwr-datasets
DRAWS = 1000  # before a partition by class is refused; NIID-Bench and PFLlib go on for ever


class Dirichlet(Partition):
    """Class shares drawn from Dirichlet distributions: one for each client, or one for each class.

    `by = "client"`: clients have equal sizes, and class shares q ~ Dirichlet(alpha * K * p), after Hsu, Qi, Brown 2019,
    section 3.  K is the number of classes and p their shares in the data set (the paper's alpha is K times this one).
    Every row has one holder: if clients want more rows of a class than there are, random ones of them draw another
    class from their shares, so no client is served last.  With few clients, class shares cannot be as extreme as a tiny
    alpha demands.

    `by = "class"`: each class is divided between the clients by shares ~ Dirichlet(alpha, ..., alpha), one number for
    each client, after Yurochkin et al. 2019, as NIID-Bench, PFLlib and flwr-datasets do.  Clients differ in size, and
    at the same alpha they hold fewer classes than above.  The draw is repeated until each client has `min_size` rows.

    Attributes:
        clients: number of clients.
        alpha: concentration, above 0; 0.1 gives a few classes per client, 100 nearly equal shares.
        by: "client" for class shares of each client and equal sizes, or "class" for clients' shares of each class.
        least: by client only: smallest number of rows of a client; the partition is refused if one would get fewer.
        sizes: by client only: number of rows of each client; by default they differ by at most one row.
        min_size: by class only: smallest number of rows of a client, test rows included where it holds out its own; 10
            if left out, as in NIID-Bench and flwr-datasets.
        balance: by class only: a client with more rows than the average gets none of the classes that follow, as in
            NIID-Bench and PFLlib; false for the shares as drawn, the default of flwr-datasets (`self_balancing`).

    Examples:
        >>> import piebald as pb
        >>> clients = pb.partition.Dirichlet(clients=4, alpha=0.1).split(pb.data.digits())
        >>> sorted(clients.size(client, "train") for client in range(4))
        [359, 359, 359, 360]
    """

    clients: int = Field(ge=1)
    alpha: float = Field(gt=0, le=1e6)
    by: Literal["client", "class"] = "client"
    least: int = Field(default=1, ge=1)
    sizes: Sizes | None = None
    min_size: int | None = Field(default=None, ge=1)
    balance: bool = True

    @model_validator(mode="after")
    def _check_by(self) -> Self:
        if self.by == "client":
            if self.min_size is not None:
                raise ValueError(f"min_size = {self.min_size} needs by = 'class': with by = 'client' use least")
            if not self.balance:
                raise ValueError(
                    "balance = false needs by = 'class': with by = 'client' sizes are equal or as in sizes"
                )
        elif self.sizes is not None:
            raise ValueError("sizes need by = 'client': with by = 'class' sizes follow from the draw")
        elif self.least != 1:
            raise ValueError(f"least = {self.least} needs by = 'client': with by = 'class' use min_size")
        return self

    def deal(self, data: DataSet, rows: Ints) -> tuple[Ints, Sequence[str]]:
        """The client of each row [n], and names."""
        label, classes = self.class_labels(data, rows)
        rng = self.generator("deal")
        stock = np.bincount(label, minlength=classes)
        client = self._by_class(label, stock, rng) if self.by == "class" else self._by_client(label, stock, rng)
        return client, Numbered(self.clients)

    def _by_client(self, label: Ints, stock: Ints, rng: Generator) -> Ints:
        """The client of each row [n], by class shares of each client."""
        rows = len(label)
        self.check_room(self.clients, label, self.least)
        present = np.flatnonzero(stock)  # a Dirichlet parameter must be above 0
        shares = stock[present] / rows
        mixture = rng.dirichlet(self.alpha * len(present) * shares, size=self.clients)
        # A client's slots are the rows it will get; the first clients get the odd rows, in random order.
        if self.sizes is None:
            slots = rng.permutation(self.clients)[np.arange(rows) % self.clients]
        else:
            counts = self.sizes.counts(self.clients, rows, rng)
            if counts.min() < self.least:
                raise self.refuse(f"sizes give a client {counts.min()} rows, below least = {self.least}: lower least")
            slots = np.repeat(np.arange(self.clients), counts)
        drawn = present[_fill(slots, mixture, stock[present], rng)]
        # Slots and rows are matched by class; rows of a class beyond its slots (explicit sizes) get no client.
        slots = slots[_in_class_order(drawn, rng)]
        order, served = _in_class_order(label, rng), np.bincount(drawn, minlength=len(stock))
        start = np.cumsum(stock) - stock
        client = np.full(rows, NOBODY)
        client[order[np.arange(rows) - start[label[order]] < served[label[order]]]] = slots
        return client

    def _by_class(self, label: Ints, stock: Ints, rng: Generator) -> Ints:
        """The client of each row [n], by clients' shares of each class."""
        least = MIN_SIZE if self.min_size is None else self.min_size
        self.check_room(self.clients, label, least, "min_size")
        for _ in range(DRAWS):
            counts = self._divided(stock, rng)
            if counts.sum(0).min() >= least:
                break
        else:
            raise self.refuse(
                f"{DRAWS} draws did not give each of {self.clients} clients min_size = {least} of {len(label)} rows: "
                "lower clients or min_size, or raise alpha"
            )
        client = np.empty(len(label), dtype=np.int64)
        # rows in order of classes meet counts [K, clients] in order of classes
        client[_in_class_order(label, rng)] = np.repeat(np.tile(np.arange(self.clients), len(stock)), counts.ravel())
        return client

    def _divided(self, stock: Ints, rng: Generator) -> Ints:
        """Rows of each class for each client [K, clients], one draw."""
        counts = np.zeros((len(stock), self.clients), dtype=np.int64)
        held = np.zeros(self.clients, dtype=np.int64)
        for number, rows in enumerate(stock.tolist()):
            # Shares of some clients, divided by their sum, are a Dirichlet draw for these clients alone.
            takes = np.flatnonzero(held * self.clients <= stock.sum()) if self.balance else np.arange(self.clients)
            share = rng.dirichlet(np.full(len(takes), self.alpha))
            # the last sum of shares may be rounded to above or below 1
            cuts = np.minimum(np.floor(np.cumsum(share) * rows), rows).astype(np.int64)
            cuts[-1] = rows
            counts[number, takes] = np.diff(cuts, prepend=0)
            held += counts[number]
        return counts


def _in_class_order(label: Ints, rng: Generator) -> Ints:
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
    remaining = stock.copy()
    unfilled = np.arange(len(slots))
    while len(unfilled):
        open_classes = np.flatnonzero(remaining)
        wish = mixture[:, open_classes]
        total = wish.sum(1, keepdims=True)
        # A second choice may be many orders of magnitude smaller than the first, so only exact zeros count as zero.
        fallback = remaining[open_classes] / remaining.sum()
        wish = np.where(total > TINY, wish / np.maximum(total, TINY), fallback)
        # One sorted line for all clients: client c's cumulated shares lie in (c, c + 1], so one search serves
        # all draws.
        line = (np.minimum(np.cumsum(wish, axis=1), 1.0) + np.arange(len(wish))[:, None]).ravel()
        # a client's stretch must end at a whole number exactly, or draws in the gap would be of the next client
        line[len(open_classes) - 1 :: len(open_classes)] = np.arange(1, len(wish) + 1)
        owner = slots[unfilled]
        cell = np.searchsorted(line, owner + rng.random(len(owner)), side="right")
        # beside a large client number a draw just below 1 is rounded to 1, past the client's last class
        pick = np.minimum(cell - owner * len(open_classes), len(open_classes) - 1)
        order = _in_class_order(pick, rng)
        picked = np.bincount(pick, minlength=len(open_classes))
        start = np.cumsum(picked) - picked
        # the random rank of each slot among those that drew the same class: the first ones get its rows
        index = np.arange(len(order)) - start[pick[order]]
        served = order[index < remaining[open_classes][pick[order]]]
        drawn[unfilled[served]] = open_classes[pick[served]]
        remaining[open_classes] -= np.bincount(pick[served], minlength=len(open_classes))
        unfilled = np.delete(unfilled, served)
    return drawn


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
