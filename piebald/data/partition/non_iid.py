"""Non-IID(x): every client holds x classes, and classes are held by several clients."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field, model_validator

from piebald.data.clients.lists import Numbered
from piebald.data.partition.class_patterns import fill, pattern
from piebald.data.partition.partition import NOBODY, Partition, spread
from piebald.data.partition.sizes import AnySizes, Uniform
from piebald.data.partition.split import Bools, Ints

if TYPE_CHECKING:
    from numpy.random import Generator

    from piebald.data.sets.dataset import DataSet


class NonIid(Partition):
    """Every client holds exactly `classes_each` classes: Metis' Non-IID(x) (Stripelis, Ambite 2020, section VI).

    The classes are drawn at random such that each class has the same number of holders (within one); a class's rows are
    dealt evenly over its holders.

    With `sizes` or with more than one number in `classes_each`, as in the paper's power law and Non-IID(8x1,4x1,3x8),
    clients get as many rows as `sizes` says (equal by default) and their classes in portions as even as that allows.
    Clients choose their classes in order, always those with the most rows left.

    The paper's notation fixes the number of classes of each client, but not which ones.  To reproduce a printed
    pattern, list the classes of each client in `held`.

    Attributes:
        clients: number of clients.
        classes_each: number of classes of each client: a number, one for each client, or groups as text, "8x1,4x1,3x8"
            (8 classes for 1 client, 4 for 1, 3 for 8).
        held: instead of `classes_each`, the class numbers of each client.
        sizes: number of rows of each client.

    Examples:
        >>> import piebald as pb
        >>> clients = pb.partition.NonIid(clients=5, classes_each=2).split(pb.data.digits())
        >>> [sum(rows > 0 for rows in clients.counts(client, "train")) for client in range(5)]
        [2, 2, 2, 2, 2]
    """

    clients: int = Field(ge=1)
    classes_each: int | str | tuple[int, ...] | None = None
    held: tuple[tuple[int, ...], ...] | None = None
    sizes: AnySizes | None = None

    @model_validator(mode="after")
    def _check(self) -> NonIid:
        if (self.classes_each is None) == (self.held is None):
            raise ValueError("either classes_each or held must be given, and not both")
        name = "classes_each" if self.held is None else "held"
        each = self._each()
        if len(each) != self.clients:
            raise ValueError(
                f"{name} says how many classes for {len(each)} clients but clients is {self.clients}: "
                f"give one {'number' if self.held is None else 'list'} for each client"
            )
        if min(each) < 1:
            raise ValueError(f"{name} must give each client at least 1 class, got {min(each)}")
        for client, classes in enumerate(self.held or ()):
            if len(set(classes)) < len(classes) or min(classes) < 0:
                raise ValueError(
                    f"held must list different classes, numbered from 0, got {classes} for client {client}"
                )
        return self

    def _each(self) -> Sequence[int]:
        """Return the number of classes of each client."""
        if self.held is not None:
            return [len(classes) for classes in self.held]
        if isinstance(self.classes_each, int):
            return [self.classes_each] * self.clients
        if not isinstance(self.classes_each, str):
            return self.classes_each or ()
        groups = re.findall(r"(\d+)x(\d+)", self.classes_each)
        if ",".join("x".join(group) for group in groups) != self.classes_each.replace(" ", ""):
            raise ValueError(
                f"classes_each must be a number, a list or groups like '8x1,4x1,3x8', got {self.classes_each!r}"
            )
        return [int(number) for number, times in groups for _ in range(int(times))]

    def deal(self, data: DataSet, rows: Ints) -> tuple[Ints, Sequence[str]]:
        """The client of each row [n], and names."""
        label, classes = self.class_labels(data, rows)
        each = self._each()
        if max(each) > classes:
            raise self.refuse(f"classes_each must be at most the {classes} classes of {data.name}, got {max(each)}")
        if self.held is None and sum(each) < classes:
            raise self.refuse(
                f"{self.clients} clients of {self.classes_each} classes cannot hold the {classes} classes of "
                f"{data.name}: raise clients or classes_each"
            )
        rng = self.generator("deal")
        if self.sizes is not None or not isinstance(self.classes_each, int):
            return self._deal_sizes(label, np.array(each), classes, rng), Numbered(self.clients)
        held = _draw(self.clients, self.classes_each, classes, rng)
        order = np.argsort(held.ravel(), kind="stable")
        cuts = np.searchsorted(held.ravel()[order], np.arange(1, classes))
        holders = np.split(order // self.classes_each, cuts)
        for number, (members, count) in enumerate(zip(holders, np.bincount(label, minlength=classes), strict=True)):
            if len(members) > count:
                raise self.refuse(
                    f"class number {number} has {count} rows for its {len(members)} holders: "
                    f"lower clients or classes_each" + ("" if self.limit is None else ", or raise limit")
                )
        return spread(label, holders, rng), Numbered(self.clients)

    def _deal_sizes(self, label: Ints, each: Ints, classes: int, rng: Generator) -> Ints:
        """The client of each row [n], with the sizes asked for."""
        stock = np.bincount(label, minlength=classes)
        self.check_room(self.clients, label)
        listed = None if self.held is None else self._as_held(classes)
        rows = len(label) if listed is None else int(stock[listed.any(0)].sum())  # the others get no client
        sizes = (self.sizes or Uniform()).counts(self.clients, rows, rng)
        held = pattern(each, sizes, stock, rng) if listed is None else listed
        counts = fill(held, sizes, stock)
        if counts is None:
            raise self.refuse(
                f"rows of {classes} classes cannot be dealt to sizes {sizes.max()} to {sizes.min()} with these "
                "classes_each: give the largest clients more classes, or sizes that differ less"
            )
        client = np.full(len(label), NOBODY)
        for number in range(classes):
            dealt = rng.permutation(np.flatnonzero(label == number))[: counts[:, number].sum()]
            client[dealt] = np.repeat(np.arange(self.clients), counts[:, number])
        return client

    def _as_held(self, classes: int) -> Bools:
        """Return the classes of each client [clients, classes], as `held` lists them."""
        lists = self.held or ()
        most = max(max(classes_held) for classes_held in lists)
        if most >= classes:
            raise self.refuse(f"held must name classes in 0..{classes - 1}, got {most}")
        held = np.zeros((self.clients, classes), dtype=bool)
        for client, classes_held in enumerate(lists):
            held[client, list(classes_held)] = True
        return held


def _draw(clients: int, each: int, classes: int, rng: Generator) -> Ints:
    """Distinct classes for each client [clients, each], every class equally often (within one).

    Clients take the next `each` classes of a random order of all classes, which starts over at its end; a new order is
    drawn whenever the end falls between two clients, so no client takes classes of two orders.
    """
    block = classes // np.gcd(classes, each)  # clients from one shuffling to the next
    orders = np.argsort(rng.random((-(-clients // block), classes)), axis=1)
    client = np.arange(clients)[:, None]
    position = (client % block * each + np.arange(each)) % classes
    drawn: Ints = orders[client // block, position]
    return drawn
