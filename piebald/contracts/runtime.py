"""The contract of a runtime: tasks in, results out, and a clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from piebald.contracts.messages import Result, SumRequest, Task

if TYPE_CHECKING:
    from torch import Tensor


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
class ChecksSignatures(Protocol):
    """A runtime that can check what its clients have signed (`contracts.Signer`)."""

    def check_signature(self, client: int, text: bytes, signature: bytes) -> bool:
        """Return whether a client has signed this text in this run."""
