"""Tasks at a site: they are served by the simulator's own engine, for one client."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from piebald.contracts import (
    MASKING,
    ClientSecrets,
    Query,
    Signer,
    Split,
    Task,
    Update,
    shown_digest,
)
from piebald.core import pytree
from piebald.core.errors import SettingError, failure_reason
from piebald.core.files import os_reason
from piebald.engines.client_context import EngineContext
from piebald.engines.engine_choice import make_engine
from piebald.engines.outgoing import personal_model, serve
from piebald.engines.sequential import SequentialEngine as Engine
from piebald.engines.stack import PRIVATE, ClientStack, StackResult
from piebald.federation.credentials.party_files import remedy
from piebald.federation.hub.run_terms import private_digest
from piebald.federation.link.wire_format import pack_update, unpack_update
from piebald.federation.site.client_store import ClientStore, RowMemory, site_rows_digest, work_digest
from piebald.federation.site.gate import REFUSED, Gate
from piebald.federation.site.policy import UNTRAINED, ExaminedModels, Policy, rows_read
from piebald.federation.site.site_rows import SiteClient, rows_of
from piebald.federation.site.work_limits import TaskWatch
from piebald.methods.choice import local_work
from piebald.methods.queries.threshold_scores import ThresholdCounts, ThresholdScores
from piebald.privacy.ledger import TRAINING, OverBudget, OverLimit, RowLedger, Withheld
from piebald.privacy.secure_aggregation.server_side import Outcome, counted_rows, masked, replied
from piebald.privacy.spending import task_mechanism

_NO_LEDGER = "this site's ledger cannot be read or written, its log says more"

log = logging.getLogger("piebald.federation")


def hides_by_noise(query: Query) -> bool:
    """Return whether noise hides single rows in the answers to a query."""
    hidden = query.hiding()
    return query.asked_of == "itself" or (hidden is not None and hidden.noise > 0)


class TaskRunner:
    """Serves the tasks of one run.

    Args:
        prepared: the run at this site.
        policy: what the site allows.
        device: where it computes.
        signer: signs the site's keys of secure aggregation, and checks those of other sites.
        terms: digest of the run's terms as they came.
        ledger: counts all that leaves, and stores answers; in memory by default.
        asks: called with what was counted, before an answer is computed.
        memory: of the values of judged rows under earlier runs; of this run alone by default.

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
        terms: str = "",
        ledger: RowLedger | None = None,
        asks: Callable[..., None] = lambda **_: None,
        memory: RowMemory | None = None,
    ) -> None:
        work = prepared.work
        self._memory = memory or RowMemory()
        self._watch = TaskWatch(policy.work)
        self.every, work = work, work.of(prepared.client)
        self.work, self.client, self._policy, self._signer = work, prepared.client, policy, signer
        self._terms, self._begins = terms, prepared.begins
        self._clients, self._asks = prepared.clients, asks
        self._threshold_of_all: dict[int, dict[str, Any]] = {}  # of the newest version that has one
        if ledger is not None:
            self.ledger = ledger
        self._rules = policy.disclosure(prepared.rows_per_person)
        self.gate = Gate(policy, self.every, prepared.clients, prepared.client, self._rules)
        self.rows = self.gate.rows
        self._examined = ExaminedModels()
        self._initial_state = work.initial_state()
        # one engine for each thread: a query is answered while the other trains
        engines = (
            make_engine("sequential", self.every, prepared.clients, torch.device(device), False) for _ in range(2)
        )
        self._training_engine, self._query_engine = engines

    @property
    def state_form(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the client's state, empty where it has none."""
        form = {name: tuple(tensor.shape) for name, tensor in self._initial_state.items()}
        private = self.work.layout.size - self.work.layout.shared
        return form | ({PRIVATE: (private,)} if private else {})

    def serve(
        self,
        task: Task,
        state: Mapping[str, Tensor] | None,
        insist: Callable[[str, Callable[[], None]], None] = lambda _, write: write(),
    ) -> tuple[Update | None, str | None, dict[str, Tensor] | None]:
        """Serve a task.

        Args:
            task: the task, which is not about keys.
            state: the client's state, None before its first training.
            insist: writes what must be on the disk before an update leaves, by its name.

        Returns:
            The update, or the reason why there is none, and the new client state (None: unchanged).
        """
        if task.query is not None:
            return (*self._answer(task, task.query, state), None)
        if not self.work.trains:
            return None, "the run's terms say that nothing is trained", None
        if (refused := self._private_reason(task, state) or self._spend_training(task)) is not None:
            return None, refused, None
        served = self._served(self._training_engine, task, state)
        if isinstance(served, str):
            return None, served, None
        update, refused = self.gate.checked(task, served.update(0))
        if update is None:  # it cannot count, so the client forgets the attempt
            return None, refused, None
        # after the checks, which need the change and not its packed form
        if served.packed and self.work.masking is None:
            update = replace(update, vectors={**update.vectors, "model": served.packed[0]})
        # before it is masked and kept: from then on it may leave, also after a crash
        counted = partial(self.ledger.add_update, self._policy.updates)
        if (refused := self._counted(lambda: insist("the ledger", counted))) is not None:
            return None, refused, None
        return update, None, {name: rows[0].clone() for name, rows in served.state.items()}

    def _served(self, engine: Engine, task: Task, state: Mapping[str, Tensor] | None) -> StackResult | str:
        """Return what an engine makes of a task, or why it makes nothing."""
        try:
            return self._watch.run(lambda: serve(engine, self._stack(task, state)))
        except Withheld as error:  # one sentence, whatever the reason; where it is stays here
            log.warning("task %d: %s", task.id, "; ".join([str(error), *getattr(error, "__notes__", ())]))
            return f"{REFUSED}{error}"
        except Exception as error:  # the site goes on; the text is not sent, since it may hold numbers of its rows
            log.exception("task %d failed", task.id)
            return failure_reason(error, told=False)

    def _answer(self, task: Task, query: Query, state: Mapping[str, Tensor] | None) -> tuple[Update | None, str | None]:
        """Return the answer to a query, or the reason why there is none.

        What follows from the same as an answer before is that answer, which costs nothing; anything else is counted.
        """
        refused = (
            self._policy.query_reject_reason(query, self.work)
            or self._policy.work.steps_reject_reason(query.most_steps())
            or self._policy.few_rows_reason(query, self.work, self.rows, self._rules)
        )
        if refused is not None:
            return None, refused
        digest, hidden = self._digest(task, query, state), query.hiding()
        masked = hidden is not None and hidden.masked  # by other masks each time, which the ledger does not see
        try:
            body = None if masked else self.ledger.answer(digest)
        except OSError as error:
            log.error("a stored answer cannot be read: %s", error)
            return None, _NO_LEDGER
        if body is None:
            # in this order, so that a question that a rule refuses spends nothing
            most_models = self._policy.most_models(self.work)
            refused = self._examined.reject_reason(task, rows_read(query, self.work), most_models) or self._counted(
                lambda: self._count(task, query, digest)
            )
            if refused is not None:
                return None, refused
            served = self._served(self._query_engine, task, state)
            if isinstance(served, str):
                body = pack_update(None, served)
            else:
                answer = query.site_answer(served.update(0), partial(self._remember, query))
                body = pack_update(*self.gate.checked(task, answer))
            # before it leaves, refusals and failures as well: what was told once is told the same way again
            if not masked and (refused := self._counted(partial(self.ledger.store, digest, body))) is not None:
                return None, refused
        if isinstance(query, ThresholdCounts) and query.chosen is not None:
            self._threshold_of_all = {task.version: {"value": query.chosen, "criterion": query.criterion}}
        return unpack_update(body)

    def _private_reason(self, task: Task, state: Mapping[str, Tensor] | None) -> str | None:
        """Return why private numbers that came are not used, or None.

        What the server alone chooses for each client could make the updates of all but one of a sum known.
        """
        private = task.vectors.get(PRIVATE) if state is None and self.work.masking is not None else None
        if private is None or private_digest(private) == self._begins:
            return None
        return "the private numbers that came are not those of the run's terms, with which all clients of a sum begin"

    def _digest(self, task: Task, query: Query, state: Mapping[str, Tensor] | None) -> str:
        """Return the digest of all that the answer to a query follows from."""
        numbers = [task.version, task.rng_version, task.committed, task.client]
        # the policy and its rules as well: what stricter ones would not tell is not told from the store
        values = [query.table(), numbers, self._terms, self._work_digest, self.ledger.rows, self._rows_digest]
        values += [self._policy.digest, repr(self._rules)]
        state_vectors = {f"state/{name}": tensor for name, tensor in (state or {}).items()}
        task_vectors = {f"task/{name}": tensor for name, tensor in task.vectors.items()}
        return shown_digest(values, {**state_vectors, **task_vectors}).hex()

    @cached_property
    def _work_digest(self) -> str:
        return work_digest(self.work)

    @cached_property
    def _rows_digest(self) -> str:
        return site_rows_digest(self._clients, self.client)

    def _counted(self, count: Callable[[], None]) -> str | None:
        """Count something that may leave, on disk; return why it does not, or None."""
        try:
            count()
        except (OverLimit, OverBudget) as error:
            return f"{REFUSED}{error}"
        except (SettingError, OSError) as error:  # the text names a path of the site
            log.error("nothing leaves that is not counted: %s", error)
            return _NO_LEDGER
        return None

    def _count(self, task: Task, query: Query, digest: str) -> None:
        """Count an answer before it is computed: a crash between the two counts one too many, never too few."""
        topic, hidden, most = query.topic(), query.hiding(), self._policy.most_asked(query)
        scores_noise = self._policy.score_noise(query) if self.gate.influence(query) else 0.0
        noise = hidden.noise if hidden is not None and hidden.noise else scores_noise
        if not self.ledger.knows_rows and any(self.rows.values()):
            raise OverLimit("nothing identifies this site's rows, so answers about them cannot be counted")
        if noise:
            # sums with noise are as many as the budget allows
            number = most if hidden is None or not hidden.noise else None
            self.ledger.spend(topic, noise, limit=self._policy.answers, digest=digest, most=number or 0)
        else:
            model = shown_digest("model", {"model": task.vectors["model"]}).hex() if query.reads_model else ""
            models = self._policy.most_models(self.work)
            self.ledger.count(topic, digest, most or 0, model, None if models is None else models * UNTRAINED)
        so_far = self.ledger.counts[topic]
        self._asks(question=topic, digest=digest, rows=self.ledger.rows, count=so_far, most=most, noise=noise or None)

    @cached_property
    def ledger(self) -> RowLedger:
        """The ledger of the site's rows; of this run alone where none was given."""
        return RowLedger(rows_of(self._clients, self.client))

    def _remember(self, query: Query, vectors: Mapping[str, Tensor]) -> tuple[dict[str, int], dict[int, Tensor]]:
        """Remember values of the rows that a query is about, see `Query.site_answer`."""
        split: Split = getattr(query, "split", "test")
        rows = self._clients.rows(self.client, split)
        leaves = [*pytree.leaves(rows.x), *pytree.leaves(rows.targets)]
        measured = [split, self.work.objective.name, self.work.objective.metric]
        digest = shown_digest(measured, {str(index): leaf for index, leaf in enumerate(leaves)}).hex()
        try:
            return self._memory.remember(digest, self._terms, vectors)
        except OSError as error:
            log.error("values of rows cannot be kept, so that runs are not compared row by row: %s", error.strerror)
            return {}, {}

    def _spend_training(self, task: Task) -> str | None:
        """Count a training task, on disk before it begins; return why it is not carried out, or None."""
        most, sent = self._policy.updates, self.ledger.updates
        if most is not None and sent >= most:  # before it costs an hour, and again when it is counted
            return f"{REFUSED}this site has sent {sent} updates in all runs and sends at most {most}"
        mechanism = task_mechanism(self.every.of_task(task), self.rows["train"])
        if mechanism is None or not mechanism[2]:
            return None
        return self._counted(lambda: self.ledger.spend(TRAINING, *mechanism, limit=self._policy.training_limit))

    def answer_key_query(self, task: Task, store: ClientStore) -> Outcome:
        """Answer a query about the keys of a secure aggregation."""
        return self._with_secrets(store, lambda client_secrets: replied(task, self.work, client_secrets))

    def mask(self, update: Update, task: Task, store: ClientStore) -> Outcome:
        """Mask an update, where the run masks updates."""
        if self.work.masking is None:
            return update, None
        return self._with_secrets(store, lambda client_secrets: masked(update, task, self.work, client_secrets))

    @cached_property
    def _digest_of_work(self) -> str:
        return self.work.digest

    @cached_property
    def _counted_rows(self) -> Mapping[Split, float]:
        return counted_rows(self.work, self._clients, self.client)

    def _with_secrets(self, store: ClientStore, act: Callable[[ClientSecrets], Outcome]) -> Outcome:
        """Call a function with the site's secrets, and write them to disk before its outcome is returned."""
        if self._signer is None:
            return None, "this run masks nothing"
        demands = self._policy.sum_demands
        client_secrets = ClientSecrets(
            self.client, store.secrets(), os.urandom, self._signer, demands, self._terms, self._digest_of_work,
            self._counted_rows,
        )  # fmt: skip
        try:
            outcome = self._watch.run(lambda: act(client_secrets))
        except Exception as error:  # the site goes on, whatever the server sends
            log.exception("the keys of a secure aggregation failed")
            outcome = None, f"{type(error).__name__} at the site, whose log says more"
        try:
            # after an error as well: a part of the secrets may have been used before it
            store.save_secrets(client_secrets.kept)
        except OSError as error:  # nothing leaves whose secrets are not kept
            log.error("%s cannot be written (%s): %s", store.folder, os_reason(error), remedy(error))
            return None, "the disk of the site cannot be written"
        return outcome

    def personalize(self, version: int, global_model: Tensor, state: Mapping[str, Tensor] | None) -> Tensor:
        """Return the model [p] that the site uses for itself, given the global model [s] and its client state."""
        task = Task(0, self.client, version, {"model": global_model})
        state = self._first_state(task) if state is None else state
        first = state
        return self._watch.run(lambda: personal_model(self._query_engine, self.client, version, global_model, first))

    def threshold(self, version: int, model: Tensor) -> dict[str, Any] | None:
        """Return the threshold of the site's model [p] and its criterion, where the run asks for one.

        It is that of all sites, where the run has chosen such a one for this version.  Otherwise validation rows choose
        it: the site keeps it beside the model, and tells it to nobody.  None without such rows of both classes.
        """
        if version in self._threshold_of_all:
            return self._threshold_of_all[version]
        kind = ThresholdScores.kind
        table = next((question for question in self.work.questions if question.get("kind") == kind), None)
        if table is None:
            return None
        query, engine = ThresholdScores(criterion=table["criterion"]), self._query_engine
        engine = engine.of(engine.work.number(self.client))
        context = EngineContext(engine, self._stack(Task(0, self.client, version, {"model": model}), None))
        try:
            (chosen,) = self._watch.run(lambda: query.thresholds(model[None].to(engine.device), context))
        except Exception:  # the model is there without it
            log.exception("no threshold could be chosen for the model")
            return None
        return None if chosen is None else {"value": chosen, "criterion": query.criterion}

    def choose(
        self,
        version: int,
        models: Mapping[str, Tensor],
        state: Mapping[str, Tensor] | None,
        trained: Sequence[tuple[str, int]],
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the model [p] that the site chooses for itself, and the record of the choice (`choice.record`).

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
        stack = self._stack(Task(0, self.client, version, models, query), state)
        served = self._watch.run(lambda: serve(self._query_engine, stack), tasks=1 + len(trained))
        update = served.update(0)
        return update.vectors["model"], query.record(update.metrics, update.examples)

    def _stack(self, task: Task, state: Mapping[str, Tensor] | None) -> ClientStack:
        state = self._first_state(task) if state is None else state
        names_apart = ("model", PRIVATE)
        vectors = {
            n: [vector] for n, vector in task.vectors.items() if n not in names_apart and not n.startswith(MASKING)
        }
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
            # noise hides what the rules are about, and what a site asks itself leaves nowhere
            disclosure=None if task.query is None or hides_by_noise(task.query) else self._rules,
        )

    def _first_state(self, task: Task) -> Mapping[str, Tensor]:
        """Return the client state before the first training: the trainer's, and the task's private slice."""
        shared = self.work.layout.shared
        if shared == self.work.layout.size:
            return self._initial_state
        return self._initial_state | {PRIVATE: task.vectors.get(PRIVATE, self.work.initial[shared:])}
