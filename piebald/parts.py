"""What a recipe is made of: frozen parts, one axis each.  `recipe.Recipe` puts one answer on every axis.

Shapes as in `contracts`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from piebald.errors import SettingError, unknown

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from piebald.contracts import (
        Assignment,
        Centre,
        Clients,
        Learned,
        Local,
        Meeting,
        Privacy,
        Runtime,
        Secrets,
        Start,
        Update,
        Work,
    )
    from piebald.parameters import Layout
    from piebald.recipe import Recipe


class Part(BaseModel):
    """A frozen value on one axis of a recipe.  Its fields are its settings; its kind is its class name in snake case.

    A subclass registers itself, so a recipe can be rebuilt from (kind, fields) on any machine with nothing pickled.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    axis: ClassVar[str] = ""
    kind: ClassVar[str] = ""
    registry: ClassVar[dict[str, dict[str, type[Part]]]] = {}

    def __init__(self, *values: Any, **fields: Any) -> None:
        if values:
            names = ", ".join(f"{name}=..." for name in type(self).model_fields) or "nothing"
            raise SettingError(f"{self.axis} {self.kind!r} takes its settings by name ({names}), got {values[0]!r}")
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

    def needs_root(self) -> bool:
        """Whether the centre must hold rows of its own (`Clients.root`)."""
        return False

    def misfit(self, work: Work) -> str | None:
        """Why this part cannot work with a run's model, task or rule, or None; said before anything is trained."""
        return None

    def table(self) -> dict[str, Any]:
        """This part as plain values: its kind and its fields, without those that are None."""
        return {"kind": self.kind, **self.model_dump(exclude_none=True)}


def build(axis: str, table: Mapping[str, Any] | str | Part) -> Part:
    """A part from its `table`, or from its kind alone; a part is handed back as it is."""
    if isinstance(table, Part):
        return table
    if isinstance(table, str):
        table = {"kind": table}
    if not isinstance(table, Mapping) or not isinstance(table.get("kind"), str):
        raise SettingError(f"{axis} must be a table with a kind, like {{ kind = '...' }}, got {table!r}")
    fields = dict(table)
    kind = fields.pop("kind")
    kinds = Part.registry.get(axis, {})
    if kind not in kinds:
        raise unknown(axis, kind, kinds)
    return kinds[kind](**fields)


def sentence(error: ValidationError, what: str, fields: Mapping[str, Any]) -> str:
    """A pydantic error as one sentence: the first complaint, and the nearest name where a name is unknown."""
    errors = error.errors()
    # a name that came mistyped, before the field that is missing because of it
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    place = first["loc"]  # a field, then numbers of items and, where several types would do, what pydantic calls them
    where = ".".join(str(word) for i, word in enumerate(place) if not i or isinstance(word, int) or word in fields)
    if first["type"] == "extra_forbidden":
        return str(unknown(f"setting of {what} called", where, fields))
    if first["type"] == "missing":
        return f"{what} needs a value for {where}"
    if first["type"] == "value_error":
        text = str(first["ctx"]["error"])
        return f"{what}: {text}" if not where or text.startswith((where, "there is no")) else f"{what}: {where} {text}"
    text = re.sub(r"^Input should be ", "must be ", first["msg"])
    text = re.sub(r"^must be a valid dictionary or instance of (\w+).*", r"must be on the axis of \1", text)
    text = re.sub(r"^must be a valid (\w+).*", r"must be a \1", text).replace("a integer", "an integer")
    return f"{what}: {where} {text}, got {first['input']!r}"


class Share(Part):
    """What leaves the client.  `private` names the layers that stay: patterns or roles that `parameters.Layout`
    resolves.
    """

    axis = "share"

    def private(self, model: nn.Module) -> frozenset[str]:
        """Names of the tensors of the model that never leave the client."""
        raise NotImplementedError

    def first(self, private: Tensor, layout: Layout, client: int) -> Tensor:
        """The private numbers [p - s] that a client begins with; `private` are those of the model the run starts
        from.
        """
        return private


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

    def validates(self) -> bool:
        """Whether clients need validation rows."""
        return False

    def privacy(self) -> Privacy | None:
        """How its steps hide single rows, or None; noise must then come from numbers that only the client knows."""
        return None

    def uploads(self) -> tuple[str, ...]:
        """Names of the vectors that an update carries besides the model, as far as the rule sends any."""
        return tuple(sorted(self.common(0)))

    def least_steps(self, examples: int) -> int:
        """Steps that an assignment takes at least: a simulator need not compute before so many could be done."""
        return 0

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
    keyed: ClassVar[bool] = False  # about keys: answered by `reply`, from what the client keeps secret

    def reply(self, parts: Mapping[str, Tensor], secrets: Secrets, stage: Stage) -> Mapping[str, Tensor]:
        """One client's answer to a question about keys, which brought `parts`; `stage` is the one that seals.

        Raises:
            Declined: the client does not do that.
        """
        raise NotImplementedError

    def answer(self, start: Start, local: Local, rule: Rule) -> Learned:
        """The answer of a stack of clients."""
        raise NotImplementedError

    def complaint(self, answer: Update, work: Work) -> str | None:
        """Why an answer cannot be used, or None.  Its parts are known to be finite."""
        return None


class Stage(Part):
    """What befalls an update on its way.  Two ends: on each update before it leaves, on the pooled result at the
    centre.
    """

    axis = "update"
    hides_each: ClassVar[bool] = False  # the centre cannot see single updates (secure sums)
    colludes: ClassVar[bool] = False  # attackers look at one another's updates, see `collude`
    model_only: ClassVar[bool] = False  # it protects the model's change and no other named part

    def send(self, parts: Mapping[str, Tensor], keys: Sequence[int], clients: Sequence[int]) -> Mapping[str, Tensor]:
        """The client's end, on named parts [c, ...] with one random key for each of these clients."""
        return parts

    def collude(self, matrix: Tensor, clients: Sequence[int], key: int) -> Tensor:
        """The changes [n, s] of a commit's clients with those of colluding attackers replaced; in simulations only."""
        return matrix

    def receive(self, average: Tensor, count: int, weights: Sequence[float], key: int) -> Tensor:
        """The centre's end, on the averaged change [s] of `count` updates with these weights (they sum to 1)."""
        return average

    def nbytes(self, parts: Mapping[str, Tensor]) -> int:
        """Bytes on the wire of ONE client's parts, if this stage is the last to touch them."""
        return sum(part.numel() * part.element_size() for part in parts.values())

    def clash(self, recipe: Recipe) -> str | None:
        """Why this stage cannot work beside a recipe's other parts, or None."""
        return None

    def settled(self, recipe: Recipe) -> Stage:
        """The same with what clients must know of the recipe's other parts."""
        return self

    # what follows is for stages that hide each update (`hides_each`)

    def meet(self, clients: Sequence[int], centre: Centre) -> Meeting:
        """Let the clients of a commit agree on keys, before any of them trains."""
        raise NotImplementedError

    def seal(self, update: Update, assignment: Assignment, secrets: Secrets) -> Update:
        """What one client hands out instead of its update.

        Raises:
            Declined: the client does not hand out anything.
        """
        raise NotImplementedError

    def broken(self, update: Update, work: Work) -> str | None:
        """Why a sealed update cannot be one, or None."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """The updates of one commit in client order.

    Attributes:
        clients, versions, updates: of each update.
        matrix: [n, s], the changes, or None where they were pooled or nobody needs them together.
        version: commits made.
        sent: [s] each, the models that the changes started from.
    """

    clients: Sequence[int]
    versions: Sequence[int]
    updates: Sequence[Update]
    matrix: Tensor | None
    version: int
    sent: Sequence[Tensor] = ()

    @property
    def staleness(self) -> list[int]:
        """Commits made since each update's model was sent."""
        return [self.version - version for version in self.versions]

    def model(self, row: int) -> Tensor:
        """The model [s] that one client came to."""
        return self.sent[row] + self.updates[row].parts["model"]

    def rows(self, rows: Sequence[int]) -> Cohort:
        """Some of the updates."""
        return Cohort(
            [self.clients[row] for row in rows],
            [self.versions[row] for row in rows],
            [self.updates[row] for row in rows],
            None if self.matrix is None else self.matrix[list(rows)],
            self.version,
            [self.sent[row] for row in rows],
        )


class Weigh(Part):
    """How much each update counts.  Linear ones say it for one update; robust ones override `combine`."""

    axis = "weigh"
    needs_each: ClassVar[bool] = False  # True: single updates must reach the centre

    def prepare(self, cohort: Cohort, centre: Centre) -> Cohort:
        """The cohort with what the weighing must know first, e.g. scores that clients gave, among updates' metrics."""
        return cohort

    def weight(self, update: Update, staleness: int = 0) -> float:
        """How much one update counts, before they are made to sum to one; from its numbers alone, not its vectors."""
        raise NotImplementedError

    def combine(self, cohort: Cohort, centre: Centre) -> tuple[Tensor, list[float]]:
        """The average change [s] and the weights [n], which sum to one, or to less where stale updates are damped."""
        raise NotImplementedError

    def validates(self) -> bool:
        """Whether clients need validation rows."""
        return False

    @classmethod
    def singly(cls) -> bool:
        """Whether each update's weight is known without the others (`weight`)."""
        return cls.weight is not Weigh.weight


class Group(Part):
    """Who is averaged with whom."""

    axis = "group"
    needs_each: ClassVar[bool] = True  # False: one group only, so that updates may be summed before they are grouped
    from_now: ClassVar[bool] = False  # True: members' models are averaged: changes count from their group's model

    def assign(self, cohort: Cohort, known: Mapping[int, int], centre: Centre) -> list[int]:
        """A group number for each update; `known` are the groups of clients seen before (others start in group 0).

        A number that is new begins with the mean of the models that its first members were sent.
        """
        raise NotImplementedError

    def validates(self) -> bool:
        """Whether clients need validation rows."""
        return False

    def main(self, memory: Mapping[str, Any]) -> int:
        """The group whose model stands for the run and that newcomers are in; `memory` is what the part keeps."""
        return 0

    def offer(self, models: Mapping[int, Tensor], work: Work) -> dict[str, Tensor]:
        """What a training assignment brings besides the client's own community model, e.g. "candidates" [K, s]."""
        return {}


class View(NamedTuple):  # made for every arrival, and a tuple is made four times as fast as a frozen dataclass
    """What a pace decides on: numbers only, so that a million clients cost nothing.

    Attributes:
        version: commits made.
        now: seconds on the runtime's clock;  stepped: when the last commit was made.
        offered: clients that are there now and not put aside, busy or not;  free: of these, not busy.
        busy: clients with an assignment under way.
        asked: assignments sent since the last commit;  due: of these, still under way.
        waiting: arrived updates that no commit has used.
        failed: assignments since the last commit that ended without a usable update.
    """

    version: int
    now: float
    stepped: float
    offered: int
    free: int
    busy: int
    asked: int
    due: int
    waiting: int
    failed: int


class Pace(Part):
    """When the centre asks, and when it steps.  Whom it asks is a seeded choice among those that are free."""

    axis = "pace"

    @property
    def rounds(self) -> bool:
        """Whether a commit uses updates of one submission only, though it may do without some of them."""
        return self.pools

    @property
    def pools(self) -> bool:
        """Whether a commit uses exactly the updates of one submission, so that they may be summed early."""
        return False

    def ask(self, view: View) -> int:
        """How many clients to send an assignment to now."""
        raise NotImplementedError

    def ready(self, view: View) -> bool:
        """Whether to step with what is waiting."""
        raise NotImplementedError

    def until(self, view: View) -> float:
        """The time at which `ready` should be asked again even if nothing arrives."""
        return float("inf")

    def late(self, staleness: int) -> str | None:
        """Why an update that missed so many commits is not used, or None."""
        return None


class Step(Part):
    """How the community model moves."""

    axis = "step"
    from_now: ClassVar[bool] = False  # True: changes are measured from the community model, not from the one sent
    cached: ClassVar[bool] = False  # True: to the mean of all learners' last models, see `controller.cache`

    def start(self, model: Tensor) -> dict[str, Tensor]:
        """The centre's own memory [s] before the first commit."""
        return {}

    def move(self, model: Tensor, average: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The new model [s] and memory, from the averaged change [s]."""
        raise NotImplementedError


class Where(Part):
    """Settings of a runtime: where a recipe runs."""

    axis = "runtime"
    simulates: ClassVar[bool] = True  # False: clients' rows are not here
    repeats: ClassVar[bool] = True  # False: what is lost since the last checkpoint cannot be computed again

    def settled(self, work: Work, clients: Clients, expected: int) -> Where:
        """The same with every choice made, so that a resumed run makes the same ones; `expected` clients work at a
        time.
        """
        return self

    def beside(self, folder: Path) -> Where:
        """The same with what it keeps on disk in a run's folder."""
        return self

    def open(self, work: Work, clients: Clients) -> Runtime:
        """Start it."""
        raise NotImplementedError
