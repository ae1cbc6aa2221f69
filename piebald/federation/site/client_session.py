"""A site's part in a run: its terms, the tasks that it has, the results that it must deliver, and lines of its log.

Lines have numbers of tasks, rows and bytes, and never a value of a row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from piebald.contracts import Split, Task
from piebald.federation.link.messaging import Connection
from piebald.federation.link.transfer import Assembly
from piebald.federation.link.wire_format import PROTOCOL, Hello, Piece, Refused, Reply, ResultBody, Welcome, unpack_task
from piebald.federation.site.client_store import ClientStore, FinishedTask
from piebald.federation.site.site_rows import SiteClient
from piebald.federation.site.task_runner import TaskRunner
from piebald.methods.queries.scores import Evaluate
from piebald.version import __version__

_OVERHEAD = 1 << 20  # bytes of a task besides its vectors, at most
_VECTORS = 64  # vectors of a whole model's size in a task, at most

log = logging.getLogger("piebald.federation")


@dataclass(slots=True, eq=False)
class TrainingJob:
    """A training task that the site has accepted.

    Attributes:
        task: the task.
        digest: digest of the task's body.
        epoch: the server process that sent it last.
    """

    task: Task
    digest: str
    epoch: str


@dataclass(frozen=True, slots=True)
class StartedTask:
    """A task for a thread to work on, with the run's task runner and files, and the client state before the task."""

    task: Task
    runner: TaskRunner
    store: ClientStore
    state: dict[str, Tensor] | None


class Delivery(NamedTuple):
    """The next result to deliver."""

    id: int
    trains: bool
    body: ResultBody


class ClientSession:
    """A site's part in the current run.

    Threads share it; each method holds the lock for as long as it takes.

    Args:
        folder: folder for the site's files, with a folder for each run.

    Attributes:
        lock: guards all that is here.
        has_deliveries: set when there may be something to deliver.
        welcome: the server's last answer to a hello.
        terms: digest of the terms that were reviewed last.
        refused: why the site does not accept them, "" where it does.
        runner: serves tasks under the accepted terms, or None.
        latest: the last model of the site's cluster that it received, and its version.
        latest_global: the global model that came with it, where there are several clusters.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.lock = threading.RLock()
        self.has_deliveries = threading.Event()
        self.welcome: Welcome | None = None
        self.terms, self.refused = "", ""
        self.runner: TaskRunner | None = None
        self.latest: tuple[int, Tensor] | None = None
        self.latest_global: Tensor | None = None
        self.store: ClientStore | None = None
        self._rows: Mapping[Split, int] = {}
        self._jobs: dict[int, TrainingJob] = {}
        self._queries: set[int] = set()  # queries accepted, until their answers are delivered
        self._answers: dict[int, ResultBody] = {}
        self._delivered: set[int] = set()  # training tasks, in this epoch
        self._assembly = Assembly()

    # -- hello and welcome

    def hello(self, incarnation: str) -> Hello:
        """Return the site's next hello."""
        with self.lock:
            held = sorted({*self._jobs, *(done.id for done in self.store.done)}) if self.store else []
            return Hello(
                protocol=PROTOCOL,
                version=__version__,
                incarnation=incarnation,
                run=self.welcome.run if self.welcome else "",
                ready=self.terms if self.runner is not None else "",
                refused=self.refused,
                held=held,
                rows=self._rows.get("train", -1),
                validation_rows=self._rows.get("validation", -1),
                test_rows=self._rows.get("test", -1),
            )

    def take_welcome(self, welcome: Welcome) -> Welcome | None:
        """Update the session from a welcome, and return the one before.

        Raises:
            OSError: the disk cannot be written; the next welcome is taken as this one would have been.
        """
        with self.lock:
            before = self.welcome
            if welcome.run and (before is None or before.run != welcome.run):
                self.begin_run(welcome.run)
            self.welcome = welcome
            # another process of the server: what was delivered to the one before may not be in its checkpoint
            if before is None or before.epoch != welcome.epoch:
                self._delivered.clear()
                self._queries.clear()
                self._answers.clear()
                self.has_deliveries.set()
            try:
                self._reconcile(welcome)
            except OSError:
                self.welcome = before
                raise
            return before

    def begin_run(self, run: str) -> None:
        """Begin a run: it has its own folder, and keeps nothing of the run before."""
        with self.lock:
            self.store = ClientStore(self._folder / run)
            self._jobs.clear()
            self._queries.clear()
            self._answers.clear()
            self._assembly.drop()
            self.runner, self.terms, self.refused, self.latest, self.latest_global = None, "", "", None, None

    def carry_over(self, lineage: str, form: Mapping[str, tuple[int, ...]]) -> None:
        """Begin the run with the state that this site kept of the run that it goes on from, where there is any.

        Args:
            lineage: number of that run.
            form: names and shapes of the state in this run.
        """
        with self.lock:
            if self.store is None or not form or not (self._folder / lineage).is_dir():
                return
            # ids are below 2**53, so this is the state after all tasks
            state = ClientStore(self._folder / lineage).state(before=1 << 53)
            form_of_state = None if state is None else {name: tuple(tensor.shape) for name, tensor in state.items()}
            if state is None or form_of_state != form:
                log.warning("the state that this site kept of the run %s does not fit, so it begins anew", lineage)
            elif self.store.begin_with(state, lineage):
                log.info("this site goes on with the state that it kept of the run %s", lineage)

    def accept_terms(self, terms: str, runner: TaskRunner | None, rows: Mapping[Split, int], refused: str) -> None:
        """Record the outcome of reviewing the run's terms; `rows` are the numbers that the server is told."""
        with self.lock:
            self.terms, self.runner, self._rows, self.refused = terms, runner, rows, refused

    def _reconcile(self, welcome: Welcome) -> None:
        """Drop results that the server has saved, and continue jobs that its checkpoint knew of."""
        if self.store is None:
            return
        for id, job in self._jobs.items():
            # the checkpoint knew of it, so the resumed server waits for its result under its own epoch
            if id in welcome.unsaved and id <= welcome.restored:
                job.epoch = welcome.epoch
        for done in self.store.done:
            if _forgotten(done, welcome) or done.id in welcome.unsaved:
                break  # later tasks depend on this one
            if 0 <= welcome.counted < done.id <= welcome.last_id:  # the server gave it up, and its update never counts
                if done.id in self._delivered:  # before, the server could think that it is still owed
                    self.store.discard(done.id)
                break
            if done.id <= welcome.last_id:
                self.store.confirm(done.id)

    # -- receiving tasks

    def receive(self, piece: Piece, data: memoryview) -> tuple[Reply, Task | None]:
        """Receive a piece of a task; the last piece also returns the task, which is accepted then.

        Raises:
            Refused: the body holds no task for this site.
        """
        with self.lock:
            welcome, runner, store = self.welcome, self.runner, self.store
            if welcome is None or runner is None or store is None or welcome.over:
                return Reply(status="not wanted"), None
            if (piece.run, piece.epoch) != (welcome.run, welcome.epoch):  # its welcome has not arrived yet
                return Reply(status="not wanted"), None
            if self._has(piece, welcome, store):
                return Reply(status="known"), None
            # 4 bytes for a value in float32
            reply, body = self._assembly.take(piece, data, _OVERHEAD + 4 * _VECTORS * runner.every.largest)
            if body is None:
                return reply, None
            task = unpack_task(body)
            # the body is what counts: `_has` and the server's books went by what the piece claims of it
            if task.client != runner.client or (task.query is None) != piece.trains:
                raise Refused("a task that is not for this site")
            if task.query is None and piece.counted >= 0:  # the welcome that would say so may not have arrived yet
                store.discard(piece.counted + 1)
            self._accept(task, piece.digest, welcome.epoch)
            return reply, task

    def _has(self, piece: Piece, welcome: Welcome, store: ClientStore) -> bool:
        """Return whether the site has a task already.

        A finished task that the server has forgotten is adopted where the server sends it again, and discarded where it
        sends another one.
        """
        if not piece.trains:
            return piece.id in self._queries
        job = self._jobs.get(piece.id)
        if job is not None and job.digest == piece.digest:
            job.epoch = welcome.epoch
            return True
        this = (piece.id, piece.digest)
        if any((done.id, done.digest) == this and done.epoch == welcome.epoch for done in store.done):
            return True
        forgotten = [done for done in store.done if _forgotten(done, welcome)]
        if forgotten and (forgotten[0].id, forgotten[0].digest) == this:
            store.adopt(piece.id, welcome.epoch)
            self.has_deliveries.set()
            return True
        if any(done.id == piece.id and done not in forgotten for done in store.done):
            return True  # the server's checkpoint knew of it, so its result will be delivered
        if forgotten:  # the resumed run went another way
            store.discard(forgotten[0].id)
        return False

    def _accept(self, task: Task, digest: str, epoch: str) -> None:
        owns = None if self.runner is None else self.runner.every.own_models
        whole = owns is None or not owns.drawn  # else a training task brings a part that is not the client's own
        if (task.query is None and whole) or isinstance(task.query, Evaluate):
            # these bring the model of the client's own cluster
            self.latest, self.latest_global = (task.version, task.vectors["model"]), task.vectors.get("global")
        if task.query is not None:
            self._queries.add(task.id)
            return
        self._jobs.clear()  # a client trains for one task at a time, so the server has forgotten the others
        self._jobs[task.id] = TrainingJob(task, digest, epoch)

    # -- working on tasks

    def start_training(self, id: int) -> tuple[TrainingJob, StartedTask] | None:
        """Start a training task, unless it was dropped."""
        with self.lock:
            job = self._jobs.get(id)
            if job is None or self.runner is None or self.store is None:
                return None
            return job, StartedTask(job.task, self.runner, self.store, self.store.state(before=id))

    def finish_training(
        self, job: TrainingJob, started: StartedTask, body: ResultBody, state: dict[str, Tensor] | None, steps: int
    ) -> None:
        """Save the result of a training task, unless the task was dropped meanwhile."""
        id = job.task.id
        with self.lock:
            # by identity: after another run began, or another task came under this id, nobody waits for this result
            if self._jobs.get(id) is not job or self.store is not started.store:
                return
            done = FinishedTask(id, job.digest, job.epoch, len(body), str(job.task.rng_version), steps)
            self.store.finish(done, body, state)
            del self._jobs[id]
        self.has_deliveries.set()

    def start_query(self, task: Task) -> StartedTask | None:
        """Start to answer a query, unless it was dropped."""
        with self.lock:
            if task.id not in self._queries or self.runner is None or self.store is None:
                return None
            return StartedTask(task, self.runner, self.store, self.store.state(before=task.id))

    def finish_query(self, task: Task, body: ResultBody) -> None:
        """Keep the answer to a query until it is delivered, unless the query was dropped meanwhile."""
        with self.lock:
            if task.id in self._queries:
                self._answers[task.id] = body
        self.has_deliveries.set()

    # -- delivering results

    def next_delivery(self) -> Delivery | None:
        """Return the next result to deliver: answers to queries first."""
        with self.lock:
            if self.welcome is None or self.store is None:
                return None
            for id, body in self._answers.items():
                return Delivery(id, False, body)
            for done in self.store.done:
                # of a task that the server has forgotten, `_has` decides when the server sends it or another one
                if done.id not in self._delivered and not _forgotten(done, self.welcome):
                    return Delivery(done.id, True, self.store.result(done.id))
        return None

    def mark_delivered(self, delivery: Delivery, epoch: str) -> None:
        """Record that a server process has received a result."""
        with self.lock:
            self._queries.discard(delivery.id)
            self._answers.pop(delivery.id, None)
            if delivery.trains and self.welcome is not None and self.welcome.epoch == epoch:
                self._delivered.add(delivery.id)

    def waits_for(self, address: str, trouble: str, heard: float, at_work: Mapping[str, float]) -> str:
        """Return what the site does and waits for, in words.

        Args:
            address: the server's, as HOST:PORT.
            trouble: why it is not connected, "" where it is.
            heard: when the server was heard last, in seconds since the epoch, 0 for never.
            at_work: what it is doing, and since when, in seconds since the epoch.
        """
        now = time.time()
        doing = [f"{activity} for {now - since:.0f} s" for activity, since in at_work.items()]
        last = f"last word {now - heard:.0f} s ago" if heard else "no word yet"
        welcome = self.welcome
        if trouble or not heard or now - heard > 15:
            waits = f"waiting for the server at {address} ({trouble or 'no answer'}; {last})"
        elif welcome is None or (not welcome.run and not welcome.over):
            waits = "connected: waiting for the server to begin a run"
        elif self.refused:
            waits = f"this site does not take part: {self.refused}"
        elif self.terms == welcome.terms and self.runner is None:
            waits = "an experiment waits for approval: piebald approve with the credentials of this site shows it"
        elif welcome.over:
            waits = "the run is over: waiting for another"
        else:
            waits = f"waiting for the server's next task ({last})"
        trains = doing and waits.startswith("waiting for the server's")
        return ", ".join(doing) if trains else "; ".join([*doing, waits])

    def status(self) -> dict[str, Any]:
        """Return the session's status as plain values, with the run as the server sees it."""
        with self.lock:
            done, said = self.store.done if self.store else [], self.welcome
            seen = {} if said is None else {
                "run_state": said.state or None, "run_until": said.ends or None, "steps": said.step,
                "sites_listed": said.sites, "sites_ready": said.ready, "seen_as": said.you or None,
            }  # fmt: skip
            return {
                "server_version": said.version if said else None,
                "run": said.run if said else None,
                **seen,
                "refused": self.refused or None,
                "working": sorted(self._jobs),
                "outbox": [finished.id for finished in done if finished.id not in self._delivered],
            }


def _forgotten(done: FinishedTask, welcome: Welcome) -> bool:
    """Return whether the server does not know of a finished task, as the process that sent it died too early."""
    return done.epoch != welcome.epoch and done.id > welcome.restored


def connected(address: str, server: Connection | None, expires: datetime) -> None:
    """Log that the server answers."""
    fields = {"event": "connected", "address": address, "certificate": "server"}
    fields |= {"expires": "" if server is None else server.expires, "own_expires": f"{expires:%Y-%m-%d}"}
    log.info(
        "connected to %(address)s: the certificate of %(certificate)s is valid until %(expires)s, this site's until "
        "%(own_expires)s", fields,
    )  # fmt: skip


def joined(prepared: SiteClient, runner: TaskRunner) -> None:
    """Log that the site takes part."""
    rows = ", ".join(f"{count:,} {split} rows" for split, count in runner.rows.items())
    fields = {"event": "joined", "client": prepared.client + 1, "clients": len(prepared.clients), "rows": rows}
    log.info("joined as client %(client)d of %(clients)d, with %(rows)s", fields)
    for why in prepared.unlike:
        log.warning(
            "this site's rows are not like those that the run was prepared by: %(why)s", {"event": "rows", "why": why}
        )


def training(started: StartedTask) -> str:
    """Log that a training task begins, and return the work in words."""
    epochs, rows = started.runner.work.trainer.table().get("epochs"), started.runner.rows["train"]
    work = f"training {'' if epochs is None else f'{epochs} epochs of '}{rows:,} rows"
    fields = {"event": "training", **_numbers(started.task), "epochs": epochs, "rows": rows, "work": work}
    log.info("task %(task)d of step %(step)d: %(work)s", fields)
    return f"task {started.task.id}: {work}"


def trained(started: StartedTask, failure: str | None, seconds: float) -> None:
    """Log that a training task ended."""
    fields: dict[str, Any] = {**_numbers(started.task), "seconds": round(seconds, 3)}
    if failure is None:
        log.info("task %(task)d of step %(step)d: trained in %(seconds).1f s", {"event": "trained", **fields})
    else:
        fields |= {"event": "failed", "why": failure}
        log.warning("task %(task)d of step %(step)d: no update: %(why)s", fields)


def answering(started: StartedTask) -> None:
    """Log that a query begins."""
    kind = "" if started.task.query is None else started.task.query.kind
    fields = {"event": "answering", **_numbers(started.task), "query": kind}
    log.debug("query %(task)d of step %(step)d: answering %(query)s", fields)


def declined(started: StartedTask, failure: str | None) -> None:
    """Log a question about the keys of a sum that got no answer: somebody may have lied."""
    if failure is not None:
        log.warning(
            "task %(task)d of step %(step)d: this site does not help to open the sum: %(why)s",
            {"event": "declined", **_numbers(started.task), "why": failure},
        )


def sent(delivery: Delivery, seconds: float) -> None:
    """Log that the server has a result."""
    size = len(delivery.body)
    fields = {
        "event": "sent",
        "task": delivery.id,
        "bytes": size,
        "megabytes": size / 1e6,
        "seconds": round(seconds, 3),
    }
    fields["kind"] = "task" if delivery.trains else "query"
    level = logging.INFO if delivery.trains else logging.DEBUG
    log.log(level, "%(kind)s %(task)d: sent %(megabytes).2f MB in %(seconds).1f s", fields)


def _numbers(task: Task) -> dict[str, Any]:
    """Return a task's number, and the server step that it is for."""
    return {"task": task.id, "step": task.version + 1}
