"""FedAvg: the average of the clients' models."""

from __future__ import annotations

from torch import Tensor

from piebald.contracts import StepContext
from piebald.methods.server_optimizer.base import ServerOptimizer


class ServerSgd(ServerOptimizer):
    """SGD with learning rate 1 at the server, w <- w + average change: the average of the clients' models (McMahan et
    al. 2017).
    """

    def step(self, model: Tensor, average: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        return model + average, {}
