"""HeteroFL, at the client: networks of several widths, each a part of the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import Field, model_validator

from piebald.contracts import ClientContext, LossBatch, TrainInput, TrainOutput
from piebald.narrow_models import narrowed
from piebald.own_models import OwnModel, OwnModels, nested_positions
from piebald.parameters import Layout
from piebald.training.sgd import Sgd

if TYPE_CHECKING:
    from torch import Tensor

    from piebald.model_spec import ModelSpec

Width = Annotated[float, Field(gt=0, le=1)]


class NestedWidths(Sgd):
    """SGD on a network that has the first channels of each hidden layer of the global one (Diao, Ding, Tarokh 2021,
    "HeteroFL: computation and communication efficient federated learning for heterogeneous clients", algorithm 1).

    A client of width r has r of the channels, rounded up: about r^2 of the parameters, of the steps' work and of the
    bytes, both ways.  Inputs and outputs stay whole.  The network that it trains is built with so many channels, and is
    its own model: it is what the client is evaluated with.  `aggregation.HeldAverage` averages each number over the
    clients that have it.

    Dividing by r (the paper's scaler) brings what a narrow layer puts out to the size that the whole one's has.  The
    paper leaves the division out when models are used, where it uses the global model only; here a narrow model keeps
    it, as it was trained with it.  Running statistics of batch norms are averaged like parameters; the paper's static
    batch norm, which asks all clients for statistics of the finished model once, is not made.

    Attributes:
        widths: r of each client by its number, above 0 and at most 1; clients beyond the last begin with the first
            again.  With [1.0] it is plain SGD.
        scaler: divide the outputs of narrowed layers by r.
        masked_loss: put 0 in the place of the outputs for classes of which the client has no training rows, and send
            which classes it has, so that the classifier's rows are averaged over the clients that have their class
            (section 3.2 of the paper, the masking trick).
    """

    reads_features: ClassVar[bool] = False
    anchors: ClassVar[tuple[str, ...]] = ()

    widths: tuple[Width, ...] = Field(default=(1.0, 0.5), min_length=1)
    scaler: bool = True
    masked_loss: bool = False

    @model_validator(mode="after")
    def _check_state(self) -> Self:
        if self.holds_parts and self.optimizer_state == "averaged":
            raise ValueError(
                "optimizer_state = 'averaged' has no average where clients have unlike widths: choose 'fresh' or 'kept'"
            )
        return self

    @property
    def holds_parts(self) -> bool:
        """See `training.GivesOwnModels`."""
        return any(width < 1 for width in self.widths)

    def own_models(self, spec: ModelSpec) -> OwnModels | None:
        """See `training.GivesOwnModels`."""
        narrow = sorted({width for width in self.widths if width < 1})
        if not narrow:
            return None
        models = tuple(self._own_model(spec, width) for width in narrow)
        return OwnModels(models, tuple(narrow.index(width) if width < 1 else None for width in self.widths))

    def _own_model(self, spec: ModelSpec, width: float) -> OwnModel:
        model = narrowed(spec.model, width, spec.shape, self.scaler)
        layout = Layout.of(model, spec.layout.private)
        places = nested_positions(spec.layout, layout)
        return OwnModel(model, layout, spec.initial[places], spec.outputs, places[: layout.shared])

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        if self.masked_loss and (spec.objective.name != "classification" or len(spec.outputs) != 1):
            return (
                f"masked_loss of {self.kind} needs classification with one label for each row: leave it out, or choose "
                "loss = 'classification'"
            )
        return super().unsupported_model(spec)

    def discloses(self) -> str | None:
        return "which classes their rows have" if self.masked_loss else None

    def uploads(self) -> tuple[str, ...]:
        return (*super().uploads(), "classes") if self.masked_loss else super().uploads()

    def upload_shapes(self, spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        return {"classes": tuple(spec.outputs)} if self.masked_loss else {}

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        if not self.masked_loss:
            return super().train(inputs, context)
        classes = {"classes": (context.label_counts() > 0).float()}
        state = self.start_state(inputs)
        end = context.run_sgd(inputs.model, self.sgd_config(inputs), state=state, local_loss=self, own=classes)
        return self.output(end, vectors=classes)

    def batch_loss(self, batch: LossBatch) -> Tensor:
        return batch.losses(batch.outputs * batch.own["classes"], batch.targets)
