"""The base class of aggregators."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from piebald.component import Part
from piebald.contracts import Centre, Cohort, Update

if TYPE_CHECKING:
    from torch import Tensor


class Weigh(Part):
    """How much each update counts.  Linear ones say it for one update; robust ones override `combine`."""

    axis = "weigh"
    needs_each: ClassVar[bool] = False  # True: single updates must reach the centre

    def prepare(self, cohort: Cohort, centre: Centre) -> Cohort:
        """The cohort with what the weighing must know first, e.g. scores that clients gave, among updates' metrics."""
        return cohort

    def weight(self, update: Update, staleness: int = 0) -> float:
        """How much one update counts, before they are made to sum to one; from its numbers alone, not its vectors."""
        raise NotImplementedError

    def combine(self, cohort: Cohort, centre: Centre) -> tuple[Tensor, list[float]]:
        """The average change [s] and the weights [n], which sum to one, or to less where stale updates are damped."""
        raise NotImplementedError

    def validates(self) -> bool:
        """Whether clients need validation rows."""
        return False

    @classmethod
    def singly(cls) -> bool:
        """Whether each update's weight is known without the others (`weight`)."""
        return cls.weight is not Weigh.weight
