"""Tasks at a site: they are served by the simulator's own engine, for one client."""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from piebald.contracts import (
    MASKING,
    Clients,
    ClientSecrets,
    Query,
    Signer,
    Split,
    Task,
    Update,
    infinite_reason,
    shown_digest,
)
from piebald.core import pytree
from piebald.core.errors import SettingError, failure_reason
from piebald.data.partition.split_settings import division_of
from piebald.engines.client_context import EngineContext
from piebald.engines.engine_choice import make_engine
from piebald.engines.sequential import SequentialEngine as Engine
from piebald.engines.serve_stack import personal_model, serve
from piebald.engines.stack import PRIVATE, ClientStack
from piebald.federation.hub.run_terms import private_digest
from piebald.federation.site.client_store import ClientStore
from piebald.federation.site.policy import UNTRAINED, ExaminedModels, Policy, declared_vectors, rows_read
from piebald.federation.site.row_memory import RowMemory
from piebald.federation.site.work_limits import TaskWatch
from piebald.methods.choice import local_work
from piebald.methods.client_work import ClientWork
from piebald.methods.queries.threshold_scores import ThresholdCounts, ThresholdScores
from piebald.methods.transforms.gaussian import Gaussian
from piebald.privacy.ledger import Ledger, OverBudget, TrainingLedger
from piebald.privacy.question_ledger import FOLDER, OverLimit, QuestionLedger, Records, records_of
from piebald.privacy.secure_aggregation.client_side import Outcome, masked, replied
from piebald.privacy.spending import task_mechanism

SPLITS: tuple[Split, ...] = ("train", "validation", "test")

log = logging.getLogger("piebald.federation")


@dataclass(frozen=True, slots=True, eq=False)
class SiteClient:
    """A run at one site, rebuilt from its terms.

    Attributes:
        work: the model, the trainer and the transforms; with clients' models where a task may be about any of them.
        clients: all clients' names, and this site's rows alone.
        client: this site's client number.
        begins: digest of the private numbers that a first task may bring where updates are masked, see `RunTerms`.
        records: digests of this site's rows as it has them, before anything that a server chooses; None takes those of
            the rows that are trained on.
        place: a folder beside the rows, for the count of what is asked about them; None where they have no folder.
    """

    work: ClientWork
    clients: Clients
    client: int
    begins: str = ""
    records: Records | None = None
    place: Path | None = None

    def questions(self, credentials: Path) -> QuestionLedger:
        """The count of what is asked about the rows, in the site's credentials and beside the rows.

        Raises:
            SettingError: it cannot be read.
        """
        return questions_about(self.clients, self.client, self.records, credentials / "state", self.place)


def questions_about(
    clients: Clients, client: int, records: Records | None, state: Path, place: Path | None
) -> QuestionLedger:
    """The count of what is asked about a client's rows; arguments are those of `SiteClient`.

    Args:
        state: what the site keeps, in its credentials.

    Raises:
        SettingError: it cannot be read.
    """
    folders = [state, *([] if place is None else [place / FOLDER])]
    row_records = rows_of(clients, client) if records is None else records
    return QuestionLedger(row_records, folders, str(clients.names[client]))


def rows_of(clients: Clients, client: int) -> Records:
    """The digests of a client's rows."""
    records = []
    for rows in (clients.rows(client, split) for split in SPLITS):
        if len(rows):
            records.append(records_of([bytes_of(leaf) for leaf in (*pytree.leaves(rows.x), *pytree.leaves(rows.y))]))
    # sorted and once each: another order or division of the same rows does not make them other rows
    return np.unique(np.concatenate(records)) if records else records_of([np.zeros((0, 1))])


def bytes_of(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes [n, b] of a tensor [n, ...]."""
    count = len(tensor) if tensor.dim() else 1
    rows = tensor.detach().cpu().contiguous().reshape(count, math.prod(tensor.shape[1:]))
    return np.asarray(rows.view(torch.uint8).numpy()) if rows.numel() else np.zeros((len(rows), 0), dtype=np.uint8)


class TaskRunner:
    """Serves the tasks of one run.

    Args:
        prepared: the run at this site.
        policy: what the site allows.
        device: where it computes.
        signer: signs the site's keys of secure aggregation, and checks those of other sites.
        ledger: counts what noisy answers spend of the policy's budget; without it there are none.
        terms: digest of the run's terms as they came.
        questions: counts all other answers; in memory by default.
        sent: how many updates the site has sent, in all runs; those of this one by default.
        training: counts what training spends of the policy's budget for it, where there is one.
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
        ledger: Ledger | None = None,
        terms: str = "",
        questions: QuestionLedger | None = None,
        sent: Callable[[], int] | None = None,
        asks: Callable[..., None] = lambda **_: None,
        training: TrainingLedger | None = None,
        memory: RowMemory | None = None,
    ) -> None:
        work = prepared.work
        self._memory = memory or RowMemory()
        self._watch = TaskWatch(policy.work)
        self.every, work = work, work.of(prepared.client)
        self.work, self.client, self._policy, self._signer = work, prepared.client, policy, signer
        self._ledger, self._terms, self._begins, self._training = ledger, terms, prepared.begins, training
        self._clients, self._asks = prepared.clients, asks
        self._trained = 0
        self._threshold_of_all: dict[int, dict[str, Any]] = {}  # of the newest version that has one
        self._sent = sent or (lambda: self._trained)
        if questions is not None:
            self.questions = questions
        self.rows = {split: len(prepared.clients.rows(prepared.client, split)) for split in SPLITS}
        self._declared = declared_vectors(work)  # as the policy saw them: what is declared later does not count
        self._examined = ExaminedModels()
        noises = [
            transform
            for transform in work.transforms
            if isinstance(transform, Gaussian) and transform.where == "client"
        ]
        self._noisy = any(noise.multiplier for noise in noises)
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
        self, task: Task, state: Mapping[str, Tensor] | None
    ) -> tuple[Update | None, str | None, dict[str, Tensor] | None]:
        """Serve a task.

        Args:
            task: the task, which is not about keys.
            state: the client's state, None before its first training.

        Returns:
            The update, or the reason why there is none, and the new client state (None: unchanged).
        """
        query, question = task.query, ""
        if query is None and not self.work.trains:
            return None, "the run's terms say that nothing is trained", None
        if query is not None:
            question = self._digest(task, query, state)
            # in this order, so that a question that a rule refuses spends nothing of a budget
            refused = (
                self._policy.query_reject_reason(query, self.work)
                or self._policy.work.steps_reject_reason(query.most_steps())
                or self._examined.reject_reason(task, rows_read(query, self.work), self._policy.most_models(self.work))
                or self._spend(query)
                or self._count(task, query, question)
            )
            if refused is not None:
                return None, refused, None
        elif (refused := self._private_reason(task, state) or self._spend_training(task)) is not None:
            return None, refused, None
        engine: Engine = self._training_engine if query is None else self._query_engine
        try:
            served = self._watch.run(lambda: serve(engine, self._stack(task, state)))
        except Exception as error:  # the site goes on; the text is not sent, since it may hold numbers of its rows
            log.exception("task %d failed", task.id)
            # how few rows there are is nobody's business where sums hide it
            return None, failure_reason(error, told=False, rows_told=self.work.masking is None), None
        update = served.update(0)
        if query is not None:
            update = query.site_answer(update, partial(self._remember, query))
            refused = self._policy.answer_reject_reason(query, update, self.every.of_task(task), self.rows)
            if refused is None:
                update, refused = self._blurred(query, update, question)
            if isinstance(query, ThresholdCounts) and query.chosen is not None:
                chosen = {"value": query.chosen, "criterion": query.criterion}
                self._threshold_of_all = {task.version: chosen}
            return (update, None, None) if refused is None else (None, f"refused by the site's policy: {refused}", None)
        self._trained += 1
        if self._noisy:  # the noise does not cover them
            update = replace(update, metrics={})
        refused = self._policy.update_reject_reason(update, self._declared, self.every.of_task(task).layout.shared)
        if refused is not None:
            return None, f"refused by the site's policy: {refused}", None
        reason = infinite_reason(update.vectors) or (None if math.isfinite(update.norm) else "not finite")
        if reason is not None:  # the update cannot count, so the client forgets the attempt
            return None, reason, None
        # after the checks, which need the change and not its packed form
        if served.packed and self.work.masking is None:
            update = replace(update, vectors={**update.vectors, "model": served.packed[0]})
        return update, None, {name: rows[0].clone() for name, rows in served.state.items()}

    def _private_reason(self, task: Task, state: Mapping[str, Tensor] | None) -> str | None:
        """Return why private numbers that came are not used, or None.

        What the server alone chooses for each client could make the updates of all but one of a sum known.
        """
        private = task.vectors.get(PRIVATE) if state is None and self.work.masking is not None else None
        if private is None or private_digest(private) == self._begins:
            return None
        return "the private numbers that came are not those of the run's terms, with which all clients of a sum begin"

    def _digest(self, task: Task, query: Query, state: Mapping[str, Tensor] | None) -> str:
        """Return the digest of a question, with all that its answer depends on besides the site's rows."""
        brought = {name: tensor for name, tensor in task.vectors.items() if name != "model" or query.reads_model}
        if state and "train" in rows_read(query, self.work):  # a model of its own
            brought |= {f"state/{name}": tensor for name, tensor in state.items()}
        division = division_of(self._clients)  # the server chooses whose scores it is told, too
        stated = query.table() if division is None else {**query.table(), "division": division.model_dump(mode="json")}
        return shown_digest(stated, brought).hex()

    def _count(self, task: Task, query: Query, question: str) -> str | None:
        """Count a question, on disk before its answer is computed; return why it is not answered, or None."""
        most, hidden = self._policy.most_asked(query), query.hiding()
        if most is None or (hidden is not None and hidden.noise):  # which the ledger of noise counts
            return None
        model = shown_digest("model", {"model": task.vectors["model"]}).hex() if query.reads_model else ""
        models = self._policy.most_models(self.work)
        most_models = None if models is None else models * UNTRAINED
        try:
            if self.questions.spend(query.topic(), question, most, model, self._sent(), most_models):
                so_far = self.questions.counts[query.topic()]
                self._asks(question=query.topic(), digest=question, rows=self.questions.rows, count=so_far, most=most)
        except OverLimit as error:
            return f"refused by the site's policy: {error}"
        except (SettingError, OSError) as error:  # the text names a path of the site
            log.error("a question is not answered: %s", error)
            return "this site's count of questions cannot be read or written, its log says more"
        return None

    @cached_property
    def questions(self) -> QuestionLedger:
        """The questions that were answered about the site's rows; of this run alone where they were not given."""
        return QuestionLedger(rows_of(self._clients, self.client))

    def _remember(self, query: Query, vectors: Mapping[str, Tensor]) -> tuple[dict[str, int], dict[int, Tensor]]:
        """Remember values of the rows that a query is about, see `Query.site_answer`."""
        split: Split = getattr(query, "split", "test")
        rows = self._clients.rows(self.client, split)
        leaves = [*pytree.leaves(rows.x), *pytree.leaves(rows.y)]
        measured = [split, self.work.objective.name, self.work.objective.metric]
        digest = shown_digest(measured, {str(place): leaf for place, leaf in enumerate(leaves)}).hex()
        try:
            return self._memory.remember(digest, self._terms, vectors)
        except OSError as error:
            log.error("values of rows cannot be kept, so that runs are not compared row by row: %s", error.strerror)
            return {}, {}

    def _blurred(self, query: Query, answer: Update, question: str) -> tuple[Update, str | None]:
        """Return an answer whose scores have noise where the policy says so, or why there is none.

        The noise is that of the question: who asks it again gets the same answer.
        """
        deviation = self._policy.score_noise(query)
        splits = sorted(rows_read(query, self.work) - {"train"}) or ["train"]
        rows = self._clients.rows(self.client, getattr(query, "split", splits[0]))
        influence = query.row_influence(rows) if deviation else None
        if influence is None:
            return answer, None
        scores = {name: answer.metrics[name] for name in sorted(influence) if name in answer.metrics}
        vectors = {name: vector for name, vector in answer.vectors.items() if name in influence}
        if not scores and not vectors:
            return answer, f"scores leave this site with noise, and {query.kind!r} has none that noise can hide"
        noise = self.questions.noise(question)
        scores = {
            # bounds are processing of what the noise has hidden already, so that they tell nothing more
            name: min(max(value + deviation * influence[name] * float(noise.gaussian(1)[0]), 0.0), 1.0)
            for name, value in scores.items()
        }
        vectors = {
            name: noise.add_to(vector.double(), deviation * influence[name]).round().clamp_min(0).to(vector.dtype)
            for name, vector in vectors.items()
        }
        examples = answer.examples
        for vector in vectors.values():
            # the server refuses more rows than there are, whose number it is told
            vector[vector.argmax()] -= min(max(float(vector.sum()) - examples, 0.0), float(vector.max()))
            examples = int(vector.sum())
        return replace(answer, vectors=vectors, metrics=scores, examples=examples), None

    def _spend(self, query: Query) -> str | None:
        """Count a noisy answer, on disk before it is computed; return why it is not given, or None.

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

    def _spend_training(self, task: Task) -> str | None:
        """Count a training task, on disk before it begins; return why it is not carried out, or None."""
        mechanism = task_mechanism(self.every.of_task(task), self.rows["train"]) if self._training else None
        if self._training is None or mechanism is None or not mechanism[2]:
            return None
        try:
            self._training.spend_task(*mechanism)
        except OverBudget as error:
            return f"refused by the site's policy: {error}"
        except SettingError as error:  # the text names a path of the site
            log.error("a task is not carried out: %s", error)
            return "this site's ledger of training cannot be read or written, its log says more"
        return None

    def answer_key_query(self, task: Task, store: ClientStore) -> Outcome:
        """Answer a query about the keys of a secure aggregation."""
        return self._with_secrets(store, lambda client_secrets: replied(task, self.work, client_secrets))

    def mask(self, update: Update, task: Task, store: ClientStore) -> Outcome:
        """Mask an update, where the run masks updates."""
        if self.work.masking is None:
            return update, None
        return self._with_secrets(store, lambda client_secrets: masked(update, task, self.work, client_secrets))

    def _with_secrets(self, store: ClientStore, act: Callable[[ClientSecrets], Outcome]) -> Outcome:
        """Call a function with the site's secrets, and write them to disk before its outcome is returned."""
        if self._signer is None:
            return None, "this run masks nothing"
        demands = self._policy.sum_demands
        client_secrets = ClientSecrets(self.client, store.secrets(), os.urandom, self._signer, demands, self._terms)
        try:
            outcome = self._watch.run(lambda: act(client_secrets))
        except Exception as error:  # the site goes on, whatever the server sends
            log.exception("the keys of a secure aggregation failed")
            outcome = None, f"{type(error).__name__} at the site, whose log says more"
        try:
            # after an error as well: a part of the secrets may have been used before it
            store.save_secrets(client_secrets.kept)
        except OSError as error:  # nothing leaves whose secrets are not kept
            log.error("%s cannot be written (%s): make room, or mend it", store.folder, (error.strerror or "").lower())
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
        )

    def _first_state(self, task: Task) -> Mapping[str, Tensor]:
        """Return the client state before the first training: the trainer's, and the task's private slice."""
        shared = self.work.layout.shared
        if shared == self.work.layout.size:
            return self._initial_state
        return self._initial_state | {PRIVATE: task.vectors.get(PRIVATE, self.work.initial[shared:])}
