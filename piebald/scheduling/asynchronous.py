"""Step at every result, or at every few."""

from __future__ import annotations

from pydantic import Field

from piebald.scheduling.base import Pace, View
from piebald.scheduling.cohort import CohortSize, cohort_size


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
