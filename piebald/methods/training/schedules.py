"""Changes of the learning rate: from server step to server step, and from step to step within one task.

Each schedule is a factor on the learning rate.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from piebald.contracts.component import Component
from piebald.core.errors import SettingError, shown
from piebald.settings import plugins

FunctionName = Annotated[str, plugins.function_name("schedule")]  # so that workers, sites and a resumed run find it


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
    """rate ** version.

    Examples:
        >>> [Exponential(rate=0.5).factor(version) for version in range(4)]
        [1.0, 0.5, 0.25, 0.125]
    """

    rate: float = Field(gt=0, le=1)

    def factor(self, version: int) -> float:
        return self.rate**version


class StepDecay(LrSchedule):
    """Multiplied by `rate` every `every` server steps.

    Examples:
        >>> [StepDecay(every=2, rate=0.5).factor(version) for version in range(5)]
        [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    every: int = Field(ge=1)
    rate: float = Field(default=0.1, gt=0, le=1)

    def factor(self, version: int) -> float:
        return float(self.rate ** (version // self.every))


class Cosine(LrSchedule):
    """Half a cosine from 1 down to `floor` over `rounds` server steps, then flat (Loshchilov and Hutter 2017, without
    restarts).

    Examples:
        >>> [round(Cosine(rounds=4, floor=0.2).factor(version), 3) for version in (0, 2, 4, 9)]
        [1.0, 0.6, 0.2, 0.2]
    """

    rounds: int = Field(ge=1)
    floor: float = Field(default=0.0, ge=0, le=1)

    def factor(self, version: int) -> float:
        # or the cosine would rise again in a run that is longer
        done = min(version / self.rounds, 1.0)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))


class Warmup(LrSchedule):
    """A linear rise to 1 over `rounds` server steps, then another schedule, which begins there.

    Attributes:
        rounds: server steps of the rise; the first one has its part already.
        after: the schedule that follows.

    Examples:
        >>> schedule = Warmup(rounds=2, after=Exponential(rate=0.5))
        >>> [schedule.factor(version) for version in range(5)]
        [0.5, 1.0, 1.0, 0.5, 0.25]
    """

    rounds: int = Field(ge=1)
    after: LrSchedule = Constant()

    def factor(self, version: int) -> float:
        if version < self.rounds:
            return (version + 1) / self.rounds
        # the schedule that follows counts from the end of the rise, where its first factor is 1
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

    Examples:
        >>> [WarmupStepSchedule(warmup=0.5).factor(step, 4) for step in range(4)]
        [0.5, 1.0, 1.0, 1.0]
    """

    warmup: float = Field(default=0.1, gt=0, le=1)

    def factor(self, step: int, steps: int) -> float:
        return min(1.0, (step + 1) / math.ceil(self.warmup * steps))


class LinearStepSchedule(StepSchedule):
    """A linear fall from 1 at the first step after a warm-up; the step after the last one would have `floor`.

    Attributes:
        warmup: share of the steps, rounded up, over which the factor rises to 1 in equal parts.
        floor: the factor at the end of the fall.

    Examples:
        >>> [LinearStepSchedule().factor(step, 4) for step in range(4)]
        [1.0, 0.75, 0.5, 0.25]
    """

    warmup: float = Field(default=0.0, ge=0, le=1)
    floor: float = Field(default=0.0, ge=0, le=1)

    def factor(self, step: int, steps: int) -> float:
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return (step + 1) / rising
        # no division by 0: where all steps rise, each of them has returned above
        return self.floor + (1 - self.floor) * self.remaining((step - rising) / (steps - rising))

    def remaining(self, done: float) -> float:
        """Return what remains of the fall after a share in [0, 1) of its steps."""
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


def called(reference: str, *numbers: int) -> float:
    """Return the value of the named function for these numbers.

    Raises:
        SettingError: it is not there, fails, or returns something other than a finite number of at least 0.
    """
    function = plugins.find(reference, "schedule")
    try:
        value = function(*numbers)
        factor = float(value)
    except Exception as error:  # whatever the user's own code may raise
        raise SettingError(f"the schedule {reference} fails at {numbers}: {type(error).__name__}: {error}") from error
    # NaN, or a negative rate that climbs, would spoil the model without an error
    if not (math.isfinite(factor) and factor >= 0):
        raise SettingError(
            f"the schedule {reference} must return a finite number of at least 0, got {shown(value)} at {numbers}"
        )
    return factor
