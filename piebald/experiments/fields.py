"""The table of an experiment file: every key and section that it may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PrivateAttr

from piebald.contracts.component import Component, build, kind_of
from piebald.core.arguments import SeedList
from piebald.core.errors import SettingError, unknown
from piebald.core.references import Resolver, Text
from piebald.data.clients.data_source import DataSource
from piebald.data.clients.sites import RemotePartition
from piebald.data.partition.split_settings import SplitSettings
from piebald.data.preparation.settings import PrepareSettings
from piebald.experiments.run_settings import RunSettings
from piebald.experiments.sections import (
    AdviseSection,
    ComparedRecipe,
    Kind,
    Named,
    RecipeSection,
    RuntimeSection,
    TuneSection,
    combinations,
)
from piebald.settings.plugins import read
from piebald.settings.setting_places import SettingPlaces
from piebald.settings.toml_document import Document, Key


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
    partition: Kind | None = None
    split: Annotated[SplitSettings | None, BeforeValidator(_split)] = None
    model: Named
    recipe: RecipeSection | None = None
    recipes: list[ComparedRecipe] | None = Field(default=None, min_length=1)
    client_settings: dict[str, dict[str, Any]] | None = Field(default=None, alias="clients")
    grid: dict[str, Any] | None = None
    extractor: Text | None = None
    fleet: Kind | None = None
    runtime: RuntimeSection = RuntimeSection()  # type: ignore[assignment]  # a file has its table
    tune: TuneSection | None = None
    advise: AdviseSection | None = None
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
    def recipe_sections(self) -> dict[Key, RecipeSection]:
        """The section of each recipe by its key in the file."""
        if self.recipe is not None:
            return {("recipe",): self.recipe}
        return {("recipes", index): section for index, section in enumerate(self.recipes or ())}

    def grid_points(self) -> list[dict[str, Any]]:
        """Return the settings at each point of the grid, by name."""
        return combinations(self.grid or {}, self._document.origin)

    def use_plugins(self) -> None:
        """Import the modules that the file lists."""
        try:
            self._resolver.use(self.plugins)
        except SettingError as error:
            raise SettingError(f"{self.places.at('plugins')}: {error}") from None

    def component(self, axis: str, section: Kind, **settings: Any) -> Component:
        """Build the component that a section defines, with `settings` that the file does not give."""
        component = self.component_class(axis, section)
        table = read(section.model_dump(), self._resolver) | {"kind": component.kind}
        # Before a field is reported as missing: it may be misspelt.
        self.places.check_names((axis,), table, ["kind", *component.model_fields], f"{axis} {component.kind!r}")
        with self.errors_placed(axis, section):
            return build(axis, table | settings)

    def component_class(self, axis: str, section: Kind) -> type[Component]:
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
