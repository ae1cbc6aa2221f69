"""The search space of a recipe: which settings may vary, and between which values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piebald.contracts.component import Component
from piebald.core.arguments import checked, checked_class, settled
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.references import USERS
from piebald.methods import recipes
from piebald.methods.recipe import Recipe
from piebald.methods.recipe_settings import plain
from piebald.methods.recipes.named import lookup
from piebald.methods.recipes.recipe_help import home

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
        """Whether only whole numbers are meant."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def ends(self) -> tuple[Value, ...]:
        """The values that show whether a setting takes all of them."""
        return self.low, self.high

    def holds(self, value: Value) -> bool:
        """Whether a value is in the range."""
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
        found = [plain(value) for value in self.values]
        if any(value in found[:number] for number, value in enumerate(found)):
            raise SettingError(f"choices must be different, got {shown(found)}")
        object.__setattr__(self, "values", tuple(settled(value) for value in self.values))

    @property
    def ends(self) -> tuple[Value, ...]:
        """The values that show whether a setting takes all of them."""
        return self.values

    def holds(self, value: Value) -> bool:
        """Whether a value is one of them."""
        return plain(value) in [plain(one) for one in self.values]

    def plain(self) -> list[Any]:
        """As JSON."""
        return [plain(value) for value in self.values]


Values = Range | Choices


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The values that settings of a recipe may have, by the setting's name.

    A setting of a component has the name of its axis before it: "server_optimizer.beta".
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
        """Those settings that a recipe has.

        Raises:
            SettingError: the recipe does not take one of the values.
        """
        own = SearchSpace({name: values for name, values in self.values.items() if has_setting(recipe, name)})
        for name, values in own.values.items():
            for value in values.ends:
                with_settings(recipe, {name: value})
        return own

    @checked
    def own_point(self, recipe: Recipe) -> dict[str, Value] | None:
        """The recipe's own values of these settings; None where one is outside of its range."""
        own = {name: setting_of(recipe, name) for name in self.values}
        return own if all(self.values[name].holds(value) for name, value in own.items()) else None

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {name: values.plain() for name, values in self.values.items()}


def _values(name: str, given: Any) -> Values:
    try:
        if isinstance(given, Range | Choices):
            return given
        if isinstance(given, Mapping):
            for key in given:
                if key not in _RANGE:
                    raise unknown("key of a range called", key, _RANGE)
            if missing := [key for key in ("low", "high") if key not in given]:
                raise SettingError(
                    f"a range needs {' and '.join(missing)}, like {{low = 0.01, high = 1.0, log = true}}"
                )
            return Range(**given)
        return Choices(given)
    except SettingError as error:
        raise SettingError(f"space of {name}: {error}") from None


def has_setting(recipe: Recipe, name: str) -> bool:
    """Whether a recipe has a setting, or its component one, as in "server_optimizer.beta"."""
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
    if found := home(recipe, name):
        part, field = found
        return next(getattr(one, field) for one in recipe.components if type(one) is part)
    return lookup(recipe.name, USERS).defaults[name]


@checked
def with_settings(recipe: Recipe, point: Mapping[str, Any]) -> Recipe:
    """A recipe with other values of some settings, those of components under names like "server_optimizer.beta".

    Raises:
        SettingError: the recipe has no such setting, or it does not take the value.
    """
    own = {name: value for name, value in point.items() if "." not in name}
    inner = {name: value for name, value in point.items() if "." in name}
    for name in point:
        if not has_setting(recipe, name):
            known = recipes.settings_of(recipe.name) if recipe.name in recipes.names() else ()
            raise unknown(f"setting of recipe {recipe.name!r} called", name, known)
    made = _remade(recipe, own) if own else recipe
    fields: dict[str, dict[str, Value]] = {}
    for name, value in inner.items():
        axis, _, field = name.partition(".")
        fields.setdefault(axis, {})[field] = value
    return made.with_(**{axis: _changed(getattr(made, axis), values) for axis, values in fields.items()})


def _remade(recipe: Recipe, own: Point) -> Recipe:
    """The recipe made again with other settings; components that were replaced keep their place."""
    if recipe.name not in recipes.names():
        parts: dict[str, Point] = {}
        for name, value in own.items():
            part, field = home(recipe, name) or (None, name)
            axis = next(axis for axis in Recipe.axes if type(getattr(recipe, axis)) is part)
            parts.setdefault(axis, {})
            parts[axis] = {**parts[axis], field: value}
        return recipe.with_(**{axis: _changed(getattr(recipe, axis), fields) for axis, fields in parts.items()})
    base = recipes.make(recipe.name, **recipe.fields)
    replaced: dict[str, Any] = {}  # all at once: some components are only valid beside others
    for axis in Recipe.axes:
        component = getattr(recipe, axis)
        if component == getattr(base, axis):
            continue
        homes = {name: home(recipe, name) for name in own}
        fields = {found[1]: own[name] for name, found in homes.items() if found and found[0] is type(component)}
        replaced[axis] = list(component) if axis == "transforms" else _changed(component, fields)
    return recipes.make(recipe.name, **{**recipe.fields, **own}).with_(**replaced)


def _changed(component: Component, fields: Point) -> Component:
    return type(component)(**{**{name: getattr(component, name) for name in component.model_fields_set}, **fields})
