"""FedALA: a client learns for each parameter how much of the global model to take over."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import ClientContext, LocalStep, SgdConfig, StateVector, StepSettings, TrainInput, TrainOutput
from piebald.contracts.data import ModelSpec
from piebald.core.arguments import Fraction, checked_class
from piebald.core.parameters import matching
from piebald.methods.training.sgd import Sgd


@checked_class
@dataclasses.dataclass(frozen=True)
class ShareOfRows(LocalStep):
    """Steps on a share of the client's rows, at least two of them, drawn for each run."""

    share: Fraction

    def seen(self, count: int) -> int | None:
        # batch norm has no variance of a single row
        return max(2, math.ceil(self.share * count)) if self.share < 1 else None


@dataclasses.dataclass(frozen=True)
class AggregationWeights:
    """The `contracts.UpdateRule` of the weights W: they are stepped along g * (sent - local) and stay in [0, 1], and
    the parameters are local + (sent - local) * W.
    """

    def state_vectors(self, momentum: float) -> tuple[StateVector, ...]:
        return StateVector("weights", 1.0), StateVector("local"), StateVector("sent")

    def update(self, w: Tensor, g: Tensor, state: Mapping[str, Tensor], settings: StepSettings) -> None:
        away = state["sent"] - state["local"]
        # the chain rule for local + away * W
        state["weights"].sub_(settings.lr * g * away).clamp_(0, 1)
        w.copy_(state["local"] + away * state["weights"])


class AdaptiveLocalAggregation(Sgd):
    """SGD from local + (sent - local) * W, with weights W that the client learns before it trains (Zhang et al. 2023,
    "FedALA: Adaptive local aggregation for personalized federated learning", algorithm 1).

    `local` is the model that the client trained the last time.  W has a number in [0, 1] for each parameter of the
    higher layers, starts at 1 and is learned by one pass over a share of the client's rows, drawn for each task; the
    other layers and the running statistics of batch norms are those of the global model.  Local model and W never
    leave the client, and updates are FedAvg's.  The client's own model is the one that it would train from next.

    The first time that the two models differ, which with all clients in every round is the second round, the paper
    trains W until convergence and does not say how that is seen; here these are `first_passes` passes.

    Attributes:
        weight_lr: eta of the paper, learning rate of W, at least 0; with 0 it is FedAvg.
        weight_share: s of the paper, share of the client's rows that W is learned from, above 0.
        adaptive_layers: the higher layers, by default the last linear one (p = 1 in the paper).
        first_passes: passes over these rows the first time that the models differ.
    """

    weight_lr: float = Field(default=1.0, ge=0)
    weight_share: float = Field(default=0.8, gt=0, le=1)
    adaptive_layers: str | tuple[str, ...] = "classifier"
    first_passes: int = Field(default=10, ge=1)

    @property
    def _layers(self) -> tuple[str, ...]:
        return (self.adaptive_layers,) if isinstance(self.adaptive_layers, str) else self.adaptive_layers

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        matching(spec.model, self._layers)  # refuses layers that the model has not
        return super().unsupported_model(spec)

    def initial_state(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        state = {"local": model, "weights": torch.ones_like(model), "begun": torch.zeros(1)}
        return super().initial_state(model, shared) | state

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        start, weights, begun = self._start(inputs, context)
        end = context.run_sgd(start, self.sgd_config(inputs), state=self.start_state(inputs))
        state = {"local": end.model, "weights": weights, "begun": begun}
        done = self.output(end)
        return dataclasses.replace(done, state={**done.state, **state})

    def personalize(self, inputs: TrainInput, context: ClientContext) -> Tensor:
        return self._start(inputs, context)[0]

    def _start(self, inputs: TrainInput, context: ClientContext) -> tuple[Tensor, Tensor, Tensor]:
        """The models [c, p] to train from, the weights W [c, p], and whether they have been learned before [c, 1]."""
        # another stream of random numbers, so that the task's steps are those of FedAvg
        adaptive, sent, aside = context.belongs(self._layers), inputs.model, context.with_rng()
        # outside the higher layers both models are one, so W has no gradient there and no effect
        local = torch.where(adaptive, inputs.state["local"], sent)
        state = {"weights": inputs.state["weights"], "local": local, "sent": sent}
        once = SgdConfig(
            lr=self.weight_lr,
            batch=self.batch,
            batches=self.batches,
            rule=AggregationWeights(),
            passes=self.passes,
            step=ShareOfRows(self.weight_share),
        )
        end = aside.run_sgd(local + (sent - local) * state["weights"], once, state=state)
        # where all clients start alike, W has no gradient yet; only the first real difference is worth `first_passes`
        differ, begun = (sent != local).any(1, keepdim=True), inputs.state["begun"]
        model, weights, first = end.model, end.state["weights"], differ & (begun == 0)
        if self.first_passes > 1 and bool(first.any()):
            # one of the passes is behind already
            rest = dataclasses.replace(once, epochs=self.first_passes - 1)
            again = aside.run_sgd(model, rest, state=state | {"weights": weights})
            model, weights = torch.where(first, again.model, model), torch.where(first, again.state["weights"], weights)
        # running statistics are the global model's, not those of the passes that learned W
        return torch.where(adaptive, model, sent), weights, torch.maximum(begun, differ.to(begun.dtype))
