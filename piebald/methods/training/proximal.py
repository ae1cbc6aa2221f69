"""FedProx: a proximal term around the model that was sent."""

from __future__ import annotations

from pydantic import Field

from piebald.contracts import ClientContext, TrainInput, TrainOutput
from piebald.methods.training.sgd import Sgd


class Proximal(Sgd):
    """SGD with mu/2 |w - w_t|^2 added to the loss (Li et al. 2020, "Federated optimization in heterogeneous networks",
    eq. 2).

    Private layers are held, too: near what they were when the task began, as w_t is the client's whole model then.

    Attributes:
        mu: strength of the proximal term, at least 0; 0 is plain SGD.
    """

    mu: float = Field(default=0.01, ge=0)

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        return self.output(self.run_sgd(inputs, context, prox=self.mu))
