"""Estimates as statisticians read them: coefficients with standard errors, tests and confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from piebald.core.moments import Floats
from piebald.report.page.markup import html_table

_OF_COEFFICIENTS = ("names", "coefficients", "errors", "covariance")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Estimates:
    """Estimates of all clients' rows.

    Attributes:
        names: of the coefficients [p]; a category's is "column=value".
        coefficients, errors: their estimates and standard errors [p].
        covariance: of the estimates [p, p].
        rows, dropped: rows in the model, and rows with gaps or of weight 0 that are left out.
        clients: how many clients have rows in the model.
        iterations: questions to the clients.
    """

    letter: ClassVar[str] = "z"

    names: tuple[str, ...]
    coefficients: Floats
    errors: Floats
    covariance: Floats
    rows: int
    dropped: int
    clients: int
    iterations: int

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

    def table(self) -> list[list[Any]]:
        """Return a table of the coefficients, with its heading as the first row."""
        letter = self.letter if math.isinf(self.degrees) else "t"
        columns = (self.coefficients, self.errors, self.statistics, self.p_values, *self.interval().T)
        rows = zip(self.names, *(column.tolist() for column in columns), strict=True)
        return [["", "coefficient", "std. error", letter, "p", "2.5 %", "97.5 %"], *map(list, rows)]

    def plain(self) -> dict[str, Any]:
        """Return the estimates as JSON values."""
        heading, *rows = self.table()
        numbers = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in _OF_COEFFICIENTS
        }
        return {
            "coefficients": {row[0]: dict(zip(heading[1:], row[1:], strict=True)) for row in rows},
            **{name: plain_value(value) for name, value in numbers.items()},
        }

    def _repr_html_(self) -> str:
        heading, *rows = self.table()
        return html_table(heading, rows)


def plain_value(value: Any) -> Any:
    """Return a value as JSON has it: arrays and tuples as lists, numbers that are not finite as None."""
    if isinstance(value, np.ndarray):
        return plain_value(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain_value(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
