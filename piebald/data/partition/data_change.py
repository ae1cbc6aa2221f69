"""Changes of some clients' rows after the partition, such as flipped labels and noise: the setting `changes`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from piebald.contracts.component import Component, build
from piebald.core.errors import SettingError
from piebald.core.randomness import generator
from piebald.data.partition.split import Ints

if TYPE_CHECKING:
    from numpy.random import Generator
    from torch import Tensor


class DataChange(Component):
    """A change of the rows of some clients.  The change of one client depends only on (seed, client).

    Attributes:
        share: share of the clients that are changed, drawn at random; at least one client if above 0.
        clients: numbers of the clients that are changed, instead of a share.
        seed: seed of all choices.
    """

    axis = "change"
    of_labels: ClassVar[bool] = False  # True: labels of training and validation rows; False: inputs of all rows
    of_both: ClassVar[bool] = False  # True: inputs and labels of training and validation rows (`rows`)

    share: float = Field(default=1.0, ge=0, le=1)
    clients: tuple[int, ...] | None = None
    seed: int = 0

    def chosen(self, count: int) -> Ints:
        """Numbers of the changed clients, increasing.

        Raises:
            SettingError: a client does not exist.
        """
        if self.clients is None:
            number = max(math.floor(self.share * count + 0.5), 1 if self.share else 0)
            return np.sort(self.generator("choose").permutation(count)[:number])
        numbers = np.unique(np.array(self.clients, dtype=np.int64))
        if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < count:
            raise self.refuse(f"clients must be in 0..{count - 1}, got {numbers[0] if numbers[0] < 0 else numbers[-1]}")
        return numbers

    def labels(self, y: Ints, classes: int, client: int) -> Ints:
        """New labels [n] for a client's labels [n]."""
        raise NotImplementedError

    def inputs(self, x: Tensor, client: int) -> Tensor:
        """New inputs [n, ...] for a client's inputs, float32 (images in [0, 1])."""
        raise NotImplementedError

    def rows(self, x: Tensor, y: Ints, classes: int, client: int) -> tuple[Tensor, Ints]:
        """New inputs and labels for a client's rows, if both change together."""
        raise NotImplementedError

    def refuse(self, why: str) -> SettingError:
        """An error about this change."""
        return SettingError(f"change {self.kind!r}: {why}")

    def generator(self, *purpose: int | str) -> Generator:
        """A NumPy generator for what is drawn; it depends on the change's seed and kind and on the words given.

        Args:
            purpose: what the numbers are for; with the client's number, they are the same whoever else is changed.
        """
        return generator(self.seed, "change", self.kind, *purpose)


class _Flip(DataChange):
    """Base class of label flips.

    Attributes:
        fraction: share of a client's rows that are flipped, in [0, 1].
    """

    axis = "change"
    of_labels: ClassVar[bool] = True

    fraction: float = Field(default=1.0, ge=0, le=1)

    def _rows(self, y: Ints, client: int) -> Ints:
        """The rows to flip."""
        return np.flatnonzero(self.generator("rows", client).random(len(y)) < self.fraction)


class FlipPairs(_Flip):
    """Labels swapped in pairs, such as 0-3 with 4-7 (one of DistFL's attacks): data poisoning.

    Attributes:
        pairs: (a, b): a becomes b and b becomes a; no class twice.

    Examples:
        >>> import numpy as np
        >>> import piebald as pb
        >>> pb.partition.FlipPairs(pairs=[(0, 1)]).labels(np.array([0, 1, 2, 0]), classes=3, client=0)
        array([1, 0, 2, 1])
    """

    pairs: tuple[tuple[int, int], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_pairs(self) -> FlipPairs:
        named = [number for pair in self.pairs for number in pair]
        if len(set(named)) < len(named):
            raise ValueError(f"pairs must name each class once, got {self.pairs}")
        return self

    def labels(self, y: Ints, classes: int, client: int) -> Ints:
        """New labels [n]."""
        check_classes(self, [number for pair in self.pairs for number in pair], classes)
        map_to = np.arange(classes)
        for a, b in self.pairs:
            map_to[a], map_to[b] = b, a
        flipped, rows = y.copy(), self._rows(y, client)
        flipped[rows] = map_to[y[rows]]
        return flipped


class FlipRandom(_Flip):
    """Each label becomes another class, drawn uniformly from all others: data poisoning."""

    def labels(self, y: Ints, classes: int, client: int) -> Ints:
        """New labels [n]."""
        if classes < 2:
            raise self.refuse(f"there must be at least two classes, got {classes}")
        flipped, rows = y.copy(), self._rows(y, client)
        flipped[rows] = (y[rows] + self.generator("labels", client).integers(1, classes, len(y))[rows]) % classes
        return flipped


class FlipTo(_Flip):
    """Labels of some classes, or of all, become one class: a targeted attack.

    Attributes:
        target: the class that labels become.
        source: classes to flip, None for all.
    """

    target: int = Field(ge=0)
    source: tuple[int, ...] | None = None

    def labels(self, y: Ints, classes: int, client: int) -> Ints:
        """New labels [n]."""
        check_classes(self, [self.target, *(self.source or ())], classes)
        flipped, rows = y.copy(), self._rows(y, client)
        if self.source is not None:
            rows = rows[np.isin(y[rows], self.source)]
        flipped[rows] = self.target
        return flipped


def check_classes(change: DataChange, named: list[int], classes: int) -> None:
    """Refuse class numbers that do not exist."""
    for number in named:
        if not 0 <= number < classes:
            raise change.refuse(f"classes must be in 0..{classes - 1}, got {number}")


AnyChange = Annotated[
    DataChange,
    BeforeValidator(lambda table: build("change", table)),
    PlainSerializer(lambda change: change.table()),
]
