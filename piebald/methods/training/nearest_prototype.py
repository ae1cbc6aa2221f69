"""FedProto's inference: the class of the nearest prototype, in place of the classifier's."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from piebald.contracts import ClientContext, ModelSpec, TrainInput, TrainOutput
from piebald.core.parameters import head
from piebald.methods.training.prototypes import Prototypes

_NEVER = -1e4  # the score of a class that nobody has had


class NearestPrototype(Prototypes):
    """FedProto whose clients predict the class with the nearest prototype (Tan et al. 2022, section 4: the label is
    arg min_j |f(x) - C_j|, with the global prototypes C).

    In the model that a client is evaluated with and has in the end, the last linear layer has the weights 2 C_j and the
    biases -|C_j|^2: then its score of class j is |f(x)|^2 - |f(x) - C_j|^2, up to what all classes have in common, so
    that the largest score is that of the nearest prototype.  C are the prototypes that came with the client's last
    task.  Before any have come, the classifier is used.  Training is the same.
    """

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        if reason := super().unsupported_model(spec):
            return reason
        last = head(spec.model)
        if last is not None and spec.model.get_submodule(last).bias is None:
            return f"{self.kind} writes prototypes into the last linear layer, and {last} has no bias: give it one"
        return None

    def initial_state(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        return super().initial_state(model, shared) | {"used": model}

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        done = super().train(inputs, context)
        prototypes, present = inputs.vectors["prototypes"], inputs.vectors["present"] > 0
        biases = torch.where(present, -prototypes.square().sum(-1), _NEVER)
        layer = context.belongs(("classifier",))  # its weights, then its biases
        used = torch.zeros(len(biases), len(layer), device=biases.device)
        used[:, layer] = torch.cat([2 * prototypes.flatten(1), biases], dim=1)
        # with no prototype at all every score would be the same, so the trained classifier stays
        replaced = present.any(1, keepdim=True) & layer
        return dataclasses.replace(done, state={**done.state, "used": torch.where(replaced, used, done.model)})

    def personalize(self, inputs: TrainInput, context: ClientContext) -> Tensor:
        return inputs.state["used"]
