"""Named recipes: made from a name and fields, listed with their paper and settings.

What every recipe is written with is imported from here: `recipe`, `Recipe`, `CohortSize`, `Sgd` and `SgdSettings`.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
import typing
from collections.abc import Callable, Mapping
from typing import Any

from piebald.contracts.component import Component
from piebald.core.arguments import checked, settled
from piebald.core.discovery import imported, modules
from piebald.core.errors import SettingError, shown, unknown
from piebald.core.references import USERS, Reference, Resolver, is_reference
from piebald.methods.catalog.recipe_help import allowed, documented, home, kind
from piebald.methods.recipe import Recipe as Recipe
from piebald.methods.recipe_settings import holds, plain
from piebald.methods.scheduling.base import CohortSize as CohortSize
from piebald.methods.training.base import Trainer
from piebald.methods.training.client_settings import ClientSettings
from piebald.methods.training.sgd import Sgd as Sgd
from piebald.methods.training.sgd import SgdSettings as SgdSettings
from piebald.settings.plugins import read
from piebald.settings.toml_document import dumps

_HOME = "piebald.methods.recipes"
_made: dict[str, _Named] = {}  # by name, those that have been imported


class _Named:
    """A recipe function with what is known about it."""

    def __init__(
        self, function: Callable[..., Recipe], paper: str, trainer: type[Component], name: str | None = None
    ) -> None:
        self.function, self.paper, self.trainer = checked(function), paper, trainer
        self.name = name or function.__name__
        self.offered: Callable[..., Recipe] = function  # what users call
        self.summary = (inspect.getdoc(function) or "").partition("\n")[0]
        signature = inspect.signature(function, eval_str=False)
        self.own = {
            name: parameter.default
            for name, parameter in signature.parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        handed_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
        self.defaults = dict(self.own)
        if handed_on:
            fields = trainer.model_fields
            self.defaults |= {name: field.get_default() for name, field in fields.items() if name not in self.own}

    def doc(self) -> str:
        """The docstring of the function, with its settings and its source."""
        lines = [(inspect.getdoc(self.function) or "").rstrip(), "", "Args:"]
        for name, description in _fields(self).items():
            meaning = f"{description['doc'] or 'a setting'}; {description['type']}"
            text = f"{name}: {meaning}, {description['default']!r} by default."
            if len(text) <= 106:  # most are, and wrapping takes a tenth of the time to import the recipes
                lines.append(f"    {text}")
            else:
                lines += textwrap.wrap(text, 110, initial_indent="    ", subsequent_indent="        ")
        return "\n".join([*lines, "", f"Source: {self.paper}."])

    def make(self, **fields: Any) -> Recipe:
        for name in fields:
            if name not in self.defaults:
                raise unknown(f"setting of recipe {self.name!r} called", name, self.defaults, recipes_with(name))
        for name, value in fields.items():
            try:
                fields[name] = settled(value)
            except ValueError as error:
                raise SettingError(f"{name} {error}") from None
            if name in ClientSettings.model_fields and isinstance(fields[name], tuple | dict):
                raise SettingError(
                    f"{name} must be one number for all clients, got {shown(fields[name])}: those of single clients "
                    'stand in [clients."NAME"] of the file, or in recipe.for_clients({...}) in Python'
                )
        if fields.get("steps") is not None and "epochs" in fields:  # also where epochs is 1, as by default
            raise SettingError("steps takes so many steps instead of epochs, and both are there: leave one of them out")
        recipe_made = self.function(**fields)
        if not isinstance(recipe_made, Recipe):
            raise SettingError(f"recipe {self.name!r} must return a Recipe, got {type(recipe_made).__name__}")
        # a recipe's settings may choose components, so where a setting has its place is asked of the usual one
        usual = self.function() if fields else recipe_made
        for name, value in fields.items():  # one setting may choose a component that has no place for another one
            if home(usual, name) and not any(holds(component, name, value) for component in recipe_made.components):
                raise SettingError(
                    f"{name} = {shown(value)} of recipe {self.name!r} would have no effect beside its other settings: "
                    "leave it out"
                )
        recorded = {name: plain(value) for name, value in fields.items()}
        return recipe_made.model_copy(update={"name": self.name, "fields": recorded, "paper": self.paper})


def recipe(paper: str, trainer: type[Component]) -> Callable[[Callable[..., Recipe]], Callable[..., Recipe]]:
    """Register a function as the recipe of its name.

    Args:
        paper: the source, as people cite it.
        trainer: the trainer whose settings the function takes as keyword arguments.
    """

    def register(function: Callable[..., Recipe]) -> Callable[..., Recipe]:
        named = _Named(function, paper, trainer)
        for setting, default in named.own.items():
            if default is inspect.Parameter.empty:
                raise SettingError(f"recipe {named.name!r} must have a default for {setting}: write {setting}=...")
        ours = function.__module__.startswith(f"{_HOME}.")
        earlier = _made.get(named.name) if ours else find(named.name)
        # a module that is executed again, as in a notebook, defines its own recipes anew
        if earlier is not None and earlier.function.__module__ != function.__module__:
            raise SettingError(
                f"recipe {named.name!r} is already defined in {earlier.function.__module__}: "
                f"rename {function.__name__} in {function.__module__}"
            )
        _made[named.name] = named

        @functools.wraps(function)
        def make_named(*positional: Any, **fields: Any) -> Recipe:
            if len(positional) > len(named.own):
                names = ", ".join(named.own)
                raise SettingError(f"{named.name} takes {names} without a name, got {len(positional)}: name the rest")
            return named.make(**USERS.mark(dict(zip(named.own, positional, strict=False))), **USERS.mark(fields))

        make_named.__doc__ = named.doc()
        named.offered = make_named
        return make_named

    return register


def find(name: str) -> _Named | None:
    """The recipe of this name, Piebald's own or one of a plugin that has been imported, or None."""
    # the module of that name first: importing all recipes takes much longer
    if name not in _made and name in modules(_HOME):
        imported(f"{_HOME}.{name}")
    return _made.get(name) or _all().get(name)  # a module can have recipes of other names


def _all() -> dict[str, _Named]:
    """All recipes by name, Piebald's own and those of plugins that have been imported."""
    for module in modules(_HOME):
        imported(f"{_HOME}.{module}")
    return _made


def names() -> list[str]:
    """The names of all recipes."""
    return sorted(_all())


@checked
def make(name: str, **fields: Any) -> Recipe:
    """Make a recipe from its name and fields.

    Args:
        name: one of `names()`, or "module:name" for a recipe, or a function that returns one, of a plugin.
        fields: settings of the recipe.

    Raises:
        SettingError: an unknown name or field, or a value that is not allowed.
    """
    return lookup(USERS.mark(name), USERS).make(**read(fields, USERS))


_ELSEWHERE = {  # names of other programs and papers
    "fedper": "hdafl keeps the classifier private, as FedPer does",
    "pfedhn": "cgau conditions one network on the client, as pFedHN's hypernetwork does",
    "fedopt": "fedadam, fedyogi and fedavgm step with an optimizer at the server",
    "fedfomo": "fedamp and fedphp weigh the models of other clients",
    "fedavgft": "fine_tuned trains each client's model further at the end",
    "finetuning": "fine_tuned trains each client's model further at the end",
    "lg": "lg_fedavg",
    "lgnet": "fine_tuned is what DistFL's paper calls LG-Net, lg_fedavg is LG-FedAvg",
    "dvw": "sync_dvw, async_dvw and adaptive_dvw are Metis' methods",
    "metis": "sync_dvw, async_dvw and adaptive_dvw are Metis' methods",
    "smmd": "piebald transfer trains two parties with different features",
    "standalone": "local",
    "localonly": "local",
    "centralized": "fedavg with pooled = true, among the recipes of a comparison",
    "pooled": "fedavg with pooled = true, among the recipes of a comparison",
    "fedsgd": "fedavg with steps = 1",
    "krum": 'aggregation = "krum" of any recipe',
    "median": 'aggregation = "median" of any recipe',
    "fltrust": 'aggregation = "fltrust" of any recipe',
}


_USUAL = {  # names of settings elsewhere
    "learningrate": "it is lr", "batchsize": "it is batch", "localepochs": "it is epochs", "numepochs": "it is epochs",
    "fraction": "it is cohort, a share of the clients", "fractionfit": "it is cohort, a share of the clients",
    "clientsperround": "it is cohort, a number of clients", "numclusters": "it is k", "nclusters": "it is k",
    "clusters": "the number of clusters is k of ifca; distfl and cfl find it", "rounds": "it belongs to the run",
    "l2": "it is weight_decay",
}  # fmt: skip


def unknown_recipe(name: str, *others: str) -> SettingError:
    """Return the error for a name that no recipe has; `others` are allowed in its place, too."""
    return unknown("recipe", name, [*names(), *others], _ELSEWHERE)


def recipes_with(setting: str) -> dict[str, str] | None:
    """Return which recipes have a setting, those with the fewest settings first, as `errors.unknown` takes it."""
    found = sorted((name for name in names() if setting in settings_of(name)), key=lambda name: len(settings_of(name)))
    if usual := _USUAL.get(setting.lower().replace("_", "").replace("-", "")):
        return {setting.lower().replace("_", "").replace("-", ""): usual}
    listed = f"{', '.join(found[:6])}{' ...' if len(found) > 6 else ''}"
    return {setting.lower().replace("_", ""): f"it is a setting of {listed}"} if found else None


def lookup(name: str, resolver: Resolver) -> _Named:
    """The recipe with a name, as `make` takes it.

    Args:
        name: the name, or a reference.
        resolver: that of the author of the name.

    Raises:
        SettingError: there is none.
    """
    if not isinstance(name, Reference):
        if (entry := find(name)) is None:
            resolver.discover()
            # again after plugins were imported, which may have registered it
            entry = _made.get(name)
        if entry is None:
            raise unknown_recipe(name)
        return entry
    target = name.resolved("recipe")
    if isinstance(target, Recipe):
        constant = target
        return _Named(lambda: constant, constant.paper, type(constant.training), name)
    if not inspect.isfunction(target):
        raise SettingError(f"{name} must be a recipe, or a function that returns one, got {target!r}")
    function = inspect.unwrap(target)
    # the same function under its reference keeps its paper and trainer
    registered = _made.get(function.__name__)
    if registered is not None and inspect.unwrap(registered.function) is function:
        return registered
    return _Named(function, "", Trainer, name)


def maker(recipe: Recipe) -> Callable[..., Recipe] | None:
    """The function that makes the recipe of this name, or None where there is none."""
    entry = find(recipe.name)
    return None if entry is None else entry.function


@checked
def settings_of(name: str) -> tuple[str, ...]:
    """The names of a recipe's settings.

    Raises:
        SettingError: there is no such recipe.
    """
    return tuple(lookup(USERS.mark(name), USERS).defaults)


@checked
def rebuild(table: Mapping[str, Any]) -> Recipe:
    """Rebuild a recipe from the output of `Recipe.model_dump`: name, fields and one table for each axis.

    What is no reference yet in its tables, names nothing.
    """
    try:
        return Recipe(**table)
    except TypeError as error:
        raise SettingError(f"not a recipe: {error}") from None


@checked
def toml(recipe: Recipe) -> str:
    """Write a recipe as the [recipe] section of an experiment file: its name and fields, and the components that were
    replaced.
    """
    # a recipe built in Python has no name to write: any base does, as all axes that differ are written out
    name, fields = (recipe.name, recipe.fields) if find(recipe.name) or is_reference(recipe.name) else ("fedavg", {})
    base, table = make(name, **fields).model_dump(), recipe.model_dump()
    replaced = {axis: table[axis] for axis in Recipe.axes if table[axis] != base[axis]}
    written = {field: plain(value) for field, value in fields.items()}
    return dumps({"recipe": {"name": name, **written, **replaced}})


def listing() -> list[dict[str, Any]]:
    """List all recipes: name, paper, summary, and fields with their default, type and meaning."""
    return [
        {"name": name, "paper": _made[name].paper, "summary": _made[name].summary, "fields": _fields(_made[name])}
        for name in names()
    ]


def _fields(named: _Named) -> dict[str, dict[str, Any]]:
    example = named.function()
    return {field: _describe_setting(named, example, field, default) for field, default in named.defaults.items()}


def _describe_setting(named: _Named, example: Recipe, field: str, default: Any) -> dict[str, Any]:
    place = (named.trainer, field) if field in named.trainer.model_fields else home(example, field)
    if place is None:  # a setting that chooses a component has its choices in the function's own signature
        annotation = typing.get_type_hints(named.function)[field]
        return {"default": plain(default), "type": kind(annotation), "doc": "the component that is chosen"}
    component, setting = place
    return {
        "default": plain(default),
        "type": allowed(component, setting),
        "doc": documented(component).get(setting, ""),
    }
