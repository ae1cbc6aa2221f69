"""APFL: a mixture of the shared model and one of the client's own, and a mixing weight that is learned."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import ClientContext, Slopes, TrainInput, TrainOutput
from piebald.methods.training.custom_steps import CustomSteps


class MixedModels(CustomSteps):
    """Train the shared model w as FedAvg does, and at every step an own model v along the gradient of the mixture
    a v + (1 - a) w (Deng et al. 2020, "Adaptive personalized federated learning", algorithm 1).

    The client uses the mixture with the model that it was last sent.  The paper learns a by a step of gradient descent,
    a - lr <v - w, grad f(a v + (1 - a) w)>, and leaves open how often: here at the first step of each task, where w is
    the model that was sent, within [0, 1].  The paper's equations take v's gradient at the mixture; PFLlib takes it at
    v, and makes the mixture the next v.

    Attributes:
        alpha: a at the beginning, in [0, 1]; 0 is FedAvg, 1 is local training.
        adaptive: learn a.
    """

    alpha: float = Field(default=0.5, ge=0, le=1)
    adaptive: bool = True

    def initial_state(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        return {"own": model, "alpha": model.new_tensor([self.alpha])}

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        return self.take_steps(inputs, context, inputs.state, keep=("own", "alpha"))

    def step(self, at: Mapping[str, Tensor], slopes: Slopes) -> dict[str, Tensor]:
        """One step of w, v and a."""
        w, v, a, lr = at["model"], at["own"], at["alpha"], at["lr"]
        mixture = a * v + (1 - a) * w
        shared, mixed = slopes(w), slopes(mixture)
        moved = {
            "model": shared.model - lr * shared.gradient,
            # as far as v is part of the mixture: d/dv f(a v + (1 - a) w) = a f'
            "own": torch.where(slopes.trained, v - lr * a * mixed.gradient, mixed.model),  # with its statistics
        }
        if self.adaptive:  # at the first step; to ask which one it is would make the host wait for a GPU
            slope = ((v - w) * mixed.gradient).sum(-1, keepdim=True)
            moved["alpha"] = torch.where(at["step"] == 0, (a - lr * slope).clamp(0, 1), a)
        return moved

    def personalize(self, inputs: TrainInput, context: ClientContext) -> Tensor:
        a = inputs.state["alpha"]
        return a * inputs.state["own"] + (1 - a) * inputs.model
