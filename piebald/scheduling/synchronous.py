"""Rounds: request a cohort, wait for all of it, step."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from piebald.scheduling.base import Scheduler, ServerView
from piebald.scheduling.cohort import CohortSize, cohort_size


class Synchronous(Scheduler):
    """Ask a random cohort, wait for all of it, step (McMahan et al. 2017).

    The choice depends on the run's seed and the version alone, so recipes that are compared on one seed get the same
    cohorts.

    Attributes:
        cohort: clients per round, as a number (10) or as a share of those that are available (0.1; 1.0 is all).
        over_selection: over-selection (Bonawitz et al. 2019): request this many times the cohort, and step when a
            cohort has arrived.  Later updates are not used; their clients can be asked again when they are done.
    """

    cohort: CohortSize = 1.0
    over_selection: float = Field(default=1.0, ge=1.0)

    def round_kind(self) -> Literal["complete", "partial"]:
        return "complete" if self.over_selection == 1.0 else "partial"

    def num_to_request(self, view: ServerView) -> int:
        if view.requested or view.waiting:
            return 0
        return min(view.idle, math.ceil(round(self.over_selection * self._wanted(view), 9)))

    def should_step(self, view: ServerView) -> bool:
        if view.outstanding and self.over_selection > 1.0:
            return view.waiting >= min(self._wanted(view), view.requested)
        return view.requested > 0 and not view.outstanding and bool(view.waiting or view.failed)

    def reject_reason(self, staleness: int) -> str | None:
        return "came after the round had ended" if staleness else None

    def _wanted(self, view: ServerView) -> int:
        return cohort_size(self.cohort, view.available)
