"""The base class of schedulers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from piebald.component import Part

if TYPE_CHECKING:
    pass


class View(NamedTuple):  # made for every arrival, and a tuple is made four times as fast as a frozen dataclass
    """What a pace decides on: numbers only, so that a million clients cost nothing.

    Attributes:
        version: commits made.
        now: seconds on the runtime's clock;  stepped: when the last commit was made.
        offered: clients that are there now and not put aside, busy or not;  free: of these, not busy.
        busy: clients with an assignment under way.
        asked: assignments sent since the last commit;  due: of these, still under way.
        waiting: arrived updates that no commit has used.
        failed: assignments since the last commit that ended without a usable update.
    """

    version: int
    now: float
    stepped: float
    offered: int
    free: int
    busy: int
    asked: int
    due: int
    waiting: int
    failed: int


class Pace(Part):
    """When the centre asks, and when it steps.  Whom it asks is a seeded choice among those that are free."""

    axis = "pace"

    @property
    def rounds(self) -> bool:
        """Whether a commit uses updates of one submission only, though it may do without some of them."""
        return self.pools

    @property
    def pools(self) -> bool:
        """Whether a commit uses exactly the updates of one submission, so that they may be summed early."""
        return False

    def ask(self, view: View) -> int:
        """How many clients to send an assignment to now."""
        raise NotImplementedError

    def ready(self, view: View) -> bool:
        """Whether to step with what is waiting."""
        raise NotImplementedError

    def until(self, view: View) -> float:
        """The time at which `ready` should be asked again even if nothing arrives."""
        return float("inf")

    def late(self, staleness: int) -> str | None:
        """Why an update that missed so many commits is not used, or None."""
        return None
