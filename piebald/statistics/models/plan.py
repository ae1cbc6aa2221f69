"""What is modelled: which columns a model takes, and what a client is asked about its own rows."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Family = Literal["gaussian", "binomial", "poisson", "negative_binomial"]


Ties = Literal["efron", "breslow"]


Ask = Literal["moments", "likelihood", "scores", "random", "two_stage", "schoenfeld", "counts", "logrank"]


HEADS = 8  # sums before those of columns, in answers about moments


MOST_COLUMNS = 256


MOST_SUMS = 1 << 20


Name = Annotated[str, Field(max_length=300)]


Term = tuple[Name, Name | None]  # a column of numbers, or a column and the category that counts as 1


class ModelPlan(BaseModel):
    """The columns of a model, and the parts that they play.

    Attributes:
        family: the distribution of targets; "cox" for a proportional-hazards model, "survival" for survival curves.
        columns: the regressors; of "survival" the groups.
        target: the column that is explained; where there is a time, the event.
        time: the column of times, of "cox" and "survival".
        entry: the column of times from which rows are observed, of "cox"; None where that is from the beginning.
        offset: the column that is added to the linear predictor, None for no offset.
        weights: the column of the rows' weights, None where all are 1.
        cluster: the column that names the cluster of a row, "" where a client is one, None where each row is.
        ties: how the likelihood of a Cox model takes tied times.
        stratified: whether rows are compared only with rows of their own client.

    Examples:
        >>> plan = ModelPlan(family="poisson", columns=(("age", None), ("ward", "b")), target=("falls", None))
        >>> plan.width, plan.parameters
        (3, 3)
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: Family | Literal["cox", "survival"]
    columns: tuple[Term, ...] = Field(default=(), max_length=MOST_COLUMNS)
    target: Term
    time: Name | None = None
    entry: Name | None = None
    offset: Name | None = None
    weights: Name | None = None
    cluster: Name | None = None
    ties: Ties = "efron"
    stratified: bool = True

    @model_validator(mode="after")
    def _check_time(self) -> Self:
        if (self.time is None) == self.has_times:
            raise ValueError("a column of times belongs to models of times, and to no others")
        if self.entry is not None and self.family != "cox":
            raise ValueError("a column of entry times belongs to Cox models, and to no others")
        return self

    @property
    def has_times(self) -> bool:
        """Whether the target is an event at a time."""
        return self.family in ("cox", "survival")

    @property
    def width(self) -> int:
        """The number of regressors, with the intercept that all but models of times have."""
        return len(self.columns) + (not self.has_times)

    @property
    def parameters(self) -> int:
        """The number of parameters: coefficients, and the logarithm of a negative binomial's dispersion."""
        return self.width + (self.family == "negative_binomial")

    def length(self, ask: Ask, numbers: int) -> int:
        """Return how many sums a client is asked for.

        Args:
            ask: the question.
            numbers: how many numbers come with it, after those of `rows.Scale`.
        """
        width, parameters, groups = self.width, self.parameters, max(len(self.columns), 1)
        return {
            "moments": HEADS + 2 * len(self.columns),
            "likelihood": 2 + parameters + parameters**2,
            "scores": 1 + parameters**2,
            "random": 4 + 3 * (width + 1) ** 2 if self.family == "gaussian" else 2 + (width + 1) * (width + 2),
            "two_stage": 5 * parameters,
            "schoenfeld": 3 + width,
            "counts": 2 * groups * numbers,
            "logrank": 2 * groups + groups**2,
        }[ask]
