"""Asynchronous schedulers: step at every result, or at every few results."""

from __future__ import annotations

from pydantic import Field

from piebald.methods.scheduling.base import CohortSize, Scheduler, ServerView, cohort_size


class NonBlockingScheduler(Scheduler):
    """Base of the schedulers that never wait for one client in particular.

    Attributes:
        cohort: clients that work at the same time, a number or a share.
        max_staleness: updates that missed more server steps than this are not used, None for no limit.
    """

    axis = "scheduling"

    cohort: CohortSize = 1.0
    max_staleness: int | None = Field(default=None, ge=0)

    def num_to_request(self, view: ServerView) -> int:
        # a cohort is here how many work at the same time, so those at work count
        return max(0, min(view.idle, cohort_size(self.cohort, view.available) - view.busy))

    def hopeless(self, view: ServerView) -> bool:
        """Return whether as many have failed since the last step as there are clients.

        A failure alone causes no step: it would use up a round and make all other updates staler.  But where all tasks
        fail the run has to end, so then a step without an update is made.
        """
        return view.failed >= max(1, view.available)

    def reject_reason(self, staleness: int) -> str | None:
        if self.max_staleness is not None and staleness > self.max_staleness:
            return f"missed {staleness} server steps, which is above the limit of {self.max_staleness}"
        return None


class Asynchronous(NonBlockingScheduler):
    """Step at every result; an idle client gets the newest model at once (Metis, section III)."""

    def num_to_request(self, view: ServerView) -> int:
        # the step comes first, so that clients are sent the model with the update that has arrived
        return 0 if view.waiting else super().num_to_request(view)

    def should_step(self, view: ServerView) -> bool:
        return view.waiting > 0 or self.hopeless(view)


class Buffered(NonBlockingScheduler):
    """Step at every `buffer_size` results; an idle client gets the newest model at once (FedBuff, Nguyen et al. 2022).

    Attributes:
        buffer_size: updates per server step (K in the paper).
    """

    buffer_size: int = Field(default=10, ge=1)

    def should_step(self, view: ServerView) -> bool:
        # nobody is left to fill the buffer: waiting for more would be for ever
        nobody_else = not view.busy and not view.idle and bool(view.waiting or view.failed)
        return view.waiting >= self.buffer_size or nobody_else or (not view.waiting and self.hopeless(view))
