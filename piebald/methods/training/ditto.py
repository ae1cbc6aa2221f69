"""Ditto: a personal model beside the shared one, regularized towards it."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from piebald.contracts import ClientContext, TrainInput, TrainOutput
from piebald.methods.training.sgd import Sgd


class Ditto(Sgd):
    """Train the shared model as FedAvg does, and a personal one on loss + lam/2 |v - w_t|^2 (Li et al. 2021, algorithm
    1).

    Attributes:
        lam: lambda of the paper, at least 0; 0 is local training.
        personal_epochs: epochs of the personal model in each task.
    """

    lam: float = Field(default=0.1, ge=0)
    personal_epochs: int = Field(default=1, ge=1)

    def initial_state(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        return super().initial_state(model, shared) | {"personal": model}

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        # the shared model first: its random numbers are then those of FedAvg, whatever the personal model does
        sent = self.run_sgd(inputs, context)
        personal = context.run_sgd(
            inputs.state["personal"],
            self.sgd_config(inputs, self.personal_epochs),
            prox=self.lam,
            prox_center=inputs.model,
        )
        return self.output(sent, state={"personal": personal.model})

    def personalize(self, inputs: TrainInput, context: ClientContext) -> Tensor:
        return inputs.state["personal"]
