"""How many clients a cohort is."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def _cohort(cohort: float) -> float:
    if not 0 < cohort < float("inf") or (cohort > 1 and cohort != int(cohort)):
        raise ValueError(
            f"must be a number of clients (1, 2, ...) or a share of them (0.1, or 1.0 for all), got {cohort}"
        )
    return int(cohort) if cohort > 1 else cohort


CohortSize = Annotated[int | float, AfterValidator(_cohort)]


def cohort_size(cohort: float, known: int) -> int:
    """How many clients a cohort means: whole numbers count clients, a float up to 1.0 is a share of those that are
    there.
    """
    return min(int(cohort), known) if isinstance(cohort, int) else min(known, max(1, round(cohort * known)))
