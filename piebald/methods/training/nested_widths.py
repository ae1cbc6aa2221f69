"""HeteroFL, at the client: networks of several widths, each a part of the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from piebald.contracts import ClientContext, LossBatch, ModelSpec, TrainInput, TrainOutput
from piebald.core.client_models import ClientModels, narrowed, nested_model
from piebald.methods.queries.batch_norms import BatchStatistics
from piebald.methods.training.sgd import Sgd

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
    it, as it was trained with it.

    With `static_batch_norm` (the paper's sBN), running statistics of batch norms are neither kept nor sent in training.
    Once models are trained, before they are evaluated and at the end, each client passes its training rows through the
    global model in batches, and the mean over all rows of what the batch norms saw becomes their statistics; so for
    each narrower network that a client has.  The clients' forward passes need room for the whole model, as in the
    paper.  Otherwise running statistics are averaged like parameters.

    With `dynamic` (the paper's dynamic mode), every training task draws its width anew from `widths`, with equal
    chances, by the run's seed, the client and the version.  No client has a width of its own then: it is evaluated with
    the global model.

    Attributes:
        widths: r of each client by its number, above 0 and at most 1; clients beyond the last begin with the first
            again.  With [1.0] it is plain SGD.
        dynamic: draw a width for every task instead; a width that is named twice is drawn twice as often.
        scaler: divide the outputs of narrowed layers by r.
        static_batch_norm: ask for the statistics of batch norms once models are trained.
        masked_loss: put 0 in place of the outputs for classes that the client has no training rows of, and average the
            classifier's rows over the clients that have their class (section 3.2 of the paper, the masking trick).
    """

    widths: tuple[Width, ...] = Field(default=(1.0, 0.5), min_length=1)
    dynamic: bool = False
    scaler: bool = True
    static_batch_norm: bool = False
    masked_loss: bool = False

    @model_validator(mode="after")
    def _check_state(self) -> Self:
        if self.holds_parts and self.optimizer_state == "averaged":
            raise ValueError(
                "optimizer_state = 'averaged' has no average where clients have unlike widths: choose 'fresh' or 'kept'"
            )
        if self.changes_parts and (self.optimizer_state != "fresh" or self.keep_momentum):
            raise ValueError(
                "with dynamic = true a client's width changes from task to task, and the state of an optimizer has the "
                "width of one: leave out optimizer_state and keep_momentum"
            )
        return self

    @property
    def holds_parts(self) -> bool:
        return any(width < 1 for width in self.widths)

    @property
    def changes_parts(self) -> bool:
        return self.dynamic and self.holds_parts

    def own_models(self, spec: ModelSpec) -> ClientModels | None:
        # sorted, so that the numbers of models do not depend on the order of clients
        narrow = sorted({width for width in self.widths if width < 1})
        if not narrow:
            return None
        modules = [narrowed(spec.model, width, spec.shape, self.scaler) for width in narrow]
        models = tuple(nested_model(module, spec.layout, spec.initial, spec.outputs) for module in modules)
        numbers = tuple(narrow.index(width) if width < 1 else None for width in self.widths)
        if self.dynamic:
            return ClientModels(models, (None,), numbers, self.static_batch_norm, spec.seed)
        return ClientModels(models, numbers, asked=self.static_batch_norm)

    def asks(self, spec: ModelSpec) -> Sequence[BatchStatistics]:
        numbers = (None, *range(len({width for width in self.widths if width < 1})))
        return [query for number in numbers if (query := self.completing_query(number)) is not None]

    def completing_query(self, number: int | None) -> BatchStatistics | None:
        needs_buffers = number is None or not self.dynamic  # nobody is evaluated with the narrow networks otherwise
        return BatchStatistics(batch=self.batch, network=number) if self.static_batch_norm and needs_buffers else None

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        if self.masked_loss and (spec.objective.name != "classification" or len(spec.outputs) != 1):
            return (
                f"masked_loss of {self.kind} needs classification with one label for each row: leave it out, or choose "
                "loss = 'classification'"
            )
        layout = spec.layout
        # shared numbers that are not trained are running statistics
        if self.static_batch_norm and layout.shared == layout.shared_trained:
            return (
                f"static_batch_norm of {self.kind} would have no effect: the model has no batch norm with running "
                "statistics that are shared"
            )
        # a client's private layers are kept in the width of one network, and here it meets several
        if layout.private and self.holds_parts and (self.dynamic or self.static_batch_norm):
            setting = "dynamic" if self.dynamic else "static_batch_norm"
            return (
                f"{setting} of {self.kind} gives clients networks of several widths, and private layers have one: "
                f"share all layers, or leave {setting} out"
            )
        return super().unsupported_model(spec)

    def discloses(self) -> str | None:
        return "which classes their rows have" if self.masked_loss else None

    def uploads(self) -> tuple[str, ...]:
        return (*super().uploads(), "classes") if self.masked_loss else super().uploads()

    def upload_shapes(self, spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        return {"classes": tuple(spec.outputs)} if self.masked_loss else {}

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        done = self._trained(inputs, context)
        if not self.static_batch_norm:
            return done
        # statistics stay as they were sent, so their change is 0 and the server's mean of them does nothing
        return dataclasses.replace(done, model=torch.where(context.belongs(), done.model, inputs.model))

    def _trained(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        if not self.masked_loss:
            return super().train(inputs, context)
        classes = {"classes": (context.label_counts() > 0).float()}
        return self.output(self.run_sgd(inputs, context, local_loss=self, own=classes), vectors=classes)

    def batch_loss(self, batch: LossBatch) -> Tensor:
        # zeros, as the paper has it, and not minus infinity: absent classes keep a share of the softmax
        return batch.losses(batch.outputs * batch.own["classes"], batch.targets)
