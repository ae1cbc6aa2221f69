"""The recipes that an experiment file names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from piebald.core.errors import SettingError
from piebald.core.references import Resolver
from piebald.experiments.fields import ExperimentFields
from piebald.methods.recipe import Recipe
from piebald.methods.recipe_settings import check_once
from piebald.settings.plugins import read
from piebald.settings.setting_places import SettingPlaces
from piebald.settings.toml_document import Key


def recipes_of(fields: ExperimentFields) -> dict[str, Recipe]:
    """Build the recipes by their labels, one for each point of the grid, with the rights of the file's author."""
    recipes: dict[str, Recipe] = {}
    points = fields.grid_points()
    for key, section in fields.recipe_sections.items():
        table = section.settings()
        for label, changes in zip(section.labels(points), points, strict=True):
            if label in recipes:
                raise SettingError(
                    f"{fields.places.at(*key)}: there are two recipes called {label!r}: give one a label"
                )
            recipe = _recipe(key, {**table, **changes}, changes, fields.places, fields.resolver)
            try:
                recipes[label] = recipe.for_clients(fields.client_settings or {})
            except SettingError as error:
                raise SettingError(f"{fields.places.at('clients')}: {error}") from None
    return recipes


def located(fields: ExperimentFields, error: SettingError) -> SettingError:
    """Return an error with its place, if its message begins with the name of a setting of a recipe."""
    from piebald.methods.recipes.named import lookup

    *quoted, message = re.fullmatch(r"(?s)(?:recipe (?:'(.*?)'|\"(.*?)\"): )?(.*)", str(error)).groups()  # type: ignore[union-attr]
    label, word = next(filter(None, quoted), None), next(iter(re.findall(r"\w+", message)), "")
    for name, search in (("tune", fields.tune), ("advise", fields.advise)):
        if search is not None and word in type(search).model_fields:
            return SettingError(f"{fields.places.at(name, word)}: {error}")
    for key, section in fields.recipe_sections.items():
        labels = (None, *section.labels(fields.grid_points()))
        if word in lookup(section.name, fields.resolver).defaults and label in labels:
            placed = fields.places.placed(SettingError(message), key, section)
            return placed if label is None else SettingError(f"recipe {label!r}: {placed}")
    return error


def _recipe(
    key: Key, table: dict[str, Any], changes: Mapping[str, Any], places: SettingPlaces, resolver: Resolver
) -> Recipe:
    """One recipe; `changes` are the settings that come from the grid."""
    from piebald.methods.recipes.named import lookup, recipes_with

    name = table.pop("name")
    try:
        method = lookup(name, resolver)
    except SettingError as error:
        raise SettingError(f"{places.at(*key, 'name')}: {error}") from None
    setting_names = tuple(method.defaults)
    # A recipe may have a setting with the name of an axis (hdafl: aggregation = "gradient_norm"); a table still
    # replaces the component.
    components = {
        axis: table.pop(axis)
        for axis in sorted(Recipe.axes, key="transforms".__eq__)  # last, since the others must fit beside them
        if axis in table and (axis not in setting_names or isinstance(table[axis], dict))
    }
    places.check_names(key, table, [*setting_names, *Recipe.axes], f"recipe {name!r}", changes, recipes_with)
    try:
        recipe = method.make(**read(table, resolver))
    except SettingError as error:
        raise places.placed(error, key, table, changes) from None
    for axis, component in components.items():
        try:
            if isinstance(component, Mapping):
                check_once(name, axis, table, component)
            recipe = recipe.replaced({axis: read(component, resolver)})
        except SettingError as error:
            inner = component if isinstance(component, dict) else {}
            raise places.placed(error, (*key, axis), inner) from None
    return recipe
