"""How the community model moves, given the averaged change."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from piebald.parts import Step


class ToAverage(Step):
    """To the average of the clients' models: w <- w + average change (McMahan et al. 2017)."""

    def move(self, model: Tensor, average: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return model + average, {}


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


class CachedSwap(Step):
    """To the weighted mean of the last models of all learners that ever answered (Metis, section III).

    A commit swaps one learner's contribution for its new one in O(model), see `controller.cache`.  Under a synchronous
    pace with all clients this is `ToAverage`; with some, or asynchronously, those that did not answer still count.

    Attributes:
        memory: bytes of learners' last models kept in RAM; more goes to a temporary file.
    """

    cached = True

    memory: int = Field(default=4 << 30, ge=0)


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


class _Adaptive(Step):
    """What Adam and Yogi share (Reddi et al. 2021, "Adaptive federated optimization", algorithm 2).

    m <- beta1 m + (1 - beta1) d;  v as the subclass says;  w <- w + lr m / (sqrt(v) + tau).  No bias correction, v
    starts at tau squared, as in the paper.

    Attributes:
        lr: eta of the paper.  beta1, beta2: in [0, 1).  tau: degree of adaptivity.
    """

    axis = "step"

    lr: float = Field(default=0.01, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    tau: float = Field(default=1e-3, gt=0)

    def start(self, model: Tensor) -> dict[str, Tensor]:
        return {"m": torch.zeros_like(model), "v": torch.full_like(model, self.tau**2)}

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        raise NotImplementedError

    def move(self, model: Tensor, average: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        m = self.beta1 * state["m"] + (1 - self.beta1) * average
        v = self.second_moment(state["v"], average.square())
        return model + self.lr * m / (v.sqrt() + self.tau), {"m": m, "v": v}


class Adam(_Adaptive):
    """FedAdam: v <- beta2 v + (1 - beta2) d^2."""

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


class Yogi(_Adaptive):
    """FedYogi: v <- v - (1 - beta2) d^2 sign(v - d^2)."""

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)
