"""Rounds: request a cohort, wait for all of it, step."""

from __future__ import annotations

import math

from pydantic import Field

from piebald.scheduling.base import Pace, View
from piebald.scheduling.cohort import CohortSize, cohort_size


class Synchronous(Pace):
    """Ask a random cohort, wait for all of it, step (McMahan et al. 2017).

    The choice depends on the run's seed and the version alone, so recipes compared on one seed meet the same cohorts.

    Attributes:
        cohort: clients a round, a number (10) or a share of those that are there (0.1; 1.0 is all).
        over: over-selection (Bonawitz et al. 2019): ask this many times the cohort and step when a cohort has arrived.
            Whoever comes later is not used, and can be asked again once it is done.
    """

    cohort: CohortSize = 1.0
    over: float = Field(default=1.0, ge=1.0)

    @property
    def pools(self) -> bool:
        return self.over == 1.0

    @property
    def rounds(self) -> bool:
        return True

    def ask(self, view: View) -> int:
        if view.asked or view.waiting:
            return 0
        return min(view.free, math.ceil(round(self.over * self._wanted(view), 9)))

    def ready(self, view: View) -> bool:
        if view.due and self.over > 1.0:
            return view.waiting >= min(self._wanted(view), view.asked)
        return view.asked > 0 and not view.due and bool(view.waiting or view.failed)

    def late(self, staleness: int) -> str | None:
        return "came after the round had ended" if staleness else None

    def _wanted(self, view: View) -> int:
        return cohort_size(self.cohort, view.offered)
