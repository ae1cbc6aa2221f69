"""When the centre asks clients, and when it steps."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AfterValidator, Field

from piebald.parts import Pace, View


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


class _AnyTime(Pace):
    """What the paces share that never wait for one client in particular.

    Attributes:
        cohort: clients that work at the same time, a number or a share.
        oldest: updates that missed more commits than this are not used, None for no limit.
    """

    axis = "pace"

    cohort: CohortSize = 1.0
    oldest: int | None = Field(default=None, ge=0)

    def ask(self, view: View) -> int:
        return max(0, min(view.free, cohort_size(self.cohort, view.offered) - view.busy))

    def hopeless(self, view: View) -> bool:
        """Whether as many have failed since the last commit as there are clients.

        A failure alone makes no commit: it would use up a round and make everybody else's update staler.  But where
        everything fails a run has to come to an end, so then a commit without an update is made.
        """
        return view.failed >= max(1, view.offered)

    def late(self, staleness: int) -> str | None:
        if self.oldest is not None and staleness > self.oldest:
            return f"missed {staleness} commits, which is above the limit of {self.oldest}"
        return None


class Asynchronous(_AnyTime):
    """Step at every arrival; whoever is free gets the newest model at once (Metis, section III)."""

    def ask(self, view: View) -> int:
        return 0 if view.waiting else super().ask(view)

    def ready(self, view: View) -> bool:
        return view.waiting > 0 or self.hopeless(view)


class Buffered(_AnyTime):
    """Step at every `size` arrivals; whoever is free gets the newest model at once (FedBuff, Nguyen et al. 2022).

    Attributes:
        size: updates a commit (K in the paper).
    """

    size: int = Field(default=10, ge=1)

    def ready(self, view: View) -> bool:
        nobody_else = not view.busy and not view.free and bool(view.waiting or view.failed)
        return view.waiting >= self.size or nobody_else or (not view.waiting and self.hopeless(view))


class Deadline(_AnyTime):
    """Step with what has arrived `seconds` after the last step; late updates count at the next one, by then stale.

    Semi-synchronous.  Clients are asked once between two steps.  Where all are in before the deadline it is not waited
    for; where nothing has come by then the first arrival is awaited, so a step is never empty unless all failed.

    Attributes:
        seconds: of the runtime's clock, from one step to the next.
    """

    seconds: float = Field(gt=0)

    @property
    def rounds(self) -> bool:
        return self.oldest == 0

    def ask(self, view: View) -> int:
        return 0 if view.asked or view.waiting else super().ask(view)

    def ready(self, view: View) -> bool:
        if not view.busy:
            return bool(view.waiting or view.failed)
        return view.waiting > 0 and view.now >= view.stepped + self.seconds

    def until(self, view: View) -> float:
        due = view.stepped + self.seconds
        return due if view.waiting and view.now < due else float("inf")
