"""Contracts of what clients hold, and of the devices they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor


Split = Literal["train", "validation", "test"]


SERVER_ID = -1  # the client number of the server itself, which may hold a common test set


@dataclass(frozen=True, slots=True)
class Rows:
    """Examples of one client or one test set: inputs `x` and targets `y`, the first axis counts examples."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return int(self.x.shape[0])


class Clients(Protocol):
    """Who holds what.  Clients are numbered from 0; their rows are fetched only when asked for.

    They may also have `server_rows`, rows (or None) that the server keeps for itself and may train on or look at, for
    components that need such rows.  Never those of `common`.
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
        dropout: probability that a task is lost.
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
