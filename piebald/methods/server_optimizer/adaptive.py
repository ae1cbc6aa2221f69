"""FedAdam and FedYogi: adaptive step sizes at the server."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import StepContext
from piebald.methods.server_optimizer.base import ServerOptimizer


class _AdaptiveOptimizer(ServerOptimizer):
    """The base of Adam and Yogi (Reddi et al. 2021, "Adaptive federated optimization", algorithm 2).

    m <- beta1 m + (1 - beta1) d;  v as the subclass says;  w <- w + lr m / (sqrt(v) + tau).  No bias correction, v
    starts at tau squared, as in the paper.

    Attributes:
        lr: eta of the paper.  beta1, beta2: in [0, 1).  tau: degree of adaptivity.
    """

    axis = "server_optimizer"

    lr: float = Field(default=0.01, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    tau: float = Field(default=1e-3, gt=0)

    def initial_state(self, model: Tensor) -> dict[str, Tensor]:
        return {"m": torch.zeros_like(model), "v": torch.full_like(model, self.tau**2)}

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        raise NotImplementedError

    def step(self, model: Tensor, average: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        m = self.beta1 * context.state["m"] + (1 - self.beta1) * average
        v = self.second_moment(context.state["v"], average.square())
        return model + self.lr * m / (v.sqrt() + self.tau), {"m": m, "v": v}


class Adam(_AdaptiveOptimizer):
    """FedAdam: v <- beta2 v + (1 - beta2) d^2."""

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


class Yogi(_AdaptiveOptimizer):
    """FedYogi: v <- v - (1 - beta2) d^2 sign(v - d^2)."""

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        # v changes by at most (1 - beta2) d^2 at a step, so that small gradients cannot make it fall fast
        return v - (1 - self.beta2) * square * torch.sign(v - square)
