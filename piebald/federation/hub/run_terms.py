"""The terms of a run: all that a site needs to rebuild its work from installed components."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from piebald.contracts import Clients, OwnChoice, Query, shown_digest
from piebald.contracts.component import build
from piebald.core import pytree
from piebald.core.client_models import ClientModel, part_without, pattern_for_client
from piebald.core.errors import SettingError
from piebald.core.parameters import Layout, frozen_digest
from piebald.core.plain_text import printable
from piebald.core.references import NOBODY, Resolver
from piebald.experiments.file import ExperimentSettings
from piebald.experiments.recipes import GivenModels
from piebald.federation.link.wire_format import MINOR, PROTOCOL, SAME_PROTOCOL, Needs, release
from piebald.methods.client_work import ClientWork
from piebald.methods.training.base import Trainer
from piebald.methods.training.client_settings import ClientSettings, settings_of
from piebald.methods.transforms.base import MaskingTransform, Transform
from piebald.models import PretrainedNetwork
from piebald.privacy.secure_aggregation.masks import unlike_reason
from piebald.settings import plugins
from piebald.version import __version__

_LEVELS = 64  # of tables and lists inside one another in a run's terms, at most


def read_values(body: bytes | bytearray) -> dict[str, Any]:
    """Return the values in a run's terms, before anything is known of them.

    Raises:
        SettingError: they are no JSON, or so deep that what is done with them later might end the process.

    Examples:
        >>> read_values(b'{"seed": 3, "clients": ["north", "south"]}')
        {'seed': 3, 'clients': ['north', 'south']}
    """
    try:
        values = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise SettingError(f"the run's terms cannot be read: {type(error).__name__}") from None
    # level by level, as so deep a nesting would end a walk by recursion
    level = [values]
    for _ in range(_LEVELS):
        tables = [
            inner.values() if isinstance(inner, dict) else inner for inner in level if isinstance(inner, dict | list)
        ]
        level = list(itertools.chain(*tables))
    if level or not isinstance(values, dict):
        raise SettingError(f"the run's terms must be a table of at most {_LEVELS} levels")
    return values


class OwnTerms(BaseModel):
    """Terms about a model that some clients have in place of the run's.

    Attributes:
        private, begins, layout, frozen, weights, lacks: as in `RunTerms`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lacks: list[str] = []

    private: list[str]
    begins: str = ""
    layout: list[tuple[str, list[int]]]
    frozen: str = ""
    weights: str = ""

    @classmethod
    def of(cls, model: nn.Module, layout: Layout, initial: Tensor, lacks: Iterable[str] = ()) -> OwnTerms:
        """Return the terms of a model, or of a part of it, that starts from `initial` [p]."""
        return cls(
            lacks=sorted(lacks),
            private=sorted(layout.private),
            begins=private_digest(initial[layout.shared :]) if layout.private else "",
            layout=[(slot.name, list(slot.shape)) for slot in layout.slots],
            frozen=frozen_digest(model),
            weights=model.source.described if isinstance(model, PretrainedNetwork) else "",
        )


_OF_ONE = {"training", *OwnTerms.model_fields}  # what `RunTerms.of` may take from terms for one client


class RunTerms(BaseModel):
    """The terms of a run, which a site receives before its first task.

    Attributes:
        protocol, minor: numbers of the server's protocol, see `wire_format`.
        piebald: the server's version of Piebald.
        plugins: modules besides Piebald that a site needs, with their versions.
        experiment: the experiment's settings.
        training: the trainer, as a table.
        transforms: the transforms of updates, as tables.
        own_query: what each update answers about its own model, as a table, None for nothing.
        choice: how a site chooses its model when the run has ended, as a table, None where it takes what it is given.
        private: names of the tensors that stay at the client.
        begins: digest of the numbers that they begin with, which a site's first task brings; "" where there are none.
        layout: names and shapes of the model's tensors, in order.
        frozen: digest of the model's frozen parameters, which no message carries; "" where it has none.
        weights: name and revision of the weights that it begins with, "" where it has none.
        public_rows: digest of the rows that all clients have, which no message carries; "" where there are none.
        objective: name of the loss.
        metrics: names of the metrics.
        seed: seed of the run.
        shape, outputs: shapes of one input and one output.
        classes: names of the classes, None where targets are not classes.
        clients: names of the clients, by number.
        sites: names of the clients' sites.
        own_models: the models of clients that have one of their own.
        lacks: names of the inputs that the client of these terms lacks, so that it has a part of the run's model.
        numbers: of each client's model among these, None for the run's; empty where nobody has another one.
        questions: what sites are asked besides training, as far as it is known before (`Query.stated`).
        trains: whether sites train at all.
        needs: what the run takes of each site while it lasts.
        lineage: number of the run that this one goes on from: a site may begin with the state that it kept of that one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    protocol: int = PROTOCOL
    minor: int = MINOR
    piebald: str
    plugins: list[tuple[str, str]] = []
    experiment: dict[str, Any]
    training: dict[str, Any]
    transforms: list[dict[str, Any]]
    own_query: dict[str, Any] | None = None
    choice: dict[str, Any] | None = None
    private: list[str]
    begins: str = ""
    layout: list[tuple[str, list[int]]]
    frozen: str = ""
    weights: str = ""
    public_rows: str = ""
    objective: str
    metrics: list[str]
    seed: int
    shape: list[int] | list[list[int]] | dict[str, list[int]]
    outputs: list[int]
    classes: list[str] | None = None
    clients: list[str]
    sites: list[str]
    own_models: list[OwnTerms] = []
    lacks: list[str] = []
    numbers: list[int | None] = []
    questions: list[dict[str, Any]] = []
    trains: bool = True
    needs: Needs = Needs()
    lineage: Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")] | None = None

    @classmethod
    def read(cls, values: Mapping[str, Any], author: Resolver = NOBODY) -> RunTerms:
        """Read terms as received, whose author names modules with the rights that this resolver gives.

        Raises:
            SettingError: they are of another protocol, or have another form.
        """
        theirs, protocol, minor = (printable(str(values.get(name)), 40) for name in ("piebald", "protocol", "minor"))
        # before their form is checked, as other protocols have other fields, and the message would name one of these
        if protocol != str(PROTOCOL):
            raise SettingError(
                f"this site has {release()}, the server Piebald {theirs} with protocol {protocol}: {SAME_PROTOCOL}"
            )
        if minor != str(MINOR):  # what another release added since can be left out
            values = {name: value for name, value in values.items() if name in cls.model_fields}
        try:
            return cls.model_validate(author.mark(values))
        except ValidationError as error:
            first = error.errors()[0]
            raise SettingError(f"the run's terms cannot be read: {first['loc']}: {first['type']}") from None

    def of(self, client: int) -> RunTerms:
        """Return the terms for one client, whose own model takes the place of the run's.

        Raises:
            SettingError: the experiment has none for it.
        """
        table, name = dict(self.experiment.get("model") or {}), self.clients[client]
        tables, terms = table.pop("clients", None), self.model_copy(update={"training": self._training_of(name)})
        tables = tables if isinstance(tables, Mapping) else {}
        chosen = {**tables, "*": table}[pattern_for_client([*tables, "*"], name)]
        number = self.numbers[client] if client < len(self.numbers) else None
        nested = isinstance(chosen, Mapping) and "clients" in chosen
        if nested or (number is not None and not 0 <= number < len(self.own_models)):
            raise SettingError(f"the run's terms cannot be read: they describe no model for {name!r}")
        own_terms = {} if number is None else dict(self.own_models[number])
        model = {"name": chosen} if isinstance(chosen, str) else dict(chosen)
        experiment = {**self.experiment, "model": model} if "model" in self.experiment else self.experiment
        return terms.model_copy(update={"experiment": experiment, "own_models": [], "numbers": [], **own_terms})

    def unlike_reason(self) -> str | None:
        """Return why members of a sum under masks would not all do the same under these terms, or None.

        It is asked of the terms as they came, before one client's part is taken from them and anything is built.
        """
        if not self.transforms:
            return None
        trainer, transforms, _ = self.client_components()
        if not any(isinstance(transform, MaskingTransform) for transform in transforms):
            return None
        tables = {"transforms": self.transforms, "own_query": self.own_query, "choice": self.choice}
        parts = (self.of(client) for client in range(len(self.clients)))
        works = (json.dumps(part.model_dump(include=_OF_ONE), sort_keys=True) for part in parts)
        return unlike_reason(trainer, tables, self.experiment, works)

    @property
    def own_shape(self) -> pytree.Form:
        """The shape of one input of the client of these terms, without those that it lacks."""
        form = pytree.formed(self.shape)
        return {name: side for name, side in form.items() if name not in self.lacks} if isinstance(form, dict) else form

    def model_of(self, settings: ExperimentSettings, clients: Clients) -> ClientModel:
        """Return the model of the client of these terms, as it is built here.

        Args:
            settings: the experiment.
            clients: all clients' names, and rows of the form of this one's.

        Raises:
            SettingError: it has other tensors or frozen weights than the server's.
        """
        shape = pytree.formed(self.shape) if self.lacks else None
        module = GivenModels.of(settings.model_for(clients, shape), clients.names, self.seed).modules[0]
        layout, outputs = Layout.of(module, self.private), tuple(self.outputs)
        lacking = {slot.name for slot in layout.slots} - {name for name, _ in self.layout} if self.lacks else set()
        tensors = [(slot.name, list(slot.shape)) for slot in layout.without(lacking).slots]
        if not tensors or tensors != self.layout:
            raise SettingError("the model that this site builds has other tensors than the server's")
        self.check_frozen(module)
        if lacking:
            return part_without(module, layout, outputs, lacking, frozenset(self.lacks))
        return ClientModel(module, layout, layout.taken(module), outputs)

    def _training_of(self, name: str) -> dict[str, Any]:
        """Return the trainer's table for the client of this name, without the settings of others."""
        training = dict(self.training)
        tables = training.pop("clients", None)
        tables = tables if isinstance(tables, Mapping) else {}
        names = ClientSettings.model_fields.keys()
        if not all(isinstance(table, Mapping) and table.keys() <= names for table in tables.values()):
            raise SettingError(f"the run's terms cannot be read: they have no settings for {name!r}")
        settings = settings_of(tables, name)
        if settings.get("epochs", 0) is None:
            del settings["epochs"]
        return {name: value for name, value in {**training, **settings}.items() if value is not None}

    def use_plugins(self, author: Resolver) -> None:
        """Import the plugins that the work of a site needs, which its policy must allow.

        Raises:
            SettingError: one is not allowed, not installed, or has another version here.
        """
        for module, theirs in self.plugins:
            try:
                author.use([module])
            except SettingError as error:
                raise SettingError(f"this site cannot use the plugin {module} {theirs}: {error}") from None
            if (here := plugins.version(module)) != theirs:
                raise SettingError(
                    f"this site has {module} {here or 'of no version'}, the server {theirs or 'one of no version'}: "
                    "install the same on both"
                )

    def check_frozen(self, model: nn.Module) -> None:
        """Refuse a model whose frozen parameters are not the server's.

        Raises:
            SettingError: they have another digest.
        """
        if frozen_digest(model) != self.frozen:
            of = f", which are those of {self.weights}" if self.weights else ""
            raise SettingError(
                f"the frozen weights of this site's model are not the server's{of}: have the same weights on both"
            )

    def check_public(self, digest: str) -> None:
        """Refuse public rows that are not the server's.

        Args:
            digest: of this site's, see `contracts.data.rows_digest`.

        Raises:
            SettingError: they have another digest.
        """
        if self.public_rows and digest != self.public_rows:
            raise SettingError(
                "this run compares models on rows that all clients have, and this site has "
                f"{'others' if digest else 'none'}: name the same file as the server, public of [data] in site.toml, "
                "or let the experiment name a data set that both can make them from"
            )

    def client_components(self) -> tuple[Trainer, tuple[Transform, ...], Query | None]:
        """Build the trainer, the transforms and the query about a client's own model from what is installed here."""
        trainer = build("training", self.training)
        transforms = tuple(build("transforms", table) for table in self.transforms)
        own_query = None if self.own_query is None else build("query", self.own_query)
        assert isinstance(trainer, Trainer)
        return trainer, transforms, own_query  # type: ignore[return-value]

    @property
    def protects(self) -> bool:
        """True if a component hides rows or updates."""
        trainer, transforms, _ = self.client_components()
        return any(component.protects for component in (trainer, *transforms))

    def choice_query(self) -> OwnChoice | None:
        """Build the query by which a site chooses its model."""
        if self.choice is None:
            return None
        query = build("query", self.choice)
        if not isinstance(query, OwnChoice):
            raise SettingError(f"the run's terms let a site choose its model by {query.kind!r}, which chooses no model")
        return query


def private_digest(numbers: Tensor) -> str:
    """Return the digest of the private numbers [p - s] that clients begin with."""
    return shown_digest("private", {"numbers": numbers}).hex()


def terms(
    work: ClientWork, experiment: Mapping[str, Any], clients: Sequence[str], sites: Sequence[str],
    classes: Sequence[str] | None = None, lineage: str | None = None, needs: Needs | None = None,
) -> bytes:  # fmt: skip
    """Serialize the terms of a run.

    Raises:
        SettingError: under masks, they say something of single clients.
    """
    functions, owns = [work.objective.loss, *work.objective.metrics.values()], work.own_models
    # other parts of the run's model are made from it by the trainer
    other_models = [] if owns is None else [other for other in owns.models if other.held is None or other.lacks]
    parts = [work.trainer, work.transforms, work.model, *(other.model for other in other_models)]
    run_terms = RunTerms(
        protocol=PROTOCOL,
        minor=MINOR,
        piebald=__version__,
        plugins=[tuple(module) for module in plugins.needed_by([*parts, functions])],
        experiment=dict(experiment),
        training=work.trainer.table(),
        transforms=[transform.table() for transform in work.transforms],
        own_query=None if work.own_query is None else work.own_query.table(),
        choice=None if work.choice is None else work.choice.table(),
        **dict(OwnTerms.of(work.model, work.layout, work.initial)),
        own_models=[
            # a part is of the run's model, whose frozen weights it has
            OwnTerms.of(work.model if other.lacks else other.model, other.layout, other.initial, other.lacks)
            for other in other_models
        ],
        numbers=list(owns.numbers) if owns is not None and other_models else [],
        public_rows=work.public_digest,
        objective=work.objective.name,
        metrics=list(work.objective.metrics),
        seed=work.seed,
        shape=pytree.plain(work.shape),
        outputs=list(work.outputs),
        classes=None if classes is None else list(classes),
        clients=list(clients),
        sites=list(sites[: len(clients)]),
        questions=[dict(question) for question in work.questions],
        trains=work.trains,
        needs=needs or Needs(),
        lineage=lineage,
    )
    if reason := run_terms.unlike_reason():
        raise SettingError(reason)
    # sorted, since their digest is what somebody at a site approves, whatever the order of settings
    return json.dumps(run_terms.model_dump(), sort_keys=True).encode()
