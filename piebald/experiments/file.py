"""The TOML file of an experiment: its sections, and the recipes, clients, model and runtime that they define."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError

from piebald.contracts import Clients
from piebald.contracts.component import Component, build, kind_of
from piebald.core.arguments import SeedList
from piebald.core.errors import SettingError
from piebald.core.references import NOBODY, USERS, Resolver, Text, search
from piebald.data.clients.data_source import DataSource
from piebald.data.clients.published_rows import with_published
from piebald.data.clients.standardise import Standardisation, constants_of
from piebald.data.partition.by_owner import by_only_owner
from piebald.data.sets.dataset import DataSet
from piebald.experiments.inputs import read_by_model
from piebald.experiments.models import given_models
from piebald.experiments.plan import Plan
from piebald.experiments.recipes import given_recipes
from piebald.experiments.sections import (
    AdviseSection,
    ComparedRecipe,
    Evaluation,
    Kind,
    Named,
    RecipeSection,
    RuntimeSection,
    Section,
    TuneSection,
    combinations,
    file_text,
    place_source,
    section_settings,
)
from piebald.methods.choice.final_models import Keep
from piebald.methods.recipe import Recipe
from piebald.runtimes.base import RuntimeSettings
from piebald.settings.plugins import read
from piebald.settings.setting_errors import of_document
from piebald.settings.setting_places import SettingPlaces
from piebald.settings.toml_document import Document, Key, dumps

if TYPE_CHECKING:
    from piebald.experiments.run_models import Model
    from piebald.server import StoppingCriteria


class ExperimentSettings(Section):
    """The checked content of an experiment file; `plan` builds what it names.

    Attributes:
        rounds: server steps, 10 where nothing else ends the run.
        stop: other limits: updates, seconds, wall_seconds, bytes, target, patience.
        checkpoint_every: server steps between checkpoints; by default as often as costs little.
        seed: the seed of one run.
        seeds: the seeds of each recipe in a comparison.
        measure: heterogeneity measures before training: of "data", of "weights" after one epoch as well, or "none".
        label: the name of the run in reports.
        plugins: modules that register components and recipes of your own, or have what "module:name" names.
        data: the data set by name, or a source of your own rows.
        partition: how rows are divided among clients; by the owners of `data.client` where that is given.
        loss: the name of an objective, a table of its name and the settings of its loss, or "module:name" for a
            function (outputs, targets); chosen by the targets by default.
        out: the run folder.
        recipe: the recipe of one run.
        recipes: the recipes of a comparison; one with `model`, a name or a table, has a model of its own.
        grid: lists of values for settings of the recipe, by name; a comparison tries all combinations.
        keep: the models to end with: those of the last server step, the best by validation loss, or the best for each
            client by its own validation rows, or its model with its nearest rows ("knn_per", or a table with a kind).
        unseen: a number of clients, or a share, that are held out until the end and then adapted to.
        extractor: a frozen network that each client runs once; the model is trained on its outputs.
        longest_step: refuse an update whose norm exceeds this many times the model's, 1000 by default.
        max_examples, max_weight: the most rows that a client counts, and the largest share of one update in a step.
        trackers: experiment trackers, each a name ("tensorboard", "mlflow", "wandb") or a table with a kind.
        tune, advise: the search for settings of the recipes, and for the best method.
        trees: the settings of `piebald trees`: `TreeSettings` of the room `statistics`.
    """

    needs_recipe: ClassVar[bool] = True  # `advise` finds one

    rounds: int | None = Field(default=None, ge=1)
    stop: dict[str, Any] | None = None
    checkpoint_every: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)
    seeds: SeedList | None = None
    measure: Literal["none", "data", "weights"] = "data"
    label: str | None = None
    out: str | None = None
    plugins: list[str] = []  # noqa: RUF012 - a pydantic field
    data: DataSource = DataSource(name="digits")
    partition: Kind | None = None
    loss: Text | dict[str, Any] | None = None
    model: Named
    recipe: RecipeSection | None = None
    recipes: list[ComparedRecipe] | None = Field(default=None, min_length=1)
    grid: dict[str, Any] | None = None
    keep: Keep | dict[str, Any] = "last"
    unseen: float = Field(default=0, ge=0)
    extractor: Text | None = None
    longest_step: float | None = Field(default=None, gt=0)
    max_examples: int | None = Field(default=None, ge=1)
    max_weight: float = Field(default=1.0, gt=0, le=1)
    trackers: list[Text | dict[str, Any]] = []  # noqa: RUF012 - a pydantic field
    fleet: Kind | None = None
    runtime: RuntimeSection = RuntimeSection()
    evaluate: Evaluation = Evaluation()
    tune: TuneSection | None = None
    advise: AdviseSection | None = None
    trees: dict[str, Any] | None = None

    _document: Document = PrivateAttr(default_factory=lambda: Document("", "settings"))
    _resolver: Resolver = PrivateAttr()
    _constants: Standardisation | None = PrivateAttr(default=None)

    @classmethod
    def load(
        cls, path: str | Path | None, flags: Sequence[str] = (), out: str | None = None, runtime: str | None = None
    ) -> Self:
        """Load a file, or the built-in experiment, with the flags of the command line on top."""
        name = "the built-in experiment" if path is None else str(path)
        document = Document(file_text(path), name)
        folder = Path.cwd() if path is None else Path(path).resolve().parent
        place_source(document, folder)
        for place in (folder, Path.cwd()):
            search(place)
        for flag in flags:
            document.set(flag)
        place_source(document, Path.cwd())  # of --set; that of the file is absolute by now
        if out is not None:
            document.put("out", out, "--out")
        given = document.values.get("runtime")
        if runtime is not None and not (isinstance(given, dict) and given.get("kind") == runtime):
            document.put("runtime", {"kind": runtime}, "--runtime")
        return cls.of(document, USERS)

    @classmethod
    def of(cls, document: Document, resolver: Resolver = NOBODY) -> Self:
        """Check a document; the first error is reported with its line.

        Args:
            document: the settings as they were written.
            resolver: that of their author, who names modules with its rights and no others; none by default.
        """
        try:
            settings = cls.model_validate(resolver.mark(document.values))
        except ValidationError as error:
            raise of_document(error, document, cls) from None
        document.refuse_dates()
        settings._document, settings._resolver = document, resolver
        if settings.recipe is not None and settings.recipes is not None:
            raise SettingError(f"{document.name} needs [recipe] or [[recipes]], not both")
        if cls.needs_recipe and settings.recipe is None and settings.recipes is None:
            raise SettingError(f"{document.name} needs a [recipe] with a name, or [[recipes]]")
        if settings.partition is None and settings.data.source is None:
            raise SettingError(f"{document.name} needs a section [partition] with a kind")
        if {"seed", "seeds"} <= settings.model_fields_set:
            raise SettingError(
                f"{document.origin(('seeds',))}: seed and seeds both say which seed to use: leave one out"
            )
        return settings

    @classmethod
    def of_table(cls, table: Mapping[str, Any], name: str, resolver: Resolver = NOBODY) -> Self:
        """Settings from a run folder or from terms, see `of`."""
        return cls.of(Document.of(table, name), resolver)

    def table(self) -> dict[str, Any]:
        """The settings as plain values, which `of_table` reads again; with constants that `plan` has computed."""
        made = self.model_dump(exclude_none=True, exclude={"seed"} if self.seeds else None)
        if self._constants is not None:
            made["data"]["standardise"] = self._constants.model_dump()
        return made

    def text(self) -> str:
        """The settings as TOML."""
        return dumps(self.table())

    @property
    def _places(self) -> SettingPlaces:
        return SettingPlaces(self._document)

    @property
    def first_seed(self) -> int:
        """The seed of one run."""
        return self.seeds[0] if self.seeds else self.seed

    @property
    def compares(self) -> bool:
        """Whether the settings define more than one run."""
        return bool(self.recipes or self.grid or (self.seeds and len(self.seeds) > 1))

    def plan(self) -> Plan:
        """Build recipes, clients, model and runtime; cheap checks come first, before data is read."""
        recipes = self.built_recipes()
        for tracker in read(self.trackers, self._resolver):
            build("tracker", tracker)
        partition = self._partition()
        runtime = self._runtime()
        clients = self._read_by_model(self._clients(partition))
        if self._constants is not None and self.runtime.kind == "federation":
            runtime = self._runtime()  # sites need the constants
        models: dict[str, Model] = {}
        for index, one in enumerate(self.recipes or ()):
            if one.model is not None:
                model = self.model_for(clients, one.model, ("recipes", index, "model"))
                models |= dict.fromkeys(one.labels(combinations(self.grid or {}, self._document.origin)), model)
        return Plan(recipes, clients, self.model_for(clients), runtime, self._stop(), models)

    @property
    def rows_at_sites(self) -> bool:
        """Whether rows are at the sites of a federation, and none are here."""
        return self.partition is not None and self.partition.kind == "sites"

    def as_in_the_source(self) -> Self:
        """The same settings with inputs as the source has them."""
        return self.model_copy(update={"data": self.data.model_copy(update={"standardise": None})})

    def source_clients(self) -> Clients:
        """The clients with their rows as the source has them."""
        self.use_plugins()
        return self._clients(self._partition())

    def clients(self) -> Clients:
        """The clients and their rows alone."""
        return self._read_by_model(self.source_clients())

    def use_plugins(self) -> None:
        """Import the modules that the file lists."""
        try:
            self._resolver.use(self.plugins)
        except SettingError as error:
            raise SettingError(f"{self._places.at('plugins')}: {error}") from None

    def _read_by_model(self, clients: Clients) -> Clients:
        made = read_by_model(clients, self.extractor, self.data.standardise, self.unseen, self._places.at)
        self._constants = constants_of(made)
        return made

    def _recipe_sections(self) -> dict[Key, RecipeSection]:
        if self.recipe is not None:
            return {("recipe",): self.recipe}
        return {("recipes", index): named for index, named in enumerate(self.recipes or ())}

    def search_space(self) -> dict[str, Any] | None:
        """The values of settings to search among, by the setting's name without "recipe."; None for the default."""
        return None if self.tune is None else self.tune.values(self._document.origin)

    def _component(self, section: str, kind: Kind, **more: Any) -> Component:
        """The component of a section."""
        try:
            table = read(kind.model_dump(), self._resolver)
            table["kind"] = kind_of(table["kind"])
        except SettingError as error:
            raise self._places.placed(error, (section,), kind) from None
        if known := Component.registry.get(section, {}).get(table["kind"]):
            # Before a field is reported as missing: it may be misspelt.
            self._places.check_names((section,), table, ["kind", *known.model_fields], f"{section} {table['kind']!r}")
        try:
            return build(section, table | more)
        except SettingError as error:
            raise self._places.placed(error, (section,), kind) from None

    def _runtime(self) -> RuntimeSettings:
        if self.runtime.kind == "federation":  # real devices have their own speed, so there is no fleet
            own = ("out", "runtime", "fleet")  # settings of the server alone, or of the simulator
            more: dict[str, Any] = {"experiment": {key: v for key, v in self.table().items() if key not in own}}
        else:
            more = {} if self.fleet is None else {"fleet": self._component("fleet", self.fleet)}
        made = self._component("runtime", self.runtime, **more)
        assert isinstance(made, RuntimeSettings)
        return made

    def _stop(self) -> StoppingCriteria | None:
        from piebald.server import StoppingCriteria

        if self.stop is None:
            return None
        self._places.check_names(("stop",), self.stop, [*StoppingCriteria.model_fields], "stop")
        try:
            return StoppingCriteria(**self.stop)
        except SettingError as error:
            raise self._places.placed(error, ("stop",), self.stop) from None

    def built_recipes(self) -> dict[str, Recipe]:
        """The recipes alone, by their labels; no data is read."""
        self.use_plugins()
        return given_recipes(self._recipe_sections(), self.grid or {}, self._places, self._resolver)

    def section(self, name: Literal["trees"]) -> Component:
        """Return the settings of a section that a room above this one defines."""
        settings, values = section_settings(name), getattr(self, name) or {}
        self._places.check_names((name,), values, [*settings.model_fields], name)
        try:
            return settings(**values)
        except SettingError as error:
            raise self._places.placed(error, (name,), values) from None

    def _partition(self) -> Component | None:
        if self.partition is not None:
            return self._component("partition", self.partition)
        if self.data.client is not None:
            return self._component("partition", Kind(kind="by_owner"), owner=self.data.client)
        return None

    def _clients(self, partition: Component | None) -> Clients:
        """The clients with the rows that all of them have."""
        clients = self._own_clients(partition)
        try:
            return with_published(clients, self.data)
        except SettingError as error:
            raise SettingError(f"{self._places.at('data', 'public')}: {error}") from None

    def _own_clients(self, partition: Component | None) -> Clients:
        """The clients: the partition's of the data, or those that the source has already."""
        from piebald.data.partition import Partition, RemotePartition

        if isinstance(partition, RemotePartition):
            return partition.clients_elsewhere()
        try:
            rows = self.data.load()
        except SettingError as error:
            raise self._places.placed(error, ("data",), self.data) from None
        if not isinstance(rows, DataSet):
            if self.partition is not None:
                raise SettingError(
                    f"{self._places.at('partition')}: {self.data.source} has clients already: remove [partition]"
                )
            return rows
        partition = partition or by_only_owner(rows)
        if partition is None:
            raise SettingError(f"{self._document.name} needs a section [partition] with a kind, or a client in [data]")
        assert isinstance(partition, Partition)
        try:
            return partition.split(rows)
        except SettingError as error:
            raise self._places.placed(error, ("partition",), self.partition or {}) from None

    def model_for(self, clients: Clients, named: Named | None = None, key: Key = ("model",)) -> Model:
        """A function of the seed that makes a model, [model] by default, for these clients' inputs and targets.

        Where clients have models of their own, several by clients' names, see `given_models.GivenModels`.
        """
        return given_models(clients, named or self.model, self.loss, self.first_seed, self._places, key)

    def located(self, error: SettingError) -> SettingError:
        """The error with its place, if its message begins with the name of a setting of a recipe."""
        from piebald.methods.recipes.named import lookup

        *quoted, why = re.fullmatch(r"(?s)(?:recipe (?:'(.*?)'|\"(.*?)\"): )?(.*)", str(error)).groups()  # type: ignore[union-attr]
        label, word = next(filter(None, quoted), None), next(iter(re.findall(r"\w+", why)), "")
        for section, own in (("tune", self.tune), ("advise", self.advise)):
            if own is not None and word in type(own).model_fields:
                return SettingError(f"{self._places.at(section, word)}: {error}")
        for key, named in self._recipe_sections().items():
            if word in lookup(named.name, self._resolver).defaults and label in (
                None,
                *named.labels(combinations(self.grid or {}, self._document.origin)),
            ):
                placed = self._places.placed(SettingError(why), key, named)
                return placed if label is None else SettingError(f"recipe {label!r}: {placed}")
        return error
