"""The size of a cohort: the setting, and the number of clients it means."""

from __future__ import annotations

from typing import Annotated, Protocol, runtime_checkable

from pydantic import AfterValidator


def _cohort(cohort: float) -> float:
    if not 0 < cohort < float("inf") or (cohort > 1 and cohort != int(cohort)):
        raise ValueError(
            f"must be a number of clients (1, 2, ...) or a share of them (0.1, or 1.0 for all), got {cohort}"
        )
    return int(cohort) if cohort > 1 else cohort


CohortSize = Annotated[int | float, AfterValidator(_cohort)]


@runtime_checkable
class HasCohort(Protocol):
    """A scheduler with a cohort: clients per round, or clients that work at the same time."""

    @property
    def cohort(self) -> int | float: ...


def cohort_size(cohort: float, known: int) -> int:
    """The number of clients in a cohort; a whole number counts clients, a float up to 1.0 is a share of `known`.

    Examples:
        >>> cohort_size(10, known=7), cohort_size(0.1, known=50)
        (7, 5)
    """
    return min(int(cohort), known) if isinstance(cohort, int) else min(known, max(1, round(cohort * known)))
