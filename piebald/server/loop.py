"""The server's loop: request training, take results one at a time, step, record what happened.

It knows the contract of a runtime and nothing behind it.  Its state is a sequence of server steps; `resume` continues
from the last one that a checkpoint holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from piebald import contracts
from piebald.core.errors import PiebaldError, RuntimeFault, diverged, shown
from piebald.core.machine import HOST, moved, on_host, raise_if_lost
from piebald.methods.aggregation.linear import Linear
from piebald.methods.client_work import ClientWork
from piebald.methods.recipe import Recipe
from piebald.methods.scheduling.base import ServerView
from piebald.privacy.secure_aggregation.key_queries import KeyQuery
from piebald.privacy.spending import Spending
from piebald.server import records
from piebald.server.client_pool import ClientPool, ClientRecords, Invitations
from piebald.server.client_queries import ClientQueries, LoopContext
from piebald.server.cluster_models import ClusterModels, cohort_of
from piebald.server.cluster_state import Counted, Keep, ModelSnapshot, where_it_is
from piebald.server.evaluation import (
    BestVersion,
    CompletedModels,
    EvaluationPlan,
    RoundProgress,
    confusion_rows,
    rows_of_scores,
)
from piebald.server.result_checks import MaskedRounds, ResultChecks, ResultIntake, by_extremes
from piebald.server.stopping import ClientFailures, RunTotals, StalledSteps, StoppingCriteria
from piebald.storage.lock import heed_stop


class ServerLoop:
    """Runs one recipe on one runtime, for `rounds` server steps or until a limit of `stop` is reached.

    The state is saved every `checkpoint_every` steps (see `StepWriter`).  With `secret`, what protects at the server is
    drawn from the operating system, and not from the run's seed.  `keep` says where long vectors lie, `device` where
    models and their sums are, and `evaluates_on` where components may evaluate models.  What `spending`
    says of a privacy budget is noted beside each step.
    """

    def __init__(
        self,
        recipe: Recipe,
        runtime: contracts.Runtime,
        work: ClientWork,
        recorder: contracts.RunRecorder,
        *,
        known: int,
        rounds: int | None,
        evaluation: EvaluationPlan,
        stop: StoppingCriteria | None = None,
        checkpoint_every: int | None = 1,
        check: ResultChecks | None = None,
        watch: Callable[[RoundProgress], None] | None = None,
        secret: bool = False,
        keep: Keep = where_it_is,
        device: torch.device = HOST,
        evaluates_on: torch.device = HOST,
        names: Sequence[str] = (),
        rows: Callable[[int], int | None] = lambda client: None,
        spending: Spending | None = None,
    ) -> None:
        self.recipe, self.runtime, self.work, self.recorder = recipe, runtime, work, recorder
        self.known, self.rounds, self.evaluation, self.evaluates_on = known, rounds, evaluation, evaluates_on
        self.stop, self.check, self.watch, self._spending = stop, check or ResultChecks(), watch, spending
        first, limit = moved(work.initial[: work.layout.shared], device), self.check.max_weight
        self.cluster_models = ClusterModels(
            recipe, first, work.layout, limit, secret=secret, noise_key=work.noise_key, keep=keep
        )
        self.client_pool = ClientPool()
        self._records = ClientRecords(rows)
        # what is gained from cohorts that are drawn adds up over runs only if each draws its own
        seed = work.noise_seed if recipe.noises_mean else work.seed
        self._invitations = Invitations(recipe.scheduling, self.client_pool, known, seed, secret, self._records)
        self.totals = RunTotals()
        self.version = 0
        self.best = BestVersion()
        self._next_id = 0
        self._stepped = 0.0
        self._requested = self._outstanding = 0  # tasks sent since the last step, and those of them under way
        self._excluded_before = 0  # clients that were excluded when those of this step were drawn
        self._attempts: dict[int, int] = {}  # how often each client was asked since the last step
        self._limits: dict[int, float] = {}  # the longest step allowed, by task under way
        self._waiting: list[contracts.Result] = []
        self._ended: list[tuple[contracts.Result, str, str]] = []  # with status and reason
        self._absent: dict[int, str] = {}  # clients that no round waits for, when others were asked since the last step
        self._excluded_updates: dict[int, tuple[str, str]] = {}  # status and reason of sound updates that do not count
        self._notes: list[records.TableRow] = []
        self._refusals: list[records.TableRow] = []
        self._queries = ClientQueries(runtime, work)
        self._completed = CompletedModels(work, self.check.max_examples)
        self._writer = records.StepWriter(recorder, checkpoint_every)
        self._contexts: dict[tuple[str, int], LoopContext] = {}
        self._masked = MaskedRounds(recipe.masking)
        self._intake = ResultIntake(self.check, work, self._masked)
        self._stalled = StalledSteps(recipe.scheduling.round_kind() is not None)
        parts = work.own_models is not None and any(
            own.held is not None or own.silent is not None for own in work.own_models.models
        )
        # only a weighted sum can be formed where clients train: whatever looks at single updates needs them here
        early = not (parts or recipe.requires_individual_updates or recipe.masking or self.check.limits_weights)
        self._summed = recipe.aggregation if early and isinstance(recipe.aggregation, Linear) else None
        self._failures = ClientFailures(names, known)
        self._began, self._before = time.perf_counter(), 0.0

    # -- the loop

    def run(self) -> None:
        """Run until it is over."""
        try:
            self._run()
        finally:
            # they point back here: a circle would keep all clients' rows until Python looks for one
            self._contexts.clear()

    def _run(self) -> None:
        self._began, self._before = time.perf_counter(), self.totals.wall
        self._excluded_before = len(self.client_pool.excluded)
        spending, epsilon = self._learned_spending(), None if self.stop is None else self.stop.epsilon
        # a resumed run may have spent its budget, and then ends by `_over` and not with an error
        if spending is not None and epsilon is not None and not self.version:
            spending.check_first(epsilon)
        self._evaluate_if_due()
        scheduler, view = self.recipe.scheduling, self._view()
        while not self._over():
            heed_stop()
            count = scheduler.num_to_request(view)
            if not self._requested:
                self._excluded_before = len(self.client_pool.excluded)
            if count and not self._send(self._invitations.draw(self.runtime.clients(), count, self.version)):
                self._step()  # a round of nobody
                view = self._view()
                continue
            if self._queries.queue:
                self._take(self._queries.queue.popleft())
            elif (result := self.runtime.next(scheduler.deadline(self._view()))) is not None:
                self._take(result)
                del result  # a name for it would keep the sum of its round in memory during the next one
            # nobody is asked, at work or waited for and the clock stands still, so nothing can ever happen again
            elif not count and not self.client_pool.busy and not self._waiting and self.runtime.now() == view.now:
                raise RuntimeFault(self.client_pool.stuck_reason())
            view = self._view()
            if scheduler.should_step(view):
                self._step()
                view = self._view()
        self._writer.finish(self.state)
        if self.evaluation.validate is None and self.work.choice is None:  # else of what is best, or chosen
            self._count_classes()
        if not self.totals.updates:
            raise RuntimeFault(self.client_pool.no_update_reason(self.version))

    def _over(self) -> bool:
        self.totals.wall = self._before + time.perf_counter() - self._began  # also of the last step
        if self.rounds is not None and self.version >= self.rounds:
            return True
        return self.stop is not None and (
            self.totals.reached
            or self.stop.used_up(self.totals, self._stepped if self.version else 0.0)
            or self._budget_is_spent(self.stop.epsilon)
        )

    def _learned_spending(self) -> Spending | None:
        """Return what is spent of budgets, where the run decides it: by sites' rows, or by who was excluded.

        Those whom a round excludes were drawn from with all others, so that they count from the next round on.  None
        where it is known before.
        """
        spending = self._spending
        if spending is None:
            return None
        if isinstance(self.runtime, contracts.StatesRows):
            spending.learn(self.runtime.stated_rows())
            return spending
        return spending if spending.learn_excluded(self.known - self._excluded_before) else None

    def _budget_is_spent(self, epsilon: float | None) -> bool:
        """Return whether the next round would spend more than epsilon of a budget that the run decides."""
        if epsilon is None or self._requested:  # a round that has begun was looked at before
            return False
        before, self._excluded_before = self._excluded_before, len(self.client_pool.excluded)
        spending = self._learned_spending()
        is_spent = spending is not None and spending.exceeds(self.version + 1, epsilon)
        # until that round is drawn, what was spent is that of the rounds before
        self._excluded_before = before
        self._learned_spending()
        return is_spent

    def _view(self) -> ServerView:
        available, idle = self.client_pool.count(self.runtime.clients())
        waiting, failed = len(self._waiting), len(self._ended)
        sent = (len(self.client_pool.busy), self._requested, self._outstanding)
        return ServerView(self.version, self.runtime.now(), self._stepped, available, idle, *sent, waiting, failed)

    # -- tasks and results

    def _send(self, clients: Sequence[int]) -> bool:
        """Send training tasks; returns whether there is any."""
        self._absent |= self._absences()
        if not clients:
            return False
        offer = self.recipe.clustering.candidates(self.cluster_models.models, self.work)
        tasks = []
        # before tasks are made, which bring the list of those that agreed
        self._masked.agree_keys(clients, self._context)
        for client in clients:
            cluster, attempt = self.cluster_models.of(client), self._attempts.get(client, 0)
            vectors = {"model": cluster.model, **cluster.server_vectors, **offer, **self._masked.vectors(client)}
            task = self._task(client, vectors, attempt=attempt, committed=cluster.committed)
            tasks.append(task)
            self.client_pool.take(task)
            self._attempts[client] = attempt + 1
            # by the model that is sent: it may have moved by the time the update comes
            self._limits[task.id] = self.check.limit(cluster.norm)
        self._requested += len(tasks)
        self._outstanding += len(tasks)
        sum_request = contracts.SumRequest(self._summed, self._limits[tasks[0].id]) if self._summed else None
        absent, now = self._masked.absent, self.runtime.now()
        self.runtime.submit([task for task in tasks if task.client not in absent], sum_request)
        for task in tasks:
            if task.client in absent:
                # as a task that has failed, so that no round waits for it
                self._take(contracts.Result(task, None, now, now, failure=absent[task.client]))
        return True

    def _task(
        self,
        client: int,
        vectors: dict[str, Tensor],
        query: contracts.Query | None = None,
        free: bool = False,
        attempt: int = 0,
        committed: int = 0,
    ) -> contracts.Task:
        """Make a task; the first one of a client brings its first private numbers."""
        work = self.work.of(client)
        shared = work.layout.shared
        # where nothing is shared nothing goes out either: such a client starts by itself
        if (
            not isinstance(query, KeyQuery)
            and 0 < shared < work.layout.size
            and client != contracts.SERVER_ID
            and client not in self.client_pool.initialized
        ):
            vectors["private"] = self.recipe.sharing.initial_private(work.initial[shared:], work.layout, client)
        self._next_id += 1
        return contracts.Task(self._next_id, client, self.version, vectors, query, free, attempt, committed)

    def _take(self, result: contracts.Result) -> None:
        """Check one result; keep it for the next step, or record why not and exclude its client."""
        task, update, version = result.task, result.update, self.version
        client = task.client
        self.client_pool.release(client)
        # tasks of earlier versions left this count at the last step
        self._outstanding -= task.version == self.version
        result, reason = self._intake.take(result, self._limits.pop(task.id))
        # an answer shows that the client has its first private numbers, also where its update does not count
        if update is not None:
            self.client_pool.initialized.add(client)
        if reason is not None:
            self._end(result, reason)
        elif late := self.recipe.scheduling.reject_reason(self.cluster_models.missed(task, version)):
            self._ended.append((result, "late", late))
        else:
            self._waiting.append(result)
            if self.recipe.scheduling.choose != "uniform":
                self._records.note(result, version)

    def _end(self, result: contracts.Result, reason: str) -> None:
        """Record a result that does not count; a client whose result was refused is not asked again.

        Numbers that are not finite and steps that are too long are no offence: training can fail, and may not in the
        next round.
        """
        refused = (result.refused or result.update is not None) and not diverged(reason)
        absent = result.update is None and result.task.client in self._absences()
        self._ended.append((result, "refused" if refused else "absent" if absent else "lost", reason))
        if refused:
            self.client_pool.exclude(result.task.client, reason)
            self._refusals.append(records.refusal(result, reason))

    # -- stepping

    def _step(self) -> None:
        lost = [(result, reason) for result, status, reason in self._ended if status == "lost"]
        self._failures.watch(lost, len(self._waiting) + len(self._ended), self.version + 1)
        # by client and not by arrival, so that floating-point sums are the same in every run
        results = sorted(self._waiting, key=lambda a: (a.task.client, a.task.id))
        self._waiting = []
        results, unlike = self._intake.split(results)
        for result, difference in unlike:
            self._end(result, difference)
        results = self._unmasked(results)
        results, counted = self._counted(results)
        self._stalled.watch(results, counted, self)
        self.version += 1
        self._stepped = self.runtime.now()
        rows = []
        for result, count in zip(results, counted, strict=True):
            status, reason = self._excluded_updates.get(result.task.client, ("ok", None))
            rows.append(records.result_row(result, self.version, status, reason, count))
        rows += [records.result_row(a, self.version, status, reason) for a, status, reason in self._ended]
        rows += self._queries.take_rows()
        rows += self._absent_rows({row["client"] for row in rows if row["kind"] == "train"})
        notes = self._notes + records.refusal_notes(self._refusals + self._queries.take_refusals())
        self._ended, self._excluded_updates, self._notes, self._refusals, self._absent = [], {}, [], [], {}
        self._requested = self._outstanding = 0
        self._attempts.clear()
        step = records.step_row(rows, self.version, self._stepped, self.cluster_models.main.norm)
        if self._masked.loss is not None:
            step["loss"] = self._masked.loss
        self.totals.updates += len(results)
        self.totals.nbytes += step["bytes_down"] + step["bytes_up"]
        over = self._over()
        step["wall"] = self.totals.wall
        if self._spending is not None and (over or self._spending.is_told(self.version)):
            self._learned_spending()
            spent = self._spending.after(self.version)
            notes.append({"axis": "privacy", "cluster": 0, "name": "spent", "value": spent})
        due = over or self._writer.due(self.version, time.perf_counter() - self._began)
        # what may be the best is kept
        due = due or (self.evaluation.validate is not None and self.evaluation.is_due(self.version, self.rounds, over))
        if self._completed.needed and (over or self.evaluation.is_due(self.version, self.rounds, over)):
            self._completed.complete(self.cluster_models, range(self.known), self.ask_for_report)
        # the checkpoint is made before measuring: a resumed run measures this version again, to the same numbers
        self._writer.write(step, rows, notes, self.state if due else None)
        self._evaluate_if_due(over)

    def _counted(self, results: list[contracts.Result]) -> tuple[list[contracts.Result], list[Counted]]:
        """Step with updates, and return those that were taken and how each counts.

        Where a component fails, the update is refused without which it does not.

        Raises:
            RuntimeFault: it fails without any single one of them, too.
        """
        # of a sum nobody's update can be left out
        summed = any(result.update is not None and result.update.partial_sum is not None for result in results)
        suspects = [] if summed else by_extremes(results)
        cause: Exception | None = None
        for left_out in (None, *suspects):
            rest, go_back = [result for result in results if result is not left_out], self._mark()
            try:
                counted = self.cluster_models.step(self._cohort(rest), self._context)
            except (PiebaldError, MemoryError, OSError):  # no number of an update's
                raise
            except Exception as error:
                raise_if_lost(error)
                cause = cause or error
                go_back()
            else:
                if left_out is not None:
                    self._end(left_out, f"made the server's step fail with {shown(cause)}")
                return rest, counted
        some = "its" if len(suspects) == len(results) else f"the {len(suspects):,} most unlike the others of its"
        tried = f", also without any single one of {some} {len(results):,} updates" if suspects else ""
        raise RuntimeFault(
            f"step {self.version + 1} failed at the server with {shown(cause)}{tried}: choose another aggregation or "
            "server optimizer"
        ) from cause

    def _mark(self) -> Callable[[], None]:
        """Return a function that undoes what components do to the server from now on."""
        models_back, notes, refusals = self.cluster_models.mark(), len(self._notes), len(self._refusals)
        excluded_updates, excluded = dict(self._excluded_updates), dict(self.client_pool.excluded)

        def go_back() -> None:
            models_back()
            del self._notes[notes:], self._refusals[refusals:]
            self._excluded_updates = excluded_updates
            self.client_pool.set_excluded(excluded)

        return go_back

    def _cohort(self, results: Sequence[contracts.Result]) -> contracts.Cohort:
        held = [self.work.counted_of(result.task) for result in results] if self.work.own_models else ()
        return cohort_of(results, self.version, self.work.layout.shared_trained, held)

    def _absences(self) -> Mapping[int, str]:
        """Return the clients that the runtime says are absent, with the reasons; none where it knows nothing of it."""
        return self.runtime.absences() if isinstance(self.runtime, contracts.TellsAbsences) else {}

    def _absent_rows(self, asked: Collection[int]) -> list[records.TableRow]:
        """Return the rows of clients that were not asked in this step because they were absent."""
        rows, now = [], self.runtime.now()
        for client, reason in sorted(self._absent.items()):
            if client not in asked:
                self._next_id += 1
                result = contracts.Result(contracts.Task(self._next_id, client, self.version - 1, {}), None, now, now)
                rows.append(records.result_row(result, self.version, "absent", reason))
        return rows

    def _unmasked(self, results: list[contracts.Result]) -> list[contracts.Result]:
        """The results that count; none where they were masked and their sum cannot be unmasked."""
        opened, reason = self._masked.unmask(results, self._context)
        if reason is not None:
            self.note("transforms", 0, "abandoned", reason)
            self._ended += [(result, "excluded", reason) for result in results]
        return opened

    # -- what components are offered

    def _context(self, axis: str, cluster: int) -> LoopContext:
        if (axis, cluster) not in self._contexts:
            self._contexts[axis, cluster] = LoopContext(self, axis, cluster)
        return self._contexts[axis, cluster]

    def exclude_update(self, client: int, reason: str) -> None:
        """See `contracts.ServerContext.exclude_update`."""
        self._excluded_updates[client] = ("excluded", reason)

    def exclude_client(self, client: int, reason: str) -> None:
        """See `contracts.ServerContext.exclude_client`."""
        self.client_pool.exclude(client, reason)
        self._refusals.append({"client": client, "task": None, "kind": None, "reason": reason})

    def note(self, axis: str, cluster: int, name: str, value: Any) -> None:
        """See `contracts.ServerContext.note`."""
        self._notes.append({"axis": axis, "cluster": cluster, "name": name, "value": value})

    def query(self, requests: Sequence[contracts.QueryRequest]) -> list[contracts.Update | None]:
        """See `contracts.ServerContext.query`."""
        tasks = [self._task(request.client, dict(request.vectors), request.query) for request in requests]
        return self._queries.ask(tasks, self.version + 1)

    # -- evaluating

    @property
    def models(self) -> ModelSnapshot:
        """The global models as they are now."""
        return self.cluster_models.snapshot()

    def _evaluate_if_due(self, last: bool = False) -> None:
        if self.evaluation.is_due(self.version, self.rounds, last):
            self._evaluate()
        elif self.watch is not None:
            self.watch(RoundProgress(self.version, {}))

    def _evaluate(self) -> None:
        """Evaluate models for the report, without bytes and virtual time, since no client needs that to train."""
        plan, rows = self.evaluation, list[records.TableRow]()
        answers = self.ask_for_report(plan.queries(self.known, self.work.seed))
        for result in answers:
            rows += records.score_rows(result, self.version)
        self.recorder.scores(rows)
        undefined = records.undefined_rows(rows, ["loss", *self.work.objective.metrics])
        self._record_failures(records.uncounted_rows(answers, self.version) + undefined)
        if plan.validate is not None and self.best.consider(self.version, rows, self.models):
            self._count_classes()
        means = records.mean_scores([row for row in rows if row["split"] == records.split_of(plan.query)])
        if self.stop is not None and plan.stopping is not None:
            judged = records.mean_scores([row for row in rows if row["split"] == records.split_of(plan.stopping)])
            self.stop.note_means(self.totals, judged, self.work.objective.metric, plan.higher)
        if self.watch is not None:
            self.watch(RoundProgress(self.version, means))

    def _count_classes(self) -> None:
        """Ask for answers by class, at thresholds and row by row, of the models that the run may end with."""
        plan, known, seed = self.evaluation, self.known, self.work.seed
        answers = self.ask_for_report(plan.counting(known, seed))
        self.recorder.confusion(confusion_rows(answers, self.version, self.work))
        answers += self.ask_for_report(plan.scoring_at(answers, known, seed))
        # an extra for the report: where targets or metrics are of an unknown kind the run goes on without it
        scoring = plan.row_scoring(self._answer_of_all(), known, seed)
        singles, _ = self._queries.usable_answers([self._asking(*request) for request in scoring])
        self.recorder.row_scores(rows_of_scores([*answers, *singles], self.version, self.work))

    def _answer_of_all(self) -> Sequence[float]:
        """The outputs of the constant answer of all sites; empty where one of them does not tell its totals."""
        query, outputs = self.evaluation.totals, tuple[float, ...]()
        while query is not None:
            results, _ = self._queries.usable_answers([self._asking(client, query) for client in range(self.known)])
            answers = [result.update for result in results if result.update is not None]
            if len(answers) < self.known:
                return ()
            outputs, query = query.outputs(answers), query.closer(answers)
        return outputs

    def ask_for_report(self, requests: Sequence[tuple[int, contracts.Query]]) -> list[contracts.Result]:
        """The usable answers of clients to queries about their own clusters' models; why others fail is recorded."""
        answers, failed = self._queries.usable_answers([self._asking(*request) for request in requests])
        self._failures.watch(failed, len(requests), self.version)
        self._record_failures([records.failure_row(result, reason, self.version) for result, reason in failed])
        return answers

    def _record_failures(self, rows: Sequence[records.TableRow]) -> None:
        if rows:
            self.recorder.failures(rows)

    def _asking(self, client: int, query: contracts.Query) -> contracts.Task:
        cluster, models = self.cluster_models.of(client), self.cluster_models.models
        vectors = {"model": self._completed.model(cluster, client)}
        if self.work.choice is not None and len(models) > 1:  # the client may choose between the two
            vectors["global"] = models[self.cluster_models.main_number]
        return self._task(client, vectors, query, free=True, committed=cluster.committed)

    # -- state

    def state(self) -> contracts.Checkpoint:
        """The state that a resumed run needs."""
        models, clients = self.cluster_models.state(), self.runtime.state()
        outstanding, sent = records.plain_tasks([*self.client_pool.busy.values()])
        queued, brought = records.plain_results(self._queries.queue)
        values = {
            "version": self.version,
            "next_id": self._next_id,
            "stepped": self._stepped,
            "totals": self.totals.plain(),
            "best": self.best.state(),
            "excluded": sorted(self.client_pool.excluded.items()),
            "initialized": sorted(self.client_pool.initialized),
            "limits": sorted(self._limits.items()),
            "stalled": self._stalled.state(),
            "records": self._records.state(),
            "outstanding": outstanding,
            "queued": queued,
            "cluster_models": dict(models.values),
            "runtime": dict(clients.values),
        }
        return contracts.Checkpoint(on_host({**models.tensors, **sent, **brought, **clients.tensors}), values)

    def begin_with(self, taken: contracts.Checkpoint) -> None:
        """Begin with what a finished run left (`lineage.Inheritance`)."""
        self.cluster_models.begin_with(contracts.Checkpoint(taken.tensors, taken.values["cluster_models"]))
        self.client_pool.initialized = set(taken.values["initialized"])

    def restore(self, checkpoint: contracts.Checkpoint) -> None:
        """Restore what `state` returned."""
        values = checkpoint.values
        # they hold the state of components that is replaced here
        self._contexts.clear()
        self.cluster_models.restore(
            contracts.Checkpoint(checkpoint.tensors, values["cluster_models"]), values["version"]
        )
        self.version, self._next_id = int(values["version"]), int(values["next_id"])
        self._stepped, self.totals = float(values["stepped"]), RunTotals(**values["totals"])
        self.best.restore(values.get("best"))
        self._stalled.restore(values["stalled"])
        self._records.restore(values.get("records"))
        self.client_pool.set_excluded({int(client): str(reason) for client, reason in values["excluded"]})
        self.client_pool.initialized = set(values["initialized"])
        self._limits = {int(number): float(limit) for number, limit in values["limits"]}
        for row in values["outstanding"]:
            self.client_pool.take(records.whole_task(row, checkpoint.tensors))
        tasks = {task.id: task for task in self.client_pool.busy.values()}
        self._queries.queue.extend(records.whole_result(row, checkpoint.tensors, tasks) for row in values["queued"])
        self.runtime.restore(contracts.Checkpoint(checkpoint.tensors, values["runtime"]), tasks)
