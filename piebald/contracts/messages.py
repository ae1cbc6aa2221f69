"""Contracts of what travels between server and clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from piebald.component import Part
from piebald.contracts.training import Learned, Local, Start

if TYPE_CHECKING:
    from torch import Tensor


ONE_WAY = frozenset({"private", "candidates"})  # named vectors that only travel down, and no update answers in kind


SEALING = "sealing/"  # names of what an assignment brings for the stage that seals, and no rule is shown


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
