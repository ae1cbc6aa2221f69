"""How the learning rate changes from step to step.  Each schedule is a factor in (0, 1]."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer

from piebald.component import Component, build


class LrSchedule(Component):
    """The factor on the learning rate at a version (server steps made so far)."""

    axis = "lr_schedule"

    def factor(self, version: int) -> float:
        """The factor at this version."""
        raise NotImplementedError


class Constant(LrSchedule):
    """Always 1."""

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
    BeforeValidator(lambda table: build("lr_schedule", table)),
    PlainSerializer(lambda schedule: schedule.table()),
]
