"""FedAvg: the average of the clients' models."""

from __future__ import annotations

from torch import Tensor

from piebald.contracts import StepContext
from piebald.server_optimizer.base import ServerOptimizer


class ServerSgd(ServerOptimizer):
    """To the average of the clients' models: w <- w + average change (McMahan et al. 2017)."""

    def step(self, model: Tensor, average: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        return model + average, {}
