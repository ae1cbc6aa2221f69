"""Stale updates count less."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from piebald.aggregation.base import Weigh
from piebald.aggregation.linear import Equal, Linear
from piebald.component import build
from piebald.contracts import Centre, Cohort, Update


def _singly(weigh: Weigh) -> Weigh:
    if not isinstance(weigh, Linear):
        raise ValueError(f"must be a weighing that is known for one update alone, got {weigh.kind}")
    return weigh


AnyLinear = Annotated[
    Weigh,
    BeforeValidator(lambda table: build("weigh", table)),
    AfterValidator(_singly),
    PlainSerializer(lambda weigh: weigh.table()),
]


class ByStaleness(Linear):
    """Another weighing times s(t), where t is the number of commits that an update missed (Xie et al. 2019, section 5).

    Shares are measured against the undamped weights: a stale update is not made up for by others, the community just
    moves less.  So one update alone moves it by s(t), as FedAsync has it, and a buffer of K by the sum of s(t) over K,
    as FedBuff has it (Nguyen et al. 2022, algorithm 1).

    Attributes:
        base: the other weighing, equal by default.
        function: "constant" s = 1; "polynomial" s = (t + 1) ** -a; "hinge" s = 1 up to t = b, then
            1 / (a (t - b) + 1).
        a, b: of the functions.
    """

    needs_each = True

    base: AnyLinear = Equal()
    function: Literal["constant", "polynomial", "hinge"] = "polynomial"
    a: float = Field(default=0.5, gt=0)
    b: float = Field(default=4, ge=0)

    def prepare(self, cohort: Cohort, centre: Centre) -> Cohort:
        return self.base.prepare(cohort, centre)

    def validates(self) -> bool:
        return self.base.validates()

    def damping(self, staleness: int) -> float:
        """s(t), in (0, 1]."""
        if self.function == "polynomial":
            return float((staleness + 1) ** -self.a)
        if self.function == "hinge" and staleness > self.b:
            return 1 / (self.a * (staleness - self.b) + 1)
        return 1.0

    def weight(self, update: Update, staleness: int = 0) -> float:
        return self.damping(staleness) * self.base.weight(update, staleness)

    def undamped(self, update: Update) -> float:
        return self.base.weight(update)
