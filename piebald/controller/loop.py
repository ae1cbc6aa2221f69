"""The controller: ask, take arrivals one at a time, step, write down what happened.

It knows the seam to a runtime and nothing behind it.  Its state is a sequence of commits; `resume` takes up the last
one.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piebald.contracts import CENTRE, Arrival, Assignment, Checkpoint, Pool, Recorder, Runtime, Update, Work
from piebald.controller.check import Check
from piebald.controller.community import Communities
from piebald.controller.pace import select
from piebald.errors import RuntimeFault
from piebald.parts import Cohort, Query, Recipe, View


@dataclass(frozen=True, slots=True)
class Measuring:
    """When and on whom models are scored for the report.

    Attributes:
        query: what clients are asked.
        every: commits between measurements; the last commit is always measured.  0: never.
        clients: how many (seeded choice), None for all.
        common: what the centre asks of its own test set, None where it has none or there is no model to use alone.
    """

    query: Query
    every: int = 1
    clients: int | None = None
    common: Query | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """What the loop tells after each commit: the commit's number, and the newest mean scores by "model/metric"."""

    version: int
    scores: Mapping[str, float]


class Controller:
    """Runs one recipe on one runtime."""

    def __init__(
        self,
        recipe: Recipe,
        runtime: Runtime,
        work: Work,
        recorder: Recorder,
        *,
        known: int,
        rounds: int,
        measuring: Measuring,
        checkpoint_every: int = 1,
        check: Check | None = None,
        watch: Callable[[Progress], None] | None = None,
    ) -> None:
        self.recipe, self.runtime, self.work, self.recorder = recipe, runtime, work, recorder
        self.known, self.rounds, self.measuring, self.checkpoint_every = known, rounds, measuring, checkpoint_every
        self.check, self.watch = check or Check(), watch
        self.communities = Communities(recipe, work.initial[: work.layout.shared].clone(), work.seed)
        self.version = 0
        self._next_id = 0
        self._stepped = 0.0
        self._busy: dict[int, Assignment] = {}  # by client: one training assignment at a time
        self._waiting: list[Arrival] = []
        self._ended: list[tuple[Arrival, str]] = []
        self._counted = False
        self._aside: set[int] = set()
        self._why_aside = "refused before"
        self._welcomed: set[int] = set()
        self._queue: deque[Arrival] = deque()  # training arrivals that came while answers were awaited
        self._limits: list[tuple[weakref.ref[Tensor], float]] = []
        self._offered: tuple[Any, list[int]] = (None, [])
        self._began = time.perf_counter()
        self._wall = 0.0

    # -- the loop

    def run(self) -> None:
        """Run until `rounds` commits are made."""
        self._began = time.perf_counter()
        self._measure_if_due()
        while self.version < self.rounds:
            asked, before = self.recipe.pace.ask(self._view(), self.work.seed), self.runtime.now()
            if asked:
                self._send(asked)
            arrival = self._queue.popleft() if self._queue else self.runtime.next(self.recipe.pace.until(self._view()))
            if arrival is not None:
                self._take(arrival)
            elif not asked and not self._busy and self.runtime.now() == before:
                self._stop_stuck()
            if self.recipe.pace.ready(self._view()):
                self._commit()
        if not self._counted:
            raise RuntimeFault(
                f"in {self.version} rounds no update counted: the arrivals of the run say why each failed"
            )

    def _view(self) -> View:
        clients = self.runtime.clients()
        if self._aside:
            clients = self._without_aside(clients)
        return View(
            self.version,
            self.runtime.now(),
            self._stepped,
            clients,
            self._busy.keys(),
            len(self._waiting),
            len(self._ended),
        )

    def _without_aside(self, clients: Sequence[int]) -> Sequence[int]:
        """Those not put aside; worked out once while nothing changes, since a million may be registered."""
        asked = (clients, len(self._aside))
        if not isinstance(clients, range) or self._offered[0] != asked:
            self._offered = (asked, [client for client in clients if client not in self._aside])
        return self._offered[1]

    def _stop_stuck(self) -> None:
        if self._aside:
            raise RuntimeFault(
                f"no client is left to ask: all {len(self._aside)} were put aside because their updates were refused, "
                f"the last one as {self._why_aside}; a lower learning rate often helps"
            )
        raise RuntimeFault("no client can be asked and none is under way: look at the devices' on intervals")

    # -- asking and taking

    def _send(self, clients: Sequence[int]) -> None:
        assignments = [self._assignment(client) for client in clients]
        self._busy |= {assignment.client: assignment for assignment in assignments}
        pool = None
        if not self.recipe.needs_each:
            pool = Pool(self.recipe.weigh, self._limit(assignments[0].parts["model"]))
        self.runtime.submit(assignments, pool)

    def _assignment(self, client: int, query: Query | None = None, free: bool = False) -> Assignment:
        """One assignment from the client's own community; at the first contact with the private part's first
        numbers.
        """
        community = self.communities.of(client)
        parts = {"model": community.model, **(community.common if query is None else {})}
        shared = self.work.layout.shared
        # where nothing is shared nothing goes out either: such a client starts by itself
        if 0 < shared < self.work.layout.size and client != CENTRE and client not in self._welcomed:
            parts["private"] = self.work.initial[shared:]
        self._next_id += 1
        return Assignment(self._next_id, client, self.version, parts, query, free)

    def _limit(self, model: Tensor) -> float:
        """The longest step allowed from a model; worked out once for each, since assignments share them."""
        # kept by the object itself, not by its id, which a later model may be given again
        self._limits = [known for known in self._limits if known[0]() is not None]
        for known, limit in self._limits:
            if known() is model:
                return limit
        self._limits.append((weakref.ref(model), self.check.limit(model)))
        return self._limits[-1][1]

    def _take(self, arrival: Arrival) -> None:
        """Check one arrival; keep it for the next commit, or note why not and put its client aside."""
        client = arrival.assignment.client
        self._busy.pop(client, None)
        reason = self.check.complaint(arrival, self.work.layout, self._limit(arrival.assignment.parts["model"]))
        if reason is None:
            self._waiting.append(arrival)
        else:
            self._ended.append((arrival, reason))
            if arrival.update is not None:
                self._aside.add(client)
                self._why_aside = reason
        if arrival.update is not None:
            self._welcomed.add(client)

    # -- stepping

    def _commit(self) -> None:
        arrivals = sorted(self._waiting, key=lambda a: (a.assignment.client, a.assignment.id))
        self._counted = self._counted or bool(arrivals)
        labels: list[int] = []
        weights: list[float] = []
        if arrivals:
            labels, weights = self.communities.commit(self._cohort(arrivals), self.known)
        self.version += 1
        self._stepped = self.runtime.now()
        rows = [self._row(a, "ok", None, w, g) for a, w, g in zip(arrivals, weights, labels, strict=True)]
        rows += [self._row(a, "lost" if a.update is None else "refused", why, 0.0, None) for a, why in self._ended]
        self._waiting, self._ended = [], []
        due = self.version % self.checkpoint_every == 0 or self.version == self.rounds
        # the checkpoint is made before measuring: a resumed run measures this version again, to the same numbers
        self.recorder.commit(self._step_row(rows), rows, self.state() if due else None)
        self._measure_if_due()

    def _cohort(self, arrivals: Sequence[Arrival]) -> Cohort:
        updates = [arrival.update for arrival in arrivals if arrival.update is not None]
        pooled = updates[0].pool is not None
        return Cohort(
            [arrival.assignment.client for arrival in arrivals],
            [arrival.assignment.version for arrival in arrivals],
            updates,
            None if pooled else torch.stack([update.parts["model"] for update in updates]),
            self.version,
        )

    def _row(
        self, arrival: Arrival, status: str, reason: str | None, weight: float, group: int | None
    ) -> dict[str, Any]:
        assignment, update = arrival.assignment, arrival.update
        return {
            "id": assignment.id,
            "version": self.version,
            "client": assignment.client,
            "kind": "train" if assignment.query is None else assignment.query.kind,
            "sent_version": assignment.version,
            "staleness": self.version - 1 - assignment.version,
            "sent": arrival.sent,
            "time": arrival.time,
            "examples": update.examples if update else 0,
            "steps": update.steps if update else 0,
            "loss": update.metrics.get("loss") if update else None,
            "norm": update.norm if update else None,
            "weight": weight,
            "grp": group,
            "bytes_down": arrival.bytes_down,
            "bytes_up": arrival.bytes_up,
            "status": status,
            "reason": reason,
        }

    def _step_row(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        good = [row for row in rows if row["status"] == "ok"]
        counted = sum(row["examples"] for row in good if row["loss"] is not None)
        total = sum(row["examples"] * row["loss"] for row in good if row["loss"] is not None and row["examples"])
        return {
            "version": self.version,
            "time": self._stepped,
            "wall": self._wall + time.perf_counter() - self._began,
            "arrived": len(good),
            "failed": len(rows) - len(good),
            "groups": len({row["grp"] for row in good}),
            "bytes_down": sum(row["bytes_down"] for row in rows),
            "bytes_up": sum(row["bytes_up"] for row in rows),
            "loss": total / counted if counted else None,
            "norm": float(torch.linalg.vector_norm(self.communities.group(0).model)),
        }

    # -- measuring

    def _measure_if_due(self) -> None:
        every = self.measuring.every
        if every and (self.version % every == 0 or self.version == self.rounds):
            self._measure()
        elif self.watch is not None:
            self.watch(Progress(self.version, {}))

    def _measure(self) -> None:
        """Score models for the report: outside the protocol, so without bytes and without virtual time."""
        measuring, query = self.measuring, self.measuring.query
        clients: Sequence[int] = range(self.known)
        if measuring.clients is not None:
            clients = select(clients, measuring.clients, "measure", self.work.seed)
        asked = [self._assignment(client, query, free=True) for client in clients]
        if measuring.common is not None:
            asked.append(self._assignment(CENTRE, measuring.common, free=True))
        rows = []
        for arrival in self._answers(asked):
            rows += _score_rows(arrival, self.version, getattr(query, "split", "test"))
        self.recorder.scores(rows)
        if self.watch is not None:
            self.watch(Progress(self.version, _means(rows)))

    def _answers(self, asked: Sequence[Assignment]) -> list[Arrival]:
        """Send questions and wait for all answers; training that arrives meanwhile is queued."""
        self.runtime.submit(asked)
        open_ids, answers = {assignment.id for assignment in asked}, []
        while open_ids:
            arrival = self.runtime.next()
            if arrival is None:
                break
            if arrival.assignment.id in open_ids:
                open_ids.discard(arrival.assignment.id)
                answers.append(arrival)
            else:
                self._queue.append(arrival)
        return sorted(answers, key=lambda arrival: arrival.assignment.id)

    # -- state

    def state(self) -> Checkpoint:
        """All that a resumed run needs."""
        mine, theirs = self.communities.state(), self.runtime.state()
        outstanding = [*self._busy.values()]
        sent: dict[int, str] = {}
        tensors = dict(mine.tensors)
        rows = []
        for assignment in outstanding:
            places = {}
            for name, part in assignment.parts.items():
                if id(part) not in sent:
                    sent[id(part)] = f"sent/{len(sent)}"
                    tensors[sent[id(part)]] = part
                places[name] = sent[id(part)]
            rows.append(
                {"id": assignment.id, "client": assignment.client, "version": assignment.version, "parts": places}
            )
        queued = []
        for arrival in self._queue:
            tensors |= {f"queued/{arrival.assignment.id}/{name}": part for name, part in _parts(arrival).items()}
            queued.append(_plain(arrival))
        values = {
            "version": self.version,
            "next_id": self._next_id,
            "stepped": self._stepped,
            "wall": self._wall + time.perf_counter() - self._began,
            "counted": self._counted,
            "aside": sorted(self._aside),
            "welcomed": sorted(self._welcomed),
            "outstanding": rows,
            "queued": queued,
            "communities": dict(mine.values),
            "runtime": dict(theirs.values),
        }
        return Checkpoint({**tensors, **theirs.tensors}, values)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take up what `state` gave."""
        values = checkpoint.values
        self.communities.restore(Checkpoint(checkpoint.tensors, values["communities"]))
        self.version, self._next_id = int(values["version"]), int(values["next_id"])
        self._counted = bool(values["counted"])
        self._stepped, self._wall = float(values["stepped"]), float(values["wall"])
        self._aside, self._welcomed = set(values["aside"]), set(values["welcomed"])
        for row in values["outstanding"]:
            parts = {name: checkpoint.tensors[place] for name, place in row["parts"].items()}
            self._busy[row["client"]] = Assignment(row["id"], row["client"], row["version"], parts)
        assignments = {assignment.id: assignment for assignment in self._busy.values()}
        for row in values["queued"]:
            prefix = f"queued/{row['id']}/"
            parts = {n.removeprefix(prefix): t for n, t in checkpoint.tensors.items() if n.startswith(prefix)}
            update = None if row["update"] is None else Update(parts, **row["update"])
            self._queue.append(Arrival(assignments[row["id"]], update, **row["arrival"]))
        self.runtime.restore(Checkpoint(checkpoint.tensors, values["runtime"]), assignments)


def _parts(arrival: Arrival) -> Mapping[str, Tensor]:
    return {} if arrival.update is None else arrival.update.parts


def _plain(arrival: Arrival) -> dict[str, Any]:
    """An arrival that waits to be taken, as JSON values; its vectors lie beside."""
    update = arrival.update
    names = ("examples", "steps", "metrics", "norm", "nbytes")
    return {
        "id": arrival.assignment.id,
        "update": None if update is None else {name: getattr(update, name) for name in names},
        "arrival": {name: getattr(arrival, name) for name in ("sent", "time", "bytes_down", "bytes_up", "failure")},
    }


def _score_rows(arrival: Arrival, version: int, split: str) -> list[dict[str, Any]]:
    client, update = arrival.assignment.client, arrival.update
    if update is None or not update.examples:
        return []
    rows = []
    for name, value in update.metrics.items():
        model, _, metric = name.partition("/")
        place = {"version": version, "client": None if client == CENTRE else client, "model": model}
        rows.append(
            {
                **place,
                "split": "common" if client == CENTRE else split,
                "metric": metric,
                "value": value,
                "examples": update.examples,
            }
        )
    return rows


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["client"] is not None:
            found.setdefault(f"{row['model']}/{row['metric']}", []).append(row["value"])
    return {name: sum(values) / len(values) for name, values in found.items()}
