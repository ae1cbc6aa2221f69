"""The recipes and the models that an experiment file names, in a table with every key and section that it may have.

A run is given one model, or several, where clients have unlike ones.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, Field, PrivateAttr
from torch import Tensor, nn

from piebald.contracts import Clients, ModelSpec, Rows
from piebald.contracts.component import Component, build, kind_of
from piebald.contracts.data import rows_with_all_inputs
from piebald.core import pytree
from piebald.core.arguments import SeedList
from piebald.core.client_models import ClientModel, ClientModels, check_shared, pattern_for_client
from piebald.core.errors import TOKENS, SettingError, about, shown, unknown
from piebald.core.objective import OF_PAIRS, speaks_in_unit, unfit_classes
from piebald.core.parameters import Layout, copied
from piebald.core.randomness import key as rng_key
from piebald.core.randomness import torch_seed
from piebald.core.references import Reference, Resolver, Text
from piebald.data.clients.data_source import DataSource
from piebald.data.clients.prepared import preparation_of
from piebald.data.clients.sites import RemotePartition
from piebald.data.clients.target_columns import PairOfColumns
from piebald.data.partition.split import SplitSettings
from piebald.data.preparation.preparation import PrepareSettings
from piebald.experiments import sections
from piebald.experiments.run_settings import RunSettings
from piebald.methods.recipe import Recipe
from piebald.methods.recipe_settings import check_once
from piebald.models import PretrainedNetwork
from piebald.settings.plugins import read
from piebald.settings.toml_document import Document, Key, SettingPlaces


def _split(value: Any) -> Any:
    return None if value is None else SplitSettings.of(value)


def _settings(value: Any) -> Any:
    """Return a table of [prepare] as its settings, whose errors name the setting."""
    return PrepareSettings(**value) if isinstance(value, Mapping) else value


class ExperimentFields(RunSettings):
    """The fields of an experiment file, those of a run and more, with the document and the author they came from.

    Attributes:
        seeds: the seeds of each recipe in a comparison.
        plugins: modules that register components and recipes of your own, or have what "module:name" names.
        data: the data set by name, or a source of your own rows.
        prepare: how columns of tables become inputs: "federated", the default for tables, as the clients agree from
            their training rows; a table of settings; or "none" for numbers as they are.
        partition: how rows are divided among clients; by the owners of `data.client` where that is given.
        split: how each client's rows are divided into those for training, validation and testing; text is the name of
            a column that says it of each row.
        out: the run folder.
        model: the network by name, with its settings.
        fleet: the clients' devices in a simulation; instant by default.
        recipe: the recipe of one run.
        recipes: the recipes of a comparison; one with `model`, a name or a table, has a model of its own.
        client_settings: settings of single clients by name or pattern, `[clients."ward *"]`, see `Recipe.for_clients`.
        grid: lists of values for settings of the recipe, by name; a comparison tries all combinations.
        extractor: a frozen network that each client runs once; the model is trained on its outputs.
        tune: the search for settings of the recipes.
        advise: the search for the best method.
        trees: the settings of `piebald trees`; the component "trees" on the axis "section".
    """

    seeds: SeedList | None = None
    out: str | None = None
    plugins: list[Text] = []  # noqa: RUF012 - a pydantic field
    data: DataSource = DataSource(name="digits")
    prepare: Annotated[Literal["federated", "none"] | PrepareSettings | None, BeforeValidator(_settings)] = None
    partition: sections.Kind | None = None
    split: Annotated[SplitSettings | None, BeforeValidator(_split)] = None
    model: sections.Named
    recipe: sections.RecipeSection | None = None
    recipes: list[sections.ComparedRecipe] | None = Field(default=None, min_length=1)
    client_settings: dict[str, dict[str, Any]] | None = Field(default=None, alias="clients")
    grid: dict[str, Any] | None = None
    extractor: Text | None = None
    fleet: sections.Kind | None = None
    runtime: sections.RuntimeSection = sections.RuntimeSection()  # type: ignore[assignment]  # a file has its table
    tune: sections.TuneSection | None = None
    advise: sections.AdviseSection | None = None
    trees: dict[str, Any] | None = None

    _document: Document = PrivateAttr(default_factory=lambda: Document("", "settings"))
    _resolver: Resolver = PrivateAttr()

    @property
    def document(self) -> Document:
        """The settings as they were written."""
        return self._document

    @property
    def resolver(self) -> Resolver:
        """The rights of the file's author, who may name modules."""
        return self._resolver

    @property
    def places(self) -> SettingPlaces:
        """The lines of the file, for messages."""
        return SettingPlaces(self._document)

    @property
    def first_seed(self) -> int:
        """The seed of one run."""
        return self.seeds[0] if self.seeds else self.seed

    @property
    def compares(self) -> bool:
        """True if the settings define more than one run."""
        return bool(self.recipes or self.grid or (self.seeds and len(self.seeds) > 1))

    @property
    def rows_at_sites(self) -> bool:
        """True if rows are at the sites of a federation, and none are here."""
        self.use_plugins()  # one may define the partition
        return self.partition is not None and issubclass(
            self.component_class("partition", self.partition), RemotePartition
        )

    @property
    def wanted(self) -> PrepareSettings:
        """The settings of [prepare], with a target that follows from the loss where they say nothing of it."""
        settings = self.prepare if isinstance(self.prepare, PrepareSettings) else PrepareSettings()
        target = self.data.target
        names = [target] if isinstance(target, str) else target or []
        if {*names} & {*settings.scale} or not speaks_in_unit(self.chosen_loss):
            return settings
        return settings.model_copy(update={"scale": {**settings.scale, **dict.fromkeys(names, "none")}})

    @property
    def chosen_loss(self) -> Any:
        """The loss that the file names, or that of a target that is a pair of columns."""
        target = self.data.target
        return target.loss if self.loss is None and isinstance(target, PairOfColumns) else self.loss

    @property
    def recipe_sections(self) -> dict[Key, sections.RecipeSection]:
        """The section of each recipe by its key in the file."""
        if self.recipe is not None:
            return {("recipe",): self.recipe}
        return {("recipes", index): section for index, section in enumerate(self.recipes or ())}

    def grid_points(self) -> list[dict[str, Any]]:
        """Return the settings at each point of the grid, by name."""
        return sections.combinations(self.grid or {}, self._document.origin)

    def use_plugins(self) -> None:
        """Import the modules that the file lists."""
        with about(self.places.at("plugins")):
            self._resolver.use(self.plugins)

    def component(self, axis: str, section: sections.Kind, **settings: Any) -> Component:
        """Build the component that a section defines, with `settings` that the file does not give."""
        component = self.component_class(axis, section)
        table = read(section.model_dump(), self._resolver) | {"kind": component.kind}
        # Before a field is reported as missing: it may be misspelt.
        self.places.check_names((axis,), table, ["kind", *component.model_fields], f"{axis} {component.kind!r}")
        with self.errors_placed(axis, section):
            return build(axis, table | settings)

    def component_class(self, axis: str, section: sections.Kind) -> type[Component]:
        """Return the class of the component that a section defines."""
        with self.errors_placed(axis, section):
            kind = kind_of(read(section.model_dump(), self._resolver)["kind"])
            kinds: dict[str, type[Component]] = Component.registry.get(axis, {})
            if kind not in kinds:
                raise unknown(axis, kind, kinds)
            return kinds[kind]

    @contextmanager
    def errors_placed(self, name: str, section: BaseModel | Mapping[str, Any]) -> Iterator[None]:
        """Give an error of what is built from a section its place in the file."""
        try:
            yield
        except SettingError as error:
            raise self.places.placed(error, (name,), section) from None


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
            with about(fields.places.at("clients")):
                recipes[label] = recipe.for_clients(fields.client_settings or {})
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
    with about(places.at(*key, "name")):
        method = lookup(name, resolver)
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
    section: sections.Named | None = None,
    key: Key = ("model",),
    shape: pytree.Form | None = None,
) -> Model:
    """Return a function of the seed that makes the model of a section, for these clients' inputs and targets.

    Where the section has models for single clients, a mapping of such functions by clients' names, see
    `piebald.experiments.recipes.GivenModels`.

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
        name: _maker(fields, clients, sections.own_section(model), (*key, name), shape)
        for name, model in by_client.items()
    }
    return {**makers, "*": default}


def _maker(
    fields: ExperimentFields, clients: Clients, section: sections.Named, key: Key, form: pytree.Form | None
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
    if problem := unfit_classes(fields.loss, clients.classes, fields.data.classes is not None):
        raise SettingError(f"{places.at('loss')}: {problem}")
    outputs = math.prod(y[0].shape[1:]) if clients.classes is None else len(clients.classes)
    if fields.chosen_loss in OF_PAIRS:
        outputs = 1  # the risk, or the rate

    agreed = preparation_of(clients) or fields.wanted.agreed
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


def _no_name(model: Any) -> Any:
    if isinstance(model, str):
        raise ValueError(
            f"must be a Module, a function of the seed that makes one, or a table of them, got {shown(model)}: "
            "piebald.models.build_model makes a model by its name"
        )
    return model


OneModel = nn.Module | Callable[[int], nn.Module]
Model = Annotated[OneModel | Mapping[str, OneModel], BeforeValidator(_no_name)]


@dataclass(frozen=True, slots=True)
class GivenModels:
    """Modules, and which client has which.

    Attributes:
        modules: the first one is that of client 0, and the run's.
        numbers: the number of each client's module.
    """

    modules: tuple[nn.Module, ...]
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, model: Model, names: Sequence[str], seed: int) -> GivenModels:
        """The modules for clients of these names.

        Args:
            model: one for all, or several by clients' names or patterns like "ward *"; the first that fits
                counts.
            names: of the clients, by number.
            seed: of the run.

        Raises:
            SettingError: a client has no model, or a model has no client.
        """
        if not isinstance(model, Mapping):
            return cls((_module(model, seed),), (0,) * len(names))
        patterns = [pattern_for_client(list(model), name) for name in names]
        if idle := next((pattern for pattern in model if pattern not in patterns), None):
            raise SettingError(
                f"model has one for {idle!r}, but no client has this name or is left for it: the clients are "
                f"{shown(list(names))}"
            )
        # in the order of clients, so that the first module is that of client 0, which is the run's
        used = list(dict.fromkeys(patterns))
        modules = tuple(_module(model[pattern], seed) for pattern in used)
        return cls(modules, tuple(used.index(pattern) for pattern in patterns))

    def own_models(self, recipe: Recipe, spec: ModelSpec, rows: Rows) -> ClientModels | None:
        """Return the models of clients that do not have the run's, None where all have it.

        Args:
            recipe: what is shared, and how clients train.
            spec: the run's model.
            rows: a client's training rows, to try the models on.

        Raises:
            SettingError: models differ in what is shared, or in what they put out.
        """
        if len(self.modules) == 1:
            return None
        layouts = [Layout.of(module, recipe.sharing.private(module)) for module in self.modules]
        check_shared(layouts, recipe.name)
        models = []
        for module, layout in zip(self.modules[1:], layouts[1:], strict=True):
            if (outputs := outputs_of(module, rows)) != spec.outputs:
                raise SettingError(
                    f"clients' models must have outputs of one shape, got {list(spec.outputs)} and {list(outputs)}"
                )
            module = copied_for_run(module)
            models.append(ClientModel(module, layout, layout.taken(module), outputs))
        return ClientModels(tuple(models), tuple(number - 1 if number else None for number in self.numbers))


def copied_for_run(module: nn.Module) -> nn.Module:
    """Return a copy for the run, since the user may change the module later; mapped weights of a file are shared."""
    return (copied(module) if isinstance(module, PretrainedNetwork) else copy.deepcopy(module)).cpu()


def outputs_of(module: nn.Module, rows: Rows) -> tuple[int, ...]:
    """The shape of the model's output for one row; refuses a model that does not fit the data."""
    layers = ((n, layer) for n, layer in module.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm))
    for name, layer in layers:
        if layer.running_mean is None:
            raise SettingError(
                f"{type(layer).__name__} {name!r} of the model keeps no running statistics, so that a row's prediction "
                "would depend on the rows beside it: leave out track_running_stats=False, or take nn.GroupNorm"
            )
    trial = copied(module).eval()  # batch norm cannot train on one row, and must not count it
    try:
        # a trial must leave the user's random numbers as they were; on the CPU, so states of GPUs need no copy
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = pytree.run(trial, rows[:1].x)
    except Exception as error:
        shape = pytree.plain(pytree.form(rows.x))
        looks_up = any(isinstance(part, nn.Embedding) for part in module.modules()) and "indices" in str(error)
        reason = str(error) if isinstance(error, SettingError) else f"{type(error).__name__}: {error}"
        if looks_up:
            reason = f"it looks up token ids, and these are real numbers: {TOKENS}"
        elif isinstance(error, NotImplementedError) and "forward" in reason:
            reason = f"{type(module).__name__} has no method forward(self, x): define it"
        elif refusing := _refusing_layer(trial, rows[:1].x):
            reason = f"{refusing}: give it the shape that it needs"
        raise SettingError(f"the model fails on an input of shape {shape}: {reason}") from error
    try:
        return tuple(pytree.logits(output).shape[1:])
    except SettingError:
        return ()  # a loss of the user's own may take other outputs


def _refusing_layer(module: nn.Module, x: pytree.Tree) -> str | None:
    """Which layer of torch a batch does not get through, in words; None where the model's own code fails."""
    inside: list[str] = []

    def enter(layer: nn.Module, given: tuple[Any, ...]) -> None:
        shapes = ", ".join(str(list(part.shape[1:])) for part in given if isinstance(part, torch.Tensor))
        inside.append(f"its layer {layer} cannot take rows of shape {shapes}")

    layers = [
        part for part in module.modules() if not any(part.children()) and type(part).__module__.startswith("torch.")
    ]
    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    # a layer that has returned did not fail, so what remains in `inside` is the one that did
    hooks += [layer.register_forward_hook(lambda *_: inside.clear()) for layer in layers]
    try:
        with torch.no_grad():
            pytree.run(module, x)
    except Exception:  # as before
        return inside[-1] if inside else None
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _called_with_seed(function: Callable[[int], nn.Module], seed: int) -> nn.Module:
    """Call a function of the seed, after a check of its signature: a class may need other arguments."""
    try:
        inspect.signature(function).bind(seed)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        name = "this lambda" if name == "<lambda>" else name
        again = "write lambda seed: ..." if name == "this lambda" else f"write lambda seed: {name}(...)"
        raise SettingError(
            f"model must be an nn.Module or a function of the seed that makes one, but {name} cannot be called with a "
            f"seed alone ({error}): call it yourself and give its module, or {again}"
        ) from None
    except ValueError:  # a function of another language, which has no signature
        pass
    return function(seed)


def _module(model: OneModel, seed: int) -> nn.Module:
    module = model if isinstance(model, nn.Module) else _called_with_seed(model, seed) if callable(model) else None
    if not isinstance(module, nn.Module):
        raise SettingError(
            f"model must be an nn.Module or a function of the seed that makes one, got {type(model).__name__}"
        )
    return module
