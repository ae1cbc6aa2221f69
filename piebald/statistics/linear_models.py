"""Generalised linear models of the pooled rows, by federated iteratively reweighted least squares (IRLS).

McCullagh and Nelder 1989, section 2.5, with canonical links.  In each iteration clients get the coefficients and answer
with X'WX, X'Wz and their deviance; the sums over clients are those of the pooled rows, so the model is that of the
pooled rows (as in DataSHIELD's `ds.glm`, Jones et al. 2012).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from piebald.contracts import Split
from piebald.core.arguments import Count, checked, checked_class
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.moments import Floats, Moments, merged
from piebald.report.page.markup import html_table
from piebald.statistics.columns import TARGET, ClientColumns, categories_of, columns_of

Family = Literal["gaussian", "binomial", "poisson"]
INTERCEPT = "(intercept)"
_TOLERANCE = 1e-13  # of the deviance's change, relative


class Sums(NamedTuple):
    """The answer of one client to coefficients: X'WX [p, p], X'W(z - eta) [p], deviance."""

    information: Floats
    score: Floats
    deviance: float


@dataclass(frozen=True, slots=True, eq=False)
class Design:
    """The rows of one client that have no gaps.

    Attributes:
        x: regressors [n, p] as standard scores, the first one 1.
        y: targets [n].
        dropped: rows with gaps, which are left out.
    """

    x: Floats
    y: Floats
    dropped: int

    def sums(self, family: Family, coefficients: Floats) -> Sums:
        """Return the client's answer to some coefficients [p]."""
        eta = self.x @ coefficients
        mean, weight = _mean_and_weight(family, eta)
        information = (self.x * weight[:, None]).T @ self.x
        return Sums(information, self.x.T @ (self.y - mean), deviance(family, self.y, eta, mean))


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class Glm:
    """A fitted model.

    Attributes:
        family: the distribution of targets.
        target: the column that is explained.
        names: of the coefficients [p]; a category's is "column=value".
        coefficients, errors: their estimates and standard errors [p].
        covariance: of the estimates [p, p].
        dispersion: 1, but for "gaussian" the residual variance.
        deviance, null_deviance: of the model, and of one with an intercept alone.
        rows, dropped: rows in the model, and rows with gaps that were left out.
        iterations: questions to the clients.
    """

    family: Family
    target: str
    names: tuple[str, ...]
    coefficients: Floats
    errors: Floats
    covariance: Floats
    dispersion: float
    deviance: float
    null_deviance: float
    rows: int
    dropped: int
    iterations: int

    def __repr__(self) -> str:
        """Return the model in one line."""
        return (
            f"<Glm {self.target} ({self.family}): {len(self.names)} coefficients of {self.rows:,} rows, deviance "
            f"{self.deviance:.6g}>"
        )

    def _repr_html_(self) -> str:
        heading, *rows = self.table()
        return html_table(heading, rows)

    @property
    def statistics(self) -> Floats:
        """Estimates in standard errors [p]: z, and t for "gaussian"."""
        return self.coefficients / self.errors

    @property
    def p_values(self) -> Floats:
        """Two-sided p-values of the coefficients [p].

        They are by Student's t for "gaussian", as in R (statsmodels takes the normal distribution there), and by the
        normal distribution otherwise.
        """
        from scipy import stats

        size = np.abs(self.statistics)
        gaussian = self.family == "gaussian"
        return np.asarray(2 * (stats.t.sf(size, self.rows - len(self.names)) if gaussian else stats.norm.sf(size)))

    def table(self) -> list[list[Any]]:
        """Return a table of the coefficients, with its heading as the first row."""
        letter = "t" if self.family == "gaussian" else "z"
        rows = zip(self.names, self.coefficients, self.errors, self.statistics, self.p_values, strict=True)
        return [
            ["", "coefficient", "std. error", letter, "p"],
            *([name, *map(float, values)] for name, *values in rows),
        ]

    def plain(self) -> dict[str, Any]:
        """Return the model as JSON values."""
        heading, *rows = self.table()
        return {
            "family": self.family,
            "target": self.target,
            "coefficients": {row[0]: dict(zip(heading[1:], row[1:], strict=True)) for row in rows},
            **{name: getattr(self, name) for name in ("dispersion", "deviance", "null_deviance")},
            **{name: getattr(self, name) for name in ("rows", "dropped", "iterations")},
        }


@checked
def glm(
    clients: Any,
    *,
    target: str | None = None,
    columns: Sequence[str] | None = None,
    family: Family = "gaussian",
    client: str | None = None,
    split: Split = "train",
    features: Sequence[str] | None = None,
    max_iterations: Count = 50,
) -> Glm:
    """Fit a generalised linear model to the rows of all clients, as if they were pooled.

    Rows with gaps are left out.  A column of text has a coefficient for each category but the first.

    Args:
        clients, client, split, features: as of `statistics`.
        target: the column to explain; "target" by default, as `Clients` have it.  Under "binomial" it has the numbers 0
            and 1, or two categories, of which the second in alphabetical order counts as 1; under "poisson" counts.
        columns: the columns to explain it by, all others by default.
        family: the distribution of targets: "gaussian" (identity link), "binomial" (logit) or "poisson" (log).
        max_iterations: questions to the clients, at most.

    Raises:
        SettingError: an argument is wrong, the target does not fit the family, columns depend on each other, or a
            combination of columns separates the classes, so that there is no finite estimate.

    Examples:
        >>> import pandas as pd
        >>> import piebald
        >>> trial = pd.DataFrame({"clinic": list("AABB"), "dose": [0.0, 1, 2, 3], "effect": [1.0, 3.1, 4.9, 7.0]})
        >>> model = piebald.glm(trial, client="clinic", target="effect")
        >>> dict(zip(model.names, model.coefficients.round(2).tolist()))
        {'(intercept)': 1.03, 'dose': 1.98}
    """
    name = TARGET if target is None else target
    if columns is not None and name in columns:
        raise SettingError(f"columns must not include the target {name!r}: leave it out")
    tables = columns_of(clients, client, None if columns is None else [*columns, name], split, features)
    first = tables[0]
    if name not in first.numbers and name not in first.texts:
        raise unknown("column", name, [*first.numbers, *first.texts])
    categories = categories_of(tables, [column for column in first.texts if column != name])
    numbers = [column for column in first.numbers if column != name]
    second = _second_class(tables, name, family)
    rows = [_regressors(table, numbers, categories, name, second) for table in tables]
    coded = [f"{column}={value}" for column, values in categories.items() for value in values[1:]]
    names = [INTERCEPT, *numbers, *coded]
    for table, (_, y, _) in zip(tables, rows, strict=True):
        _check_target(family, name, y, table.name)
    moments = merged(Moments.of(x, names[1:]) for x, _, _ in rows)
    if moments.rows <= len(names):
        raise SettingError(
            f"{len(names)} coefficients need more than {len(names)} rows without gaps, got {moments.rows}"
        )
    for place, column in enumerate(names[1:]):
        if not moments.scatter[place]:
            raise SettingError(f"column {column!r} is constant over all clients, like the intercept: leave it out")
    # standard scores, so that one threshold of `_newton_step` fits all columns
    spread = np.sqrt(moments.scatter / moments.rows)
    designs = [
        Design(np.column_stack([np.ones(len(y)), (x - moments.mean) / spread]), y, dropped) for x, y, dropped in rows
    ]
    return _fitted(designs, names, name, family, moments.mean, spread, max_iterations)


def _fitted(
    designs: Sequence[Design], names: Sequence[str], target: str, family: Family, mean: Floats, spread: Floats,
    most: int,
) -> Glm:  # fmt: skip
    rows, width = sum(len(design.y) for design in designs), len(names)
    coefficients = np.zeros(width)
    coefficients[0] = _null_intercept(family, designs)
    null = _summed(designs, family, coefficients)
    sums, questions = null, 1
    while True:
        if questions >= most:
            reason = "its numbers may be too unlike for this family"
            if family == "binomial":
                reason = "a combination of columns probably separates the classes: leave one out"
            raise SettingError(f"the model has no finite estimate after {most} iterations; {reason}")
        step = _newton_step(sums.information, sums.score, names)
        after = _summed(designs, family, coefficients + step)
        questions += 1
        while not after.deviance <= sums.deviance * (1 + 1e-9) + 1e-9 and questions < most:  # too far: half the step
            step = step / 2
            after = _summed(designs, family, coefficients + step)
            questions += 1
        coefficients, before, sums = coefficients + step, sums, after
        if abs(before.deviance - sums.deviance) <= _TOLERANCE * (abs(sums.deviance) + 1e-3):
            break
    # where classes are separated, the information in some direction has vanished by now, which this refuses
    _newton_step(sums.information, sums.score, names)
    dispersion = sums.deviance / (rows - width) if family == "gaussian" else 1.0
    covariance = dispersion * np.linalg.inv(sums.information)
    back = np.diag(np.concatenate([[1.0], 1 / spread]))  # from standard scores to the columns themselves
    back[0, 1:] = -mean / spread
    covariance = back @ covariance @ back.T
    return Glm(
        family, target, tuple(names), back @ coefficients, np.sqrt(np.diag(covariance)), covariance, dispersion,
        sums.deviance, null.deviance, rows, sum(design.dropped for design in designs), questions,
    )  # fmt: skip


def _summed(designs: Sequence[Design], family: Family, coefficients: Floats) -> Sums:
    """Return the sums over clients."""
    informations, scores, deviances = zip(*(design.sums(family, coefficients) for design in designs), strict=True)
    return Sums(np.sum(informations, axis=0), np.sum(scores, axis=0), math.fsum(deviances))


def _newton_step(information: Floats, score: Floats, names: Sequence[str]) -> Floats:
    """Return the step of Newton's method.

    Raises:
        SettingError: columns depend on each other.
    """
    values, vectors = np.linalg.eigh(information)
    if values[0] <= max(1e-11 * values[-1], 1e-9):  # in rows, since columns are standard scores
        by_weight = np.argsort(-np.abs(vectors[:, 0]))
        involved = [names[place] for place in by_weight if abs(vectors[place, 0]) > 0.1]
        raise SettingError(
            f"the columns {', '.join(involved[:4])} depend on each other over all clients, or separate the target: "
            "leave one of them out"
        )
    return np.asarray(np.linalg.solve(information, score))


def _mean_and_weight(family: Family, eta: Floats) -> tuple[Floats, Floats]:
    """Return means and their derivatives at linear predictors [n]."""
    if family == "gaussian":
        return eta, np.ones_like(eta)
    if family == "poisson":
        mean = np.exp(np.minimum(eta, 700.0))
        return mean, mean
    small = np.exp(-np.abs(eta))  # at most 1, so that nothing overflows
    mean = np.where(eta >= 0, 1 / (1 + small), small / (1 + small))
    return mean, small / np.square(1 + small)


def deviance(family: Family, y: Floats, eta: Floats, mean: Floats) -> float:
    """Return twice the log-likelihood that the model lacks to a perfect one, for means at linear predictors [n]."""
    if family == "gaussian":
        return math.fsum(np.square(y - mean).tolist())
    if family == "poisson":
        log = np.where(y > 0, y * (np.log(np.maximum(y, 1e-300)) - eta), 0.0)
        return 2 * math.fsum((log - (y - mean)).tolist())
    return 2 * math.fsum((np.logaddexp(0.0, eta) - y * eta).tolist())


def _null_intercept(family: Family, designs: Sequence[Design]) -> float:
    """Return the intercept of a model with nothing else."""
    mean = math.fsum(float(design.y.sum()) for design in designs) / sum(len(design.y) for design in designs)
    if family == "gaussian":
        return mean
    if mean <= 0 or (family == "binomial" and mean >= 1):
        raise SettingError("the target is the same in all rows without gaps, so there is nothing to explain")
    return math.log(mean) if family == "poisson" else math.log(mean / (1 - mean))


def _second_class(tables: Sequence[ClientColumns], target: str, family: Family) -> str | None:
    """Return the category of a target of text that counts as 1, None where it has numbers."""
    if target not in tables[0].texts:
        return None
    values = categories_of(tables, [target])[target]
    if family != "binomial" or len(values) != 2:
        got = f"text with {len(values)} categories, like {shown(values[0], 30) if values else 'none'}"
        raise SettingError(f"the target {target!r} must hold numbers, or two categories under 'binomial', got {got}")
    return values[1]


def _regressors(
    table: ClientColumns, numbers: Sequence[str], categories: dict[str, list[str]], target: str, second: str | None
) -> tuple[Floats, Floats, int]:
    """Return a client's regressors [n, p - 1] and targets [n] of rows without gaps, and the number of other rows."""
    columns = [table.numbers[name] for name in numbers]
    whole = np.ones(table.rows, dtype=bool)
    for name, values in categories.items():
        texts = table.texts[name]
        whole &= np.array([text is not None for text in texts], dtype=bool)
        columns += [np.array([float(text == value) for text in texts]) for value in values[1:]]
    if second is None:
        y = table.numbers[target]
    else:
        y = np.array([math.nan if text is None else float(text == second) for text in table.texts[target]])
    x = np.column_stack(columns) if columns else np.zeros((table.rows, 0))
    whole &= np.isfinite(x).all(1) & np.isfinite(y)
    return x[whole], y[whole], int(table.rows - whole.sum())


def _check_target(family: Family, target: str, y: Floats, client: str) -> None:
    if family == "binomial" and bool(((y != 0) & (y != 1)).any()):
        raise SettingError(
            f"under 'binomial' the target {target!r} must be 0 or 1, and client {client!r} has other numbers"
        )
    if family == "poisson" and bool(((y < 0) | (y != np.round(y))).any()):
        raise SettingError(
            f"under 'poisson' the target {target!r} must be counts, and client {client!r} has other numbers"
        )
