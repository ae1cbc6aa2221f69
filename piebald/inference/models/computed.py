"""Columns of a model, and those that are computed from others by a closed list of operations.

A computed column comes to a site as data: its steps are names of columns, numbers and operations of this list, and
nothing in them is run as code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from piebald.core.moments import Floats

Name = Annotated[str, Field(max_length=300)]
Term = tuple[Name, Name | None]  # a column of numbers, or a column and the category that counts as 1
CLIENT: Final = ""  # the column that has the name of the client, where a term's category is one
Operation = Literal["add", "subtract", "multiply", "divide", "power", "log", "exp", "sqrt", "abs"]
Number = Annotated[float, Field(allow_inf_nan=False)]
MOST_STEPS = 64
_BINARY: dict[Any, Callable[[Any, Any], Any]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide, "power": np.power,
}  # fmt: skip
_UNARY: dict[Any, Callable[[Any], Any]] = {"log": np.log, "exp": np.exp, "sqrt": np.sqrt, "abs": np.abs}
_LARGEST_POWER = 10.0


class Spline(BaseModel):
    """One function of a basis of B-splines; a number beyond the outer knots counts as the nearer one.

    Attributes:
        degree: of its polynomials.
        knots: of the basis, the outer ones `degree` + 1 times.
        index: of the function.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    degree: int = Field(ge=0, le=5)
    knots: tuple[Number, ...] = Field(max_length=100)
    index: int = Field(ge=0)

    @model_validator(mode="after")
    def _check_knots(self) -> Self:
        inner = self.knots[self.degree : len(self.knots) - self.degree]
        if len(inner) < 2 or self.index > len(self.knots) - self.degree - 2 or list(inner) != sorted({*inner}):
            raise ValueError("knots of a spline must increase, and its index be of one of its functions")
        ends = {*self.knots[: self.degree + 1]}, {*self.knots[len(self.knots) - self.degree - 1 :]}
        if ends != ({inner[0]}, {inner[-1]}):
            raise ValueError("the outer knots of a spline come once more than its degree")
        return self

    def __call__(self, values: Floats) -> Floats:
        """Return the function of numbers [n], NaN for gaps."""
        from scipy.interpolate import BSpline

        count = len(self.knots) - self.degree - 1
        basis = BSpline(np.array(self.knots), np.eye(count)[self.index], self.degree)
        return np.asarray(basis(np.clip(values, self.knots[0], self.knots[-1])))


Step = Term | Number | Operation | Spline


class Computed(BaseModel):
    """A column of numbers that is computed from others.

    Attributes:
        steps: columns and numbers, each before the operation that takes it, as in reverse Polish notation.

    Examples:
        >>> column = Computed(steps=(("age", None), 50.0, "subtract", ("sex", "male"), "multiply"))
        >>> values = {("age", None): np.array([40.0, 60.0]), ("sex", "male"): np.array([0.0, 1.0])}
        >>> column.results(values.__getitem__)[-1].tolist()
        [-0.0, 10.0]
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: tuple[Step, ...] = Field(max_length=MOST_STEPS)

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        depth, before = 0, math.inf
        for step in self.steps:
            takes = _taken(step)
            if depth < takes or (step == "power" and not abs(before) <= _LARGEST_POWER):
                raise ValueError(f"a step must follow what it takes, and a power be a number up to {_LARGEST_POWER:g}")
            depth, before = depth + 1 - takes, step if isinstance(step, float) else math.inf
        if depth != 1 or not self.terms or not _taken(self.steps[-1]):
            raise ValueError("the steps of a computed column must end in one number, and take a column")
        return self

    @property
    def terms(self) -> tuple[Term, ...]:
        """The columns that it is computed from."""
        return tuple(step for step in self.steps if isinstance(step, tuple))

    @property
    def is_share(self) -> bool:
        """Whether it lies between 0 and 1, as a product of categories and splines."""
        return all(
            step == "multiply" or isinstance(step, Spline)
            or (isinstance(step, tuple) and (step[1] is not None or isinstance(after, Spline)))
            for step, after in itertools.pairwise((*self.steps, None))
        )  # fmt: skip

    def with_terms(self, change: Callable[[Term], Term]) -> Computed:
        """Return the same of other columns."""
        steps = (change(step) if isinstance(step, tuple) else step for step in self.steps)
        return self.model_copy(update={"steps": tuple(steps)})

    def results(self, values: Callable[[Term], Floats]) -> list[Floats]:
        """Return the result of each operation [n], the last of which is the column; NaN where there is none.

        Args:
            values: returns those of a column [n].
        """
        stack, results = list[Any](), list[Floats]()
        with np.errstate(all="ignore"):
            for step in self.steps:
                if takes := _taken(step):
                    taken = [stack.pop() for _ in range(takes)][::-1]
                    operation: Any = step if isinstance(step, Spline) else _UNARY.get(step, _BINARY.get(step))
                    results.append(np.asarray(operation(*taken), dtype=np.float64))
                    stack.append(results[-1])
                else:
                    stack.append(values(step) if isinstance(step, tuple) else step)
        return results


Column = Term | Computed


def terms_of_column(column: Column) -> tuple[Term, ...]:
    """Return the columns that a regressor is made of."""
    return column.terms if isinstance(column, Computed) else (column,)


def is_share(column: Column) -> bool:
    """Return whether a regressor lies between 0 and 1 whatever the rows are."""
    return column.is_share if isinstance(column, Computed) else column[1] is not None


def _taken(step: Step) -> int:
    """Return how many numbers a step takes."""
    return 1 if isinstance(step, Spline) or step in _UNARY else 2 if step in _BINARY else 0
