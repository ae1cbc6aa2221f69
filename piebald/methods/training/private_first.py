"""FedRep: the private layers are trained first, then the shared ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from pydantic import Field, model_validator

from piebald.contracts import ClientContext, ModelSpec, TrainInput, TrainOutput
from piebald.methods.training.sgd import Sgd


class PrivateFirst(Sgd):
    """SGD on the private layers while the shared ones stay as they were sent, then on the shared ones (Collins et al.
    2021, "Exploiting shared representations for personalized federated learning", algorithm 1).

    `epochs` or `steps` are those of the shared layers; the paper's experiments take one epoch.  With nothing private
    it is plain SGD.  Each part has an optimizer of its own in each task, so state that outlives a task is refused.

    Attributes:
        head_epochs: tau of the paper, in passes over the client's rows, of the private layers; 0 leaves them as they
            are.
    """

    head_epochs: int = Field(default=1, ge=0)

    @model_validator(mode="after")
    def _check_state(self) -> Self:
        if self.keep_momentum:
            raise ValueError("keep_momentum cannot be used with private_first, which has two optimizers: leave it out")
        if self.optimizer_state != "fresh":
            raise ValueError("optimizer_state must be 'fresh' with private_first: leave it out")
        return self

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        layout = spec.layout
        if not layout.parameters("shared"):
            return "private_first needs shared layers to train after the private ones: make fewer layers private"
        if layout.private and not layout.parameters("private"):
            return "private_first needs private layers that are trained, and these have statistics only: name others"
        return super().unsupported_model(spec)

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        model = inputs.model
        # where nothing is private, a run with no parameter to train would still cost its passes
        if self.head_epochs and inputs.shared < model.shape[-1]:
            # two runs and not one: each part has an optimizer, and a schedule of steps, of its own
            head = replace(self.sgd_config(inputs, self.head_epochs), part="private")
            model = context.run_sgd(model, head).model
        body = replace(self.sgd_config(inputs), part="shared")
        return self.output(context.run_sgd(model, body))
