"""Semi-synchronous: step with what has arrived by a deadline."""

from __future__ import annotations

from pydantic import Field

from piebald.scheduling.asynchronous import _AnyTime
from piebald.scheduling.base import View


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
