"""The TOML file of an experiment: what may stand in it, where a wrong value stands, and what it all builds."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from piebald.component import Component, build
from piebald.contracts import Clients, Split
from piebald.errors import SettingError, unknown
from piebald.recipe import Recipe
from piebald.runtimes.base import RuntimeSettings
from piebald.toml_document import Document, Key, dotted, dumps

if TYPE_CHECKING:
    from torch import nn

    from piebald.data import DataSet
    from piebald.server import StoppingCriteria


class Section(BaseModel):
    """A table with fixed keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Named(Section):
    """A table that names something; the other keys are that thing's own settings."""

    model_config = ConfigDict(extra="allow")

    name: str


class Data(Section):
    """The data set.  It has no settings: what is done with its rows is said by the partition."""

    name: str = "digits"


class Kind(Section):
    """A table that stands for a part; the other keys are the part's own fields."""

    model_config = ConfigDict(extra="allow")

    kind: str


class Place(Kind):
    """Where it runs; fields without a kind are the simulator's."""

    kind: str = "simulator"


class Evaluation(Section):
    """When and on what models are judged.

    Attributes:
        every: commits between two evaluations, 0 for none.
        clients: how many clients are asked, all by default.
        split: which of their rows.
        metrics: names of metrics, the one that matters first; by default what fits the targets.
    """

    every: int = Field(default=1, ge=0)
    clients: int | None = Field(default=None, ge=1)
    split: Split = "test"
    metrics: list[str] | None = Field(default=None, min_length=1)


class ExperimentSettings(Section):
    """An experiment as its file says it, checked; `plan` makes the things it names.

    Attributes:
        rounds: commits of the global model, 10 where nothing else ends the run.
        stop: other limits: updates, seconds, wall_seconds, bytes, target, patience.
        checkpoint_every: commits between two that can be resumed; by default as often as costs little.
        seed: of one run.  seeds: of each recipe's runs in a comparison.
        measure: how unlike clients are, before any training: of their data, also of weights after one epoch, or none.
        label: what reports call the run.
        out: the run folder.
        recipe: of one run.  recipes: of a comparison.
        grid: lists of values for settings of the recipe, by name; a comparison tries all combinations.
        keep: the models to end with, of the last commit or the best by validation loss.
        unseen: a number of clients, or a share, that are held out until the end and then fitted to.
        extractor: a frozen network that each client runs once; the model reads what it made.
        longest_step: refuse an update whose norm is above this many times the model's, 1000 by default.
    """

    rounds: int | None = Field(default=None, ge=1)
    stop: dict[str, Any] | None = None
    checkpoint_every: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)
    seeds: list[int] | None = Field(default=None, min_length=1)
    measure: Literal["none", "data", "weights"] = "data"
    label: str | None = None
    out: str | None = None
    data: Data = Data()
    partition: Kind
    model: Named
    recipe: Named | None = None
    recipes: list[Named] | None = Field(default=None, min_length=1)
    grid: dict[str, Any] | None = None
    keep: Literal["last", "best"] = "last"
    unseen: float = Field(default=0, ge=0)
    extractor: str | None = None
    longest_step: float | None = Field(default=None, gt=0)
    fleet: Kind | None = None
    runtime: Place = Place()
    evaluate: Evaluation = Evaluation()

    _document: Document = PrivateAttr(default_factory=lambda: Document("", "settings"))

    @classmethod
    def load(
        cls, path: str | Path | None, flags: Sequence[str] = (), out: str | None = None, runtime: str | None = None
    ) -> Self:
        """Settings from a file, or the built-in experiment, with the command line's flags on top."""
        name = "the built-in experiment" if path is None else str(path)
        document = Document(_text(path), name)
        for flag in flags:
            document.set(flag)
        if out is not None:
            document.put("out", out, "--out")
        given = document.values.get("runtime")
        if runtime is not None and not (isinstance(given, dict) and given.get("kind") == runtime):
            document.put("runtime", {"kind": runtime}, "--runtime")
        return cls.of(document)

    @classmethod
    def of(cls, document: Document) -> Self:
        """Settings from a document; the first thing that is wrong is said with its line."""
        try:
            settings = cls.model_validate(document.values)
        except ValidationError as error:
            raise _reject_reason(error, document) from None
        settings._document = document
        if (settings.recipe is None) == (settings.recipes is None):
            wants = "[recipe] or [[recipes]], not both" if settings.recipe else "a [recipe] with a name, or [[recipes]]"
            raise SettingError(f"{document.name} needs {wants}")
        return settings

    @classmethod
    def of_table(cls, table: Mapping[str, Any], name: str) -> Self:
        """Settings that a run folder kept."""
        return cls.of(Document.of(table, name))

    def table(self) -> dict[str, Any]:
        """Plain values, to be kept with a run and read again by `of_table`."""
        return self.model_dump(exclude_none=True)

    def text(self) -> str:
        """The file that says the same."""
        return dumps(self.table())

    @property
    def compares(self) -> bool:
        """Whether there is more than one run in it."""
        return bool(self.recipes or self.grid or (self.seeds and len(self.seeds) > 1))

    def plan(self) -> Plan:
        """The recipes, the clients and the model.  Cheap things come first, so mistakes show before data is loaded."""
        recipes = self._recipes()
        partition = self._part("partition", self.partition, "piebald.partition")
        runtime = self._runtime()
        dataset = self._dataset(partition)
        try:
            clients = partition.split(dataset)  # type: ignore[attr-defined]
        except SettingError as error:
            raise self._placed(error, ("partition",), self.partition) from None
        clients = self.behind_extractor(clients)
        return Plan(recipes, clients, self._model(dataset, clients), runtime, self._stop())

    def behind_extractor(self, clients: Clients) -> Clients:
        """Clients as the model reads them."""
        if self.extractor is None:
            return clients
        from piebald import models

        try:
            return models.embedded(clients, self.extractor)
        except SettingError as error:
            raise SettingError(f"{self._at('extractor')}: {error}") from None

    def _given(self) -> dict[Key, Named]:
        if self.recipe is not None:
            return {("recipe",): self.recipe}
        return {("recipes", index): named for index, named in enumerate(self.recipes or ())}

    def _recipes(self) -> dict[str, Recipe]:
        made: dict[str, Recipe] = {}
        for key, named in self._given().items():
            table = named.model_dump()
            label = str(table.pop("label", table["name"]))
            for changes in self._combinations():
                called = label + "".join(f" {name}={value}" for name, value in changes.items())
                if called in made:
                    raise SettingError(f"{self._at(*key)}: there are two recipes called {called!r}: give one a label")
                made[called] = self._recipe(key, {**table, **changes}, changes)
        return made

    def _combinations(self) -> list[dict[str, Any]]:
        """The settings of each point of the grid, by name."""
        lists: dict[str, list[Any]] = {}
        for name, values, key in _leaves(self.grid or {}, ("grid",)):
            place = self._at(*key)
            if not name.startswith("recipe."):
                raise SettingError(f"{place}: grid can vary settings of the recipe, like 'recipe.lr', got {name!r}")
            if not isinstance(values, list) or not values:
                raise SettingError(f"{place}: grid needs a list of values for {name}, got {values!r}")
            lists[name.removeprefix("recipe.")] = values
        return [dict(zip(lists, point, strict=True)) for point in itertools.product(*lists.values())]

    def _recipe(self, key: Key, table: dict[str, Any], changes: Mapping[str, Any]) -> Recipe:
        from piebald import recipes

        name = table.pop("name")
        known = {entry["name"]: entry["fields"] for entry in recipes.listing()}
        if name not in known:
            raise SettingError(f"{self._at(*key, 'name')}: {unknown('recipe', name, known)}")
        # A recipe may have a setting of an axis' name (hdafl: aggregation = "gradient_norm"); a table still means the axis.
        answers = {
            axis: table.pop(axis)
            for axis in Recipe.axes
            if axis in table and (axis not in known[name] or isinstance(table[axis], dict))
        }
        self._check_names(key, table, [*known[name], *Recipe.axes], f"recipe {name!r}", changes)
        try:
            made = recipes.make(name, **table)
        except SettingError as error:
            raise self._placed(error, key, table, changes) from None
        for axis, answer in answers.items():
            try:
                made = made.with_(**{axis: answer})
            except SettingError as error:
                inner = answer if isinstance(answer, dict) else {}
                raise self._placed(error, (*key, axis), inner) from None
        return made

    def _part(self, section: str, kind: Kind, module: str, **more: Any) -> Component:
        """A part from its section; `module` is what registers the kinds."""
        __import__(module)
        table = kind.model_dump()
        if known := Component.registry.get(section, {}).get(kind.kind):
            # Before the part says that a field is missing: it may be there, misspelt.
            self._check_names((section,), table, ["kind", *known.model_fields], f"{section} {kind.kind!r}")
        try:
            return build(section, table | more)
        except SettingError as error:
            raise self._placed(error, (section,), kind) from None

    def _runtime(self) -> RuntimeSettings:
        if self.runtime.kind == "federation":  # real devices are as fast as they are, so there is no fleet
            own = ("out", "runtime", "fleet")  # what is the server's own business, or only simulated
            more: dict[str, Any] = {"experiment": {key: v for key, v in self.table().items() if key not in own}}
        else:
            more = {} if self.fleet is None else {"fleet": self._part("fleet", self.fleet, "piebald.partition")}
        made = self._part("runtime", self.runtime, "piebald.runtimes", **more)
        assert isinstance(made, RuntimeSettings)
        return made

    def _stop(self) -> StoppingCriteria | None:
        from piebald.server import StoppingCriteria

        if self.stop is None:
            return None
        self._check_names(("stop",), self.stop, [*StoppingCriteria.model_fields], "stop")
        try:
            return StoppingCriteria(**self.stop)
        except SettingError as error:
            raise self._placed(error, ("stop",), self.stop) from None

    def _dataset(self, partition: Component) -> DataSet:
        from piebald import data

        if partition.kind == "sites":
            return partition.blank()  # type: ignore[attr-defined,no-any-return]
        try:
            return data.load(self.data.name)
        except SettingError as error:
            raise SettingError(f"{self._at('data', 'name')}: {error}") from None

    def _model(self, dataset: DataSet, clients: Clients) -> Callable[[int], nn.Module]:
        from piebald import models

        table = self.model.model_dump()
        name = table.pop("name")
        if name not in models.names():
            raise SettingError(f"{self._at('model', 'name')}: {unknown('model', name, models.names())}")
        outputs = math.prod(dataset.y.shape[1:]) if dataset.classes is None else len(dataset.classes)

        shape = dataset.input_shape if self.extractor is None else tuple(clients.rows(0, "train").x.shape[1:])

        def made(seed: int) -> nn.Module:
            return models.build_model(name, shape, outputs, seed, **table)

        try:
            made(self.seed)
        except SettingError as error:
            raise self._placed(error, ("model",), self.model) from None
        return made

    def located(self, error: SettingError) -> SettingError:
        """The same reject_reason with its place, if it begins with the name of a setting of a recipe."""
        from piebald import recipes

        fields = {entry["name"]: entry["fields"] for entry in recipes.listing()}
        word = next(iter(re.findall(r"\w+", str(error))), "")
        for key, named in self._given().items():
            if word in fields[named.name]:
                return self._placed(error, key, named)
        return error

    def _at(self, *key: str | int) -> str:
        return self._document.origin(key)

    def _of(self, key: Key, name: str, changes: Container[str]) -> str:
        """Where a setting of a section came from; `changes` are those that the grid set."""
        return self._at("grid", f"recipe.{name}") if name in changes else self._at(*key, name)

    def _check_names(
        self, key: Key, table: Iterable[str], known: Sequence[str], what: str, changes: Container[str] = ()
    ) -> None:
        for name in table:
            if name not in known:
                error = unknown(f"setting of {what} called", name, known)
                raise SettingError(f"{self._of(key, name, changes)}: {error}")

    def _placed(
        self, error: SettingError, key: Key, given: Section | Mapping[str, Any], changes: Container[str] = ()
    ) -> SettingError:
        """The same reject_reason, with the place of the key it is about, and the key's whole name.

        Parts say what is wrong with them and know nothing of files, so the key is found by its name, or else by its
        value, in what they say.
        """
        table = given.model_dump() if isinstance(given, Section) else given
        message = plain(re.sub(r"^(recipe|\w+ '[^']*'): ", "", str(error)))
        words = re.findall(r"\w+", message)
        about = next((word for word in words if word in table), None)
        about = about or next((name for name, value in table.items() if repr(value) in message), None)
        start = f"{dotted(key)}." if words[0] == about else ""
        place = self._at(*key) if about is None else self._of(key, about, changes)
        return SettingError(f"{place}: {start}{message}")


@dataclass(frozen=True)
class Plan:
    """What settings build.

    Attributes:
        recipes: by label; one, unless the settings compare.
        clients: who holds what.
        model: makes the model before the first round, from a seed.
        runtime: where it runs.
        stop: when it is over, besides its rounds.
    """

    recipes: Mapping[str, Recipe]
    clients: Clients
    model: Callable[[int], nn.Module]
    runtime: RuntimeSettings
    stop: StoppingCriteria | None = None


def _text(path: str | Path | None) -> str:
    if path is None:
        return resources.files("piebald").joinpath("experiment_default.toml").read_text(encoding="utf-8")
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise SettingError(f"{path} is not a text file in UTF-8") from None
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None


def _leaves(table: Mapping[str, Any], key: Key) -> list[tuple[str, Any, Key]]:
    """The values of nested tables: their names below the first key, the values, and their whole keys."""
    found: list[tuple[str, Any, Key]] = []
    for name, value in table.items():
        inner = (*key, name)
        if isinstance(value, Mapping):
            found += _leaves(value, inner)
        else:
            found.append((".".join(str(word) for word in inner[1:]), value, inner))
    return found


def plain(message: str) -> str:
    """Pydantic's wording in our words."""
    for theirs, ours in _WORDING:
        message = re.sub(theirs, ours, message)
    return message


_WORDING = (
    (r"^(\w+)\.(int|float|str|bool)\b", r"\1"),  # which branch of a union, which nobody wrote
    (r"\bInput should be ", "must be "),
    (r"greater than or equal to ", "at least "),
    (r"less than or equal to ", "at most "),
    (r"greater than ", "above "),
    (r"less than ", "below "),
    (r"must be an? (valid )?integer[^']*?(?=,? got|$)", "must be a whole number"),
    (r"must be an? (valid )?number[^']*?(?=,? got|$)", "must be a number"),
    (r"must be an? (valid )?string", "must be text"),
    (r"must be an? (valid )?boolean[^']*?(?=,? got|$)", "must be true or false"),
    (r"must be an? (valid )?(dictionary|mapping)[^']*?(?=,? got|$)", "must be a table"),
    (r"must be an? (valid )?(list|tuple|set)\b", "must be a list"),
)


def _reject_reason(error: ValidationError, document: Document) -> SettingError:
    """The first reject_reason about a document, in one sentence with its place."""
    # A name that is not known comes first: what seems to be missing may be there, misspelt.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    key: Key = first["loc"]
    place = document.origin(key)
    if first["type"] == "extra_forbidden":
        sections: dict[str | int, type[Section]] = {"data": Data, "evaluate": Evaluation}
        fields = (ExperimentSettings if len(key) == 1 else sections[key[0]]).model_fields
        what = "setting or section called" if len(key) == 1 else f"setting of [{dotted(key[:-1])}] called"
        return SettingError(f"{place}: {unknown(what, key[-1], fields)}")
    if first["type"] == "missing" and len(key) == 1:
        wants = "kind" if key[0] == "partition" else "name"
        return SettingError(f"{document.name} needs a section [{key[0]}] with a {wants}")
    if first["type"] == "missing":
        return SettingError(f"{document.origin(key[:-1])}: [{dotted(key[:-1])}] needs a {key[-1]}")
    if first["type"] in ("model_type", "model_attributes_type"):
        return SettingError(f"{place}: {dotted(key)} must be a table, like [{dotted(key)}], got {first['input']!r}")
    if first["type"] == "too_short":
        return SettingError(f"{place}: {dotted(key)} needs at least one entry")
    return SettingError(f"{place}: {dotted(key)} {plain(first['msg'])}, got {first['input']!r}")
