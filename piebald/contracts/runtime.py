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
    """Something's whole state: named tensors and plain JSON values."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


class Runtime(Protocol):
    """Where clients run: tasks in, results out, and a clock.  Nothing else asks what time it is."""

    def submit(self, tasks: Sequence[Task], sum_request: SumRequest | None = None) -> None:
        """Send tasks; their inputs are fixed from now on.  With a request, updates are summed where they are made."""

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
        """All that a resumed run needs and the server does not know: client state, clock, what is under way."""

    def restore(self, checkpoint: Checkpoint, tasks: Mapping[int, Task]) -> None:
        """Take up a `state`; `tasks` are the outstanding ones by id."""

    def close(self) -> None:
        """Let go of processes and files.  May be called twice."""


@runtime_checkable
class DismissesSites(Protocol):
    """A runtime whose sites wait for more tasks until they are dismissed."""

    def dismiss(self) -> None:
        """Tell the sites that the run is over."""
