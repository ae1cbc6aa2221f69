"""Generalised linear models of the pooled rows, by federated iteratively reweighted least squares (IRLS).

McCullagh and Nelder 1989, section 2.5, with canonical links.  In each iteration clients get the coefficients and answer
with X'WX, X'Wz and their deviance; the sums over clients are those of the pooled rows, so the model is theirs (as in
DataSHIELD's `ds.glm`, Jones et al. 2012).
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
from piebald.statistics.columns import TARGET, ClientColumns, categories, columns_of

Family = Literal["gaussian", "binomial", "poisson"]
INTERCEPT = "(intercept)"
_TOLERANCE = 1e-13  # of the deviance's change, relative


class Sums(NamedTuple):
    """What one client answers to coefficients: X'WX [p, p], X'W(z - eta) [p], deviance."""

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
        """The client's answer to some coefficients [p]."""
        eta = self.x @ coefficients
        mean, weight = _mean_and_weight(family, eta)
        return Sums(
            (self.x * weight[:, None]).T @ self.x, self.x.T @ (self.y - mean), deviance(family, self.y, eta, mean)
        )


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
        """The model in one line."""
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
        """Two-sided p-values of the coefficients [p], by Student's t for "gaussian" (as R has it, while statsmodels
        takes the normal distribution there) and the normal distribution otherwise.
        """
        from scipy import stats

        reach = np.abs(self.statistics)
        return np.asarray(
            2 * (stats.t.sf(reach, self.rows - len(self.names)) if self.family == "gaussian" else stats.norm.sf(reach))
        )

    def table(self) -> list[list[Any]]:
        """A table of the coefficients, with its heading as the first row."""
        letter = "t" if self.family == "gaussian" else "z"
        rows = zip(self.names, self.coefficients, self.errors, self.statistics, self.p_values, strict=True)
        return [
            ["", "coefficient", "std. error", letter, "p"],
            *([name, *(float(one) for one in values)] for name, *values in rows),
        ]

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        heading, *rows = self.table()
        return {
            "family": self.family,
            "target": self.target,
            "coefficients": {row[0]: dict(zip(heading[1:], row[1:], strict=True)) for row in rows},
            "dispersion": self.dispersion,
            "deviance": self.deviance,
            "null_deviance": self.null_deviance,
            "rows": self.rows,
            "dropped": self.dropped,
            "iterations": self.iterations,
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
    """
    goal = TARGET if target is None else target
    wanted = None if columns is None else [*columns, goal]
    if columns is not None and goal in columns:
        raise SettingError(f"columns must not include the target {goal!r}: leave it out")
    found = columns_of(clients, client, wanted, split, features)
    known = [*found[0].numbers, *found[0].texts]
    if goal not in known:
        raise unknown("column", goal, known)
    codes = categories(found, [name for name in found[0].texts if name != goal])
    numbers = [name for name in found[0].numbers if name != goal]
    second = _second(found, goal, family)
    rows = [_regressors(one, numbers, codes, goal, second) for one in found]
    names = [INTERCEPT, *numbers, *(f"{name}={value}" for name, values in codes.items() for value in values[1:])]
    for who, (_, y, _) in zip(found, rows, strict=True):
        _check_target(family, goal, y, who.name)
    moments = merged(Moments.of(x, names[1:]) for x, _, _ in rows)
    if moments.rows <= len(names):
        raise SettingError(
            f"{len(names)} coefficients need more than {len(names)} rows without gaps, got {moments.rows}"
        )
    for place, name in enumerate(names[1:]):
        if not moments.scatter[place]:
            raise SettingError(f"column {name!r} is constant over all clients, like the intercept: leave it out")
    spread = np.sqrt(moments.scatter / moments.rows)
    designs = [
        Design(np.column_stack([np.ones(len(y)), (x - moments.mean) / spread]), y, dropped) for x, y, dropped in rows
    ]
    return _fitted(designs, names, goal, family, moments.mean, spread, max_iterations)


def _fitted(
    designs: Sequence[Design], names: Sequence[str], target: str, family: Family, mean: Floats, spread: Floats,
    most: int,
) -> Glm:  # fmt: skip
    rows, width = sum(len(one.y) for one in designs), len(names)
    start = np.zeros(width)
    start[0] = _null(family, designs)
    found, null, asked = start, _asked(designs, family, start), 1
    at = null
    while True:
        if asked >= most:
            raise SettingError(_diverged(family, most))
        step = _solved(at.information, at.score, names)
        after = _asked(designs, family, found + step)
        asked += 1
        while not after.deviance <= at.deviance * (1 + 1e-9) + 1e-9 and asked < most:  # too far: half the step
            step = step / 2
            after = _asked(designs, family, found + step)
            asked += 1
        found, before, at = found + step, at, after
        if abs(before.deviance - at.deviance) <= _TOLERANCE * (abs(at.deviance) + 1e-3):
            break
    _solved(at.information, at.score, names)  # where classes are separated, nothing is known of a direction any more
    dispersion = at.deviance / (rows - width) if family == "gaussian" else 1.0
    covariance = dispersion * np.linalg.inv(at.information)
    back = np.diag(np.concatenate([[1.0], 1 / spread]))  # from standard scores to the columns themselves
    back[0, 1:] = -mean / spread
    covariance = back @ covariance @ back.T
    return Glm(
        family, target, tuple(names), back @ found, np.sqrt(np.diag(covariance)), covariance, dispersion, at.deviance,
        null.deviance, rows, sum(one.dropped for one in designs), asked,
    )  # fmt: skip


def _asked(designs: Sequence[Design], family: Family, coefficients: Floats) -> Sums:
    """The sums over clients."""
    told = [one.sums(family, coefficients) for one in designs]
    return Sums(
        np.sum([one.information for one in told], axis=0),
        np.sum([one.score for one in told], axis=0),
        math.fsum(one.deviance for one in told),
    )


def _solved(information: Floats, score: Floats, names: Sequence[str]) -> Floats:
    """A Newton step.

    Raises:
        SettingError: columns depend on each other.
    """
    values, vectors = np.linalg.eigh(information)
    if values[0] <= max(1e-11 * values[-1], 1e-9):  # in rows, since columns are standard scores
        heavy = np.argsort(-np.abs(vectors[:, 0]))
        involved = [names[place] for place in heavy if abs(vectors[place, 0]) > 0.1]
        raise SettingError(
            f"the columns {', '.join(involved[:4])} depend on each other over all clients, or separate the target: "
            "leave one of them out"
        )
    return np.asarray(np.linalg.solve(information, score))


def _mean_and_weight(family: Family, eta: Floats) -> tuple[Floats, Floats]:
    """Means and their derivatives at linear predictors [n]."""
    if family == "gaussian":
        return eta, np.ones_like(eta)
    if family == "poisson":
        mean = np.exp(np.minimum(eta, 700.0))
        return mean, mean
    small = np.exp(-np.abs(eta))
    mean = np.where(eta >= 0, 1 / (1 + small), small / (1 + small))
    return mean, small / np.square(1 + small)


def deviance(family: Family, y: Floats, eta: Floats, mean: Floats) -> float:
    """Twice the log-likelihood that the model lacks to a perfect one, for means at linear predictors [n]."""
    if family == "gaussian":
        return math.fsum(np.square(y - mean).tolist())
    if family == "poisson":
        log = np.where(y > 0, y * (np.log(np.maximum(y, 1e-300)) - eta), 0.0)
        return 2 * math.fsum((log - (y - mean)).tolist())
    return 2 * math.fsum((np.logaddexp(0.0, eta) - y * eta).tolist())


def _null(family: Family, designs: Sequence[Design]) -> float:
    """The intercept of a model with nothing else."""
    mean = math.fsum(float(one.y.sum()) for one in designs) / sum(len(one.y) for one in designs)
    if family == "gaussian":
        return mean
    if mean <= 0 or (family == "binomial" and mean >= 1):
        raise SettingError("the target is the same in all rows without gaps, so there is nothing to explain")
    return math.log(mean) if family == "poisson" else math.log(mean / (1 - mean))


def _second(clients: Sequence[ClientColumns], target: str, family: Family) -> str | None:
    """The category of a target of text that counts as 1, None where it has numbers."""
    if target not in clients[0].texts:
        return None
    values = categories(clients, [target])[target]
    if family != "binomial" or len(values) != 2:
        got = f"text with {len(values)} categories, like {shown(values[0], 30) if values else 'none'}"
        raise SettingError(f"the target {target!r} must hold numbers, or two categories under 'binomial', got {got}")
    return values[1]


def _regressors(
    client: ClientColumns, numbers: Sequence[str], codes: dict[str, list[str]], target: str, second: str | None
) -> tuple[Floats, Floats, int]:
    """A client's regressors [n, p - 1] and targets [n] of rows without gaps, and how many rows have some."""
    columns = [client.numbers[name] for name in numbers]
    whole = np.ones(client.rows, dtype=bool)
    for name, values in codes.items():
        text = client.texts[name]
        whole &= np.array([one is not None for one in text], dtype=bool)
        columns += [np.array([float(one == value) for one in text]) for value in values[1:]]
    if second is None:
        y = client.numbers[target]
    else:
        y = np.array([math.nan if one is None else float(one == second) for one in client.texts[target]])
    x = np.column_stack(columns) if columns else np.zeros((client.rows, 0))
    whole &= np.isfinite(x).all(1) & np.isfinite(y)
    return x[whole], y[whole], int(client.rows - whole.sum())


def _check_target(family: Family, target: str, y: Floats, who: str) -> None:
    if family == "binomial" and bool(((y != 0) & (y != 1)).any()):
        raise SettingError(
            f"under 'binomial' the target {target!r} must be 0 or 1, and client {who!r} has other numbers"
        )
    if family == "poisson" and bool(((y < 0) | (y != np.round(y))).any()):
        raise SettingError(
            f"under 'poisson' the target {target!r} must be counts, and client {who!r} has other numbers"
        )


def _diverged(family: Family, most: int) -> str:
    why = "a combination of columns probably separates the classes: leave one out" if family == "binomial" else (
        "its numbers may be too unlike for this family"
    )  # fmt: skip
    return f"the model has no finite estimate after {most} iterations; {why}"
