"""FedProto: clients agree on a mean feature for each class, and on nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from pydantic import Field
from torch import Tensor, nn

from piebald.contracts import ClientContext, LossBatch, ModelSpec, StepContext, TrainInput, TrainOutput
from piebald.contracts.component import RecipeComponents
from piebald.core.parameters import head
from piebald.methods.training.augmentation import mixing
from piebald.methods.training.base import no_features
from piebald.methods.training.sgd import Sgd


class Prototypes(Sgd):
    """SGD that draws a row's features towards the prototype of its class (Tan et al. 2022, "FedProto: federated
    prototype learning across heterogeneous clients", eqs. 3, 6, 7 and algorithm 1).

    A prototype is the mean of a class' features over a client's training rows, under the model that it has just trained
    (eq. 3); features are what goes into the last linear layer.  Clients send the prototypes of the classes that they
    have, and which these are; the server sends back the mean of each over the clients that have the class.  lam times
    the mean squared difference from it is added to a row's loss, as in the authors' program (eq. 7 has the distance of
    a batch's mean feature).  Eq. 6 weighs prototypes by rows and divides by the number of clients as well; here, as in
    the program, they count alike.  A class that no client of a step has keeps its prototype, and one that no
    client has had yet has no term.

    Models may be unlike, as long as they have equally many features: nothing of a model is sent.  They are used with
    their own classifiers; `NearestPrototype` uses the prototypes.

    Attributes:
        lam: weight of the term, at least 0; with 0 clients train alone.
        classes, features: how many there are; set by the recipe.
    """

    reads_features = True

    lam: float = Field(default=1.0, ge=0)
    classes: int | None = Field(default=None, ge=1)
    features: int | None = Field(default=None, ge=1)

    def adapted_to(self, recipe: RecipeComponents, spec: ModelSpec) -> Self:
        width = _features(spec.model)
        has_shape = width is not None and len(spec.outputs) == 1
        return self.model_copy(update={"classes": spec.outputs[0], "features": width}) if has_shape else self

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        if spec.objective.name != "classification" or len(spec.outputs) != 1:
            return f"{self.kind} needs classification with one label for each row: choose another training"
        if reason := no_features(self.kind, spec):
            return reason
        if self.features is not None and (width := _features(spec.model)) != self.features:
            return (
                f"{self.kind} compares the features of clients' models, of which one has {self.features} and another "
                f"{width}: let what goes into the last linear layer have one length in all of them"
            )
        if mixed := mixing(self.augmentation):
            return f"{self.kind} needs rows of one class each, but {mixed} may mix them: leave it out"
        return super().unsupported_model(spec)

    def discloses(self) -> str | None:
        return "the mean features of their rows of each class"

    def uploads(self) -> tuple[str, ...]:
        return (*super().uploads(), "prototypes", "present")

    def upload_shapes(self, spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        width = _features(spec.model)
        assert width is not None
        return {"prototypes": (*spec.outputs, width), "present": tuple(spec.outputs)}

    def server_vectors(self, shared: int) -> dict[str, Tensor]:
        if self.classes is None or self.features is None:
            return super().server_vectors(shared)
        vectors = {"prototypes": torch.zeros(self.classes, self.features), "present": torch.zeros(self.classes)}
        return super().server_vectors(shared) | vectors

    def update_server_vectors(
        self, vectors: Mapping[str, Tensor], means: Mapping[str, Tensor], context: StepContext
    ) -> dict[str, Tensor]:
        held = means["present"] > 0
        # the mean over all clients over the share that has the class is the mean over these: absent ones send zeros
        mean = means["prototypes"] / means["present"].clamp(min=1e-12).unsqueeze(1)
        return {
            **super().update_server_vectors(vectors, means, context),
            "prototypes": torch.where(held.unsqueeze(1), mean, vectors["prototypes"]),
            # a class stays known once anybody has had it
            "present": torch.maximum(held.float(), vectors["present"]),
        }

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        tensors = {name: inputs.vectors[name] for name in ("prototypes", "present")}
        end = self.run_sgd(inputs, context, local_loss=self if self.lam else None, own=tensors)
        means, counts = context.class_features(end.model)
        return self.output(end, vectors={"prototypes": means, "present": (counts > 0).float()})

    def batch_loss(self, batch: LossBatch) -> Tensor:
        labels = batch.targets.long()
        away = (batch.features["model"] - batch.own["prototypes"][labels]).square().mean(-1)
        # by `present`: prototypes of classes that nobody has had are zeros, which must draw no features
        return batch.losses(batch.outputs, batch.targets) + self.lam * batch.own["present"][labels] * away


def _features(model: nn.Module) -> int | None:
    """Return the number of a model's features."""
    last = head(model)
    return None if last is None else model.get_submodule(last).get_parameter("weight").shape[1]
