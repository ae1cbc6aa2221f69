"""The nouns that all stages pass around, and what each part of a recipe must offer.  Imports nothing of the stages.

Shapes: `p` numbers in a whole model, `s` of them shared (they come first, see `parameters.Layout`), `n` updates in a
cohort, `c` clients in a stack.  Client code is written for ONE client with plain arithmetic on the last axis; an engine
may hand it a stack of clients, so vectors carry a leading axis of `c` (1 where clients run one after another).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_serializer, model_validator

from piebald.errors import SettingError, unknown

if TYPE_CHECKING:
    from torch import Tensor, nn

    from piebald.parameters import Layout
    from piebald.task import Task

Split = Literal["train", "validation", "test"]

CENTRE = -1  # the client number of the centre itself, which may hold a common test set


# ---------------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True, slots=True)
class Rows:
    """Examples of one client or one test set: inputs `x` and targets `y`, the first axis counts examples."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return int(self.x.shape[0])


class Clients(Protocol):
    """Who holds what.  Clients are numbered from 0; their rows are fetched only when asked for."""

    @property
    def names(self) -> Sequence[str]:
        """A name for each client."""

    @property
    def classes(self) -> Sequence[str] | None:
        """Names of the classes, or None where targets are not classes."""

    @property
    def common(self) -> Rows | None:
        """A test set that belongs to no client, or None."""

    def __len__(self) -> int: ...

    def rows(self, client: int, split: Split) -> Rows:
        """The rows of one split; empty where the client has none."""

    def size(self, client: int, split: Split) -> int | None:
        """How many rows, or None where that is not known without fetching them."""

    def counts(self, client: int, split: Split) -> Sequence[int] | None:
        """Rows of each class, or None where that is not known without fetching them."""


@dataclass(frozen=True, slots=True)
class Device:
    """How fast a client is.  The default is instant and always there.

    Attributes:
        seconds_per_step: time of one optimiser step.
        down, up: bandwidth in bytes a second.
        latency: seconds before each transfer.
        dropout: probability that an assignment is lost.
        on: (start, stop) intervals in seconds when the client can be asked, or None for always.
    """

    seconds_per_step: float = 0.0
    down: float = float("inf")
    up: float = float("inf")
    latency: float = 0.0
    dropout: float = 0.0
    on: tuple[tuple[float, float], ...] | None = None


class Fleet(Protocol):
    """The devices of a federation."""

    def device(self, client: int) -> Device:
        """The device of one client."""

    def available(self, clients: int, now: float) -> Sequence[int]:
        """Clients out of range(clients) that can be asked at this time, increasing; `range(clients)` itself if all
        can.
        """


# ------------------------------------------------------------------------------------------------- what travels, when


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """One request of the controller to one client.

    Attributes:
        id: unique in the run, increasing.
        client: the client's number.
        version: commits that had been made when this was sent; with the seed and the client it fixes all randomness.
        parts: named vectors on their way down: "model" [s], "private" [p - s] at the first contact only, and what the
            rule asks for (SCAFFOLD's "control").
        query: a question to answer; None means: train.
        free: asked for the report only, so it costs neither bytes nor virtual time.
    """

    id: int
    client: int
    version: int
    parts: Mapping[str, Tensor]
    query: Query | None = None
    free: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """A sum over updates, made where they were trained: `weight` = sum of weights, `parts` = weighted sum of "model"
    [s] and plain sums of the other named parts.
    """

    weight: float
    parts: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What one client sends back.

    Attributes:
        parts: named vectors; "model" [s] is the change of the shared numbers since the assignment's model.  Empty
            where the update has been summed into `pool`.
        examples: rows the client trained on (or answered for).
        steps: optimiser steps taken.
        metrics: named numbers, e.g. "loss".
        norm: Euclidean length of parts["model"].
        pool: the sum this update is in, shared by all updates of the pool, or None.
        nbytes: bytes on the wire.
    """

    parts: Mapping[str, Tensor]
    examples: int
    steps: int
    metrics: Mapping[str, float]
    norm: float = 0.0
    pool: Pooled | None = None
    nbytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """The end of an assignment: an update, or the reason why there is none.  Times are seconds of the runtime's
    clock.
    """

    assignment: Assignment
    update: Update | None
    sent: float
    time: float
    bytes_down: int = 0
    bytes_up: int = 0
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Pool:
    """Leave to sum updates where they are made.  `weight` says how much one counts; `limit` is the longest step
    allowed.
    """

    weight: Weigh
    limit: float


class Runtime(Protocol):
    """Where clients run: assignments in, arrivals out, and a clock.  Nothing else asks what time it is."""

    def submit(self, assignments: Sequence[Assignment], pool: Pool | None = None) -> None:
        """Send assignments; their inputs are fixed from now on."""

    def next(self, until: float = float("inf")) -> Arrival | None:
        """The next arrival in order of time (ties: assignment id), or None when none is due by `until`.

        After None it is `until`; where that is infinite and nothing is under way, it is when the next client can be
        asked.
        """

    def clients(self) -> Sequence[int]:
        """Clients that could be asked now, in increasing order."""

    def now(self) -> float:
        """Seconds since the run began."""

    def state(self) -> Checkpoint:
        """All that a resumed run needs and the controller does not know: client memory, clock, what is under way."""

    def restore(self, checkpoint: Checkpoint, assignments: Mapping[int, Assignment]) -> None:
        """Take up a `state`; `assignments` are the outstanding ones by id."""

    def close(self) -> None:
        """Let go of processes and files.  May be called twice."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Something's whole state: named tensors and plain JSON values."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------ on the client


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """What a rule starts from, for a stack of `c` clients.

    Attributes:
        model: [c, p], the shared numbers as sent and the private ones from the clients' memory.  Not to be written to.
        shared: `s`, how many of the numbers are shared.
        memory: what these clients remembered, by name, each [c, ...].
        parts: what was sent besides the model, by name, each [c, ...].
        versions: the assignments' versions.
        examples: [c, 1], training rows of each client.
    """

    model: Tensor
    shared: int
    memory: Mapping[str, Tensor]
    parts: Mapping[str, Tensor]
    versions: Sequence[int]
    examples: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """What a rule ends with: the local model [c, p], further named vectors to send, what to remember, and metrics
    [c].
    """

    model: Tensor
    steps: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Descent:
    """How to walk downhill on local data.  Metis eq. 2: u <- momentum * u - lr * g;  w <- w + u.

    Attributes:
        lr: step size, one number or [c, 1].
        momentum: in [0, 1).
        weight_decay: added to the gradient as weight_decay * w.
        clip: longest gradient allowed (Euclidean norm over all parameters), None for no limit.
        batch: rows a step; the last batch of an epoch is shorter, never dropped.
        epochs: passes over the client's training rows.
        steps: if given, exactly this many steps instead of `epochs`.
    """

    lr: float | Tensor
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    batch: int = 20
    epochs: int = 1
    steps: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Descended:
    """Where a descent ended: model [c, p], steps [c], mean training loss over the steps [c], velocity u [c, p] or
    None.
    """

    model: Tensor
    steps: Tensor
    loss: Tensor
    velocity: Tensor | None


class Local(Protocol):
    """What an engine lends to client code: a stack of clients' data behind two verbs."""

    def descend(
        self,
        model: Tensor,
        descent: Descent,
        *,
        pull: float = 0.0,
        anchor: Tensor | None = None,
        shift: Tensor | None = None,
        velocity: Tensor | None = None,
    ) -> Descended:
        """Walk from `model` [c, p] on mini-batches along  g + pull * (w - anchor) + shift  (parameters only, not
        buffers).

        The pull belongs to the objective, so `clip` sees it; shift and weight decay are added after clipping.  Each
        call in one assignment sees the rows in an order of its own.
        """

    def score(self, model: Tensor, split: Split) -> tuple[dict[str, Tensor], Tensor]:
        """The loss and the task's metrics by name, each [c] (NaN without rows), and how many rows were counted [c].

        Models are in evaluation mode: no dropout, batch norm with its running statistics.
        """


# ------------------------------------------------------------------------------------------------------ parts, recipe


class Part(BaseModel):
    """A frozen value on one axis of a recipe.  Its fields are its settings; its kind is its class name in snake case.

    A subclass registers itself, so a recipe can be rebuilt from (kind, fields) on any machine with nothing pickled.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    axis: ClassVar[str] = ""
    kind: ClassVar[str] = ""
    registry: ClassVar[dict[str, dict[str, type[Part]]]] = {}

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise SettingError(sentence(error, f"{self.axis} {self.kind!r}", type(self).model_fields)) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if "axis" in vars(cls):  # the head of an axis, not a choice on it
            return
        cls.kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
        Part.registry.setdefault(cls.axis, {})[cls.kind] = cls

    def table(self) -> dict[str, Any]:
        """This part as plain values: its kind and its fields, without those that are None."""
        return {"kind": self.kind, **self.model_dump(exclude_none=True)}


def build(axis: str, table: Mapping[str, Any] | Part) -> Part:
    """A part from its `table`; a part is handed back as it is."""
    if isinstance(table, Part):
        return table
    if not isinstance(table, Mapping) or not isinstance(table.get("kind"), str):
        raise SettingError(f"{axis} must be a table with a kind, like {{ kind = '...' }}, got {table!r}")
    fields = dict(table)
    kind = fields.pop("kind")
    kinds = Part.registry.get(axis, {})
    if kind not in kinds:
        raise unknown(axis, kind, kinds)
    return kinds[kind](**fields)


class Share(Part):
    """What leaves the client.  `private` names the layers that stay: patterns or roles that `parameters.Layout`
    resolves.
    """

    axis = "share"

    def private(self, model: nn.Module) -> frozenset[str]:
        """Names of the tensors of the model that never leave the client."""
        raise NotImplementedError


class Rule(Part):
    """How a client learns, and what the centre keeps for it.  Pure: no state but what goes in and out."""

    axis = "learn"

    def remember(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        """A client's memory before its first assignment; `model` [p] is the one the run starts from, `shared` is
        `s`.
        """
        return {}

    def learn(self, start: Start, local: Local) -> Learned:
        """One training assignment."""
        raise NotImplementedError

    def personal(self, start: Start, local: Local) -> Tensor:
        """The model [c, p] that clients would use for themselves, given what the centre last sent."""
        return start.model

    def tailors(self) -> bool:
        """Whether `personal` differs from the model sent (beyond private layers)."""
        return type(self).personal is not Rule.personal

    def common(self, shared: int) -> dict[str, Tensor]:
        """What the centre sends besides the model, before the first commit, by name."""
        return {}

    def fold(
        self, common: Mapping[str, Tensor], mean: Mapping[str, Tensor], arrived: int, known: int
    ) -> dict[str, Tensor]:
        """The new common parts, from the plain means of the named parts of `arrived` updates out of `known` clients."""
        return dict(common)


class Query(Part):
    """A question to a client that is no training: its answer is pure too."""

    axis = "query"

    def answer(self, start: Start, local: Local, rule: Rule) -> Learned:
        """The answer of a stack of clients."""
        raise NotImplementedError


class Stage(Part):
    """What befalls an update on its way.  Two ends: on each update before it leaves, on the pooled result at the
    centre.
    """

    axis = "update"
    hides_each: ClassVar[bool] = False  # the centre cannot see single updates (secure sums)
    model_only: ClassVar[bool] = False  # it protects the model's change and no other named part

    def send(self, parts: Mapping[str, Tensor], keys: Sequence[int]) -> Mapping[str, Tensor]:
        """The client's end, on named parts [c, ...] with one random key for each client."""
        return parts

    def receive(self, average: Tensor, count: int, weights: Sequence[float], key: int) -> Tensor:
        """The centre's end, on the averaged change [s] of `count` updates with these weights (they sum to 1)."""
        return average

    def nbytes(self, parts: Mapping[str, Tensor]) -> int:
        """Bytes on the wire of ONE client's parts, if this stage is the last to touch them."""
        return sum(part.numel() * part.element_size() for part in parts.values())


@dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """The updates of one commit in client order.  `matrix` is [n, s], or None where they were pooled."""

    clients: Sequence[int]
    versions: Sequence[int]
    updates: Sequence[Update]
    matrix: Tensor | None
    version: int

    @property
    def staleness(self) -> list[int]:
        """Commits made since each update's model was sent."""
        return [self.version - version for version in self.versions]


class Weigh(Part):
    """How much each update counts.  Linear ones say it for one update; robust ones override `combine`."""

    axis = "weigh"
    needs_each: ClassVar[bool] = False  # True: single updates must reach the centre

    def weight(self, update: Update) -> float:
        """How much one update counts, before they are made to sum to one; from its numbers alone, not its vectors."""
        raise NotImplementedError

    def combine(self, cohort: Cohort) -> tuple[Tensor, list[float]]:
        """The average change [s] and the weights [n], which sum to one."""
        raise NotImplementedError


class Group(Part):
    """Who is averaged with whom."""

    axis = "group"
    needs_each: ClassVar[bool] = False

    def assign(self, cohort: Cohort, known: Mapping[int, int]) -> list[int]:
        """A group number for each update; `known` are the groups of clients seen before (others start in group 0)."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class View:
    """What a pace decides on.

    Attributes:
        version: commits made.
        now: seconds on the runtime's clock;  stepped: when the last commit was made.
        clients: those that could be asked now and are not put aside.
        busy: clients with an assignment under way.
        waiting: arrived updates that no commit has used.
        failed: assignments since the last commit that ended without a usable update.
    """

    version: int
    now: float
    stepped: float
    clients: Sequence[int]
    busy: AbstractSet[int]
    waiting: int
    failed: int


class Pace(Part):
    """When the centre asks, and when it steps."""

    axis = "pace"
    pools: ClassVar[bool] = False  # True: a commit uses the updates of one submission, which may be summed early

    def ask(self, view: View, seed: int) -> Sequence[int]:
        """Clients to send an assignment to now."""
        raise NotImplementedError

    def ready(self, view: View) -> bool:
        """Whether to step with what is waiting."""
        raise NotImplementedError

    def until(self, view: View) -> float:
        """The time at which `ready` should be asked again even if nothing arrives."""
        return float("inf")


class Step(Part):
    """How the community model moves."""

    axis = "step"

    def start(self, model: Tensor) -> dict[str, Tensor]:
        """The centre's own memory [s] before the first commit."""
        return {}

    def move(self, model: Tensor, average: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The new model [s] and memory, from the averaged change [s]."""
        raise NotImplementedError


class Where(Part):
    """Settings of a runtime: where a recipe runs."""

    axis = "runtime"

    def settled(self, work: Work, clients: Clients, expected: int) -> Where:
        """The same with every choice made, so that a resumed run makes the same ones; `expected` clients work at a
        time.
        """
        return self

    def open(self, work: Work, clients: Clients) -> Runtime:
        """Start it."""
        raise NotImplementedError


class Recipe(BaseModel):
    """One answer for each axis.  Frozen; equal fields mean the same method; a combination that cannot work is refused
    here.

    `name`, `fields` and `paper` say which named recipe it was made by; `with_` replaces answers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str = "custom"
    fields: Mapping[str, Any] = {}
    paper: str = ""
    learn: Rule
    share: Share
    update: tuple[Stage, ...] = ()
    pace: Pace
    group: Group
    weigh: Weigh
    step: Step

    axes: ClassVar[tuple[str, ...]] = ("learn", "share", "update", "pace", "group", "weigh", "step")

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise SettingError(sentence(error, "recipe", type(self).model_fields)) from None

    @model_validator(mode="before")
    @classmethod
    def _build_tables(cls, fields: Any) -> Any:
        made = dict(fields)
        for axis in cls.axes:
            if axis == "update":
                made[axis] = tuple(build(axis, stage) for stage in made.get(axis, ()))
            elif axis in made:
                made[axis] = build(axis, made[axis])
        return made

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        hiding = [stage.kind for stage in self.update if stage.hides_each]
        for part in (self.weigh, self.group):
            if hiding and part.needs_each:
                raise ValueError(
                    f"{hiding[0]} shows the centre only sums but {part.kind} needs single updates: "
                    f"choose another {part.axis}, or drop {hiding[0]}"
                )
        extra = sorted(self.learn.common(0))
        for stage in self.update:
            if stage.model_only and extra:
                raise ValueError(
                    f"{stage.kind} protects only the model but {self.learn.kind} also sends {extra[0]!r}: "
                    f"choose another rule, or drop {stage.kind}"
                )
        return self

    @field_serializer("learn", "share", "pace", "group", "weigh", "step")
    def _part_table(self, part: Part) -> dict[str, Any]:
        return part.table()

    @field_serializer("update")
    def _stage_tables(self, stages: tuple[Stage, ...]) -> list[dict[str, Any]]:
        return [stage.table() for stage in stages]

    @property
    def needs_each(self) -> bool:
        """Whether single updates must reach the centre."""
        return self.weigh.needs_each or self.group.needs_each or not self.pace.pools

    def with_(self, **answers: Any) -> Recipe:
        """This recipe with other answers on some axes, each a part or its table."""
        for axis in answers:
            if axis not in self.axes:
                raise unknown("axis", axis, self.axes)
        parts = {axis: getattr(self, axis) for axis in self.axes} | answers
        return Recipe(name=self.name, fields=self.fields, paper=self.paper, **parts)


@dataclass(frozen=True, slots=True)
class Work:
    """All that a client must know to serve: the same on every site, rebuilt there, never pickled.

    `initial` [p] is the model the run starts from.
    """

    model: nn.Module
    layout: Layout
    initial: Tensor
    rule: Rule
    stages: tuple[Stage, ...]
    task: Task
    seed: int


class Recorder(Protocol):
    """Where the controller writes what happened; `report.store` keeps it in a run folder."""

    def commit(
        self, step: Mapping[str, Any], arrivals: Sequence[Mapping[str, Any]], checkpoint: Checkpoint | None
    ) -> None:
        """One commit with the arrivals since the one before, in one transaction; with the checkpoint, if it is due."""

    def scores(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Scores of models on clients' rows."""


def sentence(error: ValidationError, what: str, fields: Mapping[str, Any]) -> str:
    """A pydantic error as one sentence: the first complaint, and the nearest name where a name is unknown."""
    first = error.errors()[0]
    where = ".".join(str(word) for word in first["loc"])
    if first["type"] == "extra_forbidden":
        return str(unknown(f"setting of {what} called", where, fields))
    if first["type"] == "missing":
        return f"{what} needs a value for {where}"
    if first["type"] == "value_error":
        text = str(first["ctx"]["error"])
        return f"{what}: {text}" if not where or text.startswith(where) else f"{what}: {where} {text}"
    text = re.sub(r"^Input should be ", "must be ", first["msg"])
    text = re.sub(r"^must be a valid (\w+).*", r"must be a \1", text)
    return f"{what}: {where} {text}, got {first['input']!r}"
