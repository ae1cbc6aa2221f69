"""The models and recipes that an experiment file names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from piebald.contracts import Clients
from piebald.contracts.data import rows_with_all_inputs
from piebald.core import pytree
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.objective import unfit_classes
from piebald.core.randomness import key as rng_key
from piebald.core.randomness import torch_seed
from piebald.core.references import Reference, Resolver
from piebald.data.clients.prepared import preparation_of
from piebald.data.preparation.settings import PrepareSettings
from piebald.experiments.fields import ExperimentFields
from piebald.experiments.sections import Named, own_section
from piebald.methods.recipe import Recipe
from piebald.methods.recipe_settings import check_once
from piebald.settings.plugins import read
from piebald.settings.setting_places import SettingPlaces
from piebald.settings.toml_document import Key

if TYPE_CHECKING:
    from torch import nn

    from piebald.experiments.run_models import Model


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
    from piebald.methods.catalog.registry import lookup

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
    from piebald.methods.catalog.registry import lookup, recipes_with

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


def models_of(
    fields: ExperimentFields,
    clients: Clients,
    section: Named | None = None,
    key: Key = ("model",),
    shape: pytree.Form | None = None,
) -> Model:
    """Return a function of the seed that makes the model of a section, for these clients' inputs and targets.

    Where the section has models for single clients, a mapping of such functions by clients' names, see
    `piebald.experiments.run_models.GivenModels`.

    Args:
        fields: the experiment file.
        clients: with their inputs as the model reads them.
        section, key: a section with the name of a model and its place in the file, [model] by default.
        shape: of one row of inputs; by default that of a client that lacks none.
    """
    section = section or fields.model
    by_client = section.model_dump().get("clients")
    default = _maker(fields, clients, section.model_copy(update={"clients": None}), key, shape)
    if by_client is None:
        return default
    key = (*key, "clients")
    if not isinstance(by_client, Mapping) or not by_client:
        raise SettingError(
            f"{fields.places.at(*key)}: clients must be a table of models by clients' names or patterns, like "
            f'{{ "ward *" = "mlp" }}, got {shown(by_client)}'
        )
    makers = {
        name: _maker(fields, clients, own_section(model), (*key, name), shape) for name, model in by_client.items()
    }
    return {**makers, "*": default}


def _maker(
    fields: ExperimentFields, clients: Clients, section: Named, key: Key, form: pytree.Form | None
) -> Callable[[int], nn.Module]:
    """Return a function of the seed that makes one model, after a trial with the file's seed."""
    from piebald import models
    from piebald.models.networks import network
    from piebald.models.wrappers import with_embeddings

    places, table = fields.places, section.model_dump(exclude={"clients"})
    name = table.pop("name")
    if name not in models.names() and not isinstance(name, Reference):
        raise SettingError(f"{places.at(*key, 'name')}: {unknown('model', name, models.names())}")
    rows = clients.rows(0, "train") if form else rows_with_all_inputs(clients, range(len(clients)))
    shape, y = form or pytree.form(rows.x), pytree.leaves(rows.y)
    if clients.classes is None and isinstance(rows.y, Tensor) and not rows.y.dtype.is_floating_point:
        raise SettingError(f"{places.at('data')}: the clients' targets are classes without names: give classes")
    if problem := unfit_classes(fields.loss, clients.classes):
        raise SettingError(f"{places.at('loss')}: {problem}")
    outputs = math.prod(y[0].shape[1:]) if clients.classes is None else len(clients.classes)

    agreed = preparation_of(clients) or (fields.prepare.agreed if isinstance(fields.prepare, PrepareSettings) else None)
    embedded, agreed_width = ({}, 0) if agreed is None else (agreed.embedded, len(agreed.feature_names_out))

    def make(seed: int) -> nn.Module:
        if not embedded:
            return network(name, shape, outputs, seed, **table)
        with torch_seed(rng_key(seed, "embeddings") >> 1):
            return with_embeddings(
                lambda width: network(name, (width,), outputs, seed, **table), agreed_width, embedded
            )

    try:
        # once now, so that a wrong setting is an error with its line before anything is trained
        make(fields.first_seed)
    except SettingError as error:
        raise places.placed(error, key, section) from None
    return make
