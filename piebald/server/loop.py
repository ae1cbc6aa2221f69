"""The controller: ask, take arrivals one at a time, step, write down what happened.

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

from piebald.client_work import Work
from piebald.contracts import (
    CENTRE,
    Arrival,
    Assignment,
    Checkpoint,
    Cohort,
    Pool,
    Query,
    Question,
    Recorder,
    Runtime,
    Update,
)
from piebald.errors import RuntimeFault
from piebald.randomness import select
from piebald.recipe import Recipe
from piebald.scheduling.base import Pace, View
from piebald.server.best_version import Best, Models
from piebald.server.client_pool import Roster
from piebald.server.cluster_models import Communities
from piebald.server.context import Lent
from piebald.server.masked_rounds import Sealed
from piebald.server.records import (
    Row,
    arrival_row,
    mean_scores,
    plain_arrivals,
    plain_assignments,
    score_rows,
    step_row,
    whole_arrival,
    whole_assignment,
)
from piebald.server.result_checks import Check
from piebald.server.stopping import Stop, Tally

SAVING = 0.02  # the share of a run's time that may go into saving its state, where nobody says how often


@dataclass(frozen=True, slots=True)
class Measuring:
    """When and on whom models are scored for the report.

    Attributes:
        query: what clients are asked.
        every: commits between measurements; the last commit is always measured.  0: never.
        clients: how many (seeded choice), None for all.
        common: what the centre asks of its own test set, None where it has none or there is no model to use alone.
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
class Progress:
    """What the loop tells after each commit: the commit's number, and the newest mean scores by "model/metric"."""

    version: int
    scores: Mapping[str, float]


class Controller:
    """Runs one recipe on one runtime, for `rounds` commits or until `stop` says so.

    With `checkpoint_every` None the state is saved as often as takes no more than `SAVING` of the run's time.
    """

    def __init__(
        self,
        recipe: Recipe,
        runtime: Runtime,
        work: Work,
        recorder: Recorder,
        *,
        known: int,
        rounds: int | None,
        measuring: Measuring,
        stop: Stop | None = None,
        checkpoint_every: int | None = 1,
        check: Check | None = None,
        watch: Callable[[Progress], None] | None = None,
    ) -> None:
        self.recipe, self.runtime, self.work, self.recorder = recipe, runtime, work, recorder
        self.known, self.rounds, self.measuring, self.checkpoint_every = known, rounds, measuring, checkpoint_every
        self.stop, self.check, self.watch = stop, check or Check(), watch
        self.communities = Communities(recipe, work.initial[: work.layout.shared].clone(), work.layout.variances)
        self.roster = Roster()
        self.tally = Tally()
        self.version = 0
        self.best = Best()
        self._next_id = 0
        self._stepped = 0.0
        self._asked = self._due = 0  # assignments sent since the last commit, and those of them under way
        self._turns: dict[int, int] = {}  # how often each client was asked since the last commit
        self._limits: dict[int, float] = {}  # the longest step allowed, by assignment under way
        self._waiting: list[Arrival] = []
        self._ended: list[tuple[Arrival, str, str]] = []  # with status and reason
        self._exchanged: list[Row] = []  # questions that parts of the centre asked since the last commit
        self._left_out: dict[int, tuple[str, str]] = {}  # status and reason of sound updates that do not count
        self._remarks: list[Row] = []
        self._queue: deque[Arrival] = deque()  # training arrivals that came while answers were awaited
        self._written: tuple[Row, list[Row], list[Row]] | None = None  # the last commit, until a checkpoint holds it
        self._lent: dict[tuple[str, int], Lent] = {}
        self._sealed = Sealed(recipe.sealing and work.stages[-1])  # that of `work` knows how clients weigh
        self._pools = not recipe.needs_each and recipe.sealing is None
        self._waits = type(recipe.pace).until is not Pace.until
        self._began, self._before = time.perf_counter(), 0.0
        self._saving = 0.0  # seconds that saving has taken

    # -- the loop

    def run(self) -> None:
        """Run until it is over."""
        try:
            self._run()
        finally:
            self._lent.clear()  # they point back here: a circle would keep all clients' rows until Python looks for one

    def _run(self) -> None:
        self._began, self._before = time.perf_counter(), self.tally.wall
        self._measure_if_due()
        pace = self.recipe.pace
        while not self._over():
            view = self._view()
            asked = pace.ask(view)
            if asked:
                self._send(self.roster.choose(self.runtime.clients(), asked, self.work.seed, self.version))
            if self._queue:
                self._take(self._queue.popleft())
            elif (arrival := self.runtime.next(pace.until(self._view()) if self._waits else math.inf)) is not None:
                self._take(arrival)
            elif not asked and not self.roster.busy and not self._waiting and self.runtime.now() == view.now:
                self._stop_stuck()
            if pace.ready(self._view()):
                self._commit()
        if self._written is not None and self.recorder.lasts:
            # a score ended the run: its last commit still needs a checkpoint
            step, rows, remarks = self._written
            self.recorder.commit(step, rows, self.state(), remarks)
        if not self.tally.updates:
            raise RuntimeFault(
                f"in {self.version} rounds no update counted: the arrivals of the run say why each failed"
            )

    def _over(self) -> bool:
        if self.rounds is not None and self.version >= self.rounds:
            return True
        self.tally.wall = self._before + time.perf_counter() - self._began
        return self.stop is not None and (
            self.tally.reached or self.stop.used_up(self.tally, self._stepped if self.version else 0.0)
        )

    def _view(self) -> View:
        offered, free = self.roster.count(self.runtime.clients())
        return View(
            self.version,
            self.runtime.now(),
            self._stepped,
            offered,
            free,
            len(self.roster.busy),
            self._asked,
            self._due,
            len(self._waiting),
            len(self._ended),
        )

    def _stop_stuck(self) -> None:
        if self.roster.aside:
            raise RuntimeFault(
                f"no client is left to ask: all {len(self.roster.aside)} were put aside because their updates were "
                f"refused, the last one as {list(self.roster.aside.values())[-1]}; a lower learning rate often helps"
            )
        raise RuntimeFault("no client can be asked and none is under way: look at the devices' on intervals")

    # -- asking and taking

    def _send(self, clients: Sequence[int]) -> None:
        offer = self.recipe.group.offer(self.communities.models, self.work)
        assignments = []
        self._sealed.meet(clients, self._lend)
        for client in clients:
            community, turn = self.communities.of(client), self._turns.get(client, 0)
            parts = {"model": community.model, **community.common, **offer, **self._sealed.parts(client)}
            assignment = self._made(client, parts, turn=turn, committed=community.committed)
            assignments.append(assignment)
            self.roster.take(assignment)
            self._turns[client] = turn + 1
            self._limits[assignment.id] = self.check.limit(community.norm)
        self._asked += len(assignments)
        self._due += len(assignments)
        pool = Pool(self.recipe.weigh, self._limits[assignments[0].id]) if self._pools else None
        absent, now = self._sealed.absent, self.runtime.now()
        self.runtime.submit([one for one in assignments if one.client not in absent], pool)
        for one in assignments:
            if one.client in absent:
                self._take(Arrival(one, None, now, now, failure=absent[one.client]))

    def _made(
        self,
        client: int,
        parts: dict[str, Tensor],
        query: Query | None = None,
        free: bool = False,
        turn: int = 0,
        committed: int = 0,
    ) -> Assignment:
        """An assignment; at the first contact with the private part's first numbers."""
        shared = self.work.layout.shared
        # where nothing is shared nothing goes out either: such a client starts by itself
        if (
            (query is None or not query.keyed)
            and 0 < shared < self.work.layout.size
            and client != CENTRE
            and client not in self.roster.welcomed
        ):
            parts["private"] = self.recipe.share.first(self.work.initial[shared:], self.work.layout, client)
        self._next_id += 1
        return Assignment(self._next_id, client, self.version, parts, query, free, turn, committed)

    def _take(self, arrival: Arrival) -> None:
        """Check one arrival; keep it for the next commit, or note why not and put its client aside."""
        assignment, update = arrival.assignment, arrival.update
        client = assignment.client
        self.roster.give_back(client)
        self._due -= assignment.version == self.version
        limit = self._limits.pop(assignment.id)
        if self._sealed.stage is None:
            reason = self.check.complaint(arrival, self.work.layout, limit)
        else:
            reason = self._sealed.complaint(arrival, self.work)
        if update is not None:
            self.roster.welcomed.add(client)
        if reason is not None:
            self._ended.append((arrival, "lost" if update is None else "refused", reason))
            if update is not None:
                self.roster.put_aside(client, reason)
        elif late := self.recipe.pace.late(self.version - assignment.version):
            self._ended.append((arrival, "late", late))
        else:
            self._waiting.append(arrival)

    # -- stepping

    def _commit(self) -> None:
        arrivals = sorted(self._waiting, key=lambda a: (a.assignment.client, a.assignment.id))
        self._waiting = []
        arrivals = self._opened(arrivals)
        counted = self.communities.commit(self._cohort(arrivals), self._lend) if arrivals else []
        self.version += 1
        self._stepped = self.runtime.now()
        rows = []
        for arrival, how in zip(arrivals, counted, strict=True):
            status, reason = self._left_out.get(arrival.assignment.client, ("ok", None))
            rows.append(arrival_row(arrival, self.version, status, reason, how))
        rows += [arrival_row(a, self.version, status, why) for a, status, why in self._ended]
        rows += self._exchanged
        remarks = self._remarks
        self._ended, self._exchanged, self._left_out, self._remarks = [], [], {}, []
        self._asked = self._due = 0
        self._turns.clear()
        step = step_row(rows, self.version, self._stepped, self.communities.main.norm)
        if self._sealed.loss is not None:
            step["loss"] = self._sealed.loss
        self.tally.updates += len(arrivals)
        self.tally.nbytes += step["bytes_down"] + step["bytes_up"]
        over = self._over()
        step["wall"] = self.tally.wall
        due = over or self._saves()
        due = due or (self.measuring.validate is not None and self._measures(over))  # what may be the best is kept
        due = due and self.recorder.lasts
        # the checkpoint is made before measuring: a resumed run measures this version again, to the same numbers
        began = time.perf_counter()
        self.recorder.commit(step, rows, self.state() if due else None, remarks)
        self._saving += time.perf_counter() - began if due else 0.0
        self._written = None if due else (step, rows, remarks)
        self._measure_if_due(over)

    def _opened(self, arrivals: list[Arrival]) -> list[Arrival]:
        """The arrivals that count; none where they were sealed and their sum cannot be opened."""
        opened, reason = self._sealed.open(arrivals, self._lend)
        if reason is not None:
            self.remark("update", 0, "abandoned", reason)
            self._ended += [(arrival, "aside", reason) for arrival in arrivals]
        return opened

    def _saves(self) -> bool:
        """Whether the state is saved with this commit."""
        if self.checkpoint_every is None:
            return self._saving <= SAVING * (time.perf_counter() - self._began)
        return self.version % self.checkpoint_every == 0

    def _cohort(self, arrivals: Sequence[Arrival]) -> Cohort:
        return Cohort(
            [arrival.assignment.client for arrival in arrivals],
            [arrival.assignment.version for arrival in arrivals],
            [arrival.update for arrival in arrivals if arrival.update is not None],
            None,
            self.version,
            [arrival.assignment.parts["model"] for arrival in arrivals],
        )

    # -- questions

    def _lend(self, axis: str, group: int) -> Lent:
        if (axis, group) not in self._lent:
            self._lent[axis, group] = Lent(self, axis, group)
        return self._lent[axis, group]

    def leave_out(self, client: int, reason: str) -> None:
        """See `contracts.Centre.leave_out`."""
        self._left_out[client] = ("aside", reason)

    def remark(self, axis: str, group: int, name: str, value: Any) -> None:
        """See `contracts.Centre.remark`."""
        self._remarks.append({"axis": axis, "grp": group, "name": name, "value": value})

    def exchange(self, questions: Sequence[Question]) -> list[Update | None]:
        """See `contracts.Centre.ask`."""
        asked = [self._made(one.client, dict(one.parts), one.query) for one in questions]
        answers: list[Update | None] = []
        for arrival in self._answers(asked):
            reason = self._unusable(arrival)
            status = "ok" if reason is None else "lost" if arrival.update is None else "refused"
            self._exchanged.append(arrival_row(arrival, self.version + 1, status, reason))
            answers.append(arrival.update if reason is None else None)
        return answers

    def _unusable(self, arrival: Arrival) -> str | None:
        query, update = arrival.assignment.query, arrival.update
        if update is None or arrival.failure is not None or query is None:
            return arrival.failure or "no answer"
        for name, part in update.parts.items():
            if not bool(part.isfinite().all()):
                return f"{name} is not finite"
        return query.complaint(update, self.work)

    def _answers(self, asked: Sequence[Assignment]) -> list[Arrival]:
        """Send questions and wait for all answers, in order; training that arrives meanwhile is queued."""
        self.runtime.submit(asked)
        missing, answers = {assignment.id: assignment for assignment in asked}, []
        while missing:
            arrival = self.runtime.next()
            if arrival is None:  # nothing is under way any more, so they will never come
                now = self.runtime.now()
                answers += [Arrival(one, None, now, now, failure="no answer") for one in missing.values()]
                break
            if missing.pop(arrival.assignment.id, None) is not None:
                answers.append(arrival)
            else:
                self._queue.append(arrival)
        return sorted(answers, key=lambda arrival: arrival.assignment.id)

    # -- measuring

    @property
    def models(self) -> Models:
        """The community models as they are now."""
        return Models(dict(self.communities.models), dict(self.communities.group_of), self.communities.chief)

    def _measures(self, last: bool) -> bool:
        """Whether models are scored at this version."""
        every = self.measuring.every
        return bool(every) and (last or self.version % every == 0 or self.version == self.rounds)

    def _measure_if_due(self, last: bool = False) -> None:
        if self._measures(last):
            self._measure()
        elif self.watch is not None:
            self.watch(Progress(self.version, {}))

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
            asked.append(self._asking(CENTRE, measuring.common))
        rows = []
        for arrival in self._answers(asked):
            rows += score_rows(arrival, self.version)
        self.recorder.scores(rows)
        if measuring.validate is not None:
            self.best.consider(self.version, rows, self.models)
        split = getattr(query, "split", "test")
        means = mean_scores([row for row in rows if row["split"] == split])
        self._note(means)
        if self.watch is not None:
            self.watch(Progress(self.version, means))

    def _asking(self, client: int, query: Query) -> Assignment:
        """A question for the report about the client's own community model."""
        community = self.communities.of(client)
        return self._made(client, {"model": community.model}, query, free=True, committed=community.committed)

    def _note(self, means: Mapping[str, float]) -> None:
        """Let the score that matters decide whether to go on: of personal models where there are some."""
        metric = self.work.task.metric
        found = [means[name] for name in (f"personal/{metric}", f"community/{metric}") if name in means]
        if self.stop is not None and found and math.isfinite(found[0]):
            self.stop.note(self.tally, found[0], self.measuring.higher)

    # -- state

    def state(self) -> Checkpoint:
        """All that a resumed run needs."""
        mine, theirs = self.communities.state(), self.runtime.state()
        outstanding, sent = plain_assignments([*self.roster.busy.values()])
        queued, brought = plain_arrivals(self._queue)
        values = {
            "version": self.version,
            "next_id": self._next_id,
            "stepped": self._stepped,
            "tally": self.tally.plain(),
            "best": self.best.state(),
            "aside": sorted(self.roster.aside.items()),
            "welcomed": sorted(self.roster.welcomed),
            "limits": sorted(self._limits.items()),
            "outstanding": outstanding,
            "queued": queued,
            "communities": dict(mine.values),
            "runtime": dict(theirs.values),
        }
        return Checkpoint({**mine.tensors, **sent, **brought, **theirs.tensors}, values)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take up what `state` gave."""
        values = checkpoint.values
        self._lent.clear()
        self.communities.restore(Checkpoint(checkpoint.tensors, values["communities"]))
        self.version, self._next_id = int(values["version"]), int(values["next_id"])
        self._stepped, self.tally = float(values["stepped"]), Tally(**values["tally"])
        self.best.restore(values.get("best"))
        self.roster.aside = {int(client): str(reason) for client, reason in values["aside"]}
        self.roster.welcomed = set(values["welcomed"])
        self._limits = {int(number): float(limit) for number, limit in values["limits"]}
        for row in values["outstanding"]:
            self.roster.take(whole_assignment(row, checkpoint.tensors))
        assignments = {assignment.id: assignment for assignment in self.roster.busy.values()}
        self._queue.extend(whole_arrival(row, checkpoint.tensors, assignments) for row in values["queued"])
        self.runtime.restore(Checkpoint(checkpoint.tensors, values["runtime"]), assignments)
