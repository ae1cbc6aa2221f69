"""How the learning rate changes from server step to server step.  Each schedule is a factor."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer

from piebald.contracts.component import Component, build
from piebald.methods.training.schedule_functions import FunctionName, called


class LrSchedule(Component):
    """The factor on the learning rate at a version (server steps made so far)."""

    axis = "lr_schedule"

    def factor(self, version: int) -> float:
        """The factor at this version."""
        raise NotImplementedError


class Constant(LrSchedule):
    """The constant 1."""

    def factor(self, version: int) -> float:
        return 1.0


class Exponential(LrSchedule):
    """rate ** version."""

    rate: float = Field(gt=0, le=1)

    def factor(self, version: int) -> float:
        return self.rate**version


class StepDecay(LrSchedule):
    """Multiplied by `rate` every `every` server steps."""

    every: int = Field(ge=1)
    rate: float = Field(default=0.1, gt=0, le=1)

    def factor(self, version: int) -> float:
        return float(self.rate ** (version // self.every))


class Cosine(LrSchedule):
    """Half a cosine from 1 down to `floor` over `rounds` server steps, then flat (Loshchilov and Hutter 2017, without
    restarts).
    """

    rounds: int = Field(ge=1)
    floor: float = Field(default=0.0, ge=0, le=1)

    def factor(self, version: int) -> float:
        done = min(version / self.rounds, 1.0)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))


AnyLrSchedule = Annotated[
    LrSchedule,
    BeforeValidator(lambda given: build("lr_schedule", given)),
    PlainSerializer(lambda made: made.table()),
]


class Warmup(LrSchedule):
    """A linear rise to 1 over `rounds` server steps, then another schedule, which begins there.

    Attributes:
        rounds: server steps of the rise; the first one has its part already.
        after: the schedule that follows.
    """

    rounds: int = Field(ge=1)
    after: AnyLrSchedule = Constant()

    def factor(self, version: int) -> float:
        if version < self.rounds:
            return (version + 1) / self.rounds
        return self.after.factor(version - self.rounds)


class FunctionLrSchedule(LrSchedule):
    """The value of a function `f(version)` of the user.

    In Python, the function itself may be given in place of this component.  It must be found by its module and name
    wherever clients train, so it is no lambda.

    Attributes:
        function: "module:name", or the function.
    """

    function: FunctionName

    def references(self) -> tuple[str, ...]:
        return (self.function,)

    def factor(self, version: int) -> float:
        return called(self.function, version)
