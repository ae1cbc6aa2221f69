"""Contracts of the server: what components there are given, and where the loop writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from piebald.contracts.messages import Pooled, Query, Update
from piebald.contracts.runtime import Checkpoint

if TYPE_CHECKING:
    from torch import Tensor


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
