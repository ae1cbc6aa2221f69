"""Semi-synchronous: step with what has arrived by a deadline."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from piebald.methods.scheduling.asynchronous import NonBlockingScheduler
from piebald.methods.scheduling.base import ServerView


class Deadline(NonBlockingScheduler):
    """Step with what has arrived `seconds` after the last step; late updates count at the next one, by then stale.

    Semi-synchronous.  Clients are asked once between two steps.  When all results have
    arrived before the deadline, the server steps at once; when none has, it waits for the first one, so a step is
    never empty unless all tasks failed.

    Attributes:
        seconds: of the runtime's clock, from one step to the next.
    """

    rounds_setting: ClassVar[str] = "max_staleness = 0"

    seconds: float = Field(gt=0)

    def round_kind(self) -> Literal["partial"] | None:
        return "partial" if self.max_staleness == 0 else None

    def num_to_request(self, view: ServerView) -> int:
        return 0 if view.requested or view.waiting else super().num_to_request(view)

    def should_step(self, view: ServerView) -> bool:
        if not view.busy:
            return bool(view.waiting or view.failed)
        return view.waiting > 0 and view.now >= view.stepped + self.seconds

    def asks_once(self) -> bool:
        return not self.overrides(Deadline.num_to_request)

    def deadline(self, view: ServerView) -> float:
        # without an update there is nothing to step with, and the next arrival wakes the server
        due = view.stepped + self.seconds
        return due if view.waiting and view.now < due else float("inf")
