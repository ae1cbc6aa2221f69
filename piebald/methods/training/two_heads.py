"""FedRoD: a shared head for all classes alike, and a private one beside it for the client's own."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from piebald.contracts import ClientContext, ModelSpec, Slopes, TrainInput, TrainOutput
from piebald.core.parameters import matching
from piebald.methods.training.custom_steps import CustomSteps

_FEWEST = 1e-8  # rows that a class without rows counts as, so that its logarithm is finite


class TwoHeads(CustomSteps):
    """Train the shared model on the balanced softmax, and at every step a head of the client's own on the usual loss of
    the sum of both heads, which moves no other layer (Chen, Chao 2022, "On bridging generic and personalized federated
    learning for image classification", eqs. 5 to 7 and algorithm 1, FedRoD with linear heads).

    The balanced softmax adds log n_c to the output of class c, with n_c the client's training rows of that class.  So a
    client unlearns less of what others know, and the shared model is good for all classes; the sum of both heads knows
    which ones the client has.  Two linear heads are one with the sum of their weights, so a personal model is one of
    the user's own architecture.  The paper does not say where the own head starts; here it starts at 0, from the
    shared model.  (PFLlib starts it as a copy of the shared head.)  Both are trained on the same batches.

    Attributes:
        head: the classifier, one linear layer with a bias, see `parameters.matching`.
        balanced: the balanced softmax; False trains the shared model as FedAvg does.
    """

    head: str = "classifier"
    balanced: bool = True

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        if spec.objective.name != "classification" or len(spec.outputs) != 1:
            return "two_heads needs classification with one label for each row: choose another training"
        names = matching(spec.model, [self.head])
        # both heads add up to one layer only if weight and bias belong to the same linear one
        owners = {name.rpartition(".")[0] for name in names}
        layer = spec.model.get_submodule(owners.pop()) if len(owners) == 1 else None
        if not isinstance(layer, nn.Linear) or layer.bias is None or layer.out_features != spec.outputs[0]:
            return (
                f"head = {self.head!r} must be one linear layer with a bias and an output for each of the "
                f"{spec.outputs[0]} classes: name that layer, or choose another training"
            )
        if names & spec.layout.private:
            return f"head = {self.head!r} must be shared, as each client has one of its own beside it: share it"
        return super().unsupported_model(spec)

    def initial_state(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        return {"head": model.new_zeros(model.shape)}

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        inside = context.belongs([self.head])
        shift = inputs.model.new_zeros(len(inputs.versions), inputs.model.shape[-1])
        if self.balanced:
            counts = context.label_counts()
            # log n_c on the bias equals log n_c on the outputs, so the loss itself needs no change
            shift[:, inside & context.belongs(["*bias"])] = counts.clamp(min=_FEWEST).log()
        vectors = {"shift": shift, "inside": inside.expand(len(shift), -1), **inputs.state}
        return self.take_steps(inputs, context, vectors, keep=("head",))

    def step(self, at: Mapping[str, Tensor], slopes: Slopes) -> dict[str, Tensor]:
        """One step of the shared model and of the own head.  A constant added to outputs is one added to the bias."""
        w, lr, shifted = at["model"], at["lr"], at["model"] + at["shift"]
        generic, personal = slopes(shifted), slopes(w + at["head"])
        return {
            # generic.model differs from `shifted` in buffers only
            "model": w + (generic.model - shifted) - lr * generic.gradient,
            "head": at["head"] - lr * at["inside"] * personal.gradient,
        }

    def personalize(self, inputs: TrainInput, context: ClientContext) -> Tensor:
        return inputs.model + inputs.state["head"]
