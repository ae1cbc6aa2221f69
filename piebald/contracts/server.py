"""Contracts of the server: the context of its components, key agreement, and the recorder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from piebald.contracts.component import Component
from piebald.contracts.messages import PartialSum, Query, Update
from piebald.contracts.model_spec import ModelSpec
from piebald.contracts.runtime import Checkpoint


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
