"""The search space of a recipe, and the budgets, costs and rungs of a search.

A space says which settings may vary, and between which values; at each rung the worse trials are dropped.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal, get_args

from piebald.contracts.component import Component
from piebald.core.arguments import LARGEST, Fraction, checked, checked_class, settled
from piebald.core.errors import SettingError, about, shown, unknown
from piebald.core.references import USERS
from piebald.methods.catalog import recipes
from piebald.methods.catalog.recipe_help import home
from piebald.methods.catalog.registry import lookup
from piebald.methods.recipe import Recipe
from piebald.methods.recipe_settings import plain

Value = Any  # of a setting: a number, text, true or false, a list or a table
Point = Mapping[str, Value]  # settings by name

_RANGE = ("low", "high", "log")


@checked_class
@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both included; whole numbers where both ends are.

    Attributes:
        low, high: the ends.
        log: whether each factor counts the same, as for learning rates; otherwise each difference.
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise SettingError(f"low must be below high, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise SettingError(f"low must be above 0 where log is true, got {self.low}")

    @property
    def whole(self) -> bool:
        """True if the range holds whole numbers only."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def ends(self) -> tuple[Value, ...]:
        """The values that show whether a setting takes all of them."""
        return self.low, self.high

    def holds(self, value: Value) -> bool:
        """Return whether a value is in the range."""
        # True and False are ints in Python, and no numbers of a range
        number = isinstance(value, int if self.whole else int | float) and not isinstance(value, bool)
        return number and self.low <= value <= self.high

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {"low": self.low, "high": self.high, "log": self.log}


@dataclass(frozen=True, slots=True)
class Choices:
    """One of several values.

    Attributes:
        values: at least two, each once: numbers, text, true or false, lists.
    """

    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        if isinstance(self.values, str) or not isinstance(self.values, Sequence) or len(self.values) < 2:
            raise SettingError(f"choices must be a list of at least two values, got {shown(self.values)}")
        # compared one by one and not in a set, since lists have no hash
        plain_values = [plain(value) for value in self.values]
        if any(value in plain_values[:number] for number, value in enumerate(plain_values)):
            raise SettingError(f"choices must be different, got {shown(plain_values)}")
        # settled once, so that a list that the caller changes later is not searched
        object.__setattr__(self, "values", tuple(settled(value) for value in self.values))

    @property
    def ends(self) -> tuple[Value, ...]:
        """The values that show whether a setting takes all of them."""
        return self.values

    def holds(self, value: Value) -> bool:
        """Return whether a value is one of the choices."""
        return plain(value) in [plain(choice) for choice in self.values]

    def plain(self) -> list[Any]:
        """As JSON."""
        return [plain(value) for value in self.values]


Values = Range | Choices


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The values that settings of a recipe may have, by the setting's name.

    A setting of a component has the name of its axis before it: "server_optimizer.beta".

    Examples:
        >>> space = SearchSpace.of({"lr": {"low": 0.01, "high": 1.0, "log": True}, "mu": [0.01, 0.1]})
        >>> space.values["mu"]
        Choices(values=(0.01, 0.1))
        >>> list(space.of_recipe(recipes.fedavg()).values)
        ['lr']
    """

    values: Mapping[str, Values]

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> SearchSpace:
        """A space from plain values: a list of choices, or a table {low = 0.01, high = 1.0, log = true} for each name.

        Raises:
            SettingError: the table is empty, or has something else in it.
        """
        if not isinstance(table, Mapping) or not table:
            raise SettingError(f"space must be a table of settings and their values, got {shown(table)}")
        return cls({str(name): _values(str(name), value) for name, value in table.items()})

    @checked
    def of_recipe(self, recipe: Recipe) -> SearchSpace:
        """Return the part of the space that a recipe has settings for.

        Raises:
            SettingError: the recipe does not take one of the values.
        """
        subspace = SearchSpace({name: values for name, values in self.values.items() if has_setting(recipe, name)})
        for name, values in subspace.values.items():
            # only the ends are tried: a setting that takes both takes what is between
            for value in values.ends:
                with_settings(recipe, {name: value})
        return subspace

    @checked
    def point_of(self, recipe: Recipe) -> dict[str, Value] | None:
        """The recipe's own values of these settings; None where one is outside of its range."""
        point = {name: setting_of(recipe, name) for name in self.values}
        return point if all(self.values[name].holds(value) for name, value in point.items()) else None

    def grid(self) -> list[dict[str, Value]]:
        """All combinations of the values.

        Raises:
            SettingError: a range of numbers that are not whole has no end of values.
        """
        for name, values in self.values.items():
            if isinstance(values, Range) and not values.whole:
                raise SettingError(
                    f"sampler 'grid' tries all combinations, so {name} needs a list of values: give one, or choose "
                    "sampler 'tpe'"
                )
        lists = [
            v.values if isinstance(v, Choices) else range(int(v.low), int(v.high) + 1) for v in self.values.values()
        ]
        return [dict(zip(self.values, point, strict=True)) for point in itertools.product(*lists)]

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {name: values.plain() for name, values in self.values.items()}


def _values(name: str, values: Any) -> Values:
    with about(f"space of {name}"):
        if isinstance(values, Range | Choices):
            return values
        if isinstance(values, Mapping):
            for key in values:
                if key not in _RANGE:
                    raise unknown("key of a range called", key, _RANGE)
            if missing := [key for key in ("low", "high") if key not in values]:
                raise SettingError(
                    f"a range needs {' and '.join(missing)}, like {{low = 0.01, high = 1.0, log = true}}"
                )
            return Range(**values)
        return Choices(values)


def has_setting(recipe: Recipe, name: str) -> bool:
    """Return whether a recipe, or one of its components as in "server_optimizer.beta", has a setting."""
    axis, dot, field = name.partition(".")
    if dot:
        return axis in Recipe.axes and axis != "transforms" and field in type(getattr(recipe, axis)).model_fields
    return (recipe.name in recipes.names() and name in recipes.settings_of(recipe.name)) or home(
        recipe, name
    ) is not None


def setting_of(recipe: Recipe, name: str) -> Value:
    """The value that a recipe has of a setting."""
    axis, dot, field = name.partition(".")
    if dot:
        return getattr(getattr(recipe, axis), field)
    if name in recipe.fields:
        return recipe.fields[name]
    if location := home(recipe, name):
        part, field = location
        return next(getattr(component, field) for component in recipe.components if type(component) is part)
    return lookup(recipe.name, USERS).defaults[name]


@checked
def with_settings(recipe: Recipe, point: Mapping[str, Any]) -> Recipe:
    """A recipe with other values of some settings, those of components under names like "server_optimizer.beta".

    Raises:
        SettingError: the recipe has no such setting, or it does not take the value.

    Examples:
        >>> recipe = with_settings(recipes.fedavg(), {"lr": 0.5, "scheduling.cohort": 3})
        >>> setting_of(recipe, "lr"), recipe.scheduling.cohort
        (0.5, 3)
    """
    for name in point:
        if not has_setting(recipe, name):
            names = recipes.settings_of(recipe.name) if recipe.name in recipes.names() else ()
            raise unknown(f"setting of recipe {recipe.name!r} called", name, names)
    if recipe.name not in recipes.names():  # it has no settings but those of its components
        point = {_dotted(recipe, name): value for name, value in point.items()}
    # settings of the recipe first: they may rebuild a component of which a dotted name then changes one field
    of_recipe = {name: value for name, value in point.items() if "." not in name}
    changed = _rebuilt(recipe, of_recipe) if of_recipe else recipe
    fields: dict[str, dict[str, Value]] = {}
    for name, value in point.items():
        axis, dot, field = name.partition(".")
        if dot:
            fields.setdefault(axis, {})[field] = value
    return changed.with_(**{axis: _changed(getattr(changed, axis), values) for axis, values in fields.items()})


def _dotted(recipe: Recipe, name: str) -> str:
    """A setting by its component: "training.lr" for "lr"."""
    location = None if "." in name else home(recipe, name)
    return name if location is None else f"{location[0].axis}.{location[1]}"


def _rebuilt(recipe: Recipe, settings: Point) -> Recipe:
    """Return the recipe with other settings; components that were replaced stay in their place."""
    base = recipes.make(recipe.name, **recipe.fields)
    replaced: dict[str, Any] = {}  # all at once: some components are only valid beside others
    for axis in Recipe.axes:
        component = getattr(recipe, axis)
        if component == getattr(base, axis):
            continue
        homes = {name: home(recipe, name) for name in settings}
        fields = {
            location[1]: settings[name]
            for name, location in homes.items()
            if location and location[0] is type(component)
        }
        replaced[axis] = list(component) if axis == "transforms" else _changed(component, fields)
    return recipes.make(recipe.name, **{**recipe.fields, **settings}).with_(**replaced)


def _changed(component: Component, fields: Point) -> Component:
    return type(component)(**{**{name: getattr(component, name) for name in component.model_fields_set}, **fields})


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
