"""Staleness weighting: stale updates count less."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from piebald.contracts import Cohort, ServerContext, Update
from piebald.contracts.component import build
from piebald.methods.aggregation.base import Aggregator
from piebald.methods.aggregation.linear import EqualWeighted, Linear


def _linear(aggregator: Aggregator) -> Aggregator:
    if not isinstance(aggregator, Linear):
        raise ValueError(f"must be a weighted mean, whose weights are known from single updates, got {aggregator.kind}")
    return aggregator


AnyLinear = Annotated[
    Linear,
    BeforeValidator(lambda table: build("aggregation", table)),
    AfterValidator(_linear),
    PlainSerializer(lambda aggregator: aggregator.table()),
]


class StalenessWeighted(Linear):
    """Another aggregator's weights times s(t), where t is the number of server steps that an update missed (Xie et al.
    2019, section 5).

    Shares are measured against the undamped weights: other updates do not compensate for a stale one, the global model
    just moves less.  So one update alone moves it by s(t), as FedAsync has it, and a buffer of K by the sum of s(t)
    over K, as FedBuff has it (Nguyen et al. 2022, algorithm 1).

    Attributes:
        base: the other aggregator, equal by default.
        function: "constant" s = 1; "polynomial" s = (t + 1) ** -a; "hinge" s = 1 up to t = b, then
            1 / (a (t - b) + 1).
        a, b: of the functions.

    Examples:
        >>> [round(StalenessWeighted(a=0.5).damping(missed), 3) for missed in (0, 3, 8)]
        [1.0, 0.5, 0.333]
    """

    base: AnyLinear = EqualWeighted()
    function: Literal["constant", "polynomial", "hinge"] = "polynomial"
    a: float = Field(default=0.5, gt=0)
    b: float = Field(default=4, ge=0)

    def discloses(self) -> str | None:
        return self.base.discloses()

    def prepare(self, cohort: Cohort, context: ServerContext) -> Cohort:
        return self.base.prepare(cohort, context)

    def reads_data(self) -> bool:
        # damping counts server steps, which no client's data decide
        weighs = (StalenessWeighted.weight, StalenessWeighted.undamped_weight, StalenessWeighted.damping)
        is_other = self.overrides(*weighs, StalenessWeighted.aggregate, StalenessWeighted.prepare)
        return is_other or self.base.reads_data()

    def needs_validation_rows(self) -> bool:
        return self.base.needs_validation_rows()

    def damping(self, staleness: int) -> float:
        """s(t), in (0, 1]."""
        if self.function == "polynomial":
            return float((staleness + 1) ** -self.a)
        if self.function == "hinge" and staleness > self.b:
            return 1 / (self.a * (staleness - self.b) + 1)
        return 1.0

    def weight(self, update: Update, staleness: int = 0) -> float:
        return self.damping(staleness) * self.base.weight(update, staleness)

    def undamped_weight(self, update: Update) -> float:
        return self.base.weight(update)
