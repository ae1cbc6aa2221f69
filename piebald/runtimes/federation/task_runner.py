"""Tasks at a site: they are served by the simulator's own engine, for one client."""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from piebald.choice import local_work
from piebald.client_work import ClientWork
from piebald.contracts import MASKING, Clients, ClientSecrets, Query, Signer, Split, Task, Update
from piebald.errors import SettingError
from piebald.privacy.ledger import Ledger, OverBudget
from piebald.privacy.secure_aggregation.client_side import Outcome, masked, replied
from piebald.runtimes.engines.engine import Engine
from piebald.runtimes.engines.engine_choice import make_engine
from piebald.runtimes.engines.serve_stack import personal_model, serve
from piebald.runtimes.engines.stack import PRIVATE, ClientStack
from piebald.runtimes.federation.client_store import ClientStore
from piebald.runtimes.federation.examined_models import ExaminedModels
from piebald.runtimes.federation.policy import Policy, declared_vectors, rows_read
from piebald.runtimes.federation.run_terms import private_digest
from piebald.runtimes.federation.work_limits import TaskClock
from piebald.transforms.gaussian import Gaussian

log = logging.getLogger("piebald.federation")


@dataclass(frozen=True, slots=True, eq=False)
class SiteClient:
    """A run at one site, rebuilt from its terms.

    Attributes:
        work: the model, the trainer and the transforms; with clients' models where a task may be about any of them.
        clients: all clients' names, and this site's rows alone.
        client: this site's client number.
        begins: digest of the private numbers that a first task may bring where updates are masked, see `RunTerms`.
    """

    work: ClientWork
    clients: Clients
    client: int
    begins: str = ""


class TaskRunner:
    """Serves the tasks of one run.

    Args:
        prepared: the run at this site.
        policy: what the site allows.
        device: where it computes.
        signer: signs the site's keys of secure aggregation, and checks those of other sites.
        ledger: counts what noisy answers spend of the policy's budget; without it there are none.
        terms: digest of the run's terms as they came.

    Attributes:
        work: with the client's own model.
        every: the same, with the models of clients where a task may be about any of them.
        client: this site's client number.
        rows: how many rows it has of each split.
    """

    def __init__(
        self,
        prepared: SiteClient,
        policy: Policy,
        device: str,
        signer: Signer | None = None,
        ledger: Ledger | None = None,
        terms: str = "",
    ) -> None:
        work = prepared.work
        self._clock = TaskClock(policy.work.seconds)
        work = replace(work, model=self._clock.watched(work.model))
        self.every, work = work, work.of(prepared.client)
        self.work, self.client, self._policy, self._signer = work, prepared.client, policy, signer
        self._ledger, self._terms, self._begins = ledger, terms, prepared.begins
        splits: tuple[Split, ...] = ("train", "validation", "test")
        self.rows = {split: len(prepared.clients.rows(prepared.client, split)) for split in splits}
        self._declared = declared_vectors(work)  # as the policy saw them: what is declared later does not count
        self._examined = ExaminedModels()
        self._told: dict[str, Query] = {}  # what was asked about a topic, where small numbers of rows are hidden
        noises = [one for one in work.transforms if isinstance(one, Gaussian) and one.where == "client"]
        self._noisy = any(one.multiplier for one in noises)
        self._initial_state = work.initial_state()
        # one engine for each thread: a query is answered while the other trains
        engines = (
            make_engine("sequential", self.every, prepared.clients, torch.device(device), False) for _ in range(2)
        )
        self._training_engine, self._query_engine = engines

    @property
    def stated_rows(self) -> dict[Split, int]:
        """The numbers of rows that the site tells the server, which holds its results to them.

        Under secure aggregation updates tell nothing of the training rows, so their number stays here.
        """
        return {split: count for split, count in self.rows.items() if split != "train" or not self.work.masking}

    @property
    def state_form(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the client's state, empty where it has none."""
        form = {name: tuple(tensor.shape) for name, tensor in self._initial_state.items()}
        private = self.work.layout.size - self.work.layout.shared
        return form | ({PRIVATE: (private,)} if private else {})

    def serve(
        self, task: Task, state: Mapping[str, Tensor] | None
    ) -> tuple[Update | None, str | None, dict[str, Tensor] | None]:
        """Serve a task.

        Args:
            task: the task, which is not about keys.
            state: the client's state, None before its first training.

        Returns:
            The update, or the reason why there is none, and the new client state (None: unchanged).
        """
        query = task.query
        if query is not None:
            refused = (
                self._policy.query_reject_reason(query, self.work)
                or self._examined.reject_reason(task, rows_read(query, self.work), self._policy.most_models(self.work))
                or self._told_reason(query)
                or self._spend(query)
            )
            if refused is not None:
                return None, refused, None
        elif (refused := self._private_reason(task, state)) is not None:
            return None, refused, None
        engine: Engine = self._training_engine if query is None else self._query_engine
        try:
            with self._clock.task():
                served = serve(engine, self._stack(task, state))
        except Exception as error:  # the site goes on; the text is not sent, since it may hold numbers of its rows
            log.exception("task %d failed", task.id)
            return None, f"{type(error).__name__} at the site, whose log says more", None
        update = served.update(0)
        if query is not None:
            refused = self._policy.answer_reject_reason(query, update, self.every.of_task(task), self.rows)
            return (update, None, None) if refused is None else (None, f"refused by the site's policy: {refused}", None)
        if self._noisy:  # the noise does not cover them
            update = replace(update, metrics={})
        refused = self._policy.update_reject_reason(update, self._declared, self.every.of_task(task).layout.shared)
        if refused is not None:
            return None, f"refused by the site's policy: {refused}", None
        if served.packed and self.work.masking is None:
            update = replace(update, vectors={**update.vectors, "model": served.packed[0]})
        if not math.isfinite(update.norm):  # the update cannot count, so the client forgets the attempt
            return update, None, None
        return update, None, {name: rows[0].clone() for name, rows in served.state.items()}

    def _private_reason(self, task: Task, state: Mapping[str, Tensor] | None) -> str | None:
        """Why private numbers that came are not begun with, or None.

        What the server alone chooses for each client could make the updates of all but one of a sum known.
        """
        private = task.vectors.get(PRIVATE) if state is None and self.work.masking is not None else None
        if private is None or private_digest(private) == self._begins:
            return None
        return "the private numbers that came are not those of the run's terms, with which all clients of a sum begin"

    def _told_reason(self, query: Query) -> str | None:
        """Why a question is not answered after an earlier one, or None."""
        topic = query.topic()
        if self._policy.least_rows is None or topic is None or self._told.setdefault(topic, query) == query:
            return None
        return f"this site, which hides small numbers of rows, answers one question about {topic} in a run"

    def _spend(self, query: Query) -> str | None:
        """Count a noisy answer, on disk before it is computed; returns why it is not given, or None.

        A crash between the two counts one too many, never too few.
        """
        hidden = query.hiding()
        if hidden is None or not hidden.noise:
            return None
        if (few := self._policy.few_rows_reason(query, self.work, self.rows)) is not None:
            return few
        if self._ledger is None:
            return "this site keeps no ledger of noisy answers"
        try:
            self._ledger.spend(query.kind, hidden.noise)
        except OverBudget as error:
            return f"refused by the site's policy: {error}"
        except SettingError as error:  # the text names a path of the site
            log.error("a question with noise is not answered: %s", error)
            return "this site's ledger cannot be read or written, its log says more"
        return None

    def answer_key_query(self, task: Task, store: ClientStore) -> Outcome:
        """Answer a query about the keys of a secure aggregation."""
        return self._with_secrets(store, lambda own: replied(task, self.work, own))

    def mask(self, update: Update, task: Task, store: ClientStore) -> Outcome:
        """Mask an update, where the run masks updates."""
        if self.work.masking is None:
            return update, None
        return self._with_secrets(store, lambda own: masked(update, task, self.work, own))

    def _with_secrets(self, store: ClientStore, act: Callable[[ClientSecrets], Outcome]) -> Outcome:
        """Call a function with the site's secrets, and write them to disk before its outcome is returned."""
        if self._signer is None:
            return None, "this run masks nothing"
        demands = self._policy.sum_demands
        own = ClientSecrets(self.client, store.secrets(), os.urandom, self._signer, demands, self._terms)
        try:
            outcome = act(own)
        except Exception as error:  # the site goes on, whatever the server sends
            log.exception("the keys of a secure aggregation failed")
            outcome = None, f"{type(error).__name__} at the site, whose log says more"
        try:
            store.save_secrets(own.kept)
        except OSError as error:  # nothing leaves whose secrets are not kept
            log.error("%s cannot be written (%s): make room, or mend it", store.folder, (error.strerror or "").lower())
            return None, "the disk of the site cannot be written"
        return outcome

    def personalize(self, version: int, global_model: Tensor, state: Mapping[str, Tensor] | None) -> Tensor:
        """The model [p] that the site uses for itself, given the global model [s] and its client state."""
        task = Task(0, self.client, version, {"model": global_model})
        state = self._first_state(task) if state is None else state
        return personal_model(self._query_engine, self.client, version, global_model, state)

    def choose(
        self,
        version: int,
        models: Mapping[str, Tensor],
        state: Mapping[str, Tensor] | None,
        trained: Sequence[tuple[str, int]],
    ) -> tuple[Tensor, dict[str, Any]]:
        """The model [p] that the site chooses for itself, and the record of the choice (`choice.record`).

        Args:
            version: server steps made.
            models: "model" [s], that of its cluster, and "global" [s] where there are other clusters.
            state: its client state.
            trained: its training tasks, see `ClientStore.trained`.
        """
        assert self.work.choice is not None
        rows = self._query_engine.row_loader.size(self.client)
        passes = tuple(local_work(self.work.trainer, rows, steps) for _, steps in trained)
        query = self.work.choice.model_copy(update={"tasks": tuple(name for name, _ in trained), "passes": passes})
        served = serve(self._query_engine, self._stack(Task(0, self.client, version, models, query), state))
        update = served.update(0)
        return update.vectors["model"], query.record(update.metrics, update.examples)

    def _stack(self, task: Task, state: Mapping[str, Tensor] | None) -> ClientStack:
        state = self._first_state(task) if state is None else state
        own = ("model", PRIVATE)
        vectors = {n: [vector] for n, vector in task.vectors.items() if n not in own and not n.startswith(MASKING)}
        return ClientStack(
            clients=[self.client],
            versions=[task.version],
            rng_versions=[task.rng_version],
            committed=[task.committed],
            models=[task.vectors["model"]],
            vectors=vectors,
            state={name: [tensor] for name, tensor in state.items()},
            query=task.query,
            # The server knows the run's seed and picks versions, and could make noise again that depends on these
            # alone.  Nobody needs this secret twice: what is sent again are the bytes that were made with it.
            secret=secrets.token_hex(32),
        )

    def _first_state(self, task: Task) -> Mapping[str, Tensor]:
        """The client state before the first training: the trainer's, and the private slice that came with the task."""
        shared = self.work.layout.shared
        if shared == self.work.layout.size:
            return self._initial_state
        return self._initial_state | {PRIVATE: task.vectors.get(PRIVATE, self.work.initial[shared:])}
