"""The result of federated statistics: columns, histograms, counts of categories, tables.

The statistics that are asked for, checked before any client is asked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from piebald.core.arguments import checked, checked_class
from piebald.core.errors import SettingError, shown, unknown
from piebald.data.clients.standardise import Standardisation
from piebald.privacy.accounting import PrivacyBudget
from piebald.privacy.ledger import noise_for
from piebald.report.page.markup import html_table
from piebald.statistics.bounded_sums import bounds_reason

Table = Mapping[str, Mapping[str, float]]  # rows by the category of one column and of another
Mode = Literal["exact", "secure", "private", "secure and private"]
Bins = Annotated[int, Field(ge=1, le=10_000)]
Quantiles = Sequence[Annotated[float, Field(ge=0, le=1)]]
_LARGEST = 1.7e308  # a whole number may be larger than any float


@dataclass(frozen=True, slots=True)
class NumberColumn:
    """A column of numbers over all clients.

    Attributes:
        present: finite numbers, which the other statistics are of.
        missing: rows without a number.
        infinite: rows with an infinite number.
        mean: their mean, NaN where there are none.
        variance: their unbiased variance, NaN for fewer than two.
        quantiles: quantile by share.
        edges: of the histogram's bins [bins + 1], empty without one; each bin has its lower edge, the last one both.
        counts: numbers in each bin [bins].
        quantile_error: how far a quantile may be from that of the pooled rows, 0 where it is exact; noise comes on top.
    """

    present: float
    missing: float
    infinite: float
    mean: float
    variance: float
    quantiles: Mapping[float, float] = field(default_factory=dict)
    edges: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    quantile_error: float = 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation, the root of the unbiased variance."""
        return math.sqrt(self.variance)

    def plain(self) -> dict[str, Any]:
        """Return the column as JSON values; NaN becomes None."""
        values: dict[str, Any] = {name: getattr(self, name) for name in ("present", "missing", "infinite")}
        values |= {"mean": _or_none(self.mean), "deviation": _or_none(self.deviation)}
        if self.quantiles:
            values["quantiles"] = {f"{share:g}": _or_none(value) for share, value in self.quantiles.items()}
            values["quantile_error"] = self.quantile_error
        if self.counts:
            values |= {"edges": [_or_none(edge) for edge in self.edges], "counts": list(self.counts)}
        return values


@dataclass(frozen=True, slots=True)
class TextColumn:
    """A column of text over all clients: rows of each stated category, of other ones, and without a value."""

    counts: Mapping[str, float]
    other: float
    missing: float

    def plain(self) -> dict[str, Any]:
        """Return the column as JSON values."""
        return {"counts": dict(self.counts), "other": self.other, "missing": self.missing}


@checked_class
@dataclass(frozen=True, slots=True)
class FederatedStatistics:
    """Statistics over the rows of all clients.

    Attributes:
        clients: the clients' names.
        mode: the way in which answers were summed.
        rows: rows of each client; None where only sums are known.
        numbers: columns of numbers, by name.
        texts: columns of text, by name.
        tables: contingency tables, by their two columns: rows of one category and of the other, nested.
        by_client: each client's own columns of numbers, where they were asked for.
        privacy: the budget that was spent, None without noise.
        noise: standard deviation of the noise on each count, 0 without noise.
    """

    clients: Sequence[str]
    mode: Mode
    rows: Sequence[int] | None
    numbers: Mapping[str, NumberColumn]
    texts: Mapping[str, TextColumn] = field(default_factory=dict)
    tables: Mapping[tuple[str, str], Table] = field(default_factory=dict)
    by_client: Mapping[str, Mapping[str, NumberColumn]] = field(default_factory=dict)
    privacy: PrivacyBudget | None = None
    noise: float = 0.0

    def __repr__(self) -> str:
        """Return the size of the statistics in one line."""
        rows = "" if self.rows is None else f"{sum(self.rows):,} rows of "
        return (
            f"<FederatedStatistics, {self.mode}: {rows}{len(self.clients)} clients, {len(self.numbers)} columns of "
            f"numbers, {len(self.texts)} of text>"
        )

    def _repr_html_(self) -> str:
        heading, *rows = self.table()
        return html_table(heading, rows)

    def __getitem__(self, column: str) -> NumberColumn | TextColumn:
        """Return a column.

        Raises:
            SettingError: there is none of this name.
        """
        statistics: NumberColumn | TextColumn | None = self.numbers.get(column) or self.texts.get(column)
        if statistics is None:
            raise unknown("column", column, [*self.numbers, *self.texts])
        return statistics

    @checked
    def only(self, columns: Sequence[str]) -> FederatedStatistics:
        """Return the statistics of some columns alone.

        Raises:
            SettingError: there is none of a name.
        """
        for column in columns:
            self[column]
        numbers = {name: column for name, column in self.numbers.items() if name in columns}
        texts = {name: column for name, column in self.texts.items() if name in columns}
        by_client = {client: {name: held[name] for name in numbers} for client, held in self.by_client.items()}
        return replace(self, numbers=numbers, texts=texts, by_client=by_client)

    def table(self) -> list[list[Any]]:
        """Return a table of the columns of numbers, with its heading as the first row."""
        shares = next(iter(self.numbers.values())).quantiles if self.numbers else {}
        heading = ["column", "count", "missing", "mean", "sd", *(f"{100 * share:g}%" for share in shares)]
        infinite = any(round(column.infinite) for column in self.numbers.values())
        heading[3:3] = ["infinite"] if infinite else []
        rows = []
        for name, column in self.numbers.items():
            counts = [column.present, column.missing, *([column.infinite] if infinite else [])]
            values = [column.mean, column.deviation, *(column.quantiles[share] for share in shares)]
            rows.append([name, *(round(count) for count in counts), *(_or_none(value) for value in values)])
        return [heading, *rows]

    @checked
    def standardisation(self, columns: Sequence[str] | None = None) -> Standardisation:
        """Return the constants that give columns mean 0 and deviation 1.

        Args:
            columns: in the order of the model's inputs; all columns of numbers by default.

        Raises:
            SettingError: a column has no numbers, or none of this name exists.

        Examples:
            >>> import numpy as np
            >>> import piebald
            >>> rows = {"A": (np.array([[1.0], [3.0]]), [0, 1]), "B": (np.array([[5.0], [7.0]]), [1, 0])}
            >>> piebald.statistics(rows, columns=["x0"]).standardisation().mean
            [4.0]
        """
        names = list(self.numbers) if columns is None else list(columns)
        for name in names:
            if name not in self.numbers:
                raise unknown("column of numbers", name, self.numbers)
            if math.isnan(self.numbers[name].mean):
                raise SettingError(f"column {name!r} has no numbers, so it has no mean: leave it out")
        chosen = [self.numbers[name] for name in names]
        # squared deviations are divided by the count and not by one less, as in scikit-learn's StandardScaler
        deviations = [
            math.sqrt(max(column.variance, 0.0) * (column.present - 1) / column.present) if column.present > 1 else 0.0
            for column in chosen
        ]
        # a constant column keeps its scale
        return Standardisation(
            mean=[column.mean for column in chosen], deviation=[deviation or 1.0 for deviation in deviations]
        )

    def plain(self) -> dict[str, Any]:
        """Return the statistics as JSON values."""
        return {
            "clients": list(self.clients),
            "mode": self.mode,
            "rows": None if self.rows is None else list(self.rows),
            "columns": {name: column.plain() for name, column in self.numbers.items()}
            | {name: column.plain() for name, column in self.texts.items()},
            "tables": [{"columns": list(pair), "counts": table} for pair, table in self.tables.items()],
            "by_client": {
                client: {name: column.plain() for name, column in columns.items()}
                for client, columns in self.by_client.items()
            },
            "privacy": None if self.privacy is None else self.privacy.plain(),
            "noise": self.noise,
        }


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


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
    """

    quantiles: tuple[float, ...]
    bins: int | None
    bounds: Mapping[str, tuple[float, float]]
    categories: Mapping[str, tuple[str, ...]]
    tables: tuple[tuple[str, str], ...]
    by_client: bool

    def check_columns(self, numbers: Sequence[str], texts: Sequence[str]) -> None:
        """Refuse bounds, categories and tables of columns that clients do not have.

        Raises:
            SettingError: a column is not there.
        """
        for name in self.bounds:
            if name not in numbers:
                raise unknown("column of numbers to give bounds of,", name, numbers)
        for name in [*self.categories, *itertools.chain(*self.tables)]:
            if name not in numbers and name not in texts:
                raise unknown("column", name, [*numbers, *texts])

    def check_hidden(self, numbers: Sequence[str], texts: Sequence[str], option: str, alternative: str) -> None:
        """Refuse a request that bounded sums cannot answer without looking at the rows first.

        Args:
            numbers: columns of numbers, which need bounds or categories.
            texts: columns of text and of tables, which need categories.
            option: the argument that hides the rows, "secure" or "epsilon".
            alternative: what to do instead of giving bounds or categories, in words.

        Raises:
            SettingError: bounds, categories or bins are missing, or clients' own columns are asked for.
        """
        if self.by_client:
            raise SettingError("by_client shows what secure and epsilon are to hide: leave it out")
        for name in numbers:
            if name not in self.bounds and name not in self.categories:
                raise SettingError(
                    f"{option} needs bounds of column {name!r}, which must not be taken from the rows: write "
                    f"bounds={{{name!r}: (low, high)}}, or {alternative}"
                )
        for name in texts:
            if name not in self.categories:
                raise SettingError(
                    f"{option} needs categories of column {name!r}, which must not be taken from the rows: write "
                    f"categories={{{name!r}: [...]}}, or {alternative}"
                )
        if self.quantiles and self.bins is None and self.bounds:
            raise SettingError(
                f"{option} takes quantiles from a histogram: write bins=100 for an error of a hundredth of the bounds, "
                "or quantiles=()"
            )


@checked
def statistics_request(
    quantiles: Quantiles,
    bins: Bins | None,
    bounds: Mapping[str, Sequence[float]],
    by_client: bool = False,
    categories: Mapping[str, Sequence[str]] | None = None,
    tables: Sequence[Sequence[str]] = (),
) -> StatisticsRequest:
    """Return a checked request; the arguments are those of `statistics`.

    Raises:
        SettingError: an argument is wrong.
    """
    checked_bounds = {name: _checked_bounds(name, ends) for name, ends in bounds.items()}
    checked_categories = {name: _checked_categories(name, values) for name, values in (categories or {}).items()}
    pairs = tuple(map(_checked_pair, tables))
    return StatisticsRequest(tuple(map(float, quantiles)), bins, checked_bounds, checked_categories, pairs, by_client)


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
