"""Fine-tuning: each client trains the global model further for its own use."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from piebald.contracts import ClientContext, TrainInput
from piebald.methods.training.sgd import Sgd


class FineTune(Sgd):
    """FedAvg whose clients each fine-tune the model they get (LG-Net among the baselines of DistFL, 2021).

    The tuned model is computed whenever it is needed and is never sent.

    Attributes:
        tune_epochs: epochs of fine-tuning.
    """

    tune_epochs: int = Field(default=1, ge=1)

    def personalize(self, inputs: TrainInput, context: ClientContext) -> Tensor:
        return context.run_sgd(inputs.model, self.sgd_config(inputs, self.tune_epochs)).model
