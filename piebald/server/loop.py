"""The server: ask, take results one at a time, step, write down what happened.

It knows the seam to a runtime and nothing behind it.  Its state is a sequence of commits; `resume` takes up the last
one.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from piebald.aggregation.linear import Linear
from piebald.client_work import ClientWork
from piebald.clustering.base import SendsCandidates
from piebald.contracts import (
    SERVER_ID,
    Checkpoint,
    Cohort,
    Query,
    QueryRequest,
    Result,
    RunRecorder,
    Runtime,
    SumRequest,
    Task,
    Update,
)
from piebald.errors import RuntimeFault
from piebald.privacy.secure_aggregation.key_queries import KeyQuery
from piebald.randomness import select
from piebald.recipe import Recipe
from piebald.scheduling.base import HasDeadline, RejectsLate, ServerView
from piebald.server.best_version import BestVersion, ModelSnapshot
from piebald.server.client_pool import ClientPool
from piebald.server.cluster_models import ClusterModels
from piebald.server.context import LoopContext
from piebald.server.masked_rounds import MaskedRounds
from piebald.server.records import (
    TableRow,
    mean_scores,
    plain_results,
    plain_tasks,
    result_row,
    score_rows,
    step_row,
    whole_result,
    whole_task,
)
from piebald.server.result_checks import ResultChecks
from piebald.server.stopping import RunTotals, StoppingCriteria

SAVING = 0.02  # the share of a run's time that may go into saving its state, where nobody says how often


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """When and on whom models are scored for the report.

    Attributes:
        query: what clients are asked.
        every: commits between measurements; the last commit is always measured.  0: never.
        clients: how many (seeded choice), None for all.
        common: what the server asks of its own test set, None where it has none or there is no model to use alone.
        higher: whether more is better of the score that matters, the first one that clients give.
        validate: what tells which version is the best, None where the last one is kept.
    """

    query: Query
    every: int = 1
    clients: int | None = None
    common: Query | None = None
    higher: bool = True
    validate: Query | None = None


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """What the loop tells after each commit: the commit's number, and the newest mean scores by "model/metric"."""

    version: int
    scores: Mapping[str, float]


class ServerLoop:
    """Runs one recipe on one runtime, for `rounds` commits or until `stop` says so.

    With `checkpoint_every` None the state is saved as often as takes no more than `SAVING` of the run's time.
    """

    def __init__(
        self,
        recipe: Recipe,
        runtime: Runtime,
        work: ClientWork,
        recorder: RunRecorder,
        *,
        known: int,
        rounds: int | None,
        measuring: EvaluationPlan,
        stop: StoppingCriteria | None = None,
        checkpoint_every: int | None = 1,
        check: ResultChecks | None = None,
        watch: Callable[[RoundProgress], None] | None = None,
    ) -> None:
        self.recipe, self.runtime, self.work, self.recorder = recipe, runtime, work, recorder
        self.known, self.rounds, self.measuring, self.checkpoint_every = known, rounds, measuring, checkpoint_every
        self.stop, self.check, self.watch = stop, check or ResultChecks(), watch
        self.cluster_models = ClusterModels(recipe, work.initial[: work.layout.shared].clone(), work.layout.variances)
        self.client_pool = ClientPool()
        self.tally = RunTotals()
        self.version = 0
        self.best = BestVersion()
        self._next_id = 0
        self._stepped = 0.0
        self._asked = self._due = 0  # tasks sent since the last commit, and those of them under way
        self._turns: dict[int, int] = {}  # how often each client was asked since the last commit
        self._limits: dict[int, float] = {}  # the longest step allowed, by task under way
        self._waiting: list[Result] = []
        self._ended: list[tuple[Result, str, str]] = []  # with status and reason
        self._exchanged: list[TableRow] = []  # questions that parts of the server asked since the last commit
        self._excluded_updates: dict[int, tuple[str, str]] = {}  # status and reason of sound updates that do not count
        self._remarks: list[TableRow] = []
        self._queue: deque[Result] = deque()  # training results that came while answers were awaited
        self._written: tuple[TableRow, list[TableRow], list[TableRow]] | None = (
            None  # the last commit, until a checkpoint holds it
        )
        self._contexts: dict[tuple[str, int], LoopContext] = {}
        self._masked = MaskedRounds(recipe.masking)
        early = not recipe.requires_individual_updates and recipe.masking is None
        self._summed = recipe.aggregation if early and isinstance(recipe.aggregation, Linear) else None
        self._deadline = recipe.scheduling if isinstance(recipe.scheduling, HasDeadline) else None
        self._began, self._before = time.perf_counter(), 0.0
        self._saving = 0.0  # seconds that saving has taken

    # -- the loop

    def run(self) -> None:
        """Run until it is over."""
        try:
            self._run()
        finally:
            self._contexts.clear()  # they point back here: a circle would keep all clients' rows until Python looks for one

    def _run(self) -> None:
        self._began, self._before = time.perf_counter(), self.tally.wall
        self._measure_if_due()
        scheduling = self.recipe.scheduling
        while not self._over():
            view = self._view()
            asked = scheduling.num_to_request(view)
            if asked:
                self._send(self.client_pool.choose(self.runtime.clients(), asked, self.work.seed, self.version))
            if self._queue:
                self._take(self._queue.popleft())
            elif (
                result := self.runtime.next(self._deadline.next_check(self._view()) if self._deadline else math.inf)
            ) is not None:
                self._take(result)
            elif not asked and not self.client_pool.busy and not self._waiting and self.runtime.now() == view.now:
                self._stop_stuck()
            if scheduling.should_step(self._view()):
                self._commit()
        if self._written is not None and self.recorder.lasts:
            # a score ended the run: its last commit still needs a checkpoint
            step, rows, notes = self._written
            self.recorder.commit(step, rows, self.state(), notes)
        if not self.tally.updates:
            raise RuntimeFault(
                f"in {self.version} rounds no update counted: the results of the run say why each failed"
            )

    def _over(self) -> bool:
        if self.rounds is not None and self.version >= self.rounds:
            return True
        self.tally.wall = self._before + time.perf_counter() - self._began
        return self.stop is not None and (
            self.tally.reached or self.stop.used_up(self.tally, self._stepped if self.version else 0.0)
        )

    def _view(self) -> ServerView:
        offered, free = self.client_pool.count(self.runtime.clients())
        return ServerView(
            self.version,
            self.runtime.now(),
            self._stepped,
            offered,
            free,
            len(self.client_pool.busy),
            self._asked,
            self._due,
            len(self._waiting),
            len(self._ended),
        )

    def _stop_stuck(self) -> None:
        if self.client_pool.aside:
            raise RuntimeFault(
                f"no client is left to ask: all {len(self.client_pool.aside)} were put aside because their updates were "
                f"refused, the last one as {list(self.client_pool.aside.values())[-1]}; a lower learning rate often helps"
            )
        raise RuntimeFault("no client can be asked and none is under way: look at the devices' on intervals")

    # -- asking and taking

    def _send(self, clients: Sequence[int]) -> None:
        clustering, offer = self.recipe.clustering, {}
        if isinstance(clustering, SendsCandidates):
            offer = clustering.candidates(self.cluster_models.models, self.work)
        tasks = []
        self._masked.agree_keys(clients, self._context)
        for client in clients:
            cluster, turn = self.cluster_models.of(client), self._turns.get(client, 0)
            vectors = {"model": cluster.model, **cluster.server_vectors, **offer, **self._masked.vectors(client)}
            task = self._made(client, vectors, turn=turn, committed=cluster.committed)
            tasks.append(task)
            self.client_pool.take(task)
            self._turns[client] = turn + 1
            self._limits[task.id] = self.check.limit(cluster.norm)
        self._asked += len(tasks)
        self._due += len(tasks)
        pool = SumRequest(self._summed, self._limits[tasks[0].id]) if self._summed else None
        absent, now = self._masked.absent, self.runtime.now()
        self.runtime.submit([one for one in tasks if one.client not in absent], pool)
        for one in tasks:
            if one.client in absent:
                self._take(Result(one, None, now, now, failure=absent[one.client]))

    def _made(
        self,
        client: int,
        vectors: dict[str, Tensor],
        query: Query | None = None,
        free: bool = False,
        turn: int = 0,
        committed: int = 0,
    ) -> Task:
        """An task; at the first contact with the private part's first numbers."""
        shared = self.work.layout.shared
        # where nothing is shared nothing goes out either: such a client starts by itself
        if (
            not isinstance(query, KeyQuery)
            and 0 < shared < self.work.layout.size
            and client != SERVER_ID
            and client not in self.client_pool.initialized
        ):
            vectors["private"] = self.recipe.sharing.initial_private(
                self.work.initial[shared:], self.work.layout, client
            )
        self._next_id += 1
        return Task(self._next_id, client, self.version, vectors, query, free, turn, committed)

    def _take(self, result: Result) -> None:
        """Check one result; keep it for the next commit, or note why not and put its client aside."""
        task, update = result.task, result.update
        client = task.client
        self.client_pool.release(client)
        self._due -= task.version == self.version
        limit = self._limits.pop(task.id)
        if self._masked.transform is None:
            reason = self.check.reject_reason(result, self.work.layout, limit)
        else:
            reason = self._masked.reject_reason(result, self.work)
        if update is not None:
            self.client_pool.initialized.add(client)
        if reason is not None:
            self._ended.append((result, "lost" if update is None else "refused", reason))
            if update is not None:
                self.client_pool.exclude(client, reason)
        elif late := self._late(task):
            self._ended.append((result, "late", late))
        else:
            self._waiting.append(result)

    def _late(self, task: Task) -> str | None:
        """Why the update of a task came too late to be used, or None."""
        scheduler = self.recipe.scheduling
        return scheduler.reject_reason(self.version - task.version) if isinstance(scheduler, RejectsLate) else None

    # -- stepping

    def _commit(self) -> None:
        results = sorted(self._waiting, key=lambda a: (a.task.client, a.task.id))
        self._waiting = []
        results = self._opened(results)
        counted = self.cluster_models.step(self._cohort(results), self._context) if results else []
        self.version += 1
        self._stepped = self.runtime.now()
        rows = []
        for result, how in zip(results, counted, strict=True):
            status, reason = self._excluded_updates.get(result.task.client, ("ok", None))
            rows.append(result_row(result, self.version, status, reason, how))
        rows += [result_row(a, self.version, status, why) for a, status, why in self._ended]
        rows += self._exchanged
        notes = self._remarks
        self._ended, self._exchanged, self._excluded_updates, self._remarks = [], [], {}, []
        self._asked = self._due = 0
        self._turns.clear()
        step = step_row(rows, self.version, self._stepped, self.cluster_models.main.norm)
        if self._masked.loss is not None:
            step["loss"] = self._masked.loss
        self.tally.updates += len(results)
        self.tally.nbytes += step["bytes_down"] + step["bytes_up"]
        over = self._over()
        step["wall"] = self.tally.wall
        due = over or self._saves()
        due = due or (self.measuring.validate is not None and self._measures(over))  # what may be the best is kept
        due = due and self.recorder.lasts
        # the checkpoint is made before measuring: a resumed run measures this version again, to the same numbers
        began = time.perf_counter()
        self.recorder.commit(step, rows, self.state() if due else None, notes)
        self._saving += time.perf_counter() - began if due else 0.0
        self._written = None if due else (step, rows, notes)
        self._measure_if_due(over)

    def _opened(self, results: list[Result]) -> list[Result]:
        """The results that count; none where they were sealed and their sum cannot be opened."""
        opened, reason = self._masked.unmask(results, self._context)
        if reason is not None:
            self.note("update", 0, "abandoned", reason)
            self._ended += [(result, "aside", reason) for result in results]
        return opened

    def _saves(self) -> bool:
        """Whether the state is saved with this commit."""
        if self.checkpoint_every is None:
            return self._saving <= SAVING * (time.perf_counter() - self._began)
        return self.version % self.checkpoint_every == 0

    def _cohort(self, results: Sequence[Result]) -> Cohort:
        return Cohort(
            [result.task.client for result in results],
            [result.task.version for result in results],
            [result.update for result in results if result.update is not None],
            None,
            self.version,
            [result.task.vectors["model"] for result in results],
        )

    # -- questions

    def _context(self, axis: str, group: int) -> LoopContext:
        if (axis, group) not in self._contexts:
            self._contexts[axis, group] = LoopContext(self, axis, group)
        return self._contexts[axis, group]

    def exclude_update(self, client: int, reason: str) -> None:
        """See `contracts.ServerContext.exclude_update`."""
        self._excluded_updates[client] = ("aside", reason)

    def note(self, axis: str, group: int, name: str, value: Any) -> None:
        """See `contracts.ServerContext.note`."""
        self._remarks.append({"axis": axis, "grp": group, "name": name, "value": value})

    def exchange(self, questions: Sequence[QueryRequest]) -> list[Update | None]:
        """See `contracts.ServerContext.ask`."""
        asked = [self._made(one.client, dict(one.vectors), one.query) for one in questions]
        answers: list[Update | None] = []
        for result in self._answers(asked):
            reason = self._unusable(result)
            status = "ok" if reason is None else "lost" if result.update is None else "refused"
            self._exchanged.append(result_row(result, self.version + 1, status, reason))
            answers.append(result.update if reason is None else None)
        return answers

    def _unusable(self, result: Result) -> str | None:
        query, update = result.task.query, result.update
        if update is None or result.failure is not None or query is None:
            return result.failure or "no answer"
        for name, part in update.vectors.items():
            if not bool(part.isfinite().all()):
                return f"{name} is not finite"
        return query.reject_reason(update, self.work)

    def _answers(self, asked: Sequence[Task]) -> list[Result]:
        """Send questions and wait for all answers, in order; training that arrives meanwhile is queued."""
        self.runtime.submit(asked)
        missing, answers = {task.id: task for task in asked}, []
        while missing:
            result = self.runtime.next()
            if result is None:  # nothing is under way any more, so they will never come
                now = self.runtime.now()
                answers += [Result(one, None, now, now, failure="no answer") for one in missing.values()]
                break
            if missing.pop(result.task.id, None) is not None:
                answers.append(result)
            else:
                self._queue.append(result)
        return sorted(answers, key=lambda result: result.task.id)

    # -- measuring

    @property
    def models(self) -> ModelSnapshot:
        """The global models as they are now."""
        return ModelSnapshot(
            dict(self.cluster_models.models), dict(self.cluster_models.cluster_of), self.cluster_models.main_number
        )

    def _measures(self, last: bool) -> bool:
        """Whether models are scored at this version."""
        every = self.measuring.every
        return bool(every) and (last or self.version % every == 0 or self.version == self.rounds)

    def _measure_if_due(self, last: bool = False) -> None:
        if self._measures(last):
            self._measure()
        elif self.watch is not None:
            self.watch(RoundProgress(self.version, {}))

    def _measure(self) -> None:
        """Score models for the report: outside the protocol, so without bytes and without virtual time."""
        measuring, query = self.measuring, self.measuring.query
        clients: Sequence[int] = range(self.known)
        if measuring.clients is not None:
            clients = select(clients, measuring.clients, "measure", self.work.seed)
        asked = [self._asking(client, query) for client in clients]
        if measuring.validate is not None and measuring.validate != query:
            asked += [self._asking(client, measuring.validate) for client in clients]
        if measuring.common is not None:
            asked.append(self._asking(SERVER_ID, measuring.common))
        rows = []
        for result in self._answers(asked):
            rows += score_rows(result, self.version)
        self.recorder.scores(rows)
        if measuring.validate is not None:
            self.best.consider(self.version, rows, self.models)
        split = getattr(query, "split", "test")
        means = mean_scores([row for row in rows if row["split"] == split])
        self._note(means)
        if self.watch is not None:
            self.watch(RoundProgress(self.version, means))

    def _asking(self, client: int, query: Query) -> Task:
        """A question for the report about the client's own global model."""
        cluster = self.cluster_models.of(client)
        return self._made(client, {"model": cluster.model}, query, free=True, committed=cluster.committed)

    def _note(self, means: Mapping[str, float]) -> None:
        """Let the score that matters decide whether to go on: of personal models where there are some."""
        metric = self.work.objective.metric
        found = [means[name] for name in (f"personal/{metric}", f"global/{metric}") if name in means]
        if self.stop is not None and found and math.isfinite(found[0]):
            self.stop.note(self.tally, found[0], self.measuring.higher)

    # -- state

    def state(self) -> Checkpoint:
        """All that a resumed run needs."""
        mine, theirs = self.cluster_models.state(), self.runtime.state()
        outstanding, sent = plain_tasks([*self.client_pool.busy.values()])
        queued, brought = plain_results(self._queue)
        values = {
            "version": self.version,
            "next_id": self._next_id,
            "stepped": self._stepped,
            "tally": self.tally.plain(),
            "best": self.best.state(),
            "aside": sorted(self.client_pool.aside.items()),
            "initialized": sorted(self.client_pool.initialized),
            "limits": sorted(self._limits.items()),
            "outstanding": outstanding,
            "queued": queued,
            "cluster_models": dict(mine.values),
            "runtime": dict(theirs.values),
        }
        return Checkpoint({**mine.tensors, **sent, **brought, **theirs.tensors}, values)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take up what `state` gave."""
        values = checkpoint.values
        self._contexts.clear()
        self.cluster_models.restore(Checkpoint(checkpoint.tensors, values["cluster_models"]))
        self.version, self._next_id = int(values["version"]), int(values["next_id"])
        self._stepped, self.tally = float(values["stepped"]), RunTotals(**values["tally"])
        self.best.restore(values.get("best"))
        self.client_pool.aside = {int(client): str(reason) for client, reason in values["aside"]}
        self.client_pool.initialized = set(values["initialized"])
        self._limits = {int(number): float(limit) for number, limit in values["limits"]}
        for row in values["outstanding"]:
            self.client_pool.take(whole_task(row, checkpoint.tensors))
        tasks = {task.id: task for task in self.client_pool.busy.values()}
        self._queue.extend(whole_result(row, checkpoint.tensors, tasks) for row in values["queued"])
        self.runtime.restore(Checkpoint(checkpoint.tensors, values["runtime"]), tasks)
