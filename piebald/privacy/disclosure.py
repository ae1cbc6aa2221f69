"""Disclosure control: which sums may leave a site without noise, by rules of official statistics.

A sum is told only if enough rows contribute to it and few of them do not decide it, at the very numbers that are sent
(Hundepool et al. 2012, "Statistical Disclosure Control", sections 5.2 and 4.2.2).  With rows in the order of their
absolute contributions, and n the least number of rows:

- the largest one has no more than a stated share, and the two largest no more than 3/2 of it.  At the share of a third,
  what two rows that know their own contributions leave of a sum is at least twice any third one (the p-percent rule
  with p = 100);
- the n - 1 largest ones have no more than (n - 1) / n, as of n equal ones, so that many rows that hardly matter do not
  hide a few.

Where a person has several rows, the rules are those of persons: as many of the largest contributions as one person has
at most count as one, whoever they belong to.

These rules protect from careless questions.  They are no proof against somebody who combines answers to many
questions of their own choice: only noise is (`privacy.ledger`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from piebald.core.errors import Declined
from piebald.core.moments import Floats, Ints

LEAST_ROWS, LARGEST_SHARE = 10, 1 / 3
_PAIR = 1.5  # largest shares that two rows may have together
_SLACK = 1e-9  # three equal rows have a third each, whatever rounding says


class Withheld(Declined):
    """Sums that a site does not tell, since few rows decide them."""

    def __init__(self) -> None:
        # one sentence for all reasons: which rule a sum breaks may tell of the rows
        super().__init__("too few rows contribute to a sum, or one of them has a large share of it")


@dataclass(frozen=True, slots=True)
class DisclosureRules:
    """The rules that sums without noise obey at one site (`contracts.Disclosure`).

    Attributes:
        least: the least number of persons, and of units, that contribute to a sum.
        largest_share: the largest share of a person, or unit, in the sum of all absolute contributions.
        rows_per_person: the most rows that one person has.

    Examples:
        >>> rules = DisclosureRules(least=3, largest_share=0.5)
        >>> rules.allow(np.array([[1.0], [1.1], [0.9], [1.0]])), rules.allow(np.array([[9.0], [0.1], [0.1], [0.1]]))
        (True, False)
    """

    least: int = LEAST_ROWS
    largest_share: float = LARGEST_SHARE
    rows_per_person: int = 1

    @property
    def least_rows(self) -> int:
        """The least number of rows that are always of `least` persons."""
        return (self.least - 1) * self.rows_per_person + 1

    def allow(self, contributions: Floats, dominance_only: bool = False) -> bool:
        """Return whether the sums of contributions [n, k] may be told; one without any tells of nobody.

        Args:
            contributions: of rows, to some sums.
            dominance_only: whether only one or two rows with a large share count, and not how many rows have one.
        """
        sizes = np.abs(contributions)
        largest = sizes.max(axis=0, initial=0.0)
        if not np.isfinite(largest).all():
            return False
        # most sums of many rows are even enough by far, which is seen without an order of the rows
        with np.errstate(over="ignore"):
            bound = self.rows_per_person * (2 + self.least / self.largest_share)
            unclear = (largest > 0) & (largest * bound > sizes.sum(axis=0))
        # in units of the largest one, so that no total overflows
        return all(self._allow(sizes[:, place] / largest[place], dominance_only) for place in np.flatnonzero(unclear))

    def _allow(self, sizes: Floats, dominance_only: bool) -> bool:
        """Return whether a sum of contributions [n] of 0 to 1 may be told."""
        fewer, one, two = self.least_rows - 1, self.rows_per_person, 2 * self.rows_per_person
        if not dominance_only and np.count_nonzero(sizes) <= fewer:
            return False
        count = min(max(fewer, two), len(sizes))
        leading = np.sort(np.partition(sizes, len(sizes) - count)[len(sizes) - count :])[::-1]
        total = float(sizes.sum()) * (1 + _SLACK)
        even = bool(
            leading[:one].sum() <= total * self.largest_share
            and leading[:two].sum() <= total * min(_PAIR * self.largest_share, 1.0)
        )
        share = (self.least - 1) / self.least
        return even and (dominance_only or bool(leading[:fewer].sum() <= total * share))

    def allow_counts(self, counts: Floats | Ints) -> bool:
        """Return whether counts of rows may be told: each is of no row, or of enough of them."""
        return bool(((counts == 0) | (counts >= self.least_rows)).all())

    def check(
        self, contributions: Iterable[Floats], units: NDArray[np.object_] | None = None, dominance_only: bool = False
    ) -> None:
        """Refuse sums that the rules do not allow.

        Args:
            contributions: of rows, to some sums at a time [n, k].
            units: what each row belongs to [n], such as a ward; contributions of one unit count together as well.
            dominance_only: see `allow`.

        Raises:
            Withheld: a rule is broken.
        """
        numbers = None if units is None else np.unique(units, return_inverse=True)[1]
        of_units = replace(self, rows_per_person=1)
        for block in contributions:
            allowed = self.allow(block, dominance_only)
            if not allowed or not (numbers is None or of_units.allow(_summed(block, numbers), dominance_only)):
                raise Withheld

    def check_counts(self, counts: Floats | Ints) -> None:
        """Refuse counts of rows that the rules do not allow.

        Raises:
            Withheld: one is of few rows.
        """
        if not self.allow_counts(counts):
            raise Withheld


def _summed(contributions: Floats, units: Ints) -> Floats:
    """Return the sums of contributions [n, k] over the rows of each unit, whose numbers come [n]."""
    sums = np.zeros((int(units.max(initial=-1)) + 1, contributions.shape[1]))
    np.add.at(sums, units, contributions)
    return sums
