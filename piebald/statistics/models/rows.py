"""The rows of one client as a model takes them: regressors, targets, offsets, weights, times and clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from piebald.core.errors import SettingError
from piebald.core.moments import Floats, Ints
from piebald.statistics.bounded_sums import Columns
from piebald.statistics.models.plan import ModelPlan, Term


class Scale(NamedTuple):
    """Means and deviations of the columns [p], by which regressors become standard scores."""

    mean: Floats
    spread: Floats

    def from_scores(self, width: int) -> Floats:
        """Return the matrix that takes coefficients of standard scores to those of the columns [width, width].

        Args:
            width: the number of parameters; those besides the intercept and the columns stay as they are.
        """
        matrix, columns = np.eye(width), len(self.mean)
        first = min(1, width - columns)  # after an intercept, where there is one
        places = np.arange(first, first + columns)
        matrix[places, places] = 1 / self.spread
        matrix[:first, places] = -self.mean / self.spread
        return matrix


@dataclass(frozen=True, slots=True, eq=False)
class ModelRows:
    """The rows of one client that a model is of.

    Attributes:
        x: regressors [n, p], without an intercept.
        y: targets [n], events for models of times.
        offset, weight: [n].
        time: [n], 0 where the model has none.
        entry: times from which rows are observed [n], -inf for the beginning.
        cluster: labels of clusters [n].
        stratum: numbers of strata [n].
        dropped: rows with gaps, or of weight 0, which are left out.
    """

    x: Floats
    y: Floats
    offset: Floats
    weight: Floats
    time: Floats
    entry: Floats
    cluster: NDArray[np.object_]
    stratum: Ints
    dropped: int

    def design(self, plan: ModelPlan, scale: Scale) -> Floats:
        """Return regressors as standard scores [n, width], after an intercept where the model has one."""
        scores = (self.x - scale.mean) / scale.spread
        return scores if plan.has_times else np.column_stack([np.ones(len(scores)), scores])

    @property
    def support(self) -> int:
        """The fewest rows that the sums single out: those that are left out, and those that differ from most others in
        a regressor, the target or the weights.
        """
        rows = len(self.y)
        columns = [*self.x.T, self.y, self.weight] if rows else []
        apart = [rows - int(np.unique(column, return_counts=True)[1].max()) for column in columns]
        return min([rows, *(count for count in [*apart, self.dropped] if 0 < count <= max(rows // 2, self.dropped))])


def model_rows(plan: ModelPlan, table: Columns, stratum: int = 0) -> ModelRows:
    """Return the rows of a client that have no gaps and count.

    Args:
        plan: the columns.
        table: the client's columns.
        stratum: the number of the client, by which its rows are told from those of others.

    Raises:
        SettingError: a target, time or weight is not what the model takes.
    """
    x = np.column_stack([_numbers(table, term) for term in plan.columns]) if plan.columns else np.zeros((table.rows, 0))
    y = _numbers(table, plan.target)
    offset = np.zeros(table.rows) if plan.offset is None else table.numbers[plan.offset]
    weight = np.ones(table.rows) if plan.weights is None else table.numbers[plan.weights]
    time = np.zeros(table.rows) if plan.time is None else table.numbers[plan.time]
    entry = np.full(table.rows, -np.inf) if plan.entry is None else table.numbers[plan.entry]
    numbers = [*x.T, y, offset, weight, time, *(() if plan.entry is None else (entry,))]
    whole = np.isfinite(np.stack(numbers)).all(0)
    cluster = (np.arange(table.rows) + (stratum << 32)).astype(object)  # not those of another client
    if plan.cluster is not None:
        cluster = table.text(plan.cluster) if plan.cluster else np.full(table.rows, table.name, dtype=object)
        whole &= np.array([label is not None for label in cluster], dtype=bool)
    _check(plan, table.name, y[whole], weight[whole], time[whole])
    if (late := whole & (entry >= time)).any():
        raise SettingError(
            f"rows are observed from before their time on, and client {table.name!r} has a row that enters at "
            f"{entry[late][0]:g} and ends at {time[late][0]:g}: leave such rows out"
        )
    whole &= weight > 0
    strata = np.full(np.count_nonzero(whole), stratum)
    dropped = int(table.rows - whole.sum())
    columns = {"offset": offset, "weight": weight, "time": time, "entry": entry}
    parts = {name: column[whole] for name, column in columns.items()}
    return ModelRows(x=x[whole], y=y[whole], cluster=cluster[whole], stratum=strata, dropped=dropped, **parts)


def joined(parts: Sequence[ModelRows]) -> ModelRows:
    """Return the rows of several clients as those of one, which keep their strata."""
    names = ("x", "y", "offset", "weight", "time", "entry", "cluster", "stratum")
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return ModelRows(**columns, dropped=sum(part.dropped for part in parts))


def _numbers(table: Columns, term: Term) -> Floats:
    name, category = term
    if category is None:
        return table.numbers[name]
    return np.array([np.nan if text is None else float(text == category) for text in table.text(name)], dtype=float)


def _check(plan: ModelPlan, client: str, y: Floats, weight: Floats, time: Floats) -> None:
    """Refuse rows that the model does not take."""
    allowed = {
        "binomial": (((y == 0) | (y == 1)), "0 or 1"),
        "poisson": ((y >= 0) & (y == np.round(y)), "counts"),
        "cox": (((y == 0) | (y == 1)), "0 or 1, 1 for an event"),
    }
    allowed |= {"negative_binomial": allowed["poisson"], "survival": allowed["cox"]}
    sound, values = allowed.get(plan.family, (np.ones(0, dtype=bool), ""))
    if not sound.all():
        column = "event" if plan.has_times else "target"
        raise SettingError(
            f"under {plan.family!r} the {column} must be {values}, and client {client!r} has other numbers, such as "
            f"{y[~sound][0]:g}: change them, or take another column"
        )
    for name, values_of_rows in (("weights", weight), ("times", time)):
        if (values_of_rows < 0).any():
            raise SettingError(f"{name} must be at least 0, and client {client!r} has {values_of_rows.min():g}")
