"""How the learning rate changes from step to step within one task."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer

from piebald.contracts.component import Component, build
from piebald.methods.training.schedule_functions import FunctionName, called


class StepSchedule(Component):
    """The factor on the learning rate at a step of one run of training, which has so many steps.

    A task has one run, except that Ditto's personal model and fine-tuned models have a run of their own.
    """

    axis = "step_schedule"

    def factor(self, step: int, steps: int) -> float:
        """The factor at a step, from 0 to steps - 1."""
        raise NotImplementedError


class ConstantStepSchedule(StepSchedule):
    """The constant 1."""

    def factor(self, step: int, steps: int) -> float:
        return 1.0


class WarmupStepSchedule(StepSchedule):
    """A linear rise to 1, then 1.

    Attributes:
        warmup: share of the steps, rounded up, over which the factor rises to 1 in equal parts; the first step has its
            part already.
    """

    warmup: float = Field(default=0.1, gt=0, le=1)

    def factor(self, step: int, steps: int) -> float:
        return min(1.0, (step + 1) / math.ceil(self.warmup * steps))


class LinearStepSchedule(StepSchedule):
    """A linear fall from 1 at the first step after a warm-up; the step after the last one would have `floor`.

    Attributes:
        warmup: share of the steps, rounded up, over which the factor rises to 1 in equal parts.
        floor: the factor at the end of the fall.
    """

    warmup: float = Field(default=0.0, ge=0, le=1)
    floor: float = Field(default=0.0, ge=0, le=1)

    def factor(self, step: int, steps: int) -> float:
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return (step + 1) / rising
        return self.floor + (1 - self.floor) * self.remaining((step - rising) / (steps - rising))

    def remaining(self, done: float) -> float:
        """What remains of the fall after a share in [0, 1) of its steps."""
        return 1 - done


class CosineStepSchedule(LinearStepSchedule):
    """Half a cosine from 1 at the first step after a warm-up (Loshchilov, Hutter 2017, eq. 5, without restarts)."""

    def remaining(self, done: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * done))


class FunctionStepSchedule(StepSchedule):
    """The value of a function `f(step, steps)` of the user.

    In Python, the function itself may be given in place of this component.  It must be found by its module and name
    wherever clients train, so it is no lambda.

    Attributes:
        function: "module:name", or the function.
    """

    function: FunctionName

    def references(self) -> tuple[str, ...]:
        return (self.function,)

    def factor(self, step: int, steps: int) -> float:
        return called(self.function, step, steps)


AnyStepSchedule = Annotated[
    StepSchedule,
    BeforeValidator(lambda given: build("step_schedule", given)),
    PlainSerializer(lambda made: made.table()),
]
