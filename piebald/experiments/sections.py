"""The sections of an experiment file: tables with fixed keys, and those with the settings of what they name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from piebald.contracts.component import Component
from piebald.core.arguments import SeedList
from piebald.core.discovery import imported
from piebald.core.errors import SettingError, shown
from piebald.core.files import settings_text
from piebald.core.references import Text, is_reference
from piebald.settings.toml_document import Document, Key


class Section(BaseModel):
    """A table with fixed keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Named(Section):
    """A table with a name; the other keys are the settings of the model or recipe of this name."""

    model_config = ConfigDict(extra="allow")

    name: Text


class RecipeSection(Named):
    """A recipe.

    Attributes:
        label: its name in tables, the recipe's name by default.
    """

    label: Any = None

    def settings(self) -> dict[str, Any]:
        """The settings of the recipe with its name."""
        return self.model_dump(exclude={"label"})

    def labels(self, points: Iterable[Mapping[str, Any]]) -> list[str]:
        """The label at each point of the grid."""
        label = str(self.name if self.label is None else self.label)
        return [label + "".join(f" {name}={value}" for name, value in changes.items()) for changes in points]


def _table_of_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class ComparedRecipe(RecipeSection):
    """A recipe of a comparison.

    Attributes:
        model: a model of its own in place of [model]: the name of one, or a table like [model].
        validation: False where clients train on their validation rows as well, for a recipe that needs none.
        pooled: whether all training rows are in one place, the centralised model that others are compared with.
    """

    model: Annotated[Named | None, BeforeValidator(_table_of_name)] = None
    validation: bool = True
    pooled: bool = False

    def settings(self) -> dict[str, Any]:
        """The settings of the recipe with its name."""
        return self.model_dump(exclude={"label", "model", "validation", "pooled"})


def own_section(table: Any) -> Named:
    """The model of some clients, from its name or a table like [model].

    Raises:
        SettingError: it is neither.
    """
    try:
        return Named.model_validate(_table_of_name(table))
    except ValidationError:
        raise SettingError(
            f"the model of some clients must be a name, or a table with one, got {shown(table)}"
        ) from None


class Kind(Section):
    """A table of a component; the other keys are the component's fields."""

    model_config = ConfigDict(extra="allow")

    kind: Text


class RuntimeSection(Kind):
    """The runtime; fields without a kind are those of the simulator."""

    kind: Text = "simulator"


class TuneSection(Section):
    """The search for settings of recipes, `piebald tune` and `piebald compare --tune`.

    Attributes:
        space: the values of settings, by names like "recipe.lr": {low = 0.01, high = 1.0, log = true}, or a list of
            choices; the learning rate by default.
        budget: of each recipe, one of rounds, minutes and bytes; ten whole runs by default.
        sampler: "tpe", "random" or "grid".
        rungs: how often a run is judged; worse ones are dropped before its end.
        factor: between the rounds of two rungs; one run in `factor` goes on.
        seeds: each trial has a run for each; the experiment's first seed by default.
    """

    space: dict[str, Any] | None = None
    budget: dict[str, Any] | None = None
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    rungs: int = Field(default=3, ge=1)
    factor: int = Field(default=3, ge=2)
    seeds: SeedList | None = None

    def values(self, origin: Callable[[Key], str]) -> dict[str, Any] | None:
        """The values of the space by the setting's name without "recipe."; `origin` gives the place of a key."""
        if self.space is None:
            return None
        space: dict[str, Any] = {}
        for name, values, key in leaves(self.space, ("tune", "space"), {"low", "high"}):
            if not name.startswith("recipe."):
                raise SettingError(
                    f"{origin(key)}: space can vary settings of the recipe, like 'recipe.lr', got {name!r}"
                )
            space[name.removeprefix("recipe.")] = values
        return space


class AdviseSection(Section):
    """The race of `piebald advise`.

    Attributes:
        budget: of the whole search, one of rounds, minutes and bytes; twenty whole runs by default.
        seeds: the race is run with the first, what is left at its end with all; three by default.
        families: the recipes to race, all by default that need not be named; Local and FedAvg always are.
        more_data: whether a tenth of the budget is kept to train the recommendation with half and a quarter of the
            rows, and of the clients, to say what more of them would change.
        save_traffic: whether, of methods that are about as good, the one that sends least is recommended, as it is with
            a budget in bytes.
        distil: whether one model is trained towards the ensemble, for three more runs, where a single one is wanted.
    """

    budget: dict[str, Any] | None = None
    seeds: SeedList | None = None
    families: list[str] | None = Field(default=None, min_length=1)
    more_data: bool = True
    save_traffic: bool = False
    distil: bool = False


def file_text(path: str | Path | None) -> str:
    """The text of an experiment file, or of the built-in experiment."""
    if path is None:
        return resources.files("piebald.experiments").joinpath("default.toml").read_text(encoding="utf-8")
    return settings_text(path)


def leaves(
    table: Mapping[str, Any], key: Key, ends: Container[str] = (), depth: int | None = None
) -> list[tuple[str, Any, Key]]:
    """The values of nested tables: their names below a key, the values, and their full keys.

    A table with one of the keys `ends` is a value itself.
    """
    values_found: list[tuple[str, Any, Key]] = []
    depth = len(key) if depth is None else depth
    for name, value in table.items():
        inner = (*key, name)
        if isinstance(value, Mapping) and not any(end in ends for end in value):
            values_found += leaves(value, inner, ends, depth)
        else:
            values_found.append((".".join(str(word) for word in inner[depth:]), value, inner))
    return values_found


def combinations(grid: Mapping[str, Any], origin: Callable[[Key], str]) -> list[dict[str, Any]]:
    """The settings at each point of a grid, by name; `origin` gives the place of a key."""
    lists: dict[str, list[Any]] = {}
    for name, values, key in leaves(grid, ("grid",)):
        if not name.startswith("recipe."):
            raise SettingError(f"{origin(key)}: grid can vary settings of the recipe, like 'recipe.lr', got {name!r}")
        if not isinstance(values, list) or not values:
            raise SettingError(f"{origin(key)}: grid needs a list of values for {name}, got {shown(values)}")
        lists[name.removeprefix("recipe.")] = values
    return [dict(zip(lists, point, strict=True)) for point in itertools.product(*lists.values())]


def place_source(document: Document, folder: Path) -> None:
    """Make the paths of the data absolute: in the file they are relative to the file's folder."""
    table = document.values.get("data")
    for key in ("source", "public") if isinstance(table, dict) else ():
        path = document.values["data"].get(key)
        if isinstance(path, str) and not is_reference(path):
            document.values["data"] = {**document.values["data"], key: str(folder / path)}


# Sections whose settings belong to a room above this one, which it must not import: their module and class.
_SECTIONS = {"trees": ("piebald.inference.trees.forest", "TreeSettings")}


def section_settings(name: str) -> type[Component]:
    """Import and return the class of the settings of a section that another room defines."""
    module, settings = _SECTIONS[name]
    return cast("type[Component]", getattr(imported(module), settings))
