"""The mean gradient at a fixed model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from piebald.contracts import ClientContext, SgdConfig, StateVector, StepSettings

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class GradientSum:
    """A `contracts.UpdateRule` that keeps the parameters and sums the gradients of the steps."""

    def state_vectors(self, momentum: float) -> tuple[StateVector, ...]:
        return (StateVector("sum"),)

    def update(self, w: Tensor, g: Tensor, state: Mapping[str, Tensor], settings: StepSettings) -> None:
        state["sum"].add_(g)


def mean_gradient(context: ClientContext, model: Tensor, config: SgdConfig) -> Tensor:
    """The mean of the mini-batches' gradients over one pass [c, p], at models [c, p]; 0 for a client without rows."""
    still = dataclasses.replace(
        config, epochs=1, steps=None, momentum=0.0, rule=GradientSum(), schedule=None, groups=()
    )
    outcome = context.with_other_rng().run_sgd(model, still)
    return outcome.state["sum"] / outcome.steps.clamp(min=1).unsqueeze(-1)
