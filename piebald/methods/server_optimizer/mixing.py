"""FedAsync: mix each update into the global model."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from piebald.contracts import StepContext
from piebald.methods.server_optimizer.base import ServerOptimizer


class Mixing(ServerOptimizer):
    """FedAsync: w <- (1 - alpha s) w + alpha s w_k (Xie et al. 2019, algorithm 1).

    s is the damping of a stale update, see `aggregation.StalenessWeighted`.  Several updates at once are averaged
    first.

    Attributes:
        alpha: mixing weight, above 0 and at most 1; 0.5 by default, as in Metis' comparison (Stripelis, Ambite 2020,
            section VI), where Xie et al. take 0.6.
    """

    from_current_model = True

    alpha: float = Field(default=0.5, gt=0, le=1)

    def step(self, model: Tensor, average: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        return model + self.alpha * average, {}

    def statistics_weight(self, context: StepContext) -> float:
        # a stale update has a share below 1, and moves statistics as little as parameters
        return self.alpha * min(1.0, sum(context.shares))
