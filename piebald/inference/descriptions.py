"""Means of groups with their tests, and correlations, of the rows of all clients: from the sums of linear models.

Clients are asked what they are asked for a gaussian model, so policies, masks and rules of disclosure are those of
models; neither is a model fitted, nor does a row leave a client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from piebald.contracts import Query, Split
from piebald.core.arguments import checked, checked_class
from piebald.core.errors import SettingError, unknown
from piebald.core.moments import Floats
from piebald.core.result_table import ResultTable, p_text, plain_cell
from piebald.data.preparation.preparation import PrepareSettings
from piebald.inference.models.clients import ColumnRoles, ModelClients, ModelColumns, asked_tables
from piebald.inference.models.formula import Column, Computed
from piebald.inference.models.likelihood import Likelihood
from piebald.inference.models.rows import HEADS, ModelPlan
from piebald.inference.pooled_statistics import FTest, PooledResult, plain_value

_ALL = "all"  # the group of all rows, where there are no others
_NOTHING = 1e-14  # of a mean, below which a deviation is rounding


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class GroupedColumn:
    """A column of numbers in groups; those without rows are left out.

    Attributes:
        groups: the names of the groups [g].
        counts, weights: rows, and the sums of their weights [g].
        means: weighted means [g].
        variances: unbiased ones [g], NaN of a single row; of weights as Stata's `aweight`s, whose unit is without
            meaning.
        dropped: rows with a gap in the column, the group or the weight, or of weight 0, which are left out.
    """

    groups: tuple[str, ...]
    counts: Floats
    weights: Floats
    means: Floats
    variances: Floats
    dropped: int

    @property
    def deviations(self) -> Floats:
        """Standard deviations [g]."""
        return np.sqrt(self.variances)

    @property
    def errors(self) -> Floats:
        """Standard errors of the means [g]."""
        return np.sqrt(self.variances / self.counts)

    @property
    def anova(self) -> FTest:
        """Fisher's test that all means are the same, where all variances are."""
        rows, between = self.counts.sum() - len(self.counts), len(self.counts) - 1
        spread = self.weights @ np.square(self.means - np.average(self.means, weights=self.weights)) / max(between, 1)
        # the sums of weighted squares; a group of one row has none
        within = np.nansum(self.variances * (self.counts - 1) / self.counts * self.weights)
        return FTest.of(spread * rows, within, between, float(rows))

    @property
    def welch(self) -> FTest:
        """Welch's test (1951) that all means are the same, whatever the variances are; of two groups, Welch's t squared
        with its degrees of freedom.
        """
        between, squares, least = len(self.counts) - 1, np.square(self.errors), self.counts - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            if between == 1:  # where one group is constant, its mean is known exactly
                degrees = float(np.square(squares.sum()) / np.sum(np.square(squares) / least))
                return FTest.of(float(np.diff(self.means)[0] ** 2), float(squares.sum()), 1, degrees)
            share = 1 / squares / np.sum(1 / squares)
            spread = np.square(self.means - share @ self.means) @ (1 / squares) / max(between, 1)
            lost = float(np.sum(np.square(1 - share) / least) / max((between + 1) ** 2 - 1, 1))
            return FTest.of(float(spread / (1 + 2 * (between - 1) * lost)), 1.0, between, float(np.divide(1, 3 * lost)))

    @property
    def difference(self) -> tuple[float, float, float]:
        """The second of two means minus the first, and the ends of its 95 % interval after Welch; NaN of others."""
        if len(self.means) != 2:
            return math.nan, math.nan, math.nan
        from scipy import stats

        apart = float(self.means[1] - self.means[0])
        half = float(stats.t.isf(0.025, self.welch.residual_degrees) * math.sqrt(np.square(self.errors).sum()))
        return apart, apart - half, apart + half

    def plain(self) -> dict[str, Any]:
        """Return the column as JSON values."""
        parts = ("groups", "counts", "weights", "means", "deviations", "errors", "dropped", "difference")
        tests = {"welch": self.welch.plain(), "anova": self.anova.plain()} if len(self.groups) > 1 else {}
        return {**{name: plain_value(getattr(self, name)) for name in parts}, **tests}


@checked_class
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GroupMeans(PooledResult):
    """Means of columns of numbers in groups of the rows of all clients.

    Attributes:
        by: the column whose values are the groups, None where there is one of all rows.
        weights: the column of weights, None where each row counts once.
        columns: the columns, by name.
        uncounted: columns that were named and hold categories, which have no mean.
        left_out: the reasons why clients have no part in them, by name.
    """

    by: str | None
    weights: str | None
    columns: Mapping[str, GroupedColumn]
    uncounted: Sequence[str] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """A sentence on columns without a mean, and one on who is left out."""
        names = ", ".join(self.uncounted)
        uncounted = [f"Categories have no mean: {names}.  Tables count them."] if names else []
        return [*uncounted, *super(GroupMeans, self).notes]

    def __getitem__(self, column: str) -> GroupedColumn:
        """Return a column.

        Raises:
            SettingError: there is none of this name.
        """
        if column not in self.columns:
            raise unknown("column of numbers", column, self.columns)
        return self.columns[column]

    def table(self) -> ResultTable:
        """Return a table with a line for each column and group."""
        heading = ["column", self.by or "group", "count", "left out", "mean", "sd", "std. error"]
        rows = [
            [name, group, round(count), column.dropped, *map(plain_value, numbers)]
            for name, column in self.columns.items()
            for group, count, *numbers in zip(
                column.groups, column.counts, column.means, column.deviations, column.errors, strict=True
            )
        ]  # fmt: skip
        table = ResultTable(rows, heading, notes=self.notes)
        return table if self.by else table.only("column", *heading[2:])

    def publication(self) -> ResultTable:
        """Return a table of means and deviations with a column for each group, and the p-value of Welch's test."""
        groups = list(dict.fromkeys(group for column in self.columns.values() for group in column.groups))
        rows = []
        for name, column in self.columns.items():
            parts = zip(column.groups, column.means, column.deviations, strict=True)
            cells = {group: f"{plain_cell(mean)} ({plain_cell(sd)})" for group, mean, sd in map(_plain_part, parts)}
            test = {"p": p_text(column.welch.p_value)} if len(column.groups) > 1 else {}
            rows.append({"column, mean (sd)": name, **cells, **test})
        heading = ["column, mean (sd)", *groups, *["p"] * (len(groups) > 1)]
        return ResultTable(rows, heading, notes=self.notes)

    def tests(self) -> ResultTable:
        """Return a table of the tests whether groups differ, with a line for each column that several have."""
        rows = [
            [name, welch.statistic, welch.residual_degrees, welch.p_value, anova.statistic, anova.p_value,
             *column.difference]
            for name, column in self.columns.items() if len(column.groups) > 1
            for welch, anova in [(column.welch, column.anova)]
        ]  # fmt: skip
        heading = ("column", "F (Welch)", "df", "p (Welch)", "F (ANOVA)", "p (ANOVA)", "difference", "2.5 %", "97.5 %")
        table = ResultTable([[row[0], *map(plain_value, row[1:])] for row in rows], heading)
        return table if any(row["difference"] is not None for row in table) else table.only(*heading[:6])

    def plain(self) -> dict[str, Any]:
        """Return the means and tests as JSON values."""
        columns = {name: column.plain() for name, column in self.columns.items()}
        return {"by": self.by, "weights": self.weights, "columns": columns, "left_out": dict(self.left_out)}


@checked_class
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Correlations(PooledResult):
    """Correlations of columns over the rows of all clients that have a gap in none of them.

    Attributes:
        names: of the columns [p]; a category's is "column=value".
        means: their weighted means [p].
        covariance: unbiased [p, p].
        rows, dropped: rows that count, and rows with gaps or of weight 0, which are left out.
        clients: how many clients have rows that count.
        weights: the column of weights, None where each row counts once.
        left_out: the reasons why clients have no part in them, by name.
    """

    names: tuple[str, ...]
    means: Floats
    covariance: Floats
    rows: int
    dropped: int
    clients: int
    weights: str | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def deviations(self) -> Floats:
        """Standard deviations [p], 0 of columns that are constant but for rounding."""
        deviations = np.sqrt(np.diag(self.covariance))
        return np.where(deviations <= _NOTHING * np.abs(self.means), 0.0, deviations)

    @property
    def matrix(self) -> Floats:
        """Pearson's correlations [p, p], NaN of constant columns."""
        with np.errstate(divide="ignore", invalid="ignore"):
            matrix = self.covariance / np.outer(self.deviations, self.deviations)
        np.fill_diagonal(matrix, np.where(self.deviations > 0, 1.0, np.nan))
        return np.asarray(np.where(np.isfinite(matrix), np.clip(matrix, -1.0, 1.0), np.nan))

    @property
    def p_values(self) -> Floats:
        """Two-sided p-values of the correlations [p, p]; NaN with weights."""
        from scipy import stats

        if self.weights is not None or self.rows < 3:
            return np.full(self.covariance.shape, np.nan)
        with np.errstate(divide="ignore"):
            statistic = np.abs(self.matrix) * np.sqrt((self.rows - 2) / (1 - np.square(self.matrix)))
        return np.asarray(2 * stats.t.sf(statistic, self.rows - 2))

    @property
    def inflation(self) -> Floats:
        """Variance inflation factors [p] of a model with an intercept and all other columns: infinite where these
        explain a column, NaN of constant ones.
        """
        varies = np.flatnonzero(self.deviations > 0)
        factors = np.full(len(self.names), np.nan)
        if len(varies):
            values, vectors = np.linalg.eigh(self.matrix[np.ix_(varies, varies)])
            shares = np.square(vectors)
            # a direction without variance is rounding, and explains the columns that it holds
            flat = values <= len(varies) * 1e-13 * values[-1]
            factors[varies] = shares[:, ~flat] @ (1 / values[~flat])
            factors[varies[shares[:, flat].sum(1) > 1e-9]] = np.inf
        return factors

    def components(self, standardised: bool = True) -> PrincipalComponents:
        """Return the principal components of the columns.

        Args:
            standardised: whether of standard scores, so that no unit counts; False for those of the covariance.

        Raises:
            SettingError: no column varies.
        """
        varies = np.flatnonzero(self.deviations > 0)
        if not len(varies):
            raise SettingError("no column varies, so there are no principal components: name other columns")
        source = self.matrix if standardised else self.covariance
        values, vectors = np.linalg.eigh(source[np.ix_(varies, varies)])
        loadings = vectors.T[::-1].copy()
        # the sign is arbitrary: as in scikit-learn, the largest loading of a component is positive
        largest = loadings[np.arange(len(loadings)), np.argmax(np.abs(loadings), axis=1)]
        loadings *= np.sign(largest)[:, None]
        names = tuple(self.names[index] for index in varies)
        return PrincipalComponents(names, loadings, np.maximum(values[::-1], 0.0), standardised)

    def table(self) -> ResultTable:
        """Return a table of the correlations, with variance inflation factors."""
        rows = [
            [name, *plain_value(row), plain_value(factor) if not math.isinf(factor) else "infinite"]
            for name, row, factor in zip(self.names, self.matrix, self.inflation.tolist(), strict=True)
        ]
        return ResultTable(rows, ("", *self.names, "VIF"), notes=self.notes)

    def plain(self) -> dict[str, Any]:
        """Return the correlations as JSON values."""
        parts = ("names", "means", "covariance", "matrix", "p_values", "inflation", "rows", "dropped", "clients")
        return plain_value({name: getattr(self, name) for name in (*parts, "weights", "left_out")})  # type: ignore[no-any-return]


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class PrincipalComponents:
    """Principal components, from the one of most variance on.

    Attributes:
        names: of the columns [p].
        loadings: of each component [p, p], of length 1; the largest one is positive, as in scikit-learn.
        variances: of the components [p].
        standardised: whether they are of standard scores.
    """

    names: tuple[str, ...]
    loadings: Floats
    variances: Floats
    standardised: bool

    @property
    def explained(self) -> Floats:
        """The shares of the variance of all columns [p]."""
        return np.asarray(self.variances / self.variances.sum())

    def table(self, most: int | None = None) -> ResultTable:
        """Return a table of the loadings of the first components, and of what they explain."""
        names = [f"PC{number}" for number in range(1, len(self.variances) + 1)][:most]
        rows = [[name, *row] for name, row in zip(self.names, self.loadings.T[:, :most].tolist(), strict=True)]
        rows += [["(variance)", *self.variances[:most].tolist()], ["(explained)", *self.explained[:most].tolist()]]
        return ResultTable(rows, ("", *names))


def _plain_part(part: tuple[str, float, float]) -> tuple[str, Any, Any]:
    return part[0], plain_value(float(part[1])), plain_value(float(part[2]))


@checked
def group_means(
    clients: Any,
    *,
    by: str | None = None,
    weights: str | None = None,
    columns: Sequence[str] | None = None,
    client: str | None = None,
    split: Split = "train",
    features: Sequence[str] | None = None,
    categories: Mapping[str, Sequence[str]] | None = None,
    prepare: PrepareSettings | Mapping[str, Any] | None = None,
) -> GroupMeans:
    """Compute means and deviations of columns of numbers in groups of the pooled rows, and test whether groups differ.

    Clients send the sums of linear models, never a row.  Rows with a gap in a column are left out of that column alone.

    Args:
        clients, client, split, features, prepare: as of `statistics`.
        by: the column whose values are the groups, or the column `client`; all rows are one group by default.
        weights: a column of weights of rows; a row of weight 0 is left out.
        columns: columns of numbers, all by default.
        categories: the values of columns of codes.

    Raises:
        SettingError: an argument is wrong, or there are no such columns.

    Examples:
        >>> import pandas as pd
        >>> import piebald
        >>> visits = pd.DataFrame({"clinic": list("AABB"), "arm": list("xyxy"), "age": [30.0, 50.0, 40.0, 64.0]})
        >>> ages = piebald.group_means(visits, client="clinic", by="arm")["age"]
        >>> ages.groups, ages.means.tolist()
        (('x', 'y'), [35.0, 57.0])
    """
    options = GroupOptions(by, weights, columns)
    with asked_tables(clients, client, options, split, features, categories, prepare) as asked:
        return fit_group_means(asked, options)


@checked
def correlations(
    clients: Any,
    *,
    columns: Sequence[str] | None = None,
    weights: str | None = None,
    client: str | None = None,
    split: Split = "train",
    features: Sequence[str] | None = None,
    categories: Mapping[str, Sequence[str]] | None = None,
    prepare: PrepareSettings | Mapping[str, Any] | None = None,
) -> Correlations:
    """Compute correlations of the pooled rows, variance inflation factors and principal components.

    Clients send the sums of products that a linear model takes, never a row.

    Args:
        clients, client, split, features, prepare: as of `statistics`.
        columns: all columns of numbers by default; one of text stands for whether it has each category but the first.
        weights: a column of weights of rows; a row of weight 0 is left out.
        categories: the values of columns of codes.

    Raises:
        SettingError: an argument is wrong, or there are fewer than two rows without gaps.

    Examples:
        >>> import pandas as pd
        >>> import piebald
        >>> visits = pd.DataFrame({"clinic": list("AABB"), "age": [30.0, 50, 40, 64], "dose": [1.0, 3, 2, 4.4]})
        >>> found = piebald.correlations(visits, client="clinic")
        >>> found.names, float(found.matrix[0, 1].round(6)), found.components().explained.round(2).tolist()
        (('age', 'dose'), 1.0, [1.0, 0.0])
    """
    options = CorrelationOptions(columns, weights)
    with asked_tables(clients, client, options, split, features, categories, prepare) as asked:
        return fit_correlations(asked, options)


def _numbers(asked: ModelColumns, columns: Sequence[str] | None, apart: Sequence[str | None]) -> list[str]:
    """Return the columns of numbers among those that are wanted, by default all but some.

    Raises:
        SettingError: there are none.
    """
    wanted = dict.fromkeys([name for name in asked.numbers if name not in apart] if columns is None else columns)
    for name in wanted:
        asked.place(name)
    names = [name for name in wanted if name not in asked.categories]
    if not names:
        raise SettingError("there is no column of numbers to describe: name one, and count categories by tables")
    return names


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The arguments of `group_means` that say what is computed."""

    by: str | None = None
    weights: str | None = None
    columns: Sequence[str] | None = None

    def roles(self) -> ColumnRoles:
        """Return the columns that are no means."""
        return ColumnRoles(self.by or "", weights=self.weights)

    def plans(self, asked: ModelColumns) -> tuple[list[str], dict[str, ModelPlan]]:
        """Return the names of the groups, and the plan of each column."""
        groups: list[str] = []
        if self.by is not None:
            by = asked.regressor(self.by if self.by in asked.categories else f"C({self.by})")
            groups = list(asked.categories[by])
            _, terms = asked.terms([by], first=0)
        weights, plans = None if self.weights is None else asked.place(self.weights), {}
        for name in _numbers(asked, self.columns, (self.by, self.weights)):
            values = asked.term(name, None)
            columns: list[Column] = [values]
            if groups:
                # whether a row is in a group, and its value there, whose sum and that of whose squares are of the group
                columns = [*terms, *(Computed(steps=(term, values, "multiply")) for term in terms)]
            plans[name] = ModelPlan(family="gaussian", columns=tuple(columns), target=values, weights=weights)
        return groups or [_ALL], plans

    def questions(self, asked: ModelColumns) -> list[Query]:
        """Return the questions that terms name."""
        return [asked.query(plan) for plan in self.plans(asked)[1].values()]


def fit_group_means(clients: ModelClients, options: GroupOptions) -> GroupMeans:
    """Ask clients, on this machine or at sites, for the means of groups."""
    groups, plans = options.plans(clients.columns)
    columns = {name: _grouped(clients, plan, groups) for name, plan in plans.items()}
    uncounted = [name for name in options.columns or () if name not in columns]
    return GroupMeans(
        by=options.by, weights=options.weights, columns=columns, uncounted=uncounted, left_out=clients.left_out
    )


def _grouped(clients: ModelClients, plan: ModelPlan, groups: Sequence[str]) -> GroupedColumn:
    """Return the groups of one column: three questions, of which each is about the answers to those before."""
    width, count = len(plan.columns), len(plan.columns) // 2  # products come after the groups, if there are any
    ones, nothing = np.ones(width), np.zeros(width)
    moments = clients.sums(plan, "moments", np.concatenate([nothing, ones]))
    rows, dropped, weight = moments[0], int(moments[1]), moments[4]
    if not rows:
        raise SettingError("no row has a number, a group and a weight: name other columns")
    start = moments[5] / weight

    def asked(center: Floats, point: Floats) -> Likelihood:
        numbers = np.concatenate([nothing[: width - len(center)], center, ones, point])
        return Likelihood.of_flat(clients.sums(plan, "likelihood", numbers), width + 1)

    # sums of deviations from the mean of all rows keep the digits that sums of numbers far from 0 would lose
    sums = asked(np.full(width - count, start), np.concatenate([[start], nothing]))
    if count:
        counts, weights = moments[HEADS : HEADS + count], np.diag(sums.information)[1 : 1 + count]
        sums_of = sums.score[1 : 1 + count]
    else:
        counts, weights, sums_of = np.array([rows]), np.array([weight]), sums.score[:1]
    there = counts > 0
    means = start + sums_of / np.where(there, weights, 1.0)
    # products of deviations from a group's mean with residuals are its squares, but for what rows of other groups add,
    # whose product is the mean itself, times a sum of residuals that is 0 but for rounding
    sums = asked(means, np.concatenate([[0.0], means, nothing[:count]]) if count else np.append(means, 0.0))
    residuals = sums.score[1 : 1 + count] if count else sums.score[:1]
    squares = sums.score[1 + count :] + means * (residuals.sum() - residuals)
    with np.errstate(divide="ignore", invalid="ignore"):
        squares = np.maximum(squares - np.square(residuals) / weights, 0.0)
        # a column that is constant in a group has its mean but for rounding
        squares = np.where(np.sqrt(squares / weights) <= _NOTHING * np.abs(means), 0.0, squares)
        variances = np.where(counts > 1, squares / weights * counts / (counts - 1), np.nan)
    means = means + residuals / np.where(there, weights, 1.0)
    return GroupedColumn(
        tuple(group for group, present in zip(groups, there, strict=True) if present), counts[there], weights[there],
        means[there], variances[there], dropped,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CorrelationOptions:
    """The arguments of `correlations` that say what is computed."""

    columns: Sequence[str] | None = None
    weights: str | None = None

    def roles(self) -> ColumnRoles:
        """Return the other columns."""
        return ColumnRoles("", weights=self.weights)

    def plan(self, asked: ModelColumns) -> tuple[ModelPlan, list[str]]:
        """Return the plan, and the names of its columns."""
        wanted = (
            _numbers(asked, None, (self.weights,)) if self.columns is None else [*map(asked.regressor, self.columns)]
        )
        names, terms = asked.terms(list(dict.fromkeys(wanted)))
        if not terms:
            raise SettingError("there is no column of numbers: name one")
        weights = None if self.weights is None else asked.place(self.weights)
        # any column may be the target, of whose sums no use is made
        target = (terms[0][0], None)
        return ModelPlan(family="gaussian", columns=terms, target=target, weights=weights), names

    def questions(self, asked: ModelColumns) -> list[Query]:
        """Return the questions that terms name."""
        return [asked.query(self.plan(asked)[0])]


def fit_correlations(clients: ModelClients, options: CorrelationOptions) -> Correlations:
    """Ask clients, on this machine or at sites, for the correlations of columns."""
    plan, names = options.plan(clients.columns)
    width = len(names)
    moments = clients.sums(plan, "moments", np.concatenate([np.zeros(width), np.ones(width)]))
    rows, dropped, taking_part = map(int, moments[:3])
    if rows < 2:
        raise SettingError(
            f"correlations need at least 2 rows without gaps in any of {', '.join(names)}, got {rows}: leave some out"
        )
    center = moments[HEADS : HEADS + width] / rows
    numbers = np.concatenate([center, np.ones(width), np.zeros(width + 1)])
    products = Likelihood.of_flat(clients.sums(plan, "likelihood", numbers), width + 1).information
    apart = products[0, 1:] / products[0, 0]
    # weights have no unit, so the covariance is that of weights whose mean is 1
    covariance = (products[1:, 1:] / products[0, 0] - np.outer(apart, apart)) * rows / (rows - 1)
    np.fill_diagonal(covariance, np.maximum(np.diag(covariance), 0.0))
    return Correlations(
        names=tuple(names), means=center + apart, covariance=covariance, rows=rows, dropped=dropped,
        clients=taking_part, weights=options.weights, left_out=clients.left_out,
    )  # fmt: skip
