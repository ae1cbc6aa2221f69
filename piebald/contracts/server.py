"""Contracts of the server and of runtimes.

Of the server: the context of its components, key agreement, and the recorder.  Of a runtime: tasks in, results out, a
clock, and sums under masks.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from piebald.contracts.component import Component
from piebald.contracts.data import ModelSpec, Split
from piebald.contracts.messages import MASKING, PartialSum, Query, Result, SumRequest, Task, Update
from piebald.core.tensor_store import raw


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A saved state: named tensors and plain JSON values."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


class Runtime(Protocol):
    """A place where clients run: tasks in, results out, and the only clock of a run."""

    def submit(self, tasks: Sequence[Task], sum_request: SumRequest | None = None) -> None:
        """Send tasks, whose inputs must not change afterwards.  With a `sum_request`, updates are summed where they
        are made.
        """

    def next(self, until: float = float("inf")) -> Result | None:
        """The next result in order of time (ties: task id), or None when none is due by `until`.

        After None it is `until`; where that is infinite and nothing is under way, it is when the next client can be
        asked.
        """

    def clients(self) -> Sequence[int]:
        """Clients that could be asked now, in increasing order."""

    def now(self) -> float:
        """Seconds since the run began."""

    def state(self) -> Checkpoint:
        """Return what a resumed run needs besides the server's state: client state, clock, outstanding tasks."""

    def restore(self, checkpoint: Checkpoint, tasks: Mapping[int, Task]) -> None:
        """Restore what `state` returned; `tasks` are the outstanding ones by id."""

    def close(self) -> None:
        """Release processes and files.  May be called twice."""


@runtime_checkable
class DismissesSites(Protocol):
    """A runtime whose sites wait for more tasks until they are dismissed."""

    def dismiss(self) -> None:
        """Tell the sites that the run is over."""


@runtime_checkable
class TakesClientState(Protocol):
    """A runtime that keeps the state of clients, which they may bring from another run."""

    def take_client_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Give clients a state before the run begins: tensors named "client_state/CLIENT/NAME"."""


@runtime_checkable
class StatesRows(Protocol):
    """A runtime whose clients say how many rows they have when they join."""

    def stated_rows(self) -> Sequence[int]:
        """Return the number of training rows that each client has said it has, 0 for those that have said nothing."""


@runtime_checkable
class TellsAbsences(Protocol):
    """A runtime whose clients come and go for reasons that it knows."""

    def absences(self) -> Mapping[int, str]:
        """Return the clients that no round waits for now, each with the reason."""


@runtime_checkable
class ChecksSignatures(Protocol):
    """A runtime that can check what its clients have signed (`contracts.Signer`)."""

    def check_signature(self, client: int, text: bytes, signature: bytes) -> bool:
        """Return whether a client has signed this text in this run."""


SIGNATURE = 1024  # bytes of a signature with the certificate behind it


class Signer(Protocol):
    """Signatures of a client for what it sends to others through the server, and checks of theirs."""

    def sign(self, text: bytes) -> bytes:
        """A signature of `SIGNATURE` bytes."""

    def check(self, client: int, text: bytes, signature: bytes) -> bool:
        """Return whether another client has signed this."""

    def name(self, client: int) -> str:
        """A client in words, for sentences."""


# The largest share of one member in the weights of a sum, where nothing else is said.  Sizes are announced to a quarter
# of a doubling, so a member that has half of all rows could have 0.59 of them by what is announced.
LARGEST_MEMBER = 0.6


class SumDemands(BaseModel):
    """A client's demands of a sum before it takes part in it.

    The defaults are safe against a server that lies and acts with up to a tenth of the clients.

    Attributes:
        least: fewest clients in a sum; with two, each of them knows the other's update.
        threshold: the least share of a key's shares that opens a mask, and of the clients who sign one list of
            survivors.  Above 1/2 a lying server alone opens one sum of a set of keys; from 2/3 it takes
            a third of the clients with it to open two.
        neighbours: fewest neighbours to mask with, where not all others are; None leaves that to `colluding`.
        colluding: the share of the clients that may act with the server.  What they could open with a chance above
            2^-40 is refused (`privacy.secure_aggregation.security`).
        largest_share: the largest share of one member in the weights of a sum.
        clip: the largest norm to which each vector of an update is shortened before it is masked; None for any.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    least: int = Field(default=3, ge=2)
    threshold: float = Field(default=2 / 3, ge=0.5, le=1)
    neighbours: int | None = Field(default=None, ge=2)
    colluding: float = Field(default=0.1, ge=0, lt=1)
    largest_share: float = Field(default=LARGEST_MEMBER, gt=0, le=1)
    clip: float | None = Field(default=None, gt=0)


@dataclass(frozen=True, slots=True, eq=False)
class ClientSecrets:
    """The secrets of one client, for keys and masks.

    Attributes:
        client: its number.
        kept: named tensors; what is in it after a call is kept, on disk in a real federation, before anything leaves.
        draw: random bytes of a length: the system's in a real federation, repeatable ones in a simulation.
        signer: signs and checks: with the key of its certificate in a real federation, with a key that follows from
            the seed in a simulation.
        demands: what the client demands of a sum.
        terms: digest of the terms that it was shown, "" in a simulation.
        work: digest of what it does under them (`ClientWork.digest`).
        rows: how many rows of each split it has; of those to train on, how much they count.
    """

    client: int
    kept: dict[str, Tensor]
    draw: Callable[[int], bytes]
    signer: Signer
    demands: SumDemands = field(default_factory=SumDemands)
    terms: str = ""
    work: str = ""
    rows: Mapping[Split, float] = field(default_factory=dict)


SHOWN_BYTES = 32  # of a digest
_PRIVATE = "private"  # what a client begins with for itself: the run's terms hold a digest of it

_digests: dict[int, tuple[weakref.ref[Tensor], int, str]] = {}  # of tensors that are there, by their id


def shown_digest(values: Any, vectors: Mapping[str, Tensor]) -> bytes:
    """The digest [32] of JSON values and named tensors, each with its type, its shape and its bytes.

    It is the same on every machine for the same bytes, and in no other case.
    """
    parts = {name: [str(part.dtype), list(part.shape), _digest(part)] for name, part in vectors.items()}
    text = json.dumps([values, parts], sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=SHOWN_BYTES).digest()


def task_digest(task: Task) -> bytes:
    """The digest of all in a task that every member of a sum must have been shown alike.

    These are its version and attempt, from which randomness follows, its question with all arguments, the model and all
    other vectors.  Left out are its number, whose it is, the messages of the masking itself, which have digests of
    their own, and the first private numbers, which the terms of the run fix.
    """
    query = None if task.query is None else task.query.table()
    values = {"version": task.version, "attempt": task.attempt, "committed": task.committed, "query": query}
    vectors = task.vectors
    return shown_digest(values, {n: vectors[n] for n in vectors if n != _PRIVATE and not n.startswith(MASKING)})


def _digest(tensor: Tensor) -> str:
    """The digest of a tensor's bytes; that of a tensor which many clients are shown is computed once."""
    # torch counts writes in place, except for inference tensors, which have no such count; an id may be that of a
    # tensor that is gone, hence the weak reference
    number, changes = id(tensor), -1 if tensor.is_inference() else tensor._version
    holder, changes_then, digest = _digests.get(number, (None, 0, ""))
    if holder is None or holder() is not tensor or changes_then != changes:
        digest = hashlib.blake2b(raw(tensor), digest_size=SHOWN_BYTES).hexdigest()
        _digests[number] = weakref.ref(tensor, lambda _: _digests.pop(number, None)), changes, digest
    return digest


@dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """The updates of one step in client order.

    Attributes:
        clients, versions, updates: of each update.
        matrix: [n, s], the changes, or None where they were summed early or are not needed side by side.
        version: server steps made.
        sent: [s] each, the models that the changes started from.
        trained: t, how many of the s numbers are trained parameters.  They come first; the rest are buffers, the
            running statistics of batch norms.  None means all.
        missed: server steps that each update missed, where that is not the difference of versions: in a run with
            several clusters only those of its own cluster count.
        held: for each update the positions [m] of the shared numbers that its client's model has, None for all of them;
            elsewhere its change is 0.  Empty where all clients have the same model.

    Components get cohorts without buffers (`of_parameters`) unless they ask for them: buffers have no direction to
    learn in, no common scale with the parameters, and may be most of an update's length.

    Examples:
        >>> Cohort(clients=[4, 7], versions=[2, 3], updates=[], matrix=None, version=3).staleness
        [1, 0]
    """

    clients: Sequence[int]
    versions: Sequence[int]
    updates: Sequence[Update]
    matrix: Tensor | None
    version: int
    sent: Sequence[Tensor] = ()
    trained: int | None = None
    missed: Sequence[int] | None = None
    held: Sequence[Tensor | None] = ()

    @property
    def parameters(self) -> Tensor:
        """[n, t], the changes of the trained parameters: a view of `matrix`."""
        assert self.matrix is not None
        return self.matrix[:, : self.trained]

    @property
    def buffers(self) -> Tensor:
        """[n, s - t], the changes of the buffers: a view of `matrix`."""
        assert self.matrix is not None
        # a slice from None would be all numbers, where none are buffers
        return self.matrix[:, self.matrix.shape[1] if self.trained is None else self.trained :]

    @property
    def staleness(self) -> list[int]:
        """Server steps made since each update's model was sent."""
        if self.missed is not None:
            return list(self.missed)
        return [self.version - version for version in self.versions]

    def model(self, row: int) -> Tensor:
        """The trained model [s] of one client."""
        return self.sent[row] + self.updates[row].vectors["model"]

    def model_parameters(self, row: int) -> Tensor:
        """The trained parameters [t] of one client's trained model."""
        return self.model(row)[: self.trained]

    def of_parameters(self) -> Cohort:
        """The same updates without buffers: all vectors, matrices and positions end at `trained`."""
        count = self.trained
        if count is None or self.matrix is None:
            return self
        changes = [{**update.vectors, "model": update.vectors["model"][:count]} for update in self.updates]
        return replace(
            self,
            updates=[replace(update, vectors=named) for update, named in zip(self.updates, changes, strict=True)],
            matrix=self.parameters,
            sent=[model[:count] for model in self.sent],
            held=[None if positions is None else positions[positions < count] for positions in self.held],
        )

    def rows(self, rows: Sequence[int]) -> Cohort:
        """Some of the updates."""
        return replace(
            self,
            clients=[self.clients[row] for row in rows],
            versions=[self.versions[row] for row in rows],
            updates=[self.updates[row] for row in rows],
            matrix=None if self.matrix is None else self.matrix[list(rows)],
            sent=[self.sent[row] for row in rows],
            missed=None if self.missed is None else [self.missed[row] for row in rows],
            held=[self.held[row] for row in rows] if self.held else (),
        )


@dataclass(frozen=True, slots=True, eq=False)
class QueryRequest:
    """A query that a component at the server puts to a client, with the named vectors that go along."""

    client: int
    query: Query
    vectors: Mapping[str, Tensor]


class AsksClients(Protocol):
    """The server as key agreement sees it: it asks clients, and checks their answers."""

    def query(self, requests: Sequence[QueryRequest]) -> list[Update | None]:
        """Put queries to clients and wait for all answers, in the order of the requests.

        Training that ends meanwhile waits its turn.  The exchange costs bytes and time and is recorded; an answer that
        did not come or that its query's `reject_reason` refuses is None.
        """

    def exclude_client(self, client: int, reason: str) -> None:
        """Exclude a client from the rest of the run, because what it sent is certainly wrong; log and record it."""

    def check_signature(self, client: int, text: bytes, signature: bytes) -> bool:
        """Return whether a client has signed this text; true where the runtime cannot check it: clients must, too."""


class ServerContext(AsksClients, Protocol):
    """The interface of the server's loop for components at the server.

    Attributes:
        spec: the model, its layout and the objective; `spec.seed` is the run's.
        trainer: the recipe's trainer.
        known: clients in the federation.
        device: where models may be evaluated: the engine's device if that is in this process, else the CPU.
        state: what this component keeps for this cluster from step to step: tensors and JSON values, also in
            checkpoints.
    """

    spec: ModelSpec
    trainer: Component
    known: int
    device: torch.device
    state: dict[str, Any]

    @property
    def version(self) -> int:
        """Server steps made."""

    @property
    def model(self) -> Tensor:
        """The cluster model [s] of the cluster in question."""

    @property
    def models(self) -> Mapping[int, Tensor]:
        """The cluster models [s] of all clusters."""

    @property
    def members(self) -> Sequence[int]:
        """The clients of the cluster in question that can be asked now."""

    def exclude_update(self, client: int, reason: str) -> None:
        """Record that a sound update does not count in this step."""

    def note(self, name: str, value: Any) -> None:
        """Record a JSON value for the report, e.g. a divergence matrix."""


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """The context of a component that acts on the average of a step's updates.

    Attributes:
        arrived: updates in the average.
        known: clients in the federation.
        version: server steps made before this one.
        shares: how much each update counts in the average; where single weights are hidden, equal shares.
        rng_key: a key for random numbers that belong to this step, this cluster and this component alone.  In a real
            federation it has 256 bits and nobody else knows it; in a simulation it follows from the run's seed.
        expected: how many updates a step expects, where noise on their mean hides clients: their sum is divided by
            that, whoever arrives.  None elsewhere.
        state: what the component returned as its state at the step before.
    """

    arrived: int
    known: int
    version: int
    shares: Sequence[float] = ()
    rng_key: int = 0
    expected: float | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)


class KeyAgreement(Protocol):
    """Clients that have agreed on keys for one round, as the server knows them (`MaskingTransform.agree_keys`).

    `absent` says of each client that was asked and takes no part why not.
    """

    @property
    def absent(self) -> Mapping[int, str]: ...

    def vectors(self, client: int) -> Mapping[str, Tensor]:
        """Return what a client's task brings for masking, by names that begin with `MASKING`."""

    def unmask(self, masked: Mapping[int, Update], context: ServerContext) -> PartialSum | str:
        """The sum of clients' masked updates, or why there is none."""


class RunRecorder(Protocol):
    """The record of a run, written by the server; `storage.store.RunStore` keeps it in a run folder."""

    @property
    def lasts(self) -> bool:
        """True if checkpoints outlive the process; else none need be made."""

    def commit(
        self,
        step: Mapping[str, Any],
        results: Sequence[Mapping[str, Any]],
        checkpoint: Checkpoint | None = None,
        notes: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """One server step with the results since the one before and the components' notes, in one
        transaction; with the checkpoint, if it is due.
        """

    def scores(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Scores of models on clients' rows."""

    def confusion(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Clients' rows by their class and by the class that a model takes them for."""

    def row_scores(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Scores of constant answers, and of single rows."""

    def failures(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Reasons why clients have no score, or lack one."""
