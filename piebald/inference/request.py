"""The statistics that are asked for, checked before any client is asked."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from piebald.contracts import Split
from piebald.core.arguments import checked
from piebald.core.errors import SettingError, shown, unknown
from piebald.inference.bounded_sums import bounds_reason
from piebald.inference.columns import check_codes
from piebald.privacy.ledger import noise_for

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
        for name in [*self.categories, *itertools.chain(*self.tables)]:
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
    quantiles: Quantiles,
    bins: Bins | None,
    bounds: Mapping[str, Sequence[float]] | None,
    by_client: bool = False,
    categories: Mapping[str, Sequence[str]] | None = None,
    tables: Sequence[Sequence[str]] = (),
    split: Split = "train",
    secure: bool = False,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_at: NoiseAt = "client",
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
