"""SCAFFOLD: local steps corrected by control variates, kept by every client and by the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from piebald.contracts import ClientContext, SgdConfig, StateVector, StepContext, StepSettings, TrainInput, TrainOutput
from piebald.core.parameters import pad
from piebald.methods.training.sgd import Sgd


class Scaffold(Sgd):
    """Steps along g - c_k + c (Karimireddy et al. 2020, algorithm 1).

    The control variates cover the shared numbers only: a private layer has no drift to correct.  With option II the
    updated own variate is c_k - c + (w_t - w) / (steps * lr), which is the mean gradient only where every step was lr
    times a gradient.  So the method is defined for plain SGD: momentum, weight decay, clipping, other optimizers,
    groups and schedules within a task are refused.  (A correction of adaptive steps is a method of its own, such as the
    parameter tracking of Chen et al. 2025.)

    With option I it is the client's gradient at the model that was sent, w_t: here the mean of the mini-batches'
    gradients over one more pass, which no step of a task counts.  The paper calls it the more stable choice, depending
    on the application, and takes option II in its experiments.

    Attributes:
        option: how a client updates its control variate, "I" or "II".
    """

    option: Literal["I", "II"] = "II"

    @model_validator(mode="after")
    def _plain_steps_only(self) -> Self:
        for name in ("momentum", "weight_decay", "clip"):
            if getattr(self, name):
                raise ValueError(f"{name} breaks the control variates of scaffold: leave it out")
        if beyond := self.beyond_plain_sgd():
            raise ValueError(
                f"{beyond} breaks the control variates of scaffold, whose steps are plain SGD: leave it out"
            )
        return self

    def initial_state(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        return {"control": torch.zeros(shared)}

    def uploads(self) -> tuple[str, ...]:
        return ("control",)

    def server_vectors(self, shared: int) -> dict[str, Tensor]:
        return {"control": torch.zeros(shared)}

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        common = inputs.vectors["control"]
        control = inputs.state["control"]
        end = self.run_sgd(inputs, context, correction=pad(common - control, inputs.model.shape[-1]))
        if self.option == "I":
            # option I: one more pass, whose random numbers are of another stream, so that no step changes
            change = mean_gradient(context, inputs.model, self.sgd_config(inputs))[..., : inputs.shared] - control
        else:
            # option II: (w_t - w) / (steps * lr) is the mean of g - c_k + c; less c, it is the change of c_k
            moved = inputs.model[..., : inputs.shared] - end.model[..., : inputs.shared]
            change = moved / (end.steps.clamp(min=1).unsqueeze(-1) * self.rate(inputs)) - common
        # who has no rows learns nothing about its drift
        change = inputs.of_parameters(change) * (end.steps > 0).unsqueeze(-1)
        return self.output(end, vectors={"control": change}, state={"control": control + change})

    def update_server_vectors(
        self, vectors: Mapping[str, Tensor], means: Mapping[str, Tensor], context: StepContext
    ) -> dict[str, Tensor]:
        """C <- c + |S| / N * mean of the changes."""
        return {"control": vectors["control"] + means["control"] * (context.arrived / context.known)}


@dataclasses.dataclass(frozen=True)
class GradientSum:
    """A `contracts.UpdateRule` that keeps the parameters and sums the gradients of the steps."""

    def state_vectors(self, momentum: float) -> tuple[StateVector, ...]:
        return (StateVector("sum"),)

    def update(self, w: Tensor, g: Tensor, state: Mapping[str, Tensor], settings: StepSettings) -> None:
        state["sum"].add_(g)


def mean_gradient(context: ClientContext, model: Tensor, config: SgdConfig) -> Tensor:
    """The mean of the mini-batches' gradients over one pass [c, p], at models [c, p]; 0 for a client without rows."""
    still = dataclasses.replace(
        config, epochs=1, steps=None, momentum=0.0, rule=GradientSum(), schedule=None, groups=()
    )
    outcome = context.with_rng().run_sgd(model, still)
    return outcome.state["sum"] / outcome.steps.clamp(min=1).unsqueeze(-1)
