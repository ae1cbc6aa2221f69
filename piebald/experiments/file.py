"""The experiment file: loaded, checked, written, and built into the objects that it defines.

The clients of an experiment file: their rows from its source, and inputs as the model reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import PrivateAttr, ValidationError

from piebald.contracts import Clients
from piebald.contracts.component import Component, build
from piebald.core import pytree
from piebald.core.errors import SettingError, about
from piebald.core.references import NOBODY, USERS, Reference, Resolver, Users
from piebald.data.clients.client_tables import files_of
from piebald.data.clients.data_source import with_published
from piebald.data.clients.prepared import (
    SitesPrepared,
    Standardisation,
    columns_of,
    constants_of,
    preparation_of,
    prepared,
    rows_of_recipe,
    standardised,
)
from piebald.data.embeddings import embedded_by
from piebald.data.partition.by_owner import by_only_owner
from piebald.data.partition.split import unseen_numbers
from piebald.data.preparation.preparation import Preparation
from piebald.data.sets.dataset import DataSet
from piebald.experiments.recipes import ExperimentFields, Model, located, models_of, recipes_of
from piebald.experiments.run_settings import ComparedKeywords
from piebald.experiments.sections import Kind, file_text, place_source, section_settings
from piebald.methods.recipe import Recipe
from piebald.methods.transforms.base import MaskingTransform
from piebald.runtimes.base import RuntimeSettings
from piebald.server import StoppingCriteria
from piebald.settings.plugins import read
from piebald.settings.toml_document import Document, dumps, of_document


def partition_of(fields: ExperimentFields) -> Component | None:
    """Build the partition; None where the source has clients."""
    if fields.partition is not None:
        return fields.component("partition", fields.partition)
    if fields.data.client is not None:
        return fields.component("partition", Kind(kind="by_owner"), owner=fields.data.client)
    return None


def clients_of(fields: ExperimentFields, partition: Component | None) -> Clients:
    """Return the clients with their rows as the source has them, and the rows that all of them have."""
    clients = _own_rows(fields, partition)
    with about(fields.places.at("data", "public")):
        return with_published(clients, fields.data)


def _own_rows(fields: ExperimentFields, partition: Component | None) -> Clients:
    """Return the clients: the partition's of the data, or those that the source has already."""
    from piebald.data.clients.sites import Sites
    from piebald.data.partition import Partition, RemotePartition

    if isinstance(partition, RemotePartition):
        agreed, length = fields.wanted.agreed, fields.wanted.length
        with fields.errors_placed("split", {}):
            if isinstance(partition, Sites):
                if agreed is not None:
                    partition = partition.prepared(agreed)
                elif length is not None:
                    partition = partition.of_text(length)
                partition = partition.predicting(fields.data.target)
            sites = partition.clients_elsewhere().divided_by(fields.split)
            sites.target = fields.data.target
        return SitesPrepared(sites, agreed) if agreed is not None and isinstance(partition, Sites) else sites
    with fields.errors_placed("data", fields.data):
        rows = fields.data.load(fields.split, wants_preparation(fields), fields.wanted.cleaning)
    if not isinstance(rows, DataSet):
        if fields.partition is not None:
            raise SettingError(
                f"{fields.places.at('partition')}: {fields.data.source} has clients already: remove [partition]"
            )
        return rows
    partition = partition or by_only_owner(rows)
    if partition is None:
        raise SettingError(f"{fields.document.name} needs a section [partition] with a kind, or a client in [data]")
    assert isinstance(partition, Partition)
    with fields.errors_placed("partition", fields.partition or {}):
        return partition.split(rows, fields.split)


def wants_preparation(fields: ExperimentFields) -> bool:
    """Return whether columns of tables are to be prepared.

    An extractor, or constants of standard scores, want numbers as they are.
    """
    plain = fields.extractor is not None or isinstance(fields.data.standardise, Standardisation)
    if fields.prepare not in (None, "none") and (plain or fields.data.standardise is not None):
        name = "extractor" if fields.extractor is not None else "data.standardise"
        raise SettingError(
            f"{fields.places.at('prepare')}: prepare scales inputs, and {name} changes them as well: leave one out"
        )
    return fields.prepare != "none" and not plain


def as_the_model_reads(fields: ExperimentFields, clients: Clients) -> Clients:
    """Return the clients with their inputs behind the extractor of the file, and as standard scores.

    Raises:
        SettingError: the rows cannot be read so.
    """
    at, standardise = fields.places.at, fields.data.standardise
    if columns_of(clients) is not None:
        seeds = fields.seeds or [fields.seed]
        # clients that any of the seeds holds out, since all runs share one preparation
        held_out = {number for seed in seeds for number in unseen_numbers(clients.names, fields.unseen, seed)}
        target, origin = fields.data.target or "target", str(fields.data.source or "the rows")
        with about(at("prepare")):
            return prepared(clients, fields.wanted, target, held_out, origin=origin)
    if fields.prepare not in (None, "none") and not fields.rows_at_sites:
        raise SettingError(
            f"{at('prepare')}: prepare is for the columns of tables, and these inputs are arrays: leave it out, or set "
            "standardise = 'federated' in [data]"
        )
    if fields.extractor is not None:
        with about(at("extractor")):
            clients = embedded_by(clients, fields.extractor)
    if standardise is None:
        return clients
    if standardise == "federated" and fields.unseen:
        raise SettingError(
            f"{at('unseen')}: unseen holds clients out, whose rows would count in data.standardise = 'federated': give "
            "constants, standardise = { mean = [...], deviation = [...] }, or leave one of them out"
        )
    with about(at("data", "standardise")):
        return standardised(clients, standardise if isinstance(standardise, Standardisation) else None)


log = logging.getLogger("piebald.experiments")


class ExperimentSettings(ExperimentFields):
    """The checked content of an experiment file; `plan` builds what it names."""

    needs_recipe: ClassVar[bool] = True  # `advise` finds one

    _constants: Standardisation | None = PrivateAttr(default=None)
    _agreed: Preparation | None = PrivateAttr(default=None)

    @classmethod
    def load(
        cls,
        path: str | Path | None,
        flags: Sequence[str] = (),
        out: str | None = None,
        runtime: str | None = None,
        scale: str | None = None,
        text: str | None = None,
    ) -> Self:
        """Load a file, or the built-in experiment, at one of its scales, with the flags of the command line on top.

        Args:
            path: the file.
            flags, out, runtime, scale: of the command line.
            text: the settings in place of those of the file, which is then a table.
        """
        name = "the built-in experiment" if path is None else str(path)
        document = Document(file_text(path) if text is None else text, name)
        document.choose_scale(scale)
        folder = Path.cwd() if path is None else Path(path).resolve().parent
        place_source(document, folder)
        document.values = Users(folder).mark(document.values)  # code is named from there as well
        for flag in flags:
            document.set(flag)
        place_source(document, Path.cwd())  # of --set; that of the file is absolute by now
        if out is not None:
            document.put("out", out, "--out")
        section = document.values.get("runtime")
        if runtime is not None and not (isinstance(section, dict) and section.get("kind") == runtime):
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
        """Check settings from a run folder or from terms, see `of`."""
        return cls.of(Document.of(table, name), resolver)

    def table(self) -> dict[str, Any]:
        """Return the settings as plain values that `of_table` reads again, with constants that `plan` has computed."""
        table = self.model_dump(exclude_none=True, by_alias=True, exclude={"seed"} if self.seeds else None)
        if self._constants is not None:
            table["data"]["standardise"] = self._constants.model_dump()
        if self._agreed is not None:
            table["prepare"] = self.wanted.model_copy(update={"agreed": self._agreed}).model_dump(exclude_none=True)
            table["data"].pop("standardise", None)  # the preparation scales
        return table

    def text(self) -> str:
        """Return the settings as TOML."""
        return dumps(self.table())

    def plan(self, clients: Clients | None = None) -> Plan:
        """Build recipes, clients, model and runtime; cheap checks come first, before data is read.

        Args:
            clients: clients in place of those of the file, whose rows are not read then.
        """
        recipes = self.built_recipes()
        if self.prepare is None and (noise := next(filter(None, map(noise_of, recipes.values())), None)) is not None:
            # what is agreed on from the rows would tell of each what the noise hides
            log.info("columns of numbers are taken as they are (prepare = 'none') beside the noise of %s", noise)
            return self.model_copy(update={"prepare": "none"}).plan(clients)
        check_trackers(self)
        partition = partition_of(self)
        runtime = runtime_of(self, self.table())
        clients = self._read_by_model(clients_of(self, partition)) if clients is None else clients
        if self._constants is not None or self._agreed is not None:  # sites need them
            runtime = runtime_of(self, self.table())
        models: dict[str, Model] = {}
        on_all_rows: list[str] = []
        pooled: list[str] = []
        for index, section in enumerate(self.recipes or ()):
            labels = section.labels(self.grid_points())
            on_all_rows += [] if section.validation else labels
            pooled += labels if section.pooled else []
            if section.model is not None:
                model = models_of(self, clients, section.model, ("recipes", index, "model"))
                models |= dict.fromkeys(labels, model)
        stop = stopping_criteria(self)
        return Plan(recipes, clients, self.model_for(clients), runtime, stop, models, on_all_rows, pooled)

    def run_keywords(self, plan: Plan, names: type[Any] = ComparedKeywords) -> dict[str, Any]:
        """Return the settings of runs as keywords of `piebald.run`, or of a search, by `names`, see `run_settings`."""
        built = {"runtime": plan.runtime, "stop": plan.stop}
        shared = {name: built.get(name, value) for name, value in self.keywords(names).items()}
        return {**shared, "settings": self.table()}

    def built_recipes(self) -> dict[str, Recipe]:
        """Build the recipes alone, by their labels; no data is read."""
        self.use_plugins()
        return recipes_of(self)

    @property
    def missing_source(self) -> str | None:
        """The path of the source, if nothing is there any more."""
        source = self.data.source
        if source is None or isinstance(source, Reference):
            return None
        return None if any(path.exists() for path in files_of(Path(source))) else str(source)

    def source_clients(self) -> Clients:
        """Return the clients with their rows as the source has them."""
        self.use_plugins()
        return clients_of(self, partition_of(self))

    def clients(self) -> Clients:
        """Return the clients and their rows alone, with inputs as the model reads them."""
        return self._read_by_model(self.source_clients())

    def _read_by_model(self, clients: Clients) -> Clients:
        read = as_the_model_reads(self, clients)
        self._constants, self._agreed = constants_of(read), preparation_of(read)
        return read

    def model_for(self, clients: Clients, shape: pytree.Form | None = None) -> Model:
        """Return a function of the seed that makes [model] for these clients, or several by clients' names.

        Args:
            clients: with their inputs as the model reads them.
            shape: of one row of inputs; by default that of a client that lacks none.
        """
        return models_of(self, clients, shape=shape)

    def as_in_the_source(self) -> Self:
        """Return the same settings with inputs as the source has them."""
        as_they_are = {"data": self.data.model_copy(update={"standardise": None}), "prepare": "none"}
        return self.model_copy(update=as_they_are)

    @property
    def asks_sites(self) -> bool:
        """True if the sites have still to agree on the preparation of their tables.

        Raises:
            SettingError: the form of inputs is not known, and nothing is to be prepared; or no target is named.
        """
        if not self.rows_at_sites or getattr(self.partition, "inputs", None) is not None:
            return False
        if not wants_preparation(self):
            raise SettingError(
                f"{self.places.at('partition')}: inputs, the shape of one input, must be given where prepare = 'none' "
                "or an extractor reads rows"
            )
        return self.wanted.agreed is None and bool(self.target_at_sites)

    @property
    def target_at_sites(self) -> str | list[str]:
        """The column to predict of the tables that sites have, or several.

        Raises:
            SettingError: none is named.
        """
        if self.data.target is None:
            raise SettingError(f"{self.places.at('data')}: name the column to predict, target in [data]")
        return self.data.target

    def with_agreed(self, agreed: Preparation | None) -> Self:
        """Return the same settings with a preparation that clients have agreed on, or with none yet."""
        return self.model_copy(update={"prepare": self.wanted.model_copy(update={"agreed": agreed})})

    def divisions(self) -> list[Self]:
        """Return the settings of each division of the rows that [split] asks for; these settings alone without one."""
        if self.split is None or not self.split.several:
            return [self]
        whole = self.model_copy(update={"split": self.split.with_(hold_out=None, folds=None, test=0, validation=0)})
        names = whole.source_clients().names if self.split.hold_out == "each" else ()
        with self.errors_placed("split", {}):
            return [self.model_copy(update={"split": split}) for split in self.split.repeats(names)]

    def search_space(self) -> dict[str, Any] | None:
        """Return the values of settings to search among, by the setting's name without "recipe."; None by default."""
        return None if self.tune is None else self.tune.values(self.document.origin)

    def section(self, name: Literal["trees"]) -> Component:
        """Build the settings of a section that a question defines, see `preview.question_section`."""
        return question_section(self, name)

    def located(self, error: SettingError) -> SettingError:
        """Return an error with its place, if its message begins with the name of a setting of a recipe."""
        return located(self, error)


@dataclass(frozen=True)
class Plan:
    """The objects that settings define.

    Attributes:
        recipes: the recipes by label; one, unless the settings define a comparison.
        clients: the clients and their rows.
        model: a function of a seed that makes the initial model, or several by clients' names.
        runtime: the runtime.
        stop: the stopping criteria besides the number of rounds.
        models: models of recipes that bring their own, by the recipe's label.
        on_all_rows: labels of recipes whose clients train on their validation rows as well.
        pooled: labels of recipes that have all training rows in one place.
    """

    recipes: Mapping[str, Recipe]
    clients: Clients
    model: Model
    runtime: RuntimeSettings
    stop: StoppingCriteria | None = None
    models: Mapping[str, Model] = field(default_factory=dict)
    on_all_rows: Sequence[str] = ()
    pooled: Sequence[str] = ()

    def model_of(self, label: str) -> Model:
        """Return the model of a recipe."""
        return self.models.get(label, self.model)

    def clients_of(self, label: str) -> Clients:
        """Return the clients with the rows that a recipe has."""
        return rows_of_recipe(self.clients, label in self.on_all_rows, label in self.pooled)


def runtime_of(fields: ExperimentFields, table: Mapping[str, Any]) -> RuntimeSettings:
    """Build the runtime; a federation sends its sites the settings in `table`, but for those of the server alone."""
    settings: dict[str, Any] = {}
    if "experiment" in fields.component_class("runtime", fields.runtime).model_fields:
        # real devices have their own speed, so there is no fleet
        settings["experiment"] = {key: value for key, value in table.items() if key not in ("out", "runtime", "fleet")}
    elif fields.fleet is not None:
        settings["fleet"] = fields.component("fleet", fields.fleet)
    runtime = fields.component("runtime", fields.runtime, **settings)
    assert isinstance(runtime, RuntimeSettings)
    return runtime


def noise_of(recipe: Recipe) -> str | None:
    """Return the kind of the component that hides rows or updates by noise, or None."""
    hiding = (recipe.training, *recipe.transforms)
    noisy = (one for one in hiding if one.protects and not isinstance(one, MaskingTransform))
    return next((one.kind for one in noisy), None)


def stopping_criteria(fields: ExperimentFields) -> StoppingCriteria | None:
    """Build the limits of a run besides its rounds."""
    if not isinstance(fields.stop, Mapping):
        return fields.stop
    fields.places.check_names(("stop",), fields.stop, [*StoppingCriteria.model_fields], "stop")
    with fields.errors_placed("stop", fields.stop):
        return StoppingCriteria(**fields.stop)


def check_trackers(fields: ExperimentFields) -> None:
    """Refuse trackers that cannot be built."""
    for tracker in read(fields.trackers, fields.resolver):
        build("tracker", tracker)


def question_section(fields: ExperimentFields, name: Literal["trees"]) -> Component:
    """Build the settings of a section that a room above this one defines."""
    settings, values = section_settings(name), getattr(fields, name) or {}
    fields.places.check_names((name,), values, [*settings.model_fields], name)
    with fields.errors_placed(name, values):
        return settings(**values)
