"""The recipes that an experiment file names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piebald.core.errors import SettingError
from piebald.core.references import Resolver
from piebald.experiments.sections import RecipeSection, combinations
from piebald.methods.recipe import Recipe
from piebald.methods.recipe_settings import check_once
from piebald.settings.plugins import read
from piebald.settings.setting_places import SettingPlaces
from piebald.settings.toml_document import Key


def given_recipes(
    sections: Mapping[Key, RecipeSection], grid: Mapping[str, Any], places: SettingPlaces, resolver: Resolver
) -> dict[str, Recipe]:
    """The recipes of sections by their labels, one for each combination of the grid's values; they are read with the
    rights of their author's resolver.
    """
    made: dict[str, Recipe] = {}
    for key, named in sections.items():
        table = named.settings()
        points = combinations(grid, places.document.origin)
        for full, changes in zip(named.labels(points), points, strict=True):
            if full in made:
                raise SettingError(f"{places.at(*key)}: there are two recipes called {full!r}: give one a label")
            made[full] = _recipe(key, {**table, **changes}, changes, places, resolver)
    return made


def _recipe(
    key: Key, table: dict[str, Any], changes: Mapping[str, Any], places: SettingPlaces, resolver: Resolver
) -> Recipe:
    """One recipe; `changes` are the settings that come from the grid."""
    from piebald.methods.recipes.named import lookup

    name = table.pop("name")
    try:
        method = lookup(name, resolver)
    except SettingError as error:
        raise SettingError(f"{places.at(*key, 'name')}: {error}") from None
    known = tuple(method.defaults)
    # A recipe may have a setting with the name of an axis (hdafl: aggregation = "gradient_norm"); a table still
    # replaces the component.
    components = {
        axis: table.pop(axis)
        for axis in sorted(Recipe.axes, key="transforms".__eq__)  # last, since the others must fit beside them
        if axis in table and (axis not in known or isinstance(table[axis], dict))
    }
    places.check_names(key, table, [*known, *Recipe.axes], f"recipe {name!r}", changes)
    try:
        made = method.make(**read(table, resolver))
    except SettingError as error:
        raise places.placed(error, key, table, changes) from None
    for axis, component in components.items():
        try:
            if isinstance(component, Mapping):
                check_once(name, axis, table, component)
            made = made.replaced({axis: read(component, resolver)})
        except SettingError as error:
            inner = component if isinstance(component, dict) else {}
            raise places.placed(error, (*key, axis), inner) from None
    return made
