"""Rounds: request a cohort, wait for all of it, step."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from piebald.methods.scheduling.base import CohortSize, Scheduler, ServerView, cohort_size


class Synchronous(Scheduler):
    """Ask a random cohort, wait for all of it, step (McMahan et al. 2017).

    The choice depends on the run's seed and the version alone, so recipes that are compared on one seed get the same
    cohorts.

    Attributes:
        cohort: clients per round, as a number (10) or as a share of those that are available (0.1; 1.0 is all).
        over_selection: over-selection (Bonawitz et al. 2019): request this many times the cohort, and step when a
            cohort has arrived.  Later updates are not used; their clients can be asked again when they are done.
        sampling: "fixed" asks a cohort of that size, "poisson" each client independently with probability
            cohort / clients (McMahan et al. 2018, algorithm 1), for which the budget of noise at the server is several
            times smaller.

    Examples:
        >>> Synchronous(cohort=0.1).expected_updates(known=50)
        5
        >>> Synchronous(cohort=10, sampling="poisson").inclusion(known=40)
        0.25
    """

    cohort: CohortSize = 1.0
    over_selection: float = Field(default=1.0, ge=1.0)
    sampling: Literal["fixed", "poisson"] = "fixed"

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        if self.sampling == "poisson" and self.over_selection > 1.0:
            raise ValueError(
                "sampling = 'poisson' waits for all of a cohort that varies in size: leave over_selection out"
            )
        return self

    def round_kind(self) -> Literal["complete", "partial"]:
        return "complete" if self.over_selection == 1.0 else "partial"

    def num_to_request(self, view: ServerView) -> int:
        # a round is asked for at once: whoever becomes idle in it waits for the next
        if view.requested or view.waiting:
            return 0
        if self.sampling == "poisson":
            # everybody is offered, since chance decides for each client by itself
            return view.idle
        # rounded first: 1.12 * 25 is a little above 28 in floating point, and would ask 29
        return min(view.idle, math.ceil(round(self.over_selection * self._cohort_size(view), 9)))

    def should_step(self, view: ServerView) -> bool:
        if view.outstanding and self.over_selection > 1.0:
            return view.waiting >= self._cohort_size(view)
        # a round in which everybody failed must end as well, or the run would wait for ever
        return view.requested > 0 and not view.outstanding and bool(view.waiting or view.failed)

    def asks_once(self) -> bool:
        return not self.overrides(Synchronous.num_to_request)

    def expected_updates(self, known: int) -> float | None:
        # who arrives in time may depend on clients' rows, and so may whom a subclass asks besides
        if self.over_selection > 1.0 or self.overrides(Synchronous.num_to_request, Synchronous.should_step):
            return None
        share = self.inclusion(known)
        return cohort_size(self.cohort, known) if share is None else share * known

    def inclusion(self, known: int) -> float | None:
        if self.sampling == "fixed":
            return None
        return min(1.0, self.cohort / known if isinstance(self.cohort, int) else self.cohort)

    def reject_reason(self, staleness: int) -> str | None:
        return "came after the round had ended" if staleness else None

    def _cohort_size(self, view: ServerView) -> int:
        return cohort_size(self.cohort, view.available)
