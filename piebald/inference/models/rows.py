"""The rows of one client as a model takes them, and what is modelled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from piebald.core.errors import SettingError
from piebald.core.moments import Floats
from piebald.inference.columns import ClientColumns
from piebald.inference.models.formula import CLIENT, Column, Computed, Name, Term, terms_of_column


class Scale(NamedTuple):
    """Means and deviations of the columns [p], by which regressors become standard scores."""

    mean: Floats
    spread: Floats

    def from_scores(self, width: int, first: int = 1) -> Floats:
        """Return the matrix that takes coefficients of standard scores to those of the columns [width, width].

        Args:
            width: the number of parameters; those besides the intercepts and the columns stay as they are.
            first: the number of intercepts, after which the columns come.
        """
        matrix, columns = np.eye(width), len(self.mean)
        places = np.arange(first, first + columns)
        matrix[places, places] = 1 / self.spread
        matrix[:first, places] = -self.mean / self.spread
        return matrix


@dataclass(frozen=True, eq=False)
class ModelRows:
    """The rows of one client that a model is of.

    Attributes:
        x: regressors [n, p], without an intercept.
        y: targets [n], events for models of times.
        offset, weight: [n].
        time: [n], 0 where the model has none.
        entry: times from which rows are observed [n], -inf for the beginning.
        cluster: numbers of clusters [n].
        stratum: numbers of strata [n].
        dropped: rows with gaps, or of weight 0, which are left out.
        steps: results of the operations by which regressors are computed [n, k].
    """

    x: Floats
    y: Floats
    offset: Floats
    weight: Floats
    time: Floats
    entry: Floats
    cluster: Floats
    stratum: Floats
    dropped: int
    steps: Floats

    def design(self, plan: ModelPlan, scale: Scale) -> Floats:
        """Return regressors as standard scores [n, width], after an intercept where the model has one."""
        scores = (self.x - scale.mean) / scale.spread
        # thresholds of ordered levels stand in place of an intercept
        bare = plan.has_times or plan.family == "ordinal"
        return scores if bare else np.column_stack([np.ones(len(scores)), scores])

    @cached_property
    def support(self) -> int:
        """The fewest rows that the sums single out: those that are left out, and those that differ from most others in
        a regressor, the target or the weights.
        """
        rows = len(self.y)
        # a dummy of three rows is about three rows, however many rows the client has
        columns = [*self.x.T, self.y, self.weight] if rows else []
        apart = [rows - int(np.unique(column, return_counts=True)[1].max()) for column in columns]
        # where more than half of the rows differ from the most frequent value, that column singles nobody out
        return min([rows, *(count for count in [*apart, self.dropped] if 0 < count <= max(rows // 2, self.dropped))])


def model_rows(plan: ModelPlan, table: ClientColumns, refuse: bool = True) -> ModelRows:
    """Return the rows of a client that have no gaps and count.

    Args:
        plan: the columns.
        table: the client's columns.
        refuse: False to leave out rows that the model does not take.

    Raises:
        SettingError: a target, time or weight is not what the model takes.
    """
    steps, nothing = list[Floats](), np.zeros((table.rows, 0))
    x = np.column_stack([nothing, *(_regressor(table, column, steps) for column in plan.columns)])
    y = _level_numbers(table, plan) if plan.levels else _numbers(table, plan.target)
    offset = np.zeros(table.rows) if plan.offset is None else table.numbers[plan.offset]
    weight = np.ones(table.rows) if plan.weights is None else table.numbers[plan.weights]
    time = np.zeros(table.rows) if plan.time is None else table.numbers[plan.time]
    entry = np.full(table.rows, -np.inf) if plan.entry is None else table.numbers[plan.entry]
    # an entry of -inf stands for the beginning and is no gap, so it is only checked where the plan has entries
    numbers = [*x.T, y, offset, weight, time, *(() if plan.entry is None else (entry,))]
    whole = np.isfinite(np.stack(numbers)).all(0)
    cluster = np.arange(table.rows, dtype=np.float64)
    if plan.cluster is not None:
        # the numbers themselves, of which there may be as many as rows
        cluster = table.numbers[plan.cluster] if plan.cluster else np.zeros(table.rows)
        whole &= ~np.isnan(cluster)
    # before rows of weight 0 are left out, so that a negative weight is refused and not dropped
    if refuse:
        _check(plan, table.name, y[whole], weight[whole], time[whole])
    else:
        whole &= _sound(plan, y)[0] & (time >= 0) & (entry < time if plan.has_times else True)
    if (late := whole & (entry >= time)).any():
        raise SettingError(
            f"rows are observed from before their time on, and client {table.name!r} has a row that enters at "
            f"{entry[late][0]:g} and ends at {time[late][0]:g}: leave such rows out"
        )
    # after the checks; a row of weight 0 adds nothing and would only count in n
    whole &= weight > 0
    strata = np.zeros(table.rows) if plan.strata is None else table.numbers[plan.strata]
    dropped = int(table.rows - whole.sum())
    columns = {"offset": offset, "weight": weight, "time": time, "entry": entry}
    parts = {name: column[whole] for name, column in columns.items()}
    return ModelRows(
        x=x[whole], y=y[whole], cluster=cluster[whole], stratum=strata[whole], dropped=dropped, **parts,
        steps=np.column_stack([nothing, *steps])[whole],
    )  # fmt: skip


def _regressor(table: ClientColumns, column: Column, steps: list[Floats]) -> Floats:
    """Return a regressor [n], and append to the steps what is computed on the way."""
    if not isinstance(column, Computed):
        return _numbers(table, column)
    results = column.results(lambda term: _numbers(table, term))
    steps += results
    return results[-1]


def _numbers(table: ClientColumns, term: Term) -> Floats:
    name, category = term
    if name == CLIENT:
        return np.full(table.rows, float(table.name == category))
    if category is None:
        return table.numbers[name]
    texts = table.text(name)
    # a missing category is a gap and not "another category", so the row is left out
    return np.where(texts == None, np.nan, texts == category).astype(np.float64)  # noqa: E711


def _level_numbers(table: ClientColumns, plan: ModelPlan) -> Floats:
    """Return the numbers of the target's levels [n], NaN for gaps and -1 for what is no level."""
    texts = table.text(plan.target[0])
    y = np.where(texts == None, np.nan, -1.0)  # noqa: E711
    for number, level in enumerate(plan.levels):
        y[texts == level] = number
    return y


def _sound(plan: ModelPlan, y: Floats) -> tuple[NDArray[np.bool_], str]:
    """Return which targets the model takes, and what they are to be."""
    allowed = {
        "binomial": (((y == 0) | (y == 1)), "0 or 1"),
        "poisson": ((y >= 0) & (y == np.round(y)), "counts"),
        "cox": (((y == 0) | (y == 1)), "0 or 1, 1 for an event"),
    }
    levels = (y >= 0, f"of the levels {', '.join(plan.levels)}")
    allowed |= {"negative_binomial": allowed["poisson"], "survival": allowed["cox"], "ordinal": levels}
    allowed |= {"multinomial": levels, "gamma": (y > 0, "above 0"), "tweedie": (y >= 0, "at least 0")}
    return allowed.get(plan.family, (np.ones(len(y), dtype=bool), ""))


def _check(plan: ModelPlan, client: str, y: Floats, weight: Floats, time: Floats) -> None:
    """Refuse rows that the model does not take."""
    sound, values = _sound(plan, y)
    if not sound.all():
        column = "event" if plan.has_times else "target"
        raise SettingError(
            f"under {plan.family!r} the {column} must be {values}, and client {client!r} has other numbers, such as "
            f"{y[~sound][0]:g}: change them, or take another column"
        )
    for name, values_of_rows in (("weights", weight), ("times", time)):
        if (values_of_rows < 0).any():
            raise SettingError(f"{name} must be at least 0, and client {client!r} has {values_of_rows.min():g}")


Family = Literal[
    "gaussian", "binomial", "poisson", "negative_binomial", "gamma", "tweedie", "ordinal", "multinomial"
]  # fmt: skip


LOG_LINKS = ("poisson", "negative_binomial", "gamma", "tweedie")


DISPERSED = ("gaussian", "gamma", "tweedie")  # whose dispersion is that of Pearson's residuals


Ties = Literal["efron", "breslow"]


Ask = Literal["moments", "likelihood", "scores", "random", "two_stage", "slopes", "schoenfeld", "counts", "logrank"]


HEADS = 8  # sums before those of columns, in answers about moments


MOST_COLUMNS = 256


MOST_SUMS = 1 << 20


class ModelPlan(BaseModel):
    """The columns of a model, and the parts that they play.

    Attributes:
        family: the distribution of targets; "cox" for a proportional-hazards model, "survival" for survival curves.
        columns: the regressors; of "survival" the groups.  The column `CLIENT` is the client's name.
        target: the column that is explained; where there is a time, the event.
        levels: the values of the target, of "ordinal" in their order, of "multinomial" after the first one, with which
            the others are compared.
        power: of the mean, to which the variance of "tweedie" is proportional.
        time: the column of times, of "cox" and "survival".
        entry: the column of times from which rows are observed, of "cox"; None where that is from the beginning.
        offset: the column that is added to the linear predictor, None for no offset.
        weights: the column of the rows' weights, None where all are 1.
        cluster: the column that names the cluster of a row, "" where a client is one, None where each row is.
        ties: how the likelihood of a Cox model takes tied times.
        stratified: whether rows are compared only with rows of their own client.
        strata: the column of numbers by whose values rows of one client are compared, None for all of its rows.

    Examples:
        >>> plan = ModelPlan(family="poisson", columns=(("age", None), ("ward", "b")), target=("falls", None))
        >>> plan.width, plan.parameters
        (3, 3)
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: Family | Literal["cox", "survival"]
    columns: tuple[Column, ...] = Field(default=(), max_length=MOST_COLUMNS)
    target: Term
    levels: tuple[Name, ...] = Field(default=(), max_length=20)
    power: float = Field(default=1.5, gt=1, lt=2)
    time: Name | None = None
    entry: Name | None = None
    offset: Name | None = None
    weights: Name | None = None
    cluster: Name | None = None
    ties: Ties = "efron"
    stratified: bool = True
    strata: Name | None = None

    @model_validator(mode="after")
    def _check_time(self) -> Self:
        if (self.time is None) == self.has_times:
            raise ValueError("a column of times belongs to models of times, and to no others")
        if self.entry is not None and self.family != "cox":
            raise ValueError("a column of entry times belongs to Cox models, and to no others")
        if (len(self.levels) > 1) != (self.family in ("ordinal", "multinomial")):
            raise ValueError("levels belong to ordinal and multinomial models, at least two, and to no others")
        return self

    @property
    def has_times(self) -> bool:
        """Whether the target is an event at a time."""
        return self.family in ("cox", "survival")

    @property
    def width(self) -> int:
        """The number of coefficients: of regressors, and of the intercepts that all but models of times have."""
        if self.family == "multinomial":
            return (len(self.levels) - 1) * (1 + len(self.columns))
        return len(self.columns) + len(self.intercepts)

    @property
    def intercepts(self) -> list[int]:
        """The indexes of the coefficients that belong to no column."""
        if self.family == "multinomial":
            return [number * (1 + len(self.columns)) for number in range(len(self.levels) - 1)]
        return list(range(0 if self.has_times else len(self.levels) - 1 if self.levels else 1))

    def from_scores(self, scale: Scale) -> Floats:
        """Return the matrix that takes parameters of standard scores to those of the columns; thresholds of levels are
        linear predictors at which the level changes, so that they have the sign of R's `polr`.
        """
        if self.family == "multinomial":
            blocks = np.kron(np.eye(len(self.levels) - 1), scale.from_scores(1 + len(self.columns)))
            return np.asarray(blocks, dtype=np.float64)
        matrix = scale.from_scores(self.parameters, len(self.intercepts))
        if self.family == "ordinal":
            matrix[self.intercepts] *= -1
        return matrix

    @property
    def of_clients(self) -> list[int]:
        """The indexes of the regressors that are the same for all rows of a client."""
        return [index for index, column in enumerate(self.columns)
                if all(name == CLIENT for name, _ in terms_of_column(column))]  # fmt: skip

    @property
    def parameters(self) -> int:
        """The number of parameters: coefficients, and the logarithm of a negative binomial's dispersion."""
        return self.width + (self.family == "negative_binomial")

    @property
    def parameters_in_clients(self) -> int:
        """The number of parameters without those of regressors that are the same for all rows of a client."""
        within = tuple(term for index, term in enumerate(self.columns) if index not in self.of_clients)
        return self.model_copy(update={"columns": within}).parameters

    def length(self, ask: Ask, numbers: int) -> int:
        """Return how many sums a client is asked for.

        Args:
            ask: the question.
            numbers: how many numbers come with it, after those of `rows.Scale`.
        """
        width, parameters, groups = self.width, self.parameters, max(len(self.columns), 1)
        slopes = max(1, len(self.levels) * (len(self.levels) - 1))  # of each level by each predictor
        return {
            "moments": HEADS + 2 * len(self.columns),
            "likelihood": 3 + parameters + parameters**2,
            "scores": 1 + parameters**2,
            "random": 4 + 3 * (width + 1) ** 2 if self.family == "gaussian" else 3 + (width + 1) * (width + 2),
            "two_stage": 5 * parameters,
            "slopes": slopes * (1 + parameters),
            "schoenfeld": 3 + width,
            "counts": 2 * groups * numbers,
            "logrank": 2 * groups + groups**2,
        }[ask]
