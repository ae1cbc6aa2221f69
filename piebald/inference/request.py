"""The statistics that are asked for, checked before any client is asked, and sums that bounded rows make for them.

The sums are one vector of whole numbers, to which each row adds no more than its stated bounds allow.  They can be made
under masks, and noise can hide a row in them: each row adds at most 1 to a count, a number between -1 and 1 to a sum
and one between 0 and 1 to a sum of squares, all in steps of 2^-30.  Sums of whole numbers have no rounding errors that
depend on their order, so the influence of a row is exactly what `SumPlan` states (Casacuberta et al. 2022, "Widespread
underestimation of sensitivity in differentially private libraries").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from piebald.contracts import Split
from piebald.core.arguments import checked
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.moments import Floats, Ints
from piebald.inference.columns import ClientColumns, check_codes
from piebald.inference.pooled_statistics import NumberColumn
from piebald.privacy.ledger import noise_for

STEP = 2.0**-30  # of sums, which are whole numbers of steps
MOST_ROWS = 1 << 31  # of all clients together: their sums, and noise on them, fit 64 bits
_NARROWEST = 1e-300
_COUNTS = 3  # of these numbers
_HEAD = 5  # numbers of a column before its histogram: present, missing, infinite, sum, sum of squares


@dataclass(frozen=True, slots=True)
class SumPlan:
    """The sums that are made, in a fixed order.

    Attributes:
        bounds: columns of numbers with their stated bounds; a number outside counts as the nearer bound.
        bins: bins of each histogram, 0 for none.
        categories: columns of text with the categories that are counted; others count as "other".
        tables: pairs of columns of `categories` that are counted together.

    Examples:
        >>> plan = SumPlan({"age": (0.0, 100.0)}, bins=0, categories={"smokes": ("no", "yes")}, tables=())
        >>> plan.length, plan.influence
        (9, 2.0)
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
        """The number of sums."""
        tables = [len(self.categories[first]) * len(self.categories[second]) for first, second in self.tables]
        # besides the categories "other" and missing, as `_codes` numbers them
        single = [len(categories) + 2 for categories in self.categories.values()]
        return len(self.bounds) * (_HEAD + self.bins) + sum(single) + sum(tables)

    def vector(self, client: ClientColumns) -> Ints:
        """Return the sums of a client [length], in steps of 2^-30.

        Raises:
            SettingError: it has more rows than a sum has room for.
        """
        # more would let a sum overflow 64 bits under noise
        if client.rows >= MOST_ROWS:
            raise SettingError(f"sums are of fewer than {MOST_ROWS:,} rows, client {client.name!r} has {client.rows:,}")
        parts = [self._numbers(client.numbers[name], *ends) for name, ends in self.bounds.items()]
        codes = {name: _codes(client.text(name), categories) for name, categories in self.categories.items()}
        parts += [_counted(codes[name], len(categories) + 2) for name, categories in self.categories.items()]
        for first, second in self.tables:
            height, width = len(self.categories[first]), len(self.categories[second])
            in_table = (codes[first] < height) & (codes[second] < width)  # neither "other" nor missing
            parts.append(_counted((codes[first] * width + codes[second])[in_table], height * width))
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def influences(self, client: ClientColumns, vector: Ints) -> tuple[Ints, list[Floats]]:
        """Return the counts of rows among a client's sums, and what its rows contribute to all other sums [n, 2]."""
        counted = np.ones(len(vector), dtype=bool)
        for index in range(len(self.bounds)):
            counted[index * (_HEAD + self.bins) + _COUNTS : index * (_HEAD + self.bins) + _HEAD] = False
        scaled = [_scaled(client.numbers[name], *ends) for name, ends in self.bounds.items()]
        return vector[counted] >> 30, [np.column_stack([values, np.square(values)]) for values in scaled]

    def _numbers(self, values: Floats, low: float, high: float) -> Ints:
        scaled = _scaled(values, low, high)
        missing = int(np.isnan(values).sum())
        # counts are shifted to the unit of sums, 2^-30, so that one deviation of noise fits all numbers of the vector
        counts = np.array([len(scaled), missing, len(values) - len(scaled) - missing], dtype=np.int64) << 30
        # each row is rounded before the sum, so that the total does not depend on the order of rows or clients
        sums = [int(np.rint(power / STEP).astype(np.int64).sum()) for power in (scaled, np.square(scaled))]
        # the upper end falls into the last bin, which has both of its edges
        places = np.minimum(((scaled + 1) / 2 * self.bins).astype(np.int64), max(self.bins - 1, 0))
        histogram = _counted(places, self.bins) if self.bins else np.zeros(0, dtype=np.int64)
        return np.concatenate([counts, np.array(sums, dtype=np.int64), histogram])

    def numbers(self, total: NDArray[np.float64], quantiles: Sequence[float] = ()) -> dict[str, NumberColumn]:
        """Return the statistics of the columns of numbers from the sum over clients, in steps.

        Args:
            total: the sums [length].
            quantiles: shares of the quantiles, which come from the histogram.
        """
        statistics = {}
        width = _HEAD + self.bins
        for index, (name, (low, high)) in enumerate(self.bounds.items()):
            # noise may drive counts below 0, which no later division or square root takes
            part = total[index * width : (index + 1) * width] * STEP
            present, missing, infinite = (max(float(count), 0.0) for count in part[:3])
            half, mean, variance = (high - low) / 2, math.nan, math.nan
            if present >= 0.5:  # with noise, a count near 0 tells nothing about the mean
                # a mean and a mean square of numbers in [-1, 1], where noise does not keep them
                first = min(max(float(part[3]) / present, -1.0), 1.0)
                second = min(max(float(part[4]) / present, 0.0), 1.0)
                mean = low + half + half * first
                if present > 1:
                    variance = half**2 * max(second - first**2, 0.0) * present / (present - 1)
            column = NumberColumn(present, missing, infinite, mean, variance)
            if self.bins:
                edges, counts = np.linspace(low, high, self.bins + 1), np.maximum(part[_HEAD:], 0.0)
                column = column.with_histogram(edges, counts, quantiles)
            statistics[name] = column
        return statistics

    def counts(self, total: NDArray[np.float64]) -> tuple[dict[str, Floats], dict[tuple[str, str], Floats]]:
        """Return the counts of each column of text [categories, "other", missing], and of each table."""
        index = len(self.bounds) * (_HEAD + self.bins)
        single, tables = {}, {}
        for name, categories in self.categories.items():
            # noise may make a count negative; clamping is post-processing and costs no privacy
            single[name] = np.maximum(total[index : index + len(categories) + 2] * STEP, 0.0)
            index += len(categories) + 2
        for first, second in self.tables:
            shape = (len(self.categories[first]), len(self.categories[second]))
            tables[first, second] = np.maximum(total[index : index + shape[0] * shape[1]] * STEP, 0.0).reshape(shape)
            index += shape[0] * shape[1]
        return single, tables


def _scaled(values: Floats, low: float, high: float) -> Floats:
    """Return the numbers that are finite, with the bounds as -1 and 1."""
    finite = values[np.isfinite(values)]
    # the range is mapped to [-1, 1], since `influence` counts on no row adding more than 1 to a sum
    half = (high - low) / 2
    # the outer clip takes what rounding of (high - low) / 2 leaves beyond 1: such a row would exceed its influence
    return np.asarray(np.clip((np.clip(finite, low, high) - (low + half)) / half, -1.0, 1.0))


def bounds_reason(low: float, high: float) -> str | None:
    """Return why two numbers cannot be the bounds of a column, or None."""
    if not math.isfinite(low) or not math.isfinite(high - low):
        return "must be two numbers, low and high"
    # half of a narrower range is 0, and numbers in units of 0 are none
    return None if high - low >= _NARROWEST else "must be a low and a higher number"


def _codes(values: NDArray[np.object_], categories: Sequence[str]) -> Ints:
    """Return the place of each value among the categories; "other" comes after them, then missing ones."""
    import pandas as pd

    places = {category: index for index, category in enumerate(categories)}
    rows, different = pd.factorize(values)
    # the last one is for gaps, whose code is -1
    return np.array([*(places.get(value, len(places)) for value in different), len(places) + 1], dtype=np.int64)[rows]


def _counted(codes: Ints, width: int) -> Ints:
    return np.bincount(codes, minlength=width).astype(np.int64) << 30


Bins = Annotated[int, Field(ge=1, le=10_000)]
Quantiles = Sequence[Annotated[float, Field(ge=0, le=1)]]
NoiseAt = Literal["server", "client"]
_LARGEST = 1.7e308  # a whole number may be larger than any float


@dataclass(frozen=True, slots=True)
class StatisticsRequest:
    """The statistics that are asked for.

    Attributes:
        quantiles: shares of the numbers below, in [0, 1].
        bins: bins of each column's histogram; None for no histograms.
        bounds: the range of each column of numbers.
        categories: the categories of columns of text, and of numbers that are codes.
        tables: pairs of columns to count together.
        by_client: also each client's own columns.
        split: the rows that the statistics are of.
        secure: whether sums leave clients under masks.
        epsilon, delta: the privacy budget of the question; None for no noise.
        noise_at: who adds noise; under masks clients do.
        client: the column that names clients, None where there is none.
        counted: columns that are counted at each client, in tables with it.
    """

    quantiles: tuple[float, ...]
    bins: int | None
    bounds: Mapping[str, tuple[float, float]]
    categories: Mapping[str, tuple[str, ...]]
    tables: tuple[tuple[str, str], ...]
    by_client: bool = False
    split: Split = "train"
    secure: bool = False
    epsilon: float | None = None
    delta: float | None = None
    noise_at: NoiseAt = "client"
    client: str | None = None
    counted: tuple[str, ...] = ()

    @property
    def noise(self) -> float:
        """The standard deviation of the noise, in units of one row's influence; 0 without noise."""
        return noise_multiplier(self.epsilon, self.delta)

    @property
    def hides_rows(self) -> bool:
        """Whether rows are hidden in sums, by noise or by masks."""
        return self.secure or self.epsilon is not None

    @property
    def central(self) -> bool:
        """Whether noise is added once, to the sum, which under masks nobody sees before it is complete."""
        return self.epsilon is not None and not self.secure and self.noise_at == "server"

    def check_columns(self, numbers: Sequence[str], texts: Sequence[str]) -> None:
        """Refuse what does not fit the columns of clients.

        Args:
            numbers: names of columns of numbers.
            texts: names of columns of categories.

        Raises:
            SettingError: a column is not there, or has numbers where categories are words.
        """
        for name in self.bounds:
            if name not in numbers:
                raise unknown("column of numbers to give bounds of,", name, numbers)
        for name in [*self.categories, *self.counted, *itertools.chain(*self.tables)]:
            if name not in numbers and name not in texts:
                raise unknown("column", name, [*numbers, *texts])
        for name in {*self.categories} & {*numbers}:
            check_codes(name, self.categories[name])

    def check_hidden(self, numbers: Collection[str], counted: Collection[str]) -> None:
        """Refuse what sums that hide rows cannot tell without looking at the rows first.

        Args:
            numbers: names of columns of numbers, which need bounds or categories.
            counted: names of columns that are counted by category, alone or in tables.

        Raises:
            SettingError: bounds, categories or bins are missing, or clients' own columns are asked for.
        """
        option = "secure" if self.epsilon is None else "epsilon"
        if self.by_client:
            raise SettingError("by_client shows what secure and epsilon are to hide: leave it out")
        unknown_range = [name for name in numbers if name not in self.bounds and name not in self.categories]
        missing = [(name, "bounds", "(low, high)") for name in unknown_range]
        missing += [(name, "categories", "[...]") for name in counted if not self.categories.get(name)]
        for name, argument, form in missing:
            raise SettingError(
                f"{option} needs {argument} of column {name!r}, which must not be taken from the rows: write "
                f"{argument}={{{name!r}: {form}}}, or name the columns that you want without it"
            )
        # exact quantiles take about 20 questions, each under noise or masks of its own; a histogram is one
        if self.quantiles and self.bins is None and self.bounds:
            raise SettingError(
                f"{option} takes quantiles from a histogram: write bins=100 for an error of a hundredth of the bounds, "
                "or quantiles=()"
            )


@checked
def statistics_request(
    quantiles: Quantiles = (),
    bins: Bins | None = None,
    bounds: Mapping[str, Sequence[float]] | None = None,
    by_client: bool = False,
    categories: Mapping[str, Sequence[str]] | None = None,
    tables: Sequence[Sequence[str]] = (),
    split: Split = "train",
    secure: bool = False,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_at: NoiseAt = "client",
    client: str | None = None,
) -> StatisticsRequest:
    """Return a checked request; the arguments are those of `statistics`.

    Raises:
        SettingError: an argument is wrong.
    """
    noise_multiplier(epsilon, delta)  # refuses half a budget
    return StatisticsRequest(
        tuple(map(float, quantiles)), bins,
        {name: _checked_bounds(name, ends) for name, ends in (bounds or {}).items()},
        {name: _checked_categories(name, values) for name, values in (categories or {}).items()},
        tuple(map(_checked_pair, tables)), by_client, split, secure, epsilon, delta, noise_at,
        client,
    )  # fmt: skip


def _checked_pair(columns: Sequence[str]) -> tuple[str, str]:
    if isinstance(columns, str) or len(columns) != 2 or columns[0] == columns[1]:
        raise SettingError(f"tables must be pairs of different columns, got {shown(columns)}")
    return str(columns[0]), str(columns[1])


def _checked_categories(name: str, values: Sequence[str]) -> tuple[str, ...]:
    texts = tuple(map(str, values))
    if not texts or len(set(texts)) < len(texts):
        raise SettingError(f"categories of {name!r} must be different names, at least one, got {shown(values)}")
    return texts


def _checked_bounds(name: str, ends: Sequence[float]) -> tuple[float, float]:
    if len(ends) != 2 or not all(isinstance(end, int | float) and abs(end) <= _LARGEST for end in ends):
        raise SettingError(f"bounds of {name!r} must be two numbers, low and high, got {shown(ends)}")
    if reason := bounds_reason(*map(float, ends)):
        raise SettingError(f"bounds of {name!r} {reason}, got {shown(ends)}")
    return float(ends[0]), float(ends[1])


def noise_multiplier(epsilon: float | None, delta: float | None) -> float:
    """Return the standard deviation of the noise that a privacy budget asks for, in units of one row's influence.

    Args:
        epsilon, delta: the budget of one question; both None for no noise, which is 0.

    Raises:
        SettingError: only one of them is given.
    """
    if epsilon is None:
        if delta is not None:
            raise SettingError("delta belongs to noise: give epsilon, too, or leave it out")
        return 0.0
    if delta is None:
        raise SettingError("epsilon needs a delta, below one over the number of rows: write delta=1e-6")
    return noise_for(epsilon, delta)
