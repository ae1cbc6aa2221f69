"""Statistics as one sum of whole numbers, in which nothing of a row is larger than its stated bounds allow.

That is what can be summed under masks, and what noise can hide: each row adds at most 1 to a count, a number between -1
and 1 to a sum and one between 0 and 1 to a sum of squares, all in steps of 2^-30.  Sums of whole numbers have no
rounding errors that depend on their order, so a row's influence is exactly what is said here (Casacuberta et al. 2022,
"Widespread underestimation of sensitivity in differentially private libraries").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from piebald.core.errors import SettingError
from piebald.core.moments import Floats, Ints

STEP = 2.0**-30
MOST_ROWS = 1 << 31  # of all clients together: their sums, and noise on them, fit 64 bits
_NARROWEST = 1e-300
_HEAD = 5  # numbers of a column before its histogram: present, missing, infinite, sum, sum of squares


class Columns(Protocol):
    """One client's rows, column by column.

    Attributes:
        name: the client's name.
        rows: how many rows it has.
        numbers: columns of numbers [rows] by name, NaN for missing ones.
    """

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def numbers(self) -> Mapping[str, Floats]: ...

    def text(self, name: str) -> NDArray[np.object_]:
        """A column as text [rows], None for missing ones."""


@dataclass(frozen=True, slots=True)
class NumberSums:
    """Sums over one column of numbers: present, missing and infinite ones, mean and variance, counts of bins."""

    present: float
    missing: float
    infinite: float
    mean: float
    variance: float
    bins: Floats


@dataclass(frozen=True, slots=True)
class SumPlan:
    """Which sums are made, in a fixed order.

    Attributes:
        bounds: columns of numbers with their stated bounds; a number outside counts as the nearer bound.
        bins: bins of each histogram, 0 for none.
        categories: columns of text with the categories that are counted; others count as "other".
        tables: pairs of columns of `categories` that are counted together.
    """

    bounds: Mapping[str, tuple[float, float]]
    bins: int
    categories: Mapping[str, Sequence[str]]
    tables: Sequence[tuple[str, str]]

    @property
    def influence(self) -> float:
        """The largest Euclidean length of what one row adds to the sums."""
        numbers = len(self.bounds) * (3 + (self.bins > 0))  # one kind of presence, a sum, a sum of squares, one bin
        return math.sqrt(numbers + len(self.categories) + len(self.tables))

    @property
    def exchange_influence(self) -> float:
        """The largest Euclidean length of what changes in the sums when one row takes the place of another.

        Two numbers a and b of a column change its sums by a - b and a^2 - b^2, of which the squares add up to at most 4
        in [-1, 1], at its ends; and two counts of a histogram.  A number in place of a missing one changes less.
        """
        numbers = len(self.bounds) * (4 + 2 * (self.bins > 0))
        return math.sqrt(numbers + 2 * (len(self.categories) + len(self.tables)))

    @property
    def length(self) -> int:
        """How many numbers the sums are."""
        tables = [len(self.categories[one]) * len(self.categories[other]) for one, other in self.tables]
        single = [len(known) + 2 for known in self.categories.values()]
        return len(self.bounds) * (_HEAD + self.bins) + sum(single) + sum(tables)

    def vector(self, client: Columns) -> Ints:
        """A client's sums, in steps of 2^-30.

        Raises:
            SettingError: it has more rows than fit.
        """
        if client.rows >= MOST_ROWS:
            raise SettingError(f"sums are of fewer than {MOST_ROWS:,} rows, client {client.name!r} has {client.rows:,}")
        parts = [self._numbers(client.numbers[name], *ends) for name, ends in self.bounds.items()]
        codes = {name: _codes(client.text(name), known) for name, known in self.categories.items()}
        parts += [_counted(codes[name], len(known) + 2) for name, known in self.categories.items()]
        for one, other in self.tables:
            width = len(self.categories[other])
            kept = (codes[one] < len(self.categories[one])) & (codes[other] < width)
            parts.append(_counted((codes[one] * width + codes[other])[kept], len(self.categories[one]) * width))
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def _numbers(self, values: Floats, low: float, high: float) -> Ints:
        finite = values[np.isfinite(values)]
        half = (high - low) / 2
        apart = np.clip((np.clip(finite, low, high) - (low + half)) / half, -1.0, 1.0)
        missing = int(np.isnan(values).sum())
        counts = np.array([len(finite), missing, len(values) - len(finite) - missing], dtype=np.int64) << 30
        sums = [int(np.rint(one / STEP).astype(np.int64).sum()) for one in (apart, np.square(apart))]
        places = np.minimum(((apart + 1) / 2 * self.bins).astype(np.int64), max(self.bins - 1, 0))
        histogram = _counted(places, self.bins) if self.bins else np.zeros(0, dtype=np.int64)
        return np.concatenate([counts, np.array(sums, dtype=np.int64), histogram])

    def numbers(self, total: NDArray[np.float64]) -> dict[str, NumberSums]:
        """The statistics of the columns of numbers from the sum over clients, in steps."""
        found = {}
        width = _HEAD + self.bins
        for place, (name, (low, high)) in enumerate(self.bounds.items()):
            part = total[place * width : (place + 1) * width] * STEP
            present, missing, infinite = (max(float(one), 0.0) for one in part[:3])
            half, mean, variance = (high - low) / 2, math.nan, math.nan
            if present >= 0.5:  # with noise, a count near 0 says that nothing is known
                first = min(max(float(part[3]) / present, -1.0), 1.0)
                second = min(max(float(part[4]) / present, 0.0), 1.0)
                mean = low + half + half * first
                if present > 1:
                    variance = half**2 * max(second - first**2, 0.0) * present / (present - 1)
            found[name] = NumberSums(present, missing, infinite, mean, variance, np.maximum(part[_HEAD:], 0.0))
        return found

    def counts(self, total: NDArray[np.float64]) -> tuple[dict[str, Floats], dict[tuple[str, str], Floats]]:
        """Counts of each column of text [categories + 2], then "other" and missing ones, and of each table [a, b]."""
        place = len(self.bounds) * (_HEAD + self.bins)
        single, tables = {}, {}
        for name, known in self.categories.items():
            single[name] = np.maximum(total[place : place + len(known) + 2] * STEP, 0.0)
            place += len(known) + 2
        for one, other in self.tables:
            shape = (len(self.categories[one]), len(self.categories[other]))
            tables[one, other] = np.maximum(total[place : place + shape[0] * shape[1]] * STEP, 0.0).reshape(shape)
            place += shape[0] * shape[1]
        return single, tables


def bounds_reason(low: float, high: float) -> str | None:
    """Why two numbers are no bounds of a column, or None."""
    if not math.isfinite(low) or not math.isfinite(high - low):
        return "must be two numbers, low and high"
    # half of a narrower range is 0, and numbers in units of 0 are none
    return None if high - low >= _NARROWEST else "must be a low and a higher number"


def as_text(values: Floats) -> NDArray[np.object_]:
    """Numbers as categories [rows], whole ones as such: "3" for 3.0, others to six digits; None for missing ones."""
    return np.array([None if np.isnan(value) else _text(value) for value in values.tolist()], dtype=object)


def _text(value: float) -> str:
    return str(int(value)) if value.is_integer() else f"{value:g}"


def _codes(values: NDArray[np.object_], known: Sequence[str]) -> Ints:
    """The place of each value among the known ones; then comes "other", then missing ones."""
    places = {value: place for place, value in enumerate(known)}
    other = len(known)
    return np.array([other + 1 if one is None else places.get(one, other) for one in values], dtype=np.int64)


def _counted(codes: Ints, width: int) -> Ints:
    return np.bincount(codes, minlength=width).astype(np.int64) << 30


def binned_quantiles(counts: Floats, edges: Floats, shares: Sequence[float]) -> list[float]:
    """Quantiles from a histogram, linear within a bin: at most one bin's width from those of the numbers themselves.

    Args:
        counts: of bins [bins].
        edges: [bins + 1].
        shares: of the numbers below.
    """
    reached = np.concatenate([[0.0], np.cumsum(counts)])
    if reached[-1] <= 0:
        return [math.nan for _ in shares]
    found = []
    for share in shares:
        wanted = share * reached[-1]
        place = min(int(np.searchsorted(reached, wanted, side="left")), len(counts))
        place = max(place, 1 + int(np.argmax(counts > 0)))  # the first bin that holds any
        inside = counts[place - 1]
        part = 0.0 if inside == 0 else (wanted - reached[place - 1]) / inside
        found.append(float(edges[place - 1] + min(max(part, 0.0), 1.0) * (edges[place] - edges[place - 1])))
    return found
