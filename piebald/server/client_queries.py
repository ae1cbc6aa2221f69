"""Queries to clients, and the context through which components at the server put them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from piebald.contracts import MOST_ROWS, ChecksSignatures, QueryRequest, Result, Runtime, Task, Update, count_reason
from piebald.contracts.component import Component
from piebald.contracts.data import ModelSpec
from piebald.core.machine import raise_if_lost
from piebald.core.metrics import impossible_reason
from piebald.methods.recipe import Recipe
from piebald.server.client_pool import ClientPool
from piebald.server.cluster_models import ClusterModels
from piebald.server.records import TableRow, refusal, result_row

log = logging.getLogger(__name__)


class ClientQueries:
    """Puts queries to clients and waits for all answers.

    Attributes:
        queue: training results that came while answers were awaited.

    Args:
        runtime: where the clients are.
        spec: the model that the queries are about.
    """

    def __init__(self, runtime: Runtime, spec: ModelSpec) -> None:
        self.queue: deque[Result] = deque()
        self._runtime, self._spec = runtime, spec
        self._refusals: list[TableRow] = []
        self._rows: list[TableRow] = []

    def answers(self, tasks: Sequence[Task]) -> list[Result]:
        """Send queries and wait for their results, which are returned in the order of the tasks' ids."""
        self._runtime.submit(tasks)
        missing, answers = {task.id: task for task in tasks}, []
        while missing:
            result = self._runtime.next()
            if result is None:  # nothing is under way any more, so they will never come
                now = self._runtime.now()
                answers += [Result(task, None, now, now, failure="no answer") for task in missing.values()]
                break
            if missing.pop(result.task.id, None) is not None:
                answers.append(result)
            else:
                # a training task that ends meanwhile belongs to the loop, which takes it next
                self.queue.append(result)
        # not in the order of arrival, which differs from run to run where clients are processes
        return sorted(answers, key=lambda result: result.task.id)

    def usable_answers(self, tasks: Sequence[Task]) -> tuple[list[Result], list[tuple[Result, str]]]:
        """Those results of queries that can be used, and the others with the reason."""
        judged = [(result, self._reject_reason(result)) for result in self.answers(tasks)]
        others = [(result, reason) for result, reason in judged if reason is not None]
        return [result for result, reason in judged if reason is None], others

    def ask(self, tasks: Sequence[Task], version: int) -> list[Update | None]:
        """The usable answers to queries, None for the others; the exchange is recorded for `version`."""
        answers: list[Update | None] = []
        for result in self.answers(tasks):
            reason = self._reject_reason(result)
            status = "ok" if reason is None else "refused" if result.update is not None or result.refused else "lost"
            self._rows.append(result_row(result, version, status, reason))
            answers.append(result.update if reason is None else None)
        return answers

    def take_rows(self) -> list[TableRow]:
        """The exchanges since the last call, as rows of the run folder."""
        rows, self._rows = self._rows, []
        return rows

    def take_refusals(self) -> list[TableRow]:
        """The answers that were refused since the last call."""
        refusals, self._refusals = self._refusals, []
        return refusals

    def _reject_reason(self, result: Result) -> str | None:
        """Return why an answer cannot be used, or None; one that is no answer is noted."""
        try:
            reason = self._checked(result)
        except Exception as error:  # whatever one answer raises is the fault of its client
            raise_if_lost(error)
            log.debug("the answer to query %d raised an error", result.task.id, exc_info=True)
            reason = f"raised {type(error).__name__} when it was checked"
        if reason is not None and (result.refused or result.update is not None):
            self._refusals.append(refusal(result, reason))
        return reason

    def _checked(self, result: Result) -> str | None:
        query, update = result.task.query, result.update
        if update is None or result.failure is not None or query is None:
            return result.failure or "no answer"
        for name, vector in update.vectors.items():
            if not bool(vector.isfinite().all()):
                return f"{name} is not finite"
        if reason := count_reason("examples", update.examples, MOST_ROWS):
            return reason
        own = self._spec.objective.own_metrics
        impossible = (impossible_reason(name, value, own) for name, value in update.metrics.items())
        return next(filter(None, impossible), None) or query.reject_reason(update, self._spec)


class LoopState(Protocol):
    """The part of the server loop that a context shows, and acts through."""

    recipe: Recipe
    client_pool: ClientPool
    cluster_models: ClusterModels
    version: int
    evaluates_on: torch.device

    @property
    def work(self) -> ModelSpec: ...
    @property
    def known(self) -> int: ...
    @property
    def runtime(self) -> Runtime: ...
    def query(self, requests: Sequence[QueryRequest]) -> list[Update | None]: ...
    def exclude_update(self, client: int, reason: str) -> None: ...
    def exclude_client(self, client: int, reason: str) -> None: ...
    def note(self, axis: str, cluster: int, name: str, value: Any) -> None: ...


class LoopContext:
    """`contracts.ServerContext` for the component of one axis and one cluster."""

    def __init__(self, server: LoopState, axis: str, cluster: int) -> None:
        self._server, self._axis, self._cluster = server, axis, cluster
        self.spec: ModelSpec = server.work
        self.known, self.device = server.known, server.evaluates_on
        self.trainer: Component = server.recipe.training
        self.state = server.cluster_models.kept.setdefault((axis, cluster), {})

    @property
    def version(self) -> int:
        return self._server.version

    @property
    def model(self) -> Tensor:
        return self._server.cluster_models.cluster(self._cluster).model

    @property
    def models(self) -> Mapping[int, Tensor]:
        return self._server.cluster_models.models

    @property
    def members(self) -> Sequence[int]:
        here, excluded = self._server.runtime.clients(), self._server.client_pool.excluded
        cluster_of = self._server.cluster_models.cluster_of
        return [c for c in here if c not in excluded and (not cluster_of or cluster_of.get(c, 0) == self._cluster)]

    def query(self, requests: Sequence[QueryRequest]) -> list[Update | None]:
        return self._server.query(requests)

    def exclude_update(self, client: int, reason: str) -> None:
        self._server.exclude_update(client, reason)

    def exclude_client(self, client: int, reason: str) -> None:
        if client not in self._server.client_pool.excluded:
            self._server.exclude_client(client, reason)
            log.warning("client %d is not asked any more: %s", client, reason)

    def check_signature(self, client: int, text: bytes, signature: bytes) -> bool:
        runtime = self._server.runtime
        return not isinstance(runtime, ChecksSignatures) or runtime.check_signature(client, text, signature)

    def note(self, name: str, value: Any) -> None:
        self._server.note(self._axis, self._cluster, name, value)
