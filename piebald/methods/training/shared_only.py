"""FedBABU: the private layers keep their first values until the model is fine-tuned."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field
from torch import Tensor

from piebald.contracts import ClientContext, ModelSpec, TrainInput, TrainOutput
from piebald.methods.training.sgd import Sgd


class SharedOnly(Sgd):
    """SGD on the shared layers under private ones that are not trained, so that they are the same everywhere; each
    client fine-tunes the model for its own use (Oh et al. 2022, "FedBABU: toward enhanced representation for federated
    image classification", algorithm 1).

    The tuned model is computed whenever it is needed and is never sent.  The paper fine-tunes once, when training has
    ended; here every evaluation does, from the model of that round.

    Attributes:
        tune_epochs: epochs of fine-tuning, 0 for none.
        tune: what is fine-tuned: "all" layers, or only the "shared" or the "private" ones (table 5 of the paper).
    """

    tune_epochs: int = Field(default=1, ge=0)
    tune: Literal["all", "shared", "private"] = "all"

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        if not spec.layout.parameters("shared"):
            return "shared_only needs shared layers to train: make fewer layers private"
        if not spec.layout.parameters(self.tune):
            return f"tune = {self.tune!r} needs {self.tune} layers that are trained, and there are none: write 'all'"
        return super().unsupported_model(spec)

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        body = replace(self.sgd_config(inputs), part="shared")
        return self.output(context.run_sgd(inputs.model, body, state=self.start_state(inputs)))

    def personalize(self, inputs: TrainInput, context: ClientContext) -> Tensor:
        if not self.tune_epochs:
            return inputs.model
        tuning = replace(self.sgd_config(inputs, self.tune_epochs), part=self.tune)
        return context.run_sgd(inputs.model, tuning).model
