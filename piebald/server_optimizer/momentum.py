"""FedAvgM: momentum at the server."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from piebald.server_optimizer.base import Step


class Momentum(Step):
    """FedAvgM: v <- beta v + average change;  w <- w + lr v (Hsu et al. 2019).

    Attributes:
        lr: the centre's step size; with beta = 0 and lr = 1 this is `ToAverage`.
        beta: in [0, 1).
    """

    lr: float = Field(default=1.0, gt=0)
    beta: float = Field(default=0.9, ge=0, lt=1)

    def start(self, model: Tensor) -> dict[str, Tensor]:
        return {"velocity": torch.zeros_like(model)}

    def move(self, model: Tensor, average: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        velocity = self.beta * state["velocity"] + average
        return model + self.lr * velocity, {"velocity": velocity}
