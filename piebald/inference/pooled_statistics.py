"""The result of federated statistics: columns, histograms, counts of categories, tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic_core import to_jsonable_python

from piebald.core.arguments import checked, checked_class
from piebald.core.errors import SettingError, unknown
from piebald.core.moments import Floats
from piebald.core.result_table import ResultTable, Tabular, p_text
from piebald.data.clients.prepared import Standardisation
from piebald.privacy.accounting import PrivacyBudget

Table = Mapping[str, Mapping[str, float]]  # rows by the category of one column and of another
Mode = Literal["exact", "secure", "private", "secure and private"]


class PooledResult(Tabular):
    """A result over clients, which notebooks show as a table.

    Attributes:
        left_out: the reasons why clients have no part in it, or not in all of it, by name.
    """

    left_out: Mapping[str, str]

    @property
    def notes(self) -> list[str]:
        """A sentence on who is left out, and why, where anybody is."""
        clients = ", ".join(f"{name} ({reason})" for name, reason in self.left_out.items())
        return [f"Left out: {clients}."] if clients else []

    @property
    def _fewer(self) -> str:
        """The number of clients that are left out, for a line about the result."""
        return f", {len(self.left_out)} left out" if self.left_out else ""


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """A test whose statistic has a chi-square distribution.

    Attributes:
        statistic, degrees: the statistic, and its degrees of freedom.
    """

    statistic: float
    degrees: int

    @property
    def p_value(self) -> float:
        """The probability of a statistic as large where nothing differs."""
        from scipy import stats

        return float(stats.chi2.sf(self.statistic, self.degrees))

    def plain(self) -> dict[str, Any]:
        """Return the test as JSON values."""
        values: dict[str, Any] = plain_value({"statistic": self.statistic, "degrees": self.degrees, "p": self.p_value})
        return values


@dataclass(frozen=True, slots=True)
class FTest:
    """A test whose statistic has an F distribution; NaN where rows do not vary, or are too few.

    Attributes:
        statistic, degrees, residual_degrees: the statistic, and the degrees of freedom of what it divides.
    """

    statistic: float
    degrees: int
    residual_degrees: float

    @classmethod
    def of(cls, explained: float, residual: float, degrees: int, residual_degrees: float) -> FTest:
        """Return the test by two variances: infinite where only the first one is above 0."""
        statistic = explained / residual if residual > 0 else math.inf if explained > 0 else math.nan
        return cls(statistic if degrees > 0 and residual_degrees > 0 else math.nan, degrees, residual_degrees)

    @property
    def p_value(self) -> float:
        """The probability of a statistic as large where nothing differs."""
        from scipy import stats

        return float(stats.f.sf(self.statistic, self.degrees, self.residual_degrees))

    def plain(self) -> dict[str, Any]:
        """Return the test as JSON values."""
        values = {"statistic": self.statistic, "degrees": [self.degrees, self.residual_degrees], "p": self.p_value}
        return plain_value(values)  # type: ignore[no-any-return]


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

    def with_histogram(self, edges: Floats, counts: Floats, shares: Sequence[float]) -> NumberColumn:
        """Return the same column with a histogram, and with quantiles that follow from it.

        They are linear within a bin, so at most its width from those of the numbers.

        Args:
            edges: of the bins [bins + 1].
            counts: of numbers in each bin [bins], at least 0.
            shares: of the numbers below.
        """
        first = int(np.argmax(counts > 0))  # bin that holds any
        reached = np.concatenate([[0.0], np.cumsum(counts)])[first:]
        # backwards, so that a share that ends with a bin is that bin's end, and not the end of empty ones after it
        quantiles = np.interp(-np.multiply(shares, reached[-1]), -reached[::-1], edges[first:][::-1])
        values = quantiles.tolist() if reached[-1] > 0 else [math.nan] * len(shares)
        return replace(
            self, edges=tuple(edges.tolist()), counts=tuple(counts.tolist()),
            quantiles=dict(zip(shares, values, strict=True)), quantile_error=float(edges[1] - edges[0]),
        )  # fmt: skip

    def plain(self) -> dict[str, Any]:
        """Return the column as JSON values; NaN becomes None."""
        names = ["present", "missing", "infinite", "mean", "deviation"]
        values = {name: plain_value(getattr(self, name)) for name in names + ["edges", "counts"] * bool(self.counts)}
        if self.quantiles:
            values["quantiles"] = {f"{share:g}": plain_value(value) for share, value in self.quantiles.items()}
            values["quantile_error"] = self.quantile_error
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
class FederatedStatistics(PooledResult):
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
        noise: standard deviation of the noise on each count, 0 without noise.  That of clients is larger than that of a
            server, besides the root of their number: see `noise_at` of `statistics`, and `privacy.meaning`.
        left_out: the reasons why clients have no part in them, by name.
        dates: the columns of dates, whose numbers are days since 1970.
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
    left_out: Mapping[str, str] = field(default_factory=dict)
    dates: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        """Return the size of the statistics in one line."""
        rows = "" if self.rows is None else f"{sum(self.rows):,} rows of "
        return (
            f"<FederatedStatistics, {self.mode}: {rows}{len(self.clients)} clients{self._fewer}, {len(self.numbers)} "
            f"columns of numbers, {len(self.texts)} of text>"
        )

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
            # raises for an unknown name, which the filters below would leave out in silence
            self[column]
        numbers = {name: column for name, column in self.numbers.items() if name in columns}
        texts = {name: column for name, column in self.texts.items() if name in columns}
        by_client = {client: {name: held[name] for name in numbers} for client, held in self.by_client.items()}
        return replace(self, numbers=numbers, texts=texts, by_client=by_client)

    @property
    def tests(self) -> dict[tuple[str, str], ChiSquare]:
        """Pearson's test of each contingency table that its columns are independent, without a correction; none with
        noise, whose counts have another distribution, nor of a table with a single row or column.
        """
        from scipy import stats

        tests = {}
        for pair, table in self.tables.items() if self.privacy is None else ():
            counts = np.array([[*line.values()] for line in table.values()])
            # categories that nobody has are expected of nobody
            counts = counts[counts.sum(1) > 0][:, counts.sum(0) > 0]
            if min(counts.shape) > 1:
                found = stats.chi2_contingency(counts, correction=False)
                tests[pair] = ChiSquare(float(found.statistic), int(found.dof))
        return tests

    @checked
    def shown(self, name: str, number: float) -> float | str | None:
        """Return a mean or a quantile of a column for tables: dates as 2024-05-31."""
        if name not in self.dates or not math.isfinite(number):
            return plain_value(number)  # type: ignore[no-any-return]
        return str(np.datetime64(0, "D") + np.timedelta64(math.floor(number), "D"))

    def table(self) -> ResultTable:
        """Return a table of the columns of numbers; means and quantiles of dates are dates, and deviations days."""
        shares = next(iter(self.numbers.values())).quantiles if self.numbers else {}
        heading = ["column", "count", "missing", "mean", "sd", *(f"{100 * share:g}%" for share in shares)]
        # most columns have none, so their count is shown only where it is not 0
        infinite = any(round(column.infinite) for column in self.numbers.values())
        heading[3:3] = ["infinite"] if infinite else []
        rows = []
        for name, column in self.numbers.items():
            counts = [column.present, column.missing, *([column.infinite] if infinite else [])]
            values = [
                self.shown(name, value) for value in (column.mean, *(column.quantiles[share] for share in shares))
            ]
            rows.append(
                [name, *(round(count) for count in counts), values[0], plain_value(column.deviation), *values[1:]]
            )
        return ResultTable(rows, heading, notes=self.notes)

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
            # noise may make a variance negative or a count smaller than 1
            math.sqrt(max(column.variance, 0.0) * (column.present - 1) / column.present) if column.present > 1 else 0.0
            for column in chosen
        ]
        # a constant column keeps its scale
        return Standardisation(
            mean=[column.mean for column in chosen], deviation=[deviation or 1.0 for deviation in deviations]
        )

    def plain(self) -> dict[str, Any]:
        """Return the statistics as JSON values."""
        columns: Mapping[str, NumberColumn | TextColumn] = {**self.numbers, **self.texts}
        tests = self.tests
        return {
            **plain_value({name: getattr(self, name) for name in ("clients", "mode", "rows")}),
            "columns": {name: column.plain() for name, column in columns.items()},
            "tables": [
                {"columns": list(pair), "counts": table, "test": test.plain() if (test := tests.get(pair)) else None}
                for pair, table in self.tables.items()
            ],
            "by_client": {
                client: {name: column.plain() for name, column in columns.items()}
                for client, columns in self.by_client.items()
            },
            "privacy": None if self.privacy is None else self.privacy.plain(),
            "noise": self.noise,
            "left_out": dict(self.left_out),
            "dates": sorted(self.dates),
        }


_OF_COEFFICIENTS = ("names", "coefficients", "errors", "covariance", "baselines")
_RATIOS = {  # by family: exp of a coefficient
    "binomial": "odds ratio", "ordinal": "odds ratio", "poisson": "rate ratio", "negative_binomial": "rate ratio",
    "gamma": "mean ratio", "tweedie": "mean ratio", "cox": "hazard ratio",
}  # fmt: skip
FEW = 10  # clusters, or clients with a model each, below which errors between them are said to be rough


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Estimates(PooledResult):
    """Estimates of all clients' rows.

    Attributes:
        names: of the coefficients [p]; a category's is "column=value".
        coefficients, errors: their estimates and standard errors [p].
        covariance: of the estimates [p, p].
        rows, dropped: rows in the model, and rows with gaps or of weight 0 that are left out.
        clients: how many clients have rows in the model.
        iterations: questions to the clients.
        baselines: how many of the first coefficients belong to no column, such as an intercept.
        remarks: sentences about the model, shown below its table.
        left_out: the reasons why clients have no part in the model, by name.
    """

    letter: ClassVar[str] = "z"
    what: ClassVar[str] = "coefficient"

    names: tuple[str, ...]
    coefficients: Floats
    errors: Floats
    covariance: Floats
    rows: int
    dropped: int
    clients: int
    iterations: int
    baselines: int = 0
    remarks: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """The remarks, and a sentence on who is left out, and why."""
        return [*self.remarks, *super(Estimates, self).notes]

    @property
    def ratio(self) -> str | None:
        """What exp of a coefficient is: an odds ratio, for instance; None where coefficients are differences."""
        return _RATIOS.get(getattr(self, "family", ""))

    @property
    def degrees(self) -> float:
        """Degrees of freedom of Student's t; infinite for the normal distribution."""
        return math.inf

    @property
    def statistics(self) -> Floats:
        """Estimates in standard errors [p]."""
        return self.coefficients / self.errors

    @property
    def p_values(self) -> Floats:
        """Two-sided p-values of the coefficients [p]."""
        from scipy import stats

        return np.asarray(2 * stats.t.sf(np.abs(self.statistics), self.degrees))

    def interval(self, level: float = 0.95) -> Floats:
        """Return confidence intervals of the coefficients [p, 2].

        Args:
            level: the probability with which an interval covers its coefficient, in (0, 1).
        """
        from scipy import stats

        half = float(stats.t.isf((1 - level) / 2, self.degrees)) * self.errors
        return np.stack([self.coefficients - half, self.coefficients + half], axis=1)

    def table(self) -> ResultTable:
        """Return a table of the coefficients, and of the ratios that they are the logarithms of."""
        letter = self.letter if math.isinf(self.degrees) else "t"
        columns = (self.coefficients, self.errors, self.statistics, self.p_values, *self.interval().T)
        rows = zip(self.names, *(column.tolist() for column in columns), strict=True)
        heading = ("", self.what, "std. error", letter, "p", "2.5 %", "97.5 %")
        table = ResultTable(rows, heading, notes=self.notes)
        if self.ratio is None:
            return table
        names = (self.ratio, f"{self.ratio} 2.5 %", f"{self.ratio} 97.5 %")
        with np.errstate(over="ignore"):
            ratios = np.exp(np.column_stack([self.coefficients, self.interval()])).tolist()
        for row, values in list(zip(table, ratios, strict=True))[self.baselines :]:
            row |= dict(zip(names, values, strict=True))
        return table.only(*heading, *names)

    def publication(self) -> ResultTable:
        """Return a table of the ratios, or of the coefficients where there are none, with 95 % intervals and p."""
        kind, ratios = self.ratio or self.what, self.ratio is not None
        numbers = np.column_stack([self.coefficients, self.interval()])
        with np.errstate(over="ignore"):
            numbers = np.exp(numbers) if ratios else numbers
        rows = [
            [name, f"{middle:.3g} ({low:.3g} to {high:.3g})", p_text(p)]
            for name, (middle, low, high), p in zip(self.names, numbers.tolist(), self.p_values.tolist(), strict=True)
        ][self.baselines if ratios else 0 :]
        return ResultTable(rows, ("", f"{kind} (95 % interval)", "p"), notes=self.notes)

    def plain(self) -> dict[str, Any]:
        """Return the estimates as JSON values."""
        names = [field.name for field in fields(self) if field.name not in _OF_COEFFICIENTS]
        coefficients = plain_value({row.pop(""): row for row in self.table()})
        return {"coefficients": coefficients, **plain_value({name: getattr(self, name) for name in names})}


def plain_value(value: Any) -> Any:
    """Return a value, or a table of some, as JSON has it: arrays as lists, numbers that are not finite as None."""
    # JSON has no NaN and no infinity, which browsers and strict parsers refuse
    return to_jsonable_python(value, inf_nan_mode="null", fallback=np.ndarray.tolist)
