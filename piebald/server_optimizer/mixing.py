"""FedAsync: mix each update into the global model."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field
from torch import Tensor

from piebald.server_optimizer.base import Step


class Mixing(Step):
    """FedAsync: w <- (1 - alpha s) w + alpha s w_k (Xie et al. 2019, algorithm 1).

    s is what the weighing says of a stale update, see `weigh.ByStaleness`.  Several updates at once are averaged first.

    Attributes:
        alpha: mixing weight, above 0 and at most 1.
    """

    from_now = True

    alpha: float = Field(default=0.6, gt=0, le=1)

    def move(self, model: Tensor, average: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return model + self.alpha * average, {}
