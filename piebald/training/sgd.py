"""Local stochastic gradient descent, which all other rules bend a little."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from pydantic import Field

from piebald.contracts import Descended, Descent, Learned, Local, Start
from piebald.training.base import Rule
from piebald.training.lr_schedule import AnySchedule, Constant, Schedule

if TYPE_CHECKING:
    from torch import Tensor


class Training(TypedDict, total=False):
    """The settings of `Sgd`, for recipes that hand them on."""

    lr: float
    schedule: Schedule | dict[str, object]
    epochs: int
    steps: int | None
    batch: int
    momentum: float
    keep_momentum: bool
    weight_decay: float
    clip: float | None


class Sgd(Rule):
    """Mini-batch SGD with momentum from the model that was sent (McMahan et al. 2017, ClientUpdate; Metis eq. 2).

    Attributes:
        lr: learning rate, above 0.
        schedule: factor on the learning rate by commits made.
        epochs: passes over the client's rows.  steps: exactly this many steps instead.
        batch: rows a step.
        momentum: in [0, 1).  keep_momentum: the velocity outlives the assignment, in the client's memory.
        weight_decay: L2 decay.
        clip: longest gradient allowed (Euclidean norm), none by default.
    """

    lr: float = Field(default=0.05, gt=0)
    schedule: AnySchedule = Constant()
    epochs: int = Field(default=1, ge=1)
    steps: int | None = Field(default=None, ge=1)
    batch: int = Field(default=20, ge=1)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    keep_momentum: bool = False
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float | None = Field(default=None, gt=0)

    def remember(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        return {"velocity": model.new_zeros(model.shape)} if self.momentum and self.keep_momentum else {}

    def learn(self, start: Start, local: Local) -> Learned:
        return self.learned(self.descend(start, local))

    def least_steps(self, examples: int) -> int:
        return self.steps if self.steps is not None and examples else self.epochs * self.epoch_steps(examples)

    def epoch_steps(self, examples: int) -> int:
        """Steps of one pass, at least: a lone last row may join the batch before it."""
        return max(1, examples // self.batch) if examples else 0

    def descend(self, start: Start, local: Local, *, pull: float = 0.0, shift: Tensor | None = None) -> Descended:
        """The walk from the model that was sent, pulled back to it by `pull` and steered by `shift`."""
        return local.descend(
            start.model,
            self.descent(start),
            pull=pull,
            anchor=start.model if pull else None,
            shift=shift,
            velocity=start.memory.get("velocity"),
        )

    def descent(self, start: Start, epochs: int | None = None) -> Descent:
        """These settings, with the learning rates that the assignments' versions mean and perhaps other epochs."""
        return Descent(
            lr=self.rate(start),
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            clip=self.clip,
            batch=self.batch,
            epochs=epochs or self.epochs,
            steps=None if epochs else self.steps,
        )

    def rate(self, start: Start) -> float | Tensor:
        """The learning rate: one number where all clients of the stack have one version, else [c, 1]."""
        rates = [self.lr * self.schedule.factor(version) for version in start.versions]
        return rates[0] if len(set(rates)) == 1 else start.model.new_tensor(rates).unsqueeze(1)

    def learned(self, end: Descended, **more: dict[str, Tensor]) -> Learned:
        """What every descent ends with; `more` adds memory and parts."""
        memory = dict(more.get("memory", {}))
        if self.momentum and self.keep_momentum and end.velocity is not None:
            memory["velocity"] = end.velocity
        return Learned(end.model, end.steps, parts=more.get("parts", {}), memory=memory, metrics={"loss": end.loss})
