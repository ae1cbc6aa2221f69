"""SGD whose updates also carry mean and variance of the inputs of some layers."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from piebald.contracts import ClientContext, ModelSpec, TrainInput, TrainOutput
from piebald.methods.training.sgd import Sgd


class WithMoments(Sgd):
    """SGD whose updates carry "moments": the statistics that batch norm would hold, for models without batch norm.

    DistFL (Liu et al. 2021) can then group the clients of such models.  For each named layer the means, then the
    variances, of its input channels over the client's training rows under the trained model: they leave the client, are
    counted as bytes, and tell more about its data than a model without batch norm does.

    Attributes:
        layers: convolutions or linear layers, as `named_modules` calls them.
    """

    layers: tuple[str, ...] = Field(min_length=1)

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        named = dict(spec.model.named_modules())
        for name in self.layers:
            weight = getattr(named.get(name), "weight", None)
            if weight is None or weight.dim() < 2:
                fits = [name for name, layer in named.items() if getattr(layer, "weight", None) is not None]
                return f"with_moments: {name!r} must be a convolution or linear layer, such as {', '.join(fits[:4])}"
        return None

    def uploads(self) -> tuple[str, ...]:
        return (*super().uploads(), "moments")

    def moment_layers(self) -> tuple[str, ...]:
        return self.layers

    def upload_shapes(self, spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        named = dict(spec.model.named_modules())
        channels = sum(named[name].get_parameter("weight").shape[1] for name in self.layers)
        return {"moments": (2 * channels,)}

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        end = self.run_sgd(inputs, context)
        return self.output(end, vectors={"moments": context.moments(end.model, self.layers)})
