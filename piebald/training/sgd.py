"""Local stochastic gradient descent, the base of most other trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from pydantic import Field

from piebald.contracts import ClientContext, SgdConfig, SgdOutcome, TrainInput, TrainOutput
from piebald.training.base import Trainer
from piebald.training.lr_schedule import AnyLrSchedule, Constant, LrSchedule

if TYPE_CHECKING:
    from torch import Tensor


class SgdSettings(TypedDict, total=False):
    """The settings of `Sgd`, for recipes that hand them on."""

    lr: float
    lr_schedule: LrSchedule | dict[str, object]
    epochs: int
    steps: int | None
    batch: int
    momentum: float
    keep_momentum: bool
    weight_decay: float
    clip: float | None


class Sgd(Trainer):
    """Mini-batch SGD with momentum from the model that was sent (McMahan et al. 2017, ClientUpdate; Metis eq. 2).

    Attributes:
        lr: learning rate, above 0.
        lr_schedule: factor on the learning rate, depending on the number of server steps made.
        epochs: passes over the client's rows.  steps: exactly this many steps instead of whole epochs.
        batch: rows in each step.
        momentum: in [0, 1).  keep_momentum: keep the velocity in the client's state between tasks.
        weight_decay: L2 decay.
        clip: largest gradient norm (Euclidean), no limit by default.
    """

    lr: float = Field(default=0.05, gt=0)
    lr_schedule: AnyLrSchedule = Constant()
    epochs: int = Field(default=1, ge=1)
    steps: int | None = Field(default=None, ge=1)
    batch: int = Field(default=20, ge=1)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    keep_momentum: bool = False
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float | None = Field(default=None, gt=0)

    def initial_state(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        return {"velocity": model.new_zeros(model.shape)} if self.momentum and self.keep_momentum else {}

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        return self.output(self.run_sgd(inputs, context))

    def min_steps(self, examples: int) -> int:
        return self.steps if self.steps is not None and examples else self.epochs * self.epoch_steps(examples)

    def max_steps(self, examples: int) -> int:
        return self.steps if self.steps is not None and examples else self.epochs * -(-examples // self.batch)

    def epoch_steps(self, examples: int) -> int:
        """Steps of one pass, at least: a lone last row may join the batch before it."""
        return max(1, examples // self.batch) if examples else 0

    def run_sgd(
        self, inputs: TrainInput, context: ClientContext, *, prox: float = 0.0, correction: Tensor | None = None
    ) -> SgdOutcome:
        """Run SGD from the model that was sent, with a proximal term around it and a `correction` of gradients."""
        return context.run_sgd(
            inputs.model,
            self.sgd_config(inputs),
            prox=prox,
            prox_center=inputs.model if prox else None,
            correction=correction,
            velocity=inputs.state.get("velocity"),
        )

    def sgd_config(self, inputs: TrainInput, epochs: int | None = None) -> SgdConfig:
        """These settings, with the learning rates that the tasks' versions mean and perhaps other epochs."""
        return SgdConfig(
            lr=self.rate(inputs),
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            clip=self.clip,
            batch=self.batch,
            epochs=epochs or self.epochs,
            steps=None if epochs else self.steps,
        )

    def rate(self, inputs: TrainInput) -> float | Tensor:
        """The learning rate: one number where all clients of the stack have one version, else [c, 1]."""
        rates = [self.lr * self.lr_schedule.factor(version) for version in inputs.versions]
        return rates[0] if len(set(rates)) == 1 else inputs.model.new_tensor(rates).unsqueeze(1)

    def output(self, end: SgdOutcome, **more: dict[str, Tensor]) -> TrainOutput:
        """What training ends with; `more` adds state and vectors."""
        state = dict(more.get("state", {}))
        if self.momentum and self.keep_momentum and end.velocity is not None:
            state["velocity"] = end.velocity
        return TrainOutput(
            end.model, end.steps, vectors=more.get("vectors", {}), state=state, metrics={"loss": end.loss}
        )
