"""The contract of a runtime: tasks in, results out, a clock, and sums under masks."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from piebald.contracts.data import Split
from piebald.contracts.messages import MASKING, Result, SumRequest, Task
from piebald.core.stored_vectors import raw


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
    rows: Mapping[Split, int] = field(default_factory=dict)


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
