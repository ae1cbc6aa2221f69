"""FedAvgM: momentum at the server."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import StepContext
from piebald.methods.server_optimizer.base import ServerOptimizer


class Momentum(ServerOptimizer):
    """FedAvgM: v <- beta v + average change;  w <- w + lr v (Hsu et al. 2019, section 4.2).

    Attributes:
        lr: the server's step size; with beta = 0 and lr = 1 this is `ServerSgd`.
        beta: in [0, 1).
    """

    lr: float = Field(default=1.0, gt=0)
    beta: float = Field(default=0.9, ge=0, lt=1)

    def initial_state(self, model: Tensor) -> dict[str, Tensor]:
        return {"velocity": torch.zeros_like(model)}

    def step(self, model: Tensor, average: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        velocity = self.beta * context.state["velocity"] + average
        return model + self.lr * velocity, {"velocity": velocity}
