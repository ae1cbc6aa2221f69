"""A vertical split: two parties with different features of partly the same people."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from piebald.contracts.component import Component
from piebald.core.arguments import checked_class
from piebald.core.errors import SettingError, unknown
from piebald.core.randomness import generator
from piebald.data.partition.split import Ints

if TYPE_CHECKING:
    from torch import Tensor

    from piebald.data.sets.dataset import DataSet


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class PartyRows:
    """The rows of one party.

    Attributes:
        ids: sample ids [n], increasing; the same id is the same person at both parties.
        x: features [n, f].
        y: targets [n], None at the party without targets.
        features: the features' names or numbers [f].
    """

    ids: Ints
    x: Tensor
    y: Tensor | None
    features: tuple[str, ...]


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class Parties:
    """The active party, which has the targets, the passive one, and the ids both hold [overlap], increasing."""

    active: PartyRows
    passive: PartyRows
    overlap: Ints


class Division(Component):
    """Base class of divisions of features between two parties."""

    axis = "vertical"


class Vertical(Division):
    """Divide features between two parties, with a given number of rows that both hold.

    The other rows are divided at random: `active_share` of them for the active party, the rest for the passive one.

    Attributes:
        overlap: rows that both parties hold, None for all.
        features: names of the active party's features; without names in the data set, their numbers as text.
        common: names of features among these that the passive party has, too.
        share: share of the features for the active party, drawn at random, if `features` is None.
        active_share: share of the rows outside the overlap that the active party holds.
        seed: seed of all choices.

    Examples:
        >>> import torch
        >>> from piebald.data import DataSet
        >>> people = DataSet("people", torch.rand(6, 2), torch.tensor([0, 1] * 3), features=("income", "visits"))
        >>> parties = Vertical(overlap=2, features=("income",)).split(people)
        >>> parties.passive.features, len(parties.active.ids), len(parties.overlap)
        (('visits',), 4, 2)
    """

    overlap: int | None = Field(default=None, ge=1)
    features: tuple[str, ...] | None = Field(default=None, min_length=1)
    common: tuple[str, ...] = ()
    share: float = Field(default=0.5, gt=0, lt=1)
    active_share: float = Field(default=0.5, ge=0, le=1)
    seed: int = 0

    def split(self, data: DataSet, rows: Ints | None = None) -> Parties:
        """Divide rows of a data set, by default its training rows; call it again for the test rows.

        The division of features does not depend on the rows.

        Raises:
            SettingError: inputs are not a table, features do not exist or are all given, or there are too few rows.
        """
        rows = (np.arange(len(data)) if data.train is None else data.train) if rows is None else rows
        if data.inputs.dim() != 2 or data.inputs.shape[1] < 2:
            raise self._refuse(f"inputs must be a table of two features or more, got {list(data.inputs.shape[1:])}")
        owned = self._chosen(data)
        rng = generator(self.seed, "vertical", "rows")
        both = len(rows) if self.overlap is None else self.overlap
        if both > len(rows):
            raise self._refuse(f"overlap must be at most the {len(rows)} rows, got {both}")
        # sorted first, so that the choice does not depend on the order in which rows are given
        shuffled = rng.permutation(np.sort(rows))
        cut = both + math.floor((len(rows) - both) * self.active_share + 0.5)
        active, passive = np.sort(shuffled[:cut]), np.sort(np.r_[shuffled[:both], shuffled[cut:]])
        names = feature_names(data)
        theirs = np.array([index for index, name in enumerate(names) if index not in owned or name in self.common])
        return Parties(
            _party(data, active, owned, True), _party(data, passive, theirs, False), np.sort(shuffled[:both])
        )

    def _refuse(self, reason: str) -> SettingError:
        return SettingError(f"vertical: {reason}")

    def _chosen(self, data: DataSet) -> Ints:
        """Positions of the active party's features, increasing."""
        names = feature_names(data)
        if missing := [name for name in self.common if name not in (self.features or ())]:
            raise self._refuse(f"common must be among features, got {missing[0]!r}")
        if self.features is None:
            # each party has one feature at least, whatever the share
            count = min(max(math.floor(len(names) * self.share + 0.5), 1), len(names) - 1)
            return np.sort(generator(self.seed, "vertical", "features").permutation(len(names))[:count])
        for name in self.features:
            if name not in names:
                raise unknown(f"feature of {data.name} called", name, names)
        if len(set(self.features)) == len(names):
            raise self._refuse("features must leave at least one to the passive party, got all of them")
        return np.array(sorted({names.index(name) for name in self.features}), dtype=np.int64)


def feature_names(data: DataSet) -> list[str]:
    """Names of the features, or their numbers as text."""
    return [str(number) for number in range(data.inputs.shape[1])] if data.features is None else list(data.features)


def _party(data: DataSet, rows: Ints, places: Ints, labelled: bool) -> PartyRows:
    names = feature_names(data)
    x = data.inputs[rows][:, places]
    return PartyRows(rows, x, data.targets[rows] if labelled else None, tuple(names[index] for index in places))
