"""The nouns that all stages pass around: data, assignments, arrivals, updates, and the seam to a runtime.

Shapes: `p` numbers in a whole model, `s` of them shared (they come first, see `parameters.Layout`), `n` updates in a
cohort, `c` clients in a stack.  Client code is written for ONE client with plain arithmetic on the last axis; an engine
may hand it a stack of clients, so vectors carry a leading axis of `c` (1 where clients run one after another).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from piebald.parameters import Layout
    from piebald.parts import Query, Rule, Stage, Weigh
    from piebald.task import Task

Split = Literal["train", "validation", "test"]

CENTRE = -1  # the client number of the centre itself, which may hold a common test set
ONE_WAY = frozenset({"private", "candidates"})  # named vectors that only travel down, and no update answers in kind
SIGNATURE = 1024  # bytes of a signature with the certificate behind it
SEALING = "sealing/"  # names of what an assignment brings for the stage that seals, and no rule is shown


# ---------------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True, slots=True)
class Rows:
    """Examples of one client or one test set: inputs `x` and targets `y`, the first axis counts examples."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return int(self.x.shape[0])


class Clients(Protocol):
    """Who holds what.  Clients are numbered from 0; their rows are fetched only when asked for.

    They may also have `root`, rows (or None) that the centre keeps for itself and may train on or look at, for the
    parts that need such rows.  Never those of `common`.
    """

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
        seconds_per_row: time to run a model over one row when a question is answered; None takes a sixtieth of a step,
            as if a step had 20 rows and forward were a third of it.
    """

    seconds_per_step: float = 0.0
    down: float = float("inf")
    up: float = float("inf")
    latency: float = 0.0
    dropout: float = 0.0
    on: tuple[tuple[float, float], ...] | None = None
    seconds_per_row: float | None = None

    def answering(self, rows: int) -> float:
        """Seconds to run a model over some rows."""
        return rows * (self.seconds_per_step / 60 if self.seconds_per_row is None else self.seconds_per_row)


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
        parts: named vectors on their way down: "model" [s], "private" [p - s] at the first contact only, what the
            rule asks for (SCAFFOLD's "control") and what the grouping offers ("candidates", other groups' models).
        query: a question to answer; None means: train.
        free: asked for the report only, so it costs neither bytes nor virtual time.
        turn: how often this client was asked at this version before; it enters the randomness too.
        committed: optimiser steps behind the commits that its group's model had seen when this was sent; from two of
            these a client learns how fast the others go.
    """

    id: int
    client: int
    version: int
    parts: Mapping[str, Tensor]
    query: Query | None = None
    free: bool = False
    turn: int = 0
    committed: int = 0

    @property
    def moment(self) -> int | str:
        """What tells this assignment's randomness from that of the client's others."""
        return f"{self.version}.{self.turn}" if self.turn else self.version


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """A sum over updates, made where they were trained: `weight` = sum of weights, `parts` = weighted sum of "model"
    [s] and plain sums of the other named parts.

    `sealed` where the updates came under a seal: then no number of a single one is known, and `loss` is their weighted
    mean training loss.
    """

    weight: float
    parts: Mapping[str, Tensor]
    sealed: bool = False
    loss: float | None = None


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


class Signer(Protocol):
    """How a client vouches for what it tells others through the centre, and checks what they tell it."""

    def sign(self, text: bytes) -> bytes:
        """A signature of `SIGNATURE` bytes."""

    def check(self, client: int, text: bytes, signature: bytes) -> bool:
        """Whether another client has signed this."""


@dataclass(frozen=True, slots=True, eq=False)
class Secrets:
    """What one client keeps from everybody, for keys and seals.

    Attributes:
        client: its number.
        kept: named tensors; what is in it after a call is kept, on disk in a real federation, before anything leaves.
        draw: so many random bytes: the system's in a real federation, repeatable ones in a simulation.
        signer: signs and checks, in a real federation; None in a simulation, where nobody could lie.
    """

    client: int
    kept: dict[str, Tensor]
    draw: Callable[[int], bytes]
    signer: Signer | None = None


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
        committed: [c, 1] float64, the assignments' `committed`.
        examples: [c, 1], training rows of each client.
    """

    model: Tensor
    shared: int
    memory: Mapping[str, Tensor]
    parts: Mapping[str, Tensor]
    versions: Sequence[int]
    committed: Tensor
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


@dataclass(frozen=True, slots=True)
class Privacy:
    """How a descent hides single rows (DP-SGD, Abadi et al. 2016, algorithm 1).

    Attributes:
        clip: C, longest gradient of one row (Euclidean norm over all parameters).
        noise: sigma, standard deviation of the noise on the sum of a step's rows, in clips.
    """

    clip: float
    noise: float


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
        privacy: if given, each row is in a step's batch by itself with probability q = min(1, batch / rows), and the
            gradient is (sum of the rows' own clipped gradients + noise) / (q rows).  As many steps as otherwise.
    """

    lr: float | Tensor
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    batch: int = 20
    epochs: int = 1
    steps: int | None = None
    privacy: Privacy | None = None


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

    def moments(self, model: Tensor, layers: Sequence[str]) -> Tensor:
        """Mean and variance of what goes into some layers over the clients' training rows, channel by channel [c, m].

        For each layer all means, then all variances; 0 for a client without rows.  Models are in evaluation mode.
        """

    def confusion(self, model: Tensor, split: Split) -> Tensor:
        """Rows by true class and by the class with the largest output, [c, classes, classes]; for classification."""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A question that a part of the centre wants put to a client, with the named vectors that go along."""

    client: int
    query: Query
    parts: Mapping[str, Tensor]


class Centre(Protocol):
    """What the loop lends to the parts that work at the centre.

    Attributes:
        work: the model, its layout and the task; `work.seed` is the run's.
        known: clients in the federation.
        memory: what this part keeps for this group from commit to commit: tensors and JSON values, also in checkpoints.
    """

    work: Work
    known: int
    memory: dict[str, Any]

    @property
    def version(self) -> int:
        """Commits made."""

    @property
    def model(self) -> Tensor:
        """The community model [s] of the group in question."""

    @property
    def models(self) -> Mapping[int, Tensor]:
        """The community models [s] of all groups."""

    @property
    def members(self) -> Sequence[int]:
        """The clients of the group in question that can be asked now."""

    def ask(self, questions: Sequence[Question]) -> list[Update | None]:
        """Put questions to clients and wait for all answers, in the order of the questions.

        Training that ends meanwhile waits its turn.  The exchange costs bytes and time and is recorded; an answer that
        did not come or that its query's `complaint` refuses is None.
        """

    def leave_out(self, client: int, reason: str) -> None:
        """Put on record that a sound update does not count in this commit."""

    def remark(self, name: str, value: Any) -> None:
        """Put a JSON value on record for the report, e.g. a divergence matrix."""


@dataclass(frozen=True, slots=True)
class Work:
    """All that a client must know to serve: the same on every site, rebuilt there, never pickled.

    `initial` [p] is the model the run starts from, `shape` that of one input, `outputs` that of what comes out.
    """

    model: nn.Module
    layout: Layout
    initial: Tensor
    rule: Rule
    stages: tuple[Stage, ...]
    task: Task
    seed: int
    shape: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


class Meeting(Protocol):
    """Clients that have agreed on keys for one commit, as the centre knows them (`parts.Stage.meet`).

    `absent` says of each client that was asked and takes no part why not.
    """

    @property
    def absent(self) -> Mapping[int, str]: ...

    def parts(self, client: int) -> Mapping[str, Tensor]:
        """What a client's assignment brings for its seal, by names that begin with `SEALING`."""

    def open(self, sealed: Mapping[int, Update], centre: Centre) -> Pooled | str:
        """The sum of clients' sealed updates, or why there will be none."""


class Recorder(Protocol):
    """Where the controller writes what happened; `report.store` keeps it in a run folder."""

    @property
    def lasts(self) -> bool:
        """Whether checkpoints outlive the process; else none need be made."""

    def commit(
        self,
        step: Mapping[str, Any],
        arrivals: Sequence[Mapping[str, Any]],
        checkpoint: Checkpoint | None = None,
        remarks: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """One commit with the arrivals since the one before and what parts of the centre put on record, in one
        transaction; with the checkpoint, if it is due.
        """

    def scores(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Scores of models on clients' rows."""
