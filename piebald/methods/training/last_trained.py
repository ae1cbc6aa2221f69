"""FedAMP, at the client: the model that a client trained the last time is its own."""

from __future__ import annotations

from torch import Tensor

from piebald.contracts import ClientContext, TrainInput, TrainOutput
from piebald.methods.training.proximal import Proximal


class LastTrained(Proximal):
    """SGD with mu/2 |w - u|^2 added to the loss, where u is the model that was sent (Huang et al. 2021, algorithm 1,
    line 4, with mu = lambda / alpha).

    Training starts from u; the paper asks for the minimum only.  The trained model is what the client uses for itself,
    and stays in its state.
    """

    def initial_state(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        return super().initial_state(model, shared) | {"trained": model}

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        end = self.run_sgd(inputs, context, prox=self.mu)
        return self.output(end, state={"trained": end.model})

    def personalize(self, inputs: TrainInput, context: ClientContext) -> Tensor:
        return inputs.state["trained"]
