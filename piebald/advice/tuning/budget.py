"""Budgets and costs of searches, and the rungs at which the worse trials are dropped."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Literal, get_args

from piebald.core.arguments import LARGEST, Fraction, checked
from piebald.core.errors import SettingError, shown, unknown

Unit = Literal["rounds", "minutes", "bytes"]


@dataclass(frozen=True, slots=True)
class Budget:
    """The cost that a search stays below, as long as it has tried each recipe once.

    Attributes:
        amount: above 0.
        unit: "rounds" of all runs together, "minutes" of training on the clock of the wall, or "bytes" sent in both
            directions.

    Examples:
        >>> Budget.of("10 minutes").part(0.5)
        Budget(amount=5.0, unit='minutes')
        >>> Budget.of(300).has_room(Cost(rounds=290), 10), Budget.of(300).has_room(Cost(rounds=290), 11)
        (True, False)
    """

    amount: float
    unit: Unit = "rounds"

    def __post_init__(self) -> None:
        if not isinstance(self.unit, str) or self.unit not in get_args(Unit):
            raise unknown("unit of a budget called", self.unit, get_args(Unit))
        whole = self.unit != "minutes"
        kinds = int if whole else int | float
        if isinstance(self.amount, bool) or not isinstance(self.amount, kinds) or not 0 < self.amount <= LARGEST:
            allowed = "a whole number of at least 1" if whole else "a number above 0"
            raise SettingError(f"budget: {self.unit} must be {allowed}, got {shown(self.amount)}")

    @classmethod
    def of(cls, given: Any) -> Budget:
        """A budget from a number of rounds, from words, or from a table with one of rounds, minutes and bytes."""
        if isinstance(given, Budget):
            return given
        if isinstance(given, str):
            return cls.parse(given)
        if isinstance(given, int | float) and not isinstance(given, bool):
            return cls(given)
        if not isinstance(given, Mapping) or len(given) != 1:
            raise SettingError(
                "budget must be a number of rounds, or a table with one of rounds, minutes and bytes, got "
                f"{shown(given)}"
            )
        ((unit, amount),) = given.items()
        return cls(amount, unit)

    @classmethod
    @checked
    def parse(cls, text: str) -> Budget:
        """A budget from words like "300 rounds", "10 minutes" or "2e9 bytes"; a number alone counts rounds."""
        number, _, unit = text.strip().partition(" ")
        try:
            amount = float(number)
        except ValueError:
            amount = math.nan
        if not math.isfinite(amount):
            raise SettingError(
                f"budget must be a number and a unit, like '300 rounds' or '10 minutes', got {shown(text)}"
            )
        # "2e9 bytes" is a whole number that float has read
        whole = unit.strip() != "minutes" and amount == int(amount)
        return cls.of({unit.strip() or "rounds": int(amount) if whole else amount})

    @checked
    def part(self, share: Fraction) -> Budget:
        """A share of the budget, at least one round or byte."""
        amount = self.amount * share
        return Budget(amount if self.unit == "minutes" else max(1, int(amount)), self.unit)

    def has_room(self, spent: Cost, rounds: int) -> bool:
        """Return whether something is left of the budget, and as many further server steps if it counts these."""
        amount = getattr(spent, self.unit)
        # minutes and bytes of a run are not known before, so the last run may go beyond the budget
        return bool(amount < self.amount and (self.unit != "rounds" or amount + rounds <= self.amount))

    def __str__(self) -> str:
        return f"{self.amount:,g} {self.unit}" if self.unit == "minutes" else f"{self.amount:,} {self.unit}"


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of runs.

    Attributes:
        rounds: server steps.  bytes: in both directions.  minutes: on the clock of the wall.  steps: of optimizers.
        seconds: of the runtime's clock, that of the devices.
    """

    rounds: int = 0
    bytes: int = 0
    minutes: float = 0.0
    steps: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*map(operator.sub, astuple(self), astuple(other)))

    def averaged(self, other: Cost, count: int) -> Cost:
        """The mean of this one, which is that of `count` runs, and that of one more run."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        means = [(count * mean + value) / (count + 1) for mean, value in pairs]
        return Cost(round(means[0]), round(means[1]), means[2], round(means[3]), means[4])


def rungs_of(rounds: int, count: int, factor: int) -> tuple[int, ...]:
    """The server steps after which trials are judged, the last one at the end: rounds / factor^2,
    rounds / factor, rounds.

    Successive halving (Jamieson and Talwalkar 2016): each rung keeps one trial in `factor`.

    Args:
        rounds: server steps of a whole run.
        count: the number of rungs, at least 1; fewer where there are too few rounds.
        factor: at least 2.

    Examples:
        >>> rungs_of(90, 3, 3), rungs_of(5, 3, 3)
        ((10, 30, 90), (1, 5))
    """
    # a rung of less than one round cannot be trained
    while count > 1 and rounds < factor ** (count - 1):
        count -= 1
    first = rounds // factor ** (count - 1)
    return (*(first * factor**rung for rung in range(count - 1)), rounds)
