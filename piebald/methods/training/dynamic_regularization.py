"""FedDyn, at the client: a loss whose regularizer follows the client's own gradients."""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from piebald.contracts import ClientContext, TrainInput, TrainOutput
from piebald.core.parameters import pad
from piebald.methods.training.sgd import Sgd


class DynamicRegularization(Sgd):
    """SGD on L_k(w) - <g_k, w> + alpha/2 |w - w_t|^2 (Acar et al. 2021, "Federated learning based on dynamic
    regularization", algorithm 1, the device's part).

    g_k is the client's own estimate of its gradient at its last model: it starts at 0 and becomes
    g_k - alpha (w_k - w_t) after training.  It covers the shared parameters only and never leaves the client; private
    layers have the quadratic term alone, around what they were when the task began.  The server's part is
    `server_optimizer.DynamicCorrection`, with the same alpha.  Any optimizer may look for the minimum of this loss, as
    the paper asks for the minimum only.  Momentum and other state that outlive a task are refused, because their
    direction belongs to another g_k.

    Attributes:
        alpha: strength of the regularizer, above 0.
    """

    alpha: float = Field(default=0.01, gt=0)

    @model_validator(mode="after")
    def _check_momentum(self) -> Self:
        if self.keep_momentum:
            raise ValueError("keep_momentum cannot be used with dynamic_regularization: leave it out")
        if self.optimizer_state != "fresh":
            raise ValueError("optimizer_state must be 'fresh' with dynamic_regularization: leave it out")
        return self

    def initial_state(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        return {"gradient": torch.zeros(shared)}

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        gradient = inputs.state["gradient"]
        # private parameters have no g_k: their part of the correction is 0
        correction = pad(-gradient, inputs.model.shape[-1])
        end = self.run_sgd(inputs, context, prox=self.alpha, correction=correction)
        # shared numbers only: g_k estimates the gradient of what clients agree on
        moved = inputs.of_parameters(end.model[..., : inputs.shared] - inputs.model[..., : inputs.shared])
        return self.output(end, state={"gradient": gradient - self.alpha * moved})
