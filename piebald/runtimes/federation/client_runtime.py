"""One site: it says hello, takes work, trains, answers questions, and delivers until the server has what it did.

Threads: one says hello, one trains, one answers, one delivers; messages come in on the link's own.  What they share is
changed under one lock.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from piebald.contracts import Task
from piebald.errors import PiebaldError
from piebald.privacy.secure_aggregation.key_queries import KeyQuery
from piebald.runtimes.federation.client_store import ClientStore, FinishedTask, secret
from piebald.runtimes.federation.flare_link import SERVER, Link
from piebald.runtimes.federation.messages import (
    PROTOCOL,
    Hello,
    Piece,
    Refused,
    Welcome,
    Wish,
    Word,
    decode,
    encode,
)
from piebald.runtimes.federation.policy import Policy
from piebald.runtimes.federation.provisioning import Credentials, private
from piebald.runtimes.federation.signing import CertificateSigner
from piebald.runtimes.federation.task_runner import SiteClient, TaskRunner
from piebald.runtimes.federation.wire_format import Assembly, digest, pack_update, pieces, unpack_task
from piebald.version import __version__

BEAT = 1.0  # seconds between two hellos
TERMS = 16 << 20  # bytes of a run's terms
WAIT = 20.0  # seconds for the server to answer
_ROOM = 1 << 20  # bytes that a task may have beside its vectors
_VECTORS = 64  # whole models' worth of vectors that a task may bring

log = logging.getLogger("piebald.federation")


@dataclass(slots=True)
class _Job:
    """Training that was accepted; `epoch` is that of the server's process that asked last."""

    task: Task
    asked: str
    epoch: str


class FederationClient:
    """A running site.

    Args:
        credentials: the site's credentials.
        prepare: makes sense of a run's terms, or raises a `PiebaldError` that says why this site cannot.
        policy: what the site agrees to.
        device: where it computes.
        stays: whether to wait for another run when one is over.
    """

    def __init__(
        self,
        credentials: Credentials,
        prepare: Callable[[Mapping[str, Any]], SiteClient],
        *,
        policy: Policy,
        device: str = "cpu",
        stays: bool = False,
    ) -> None:
        self.credentials, self._prepare, self._policy, self._device, self._stays = (
            credentials,
            prepare,
            policy,
            device,
            stays,
        )
        self._incarnation = secrets.token_hex(8)
        self._lock = threading.RLock()
        self._secrets = threading.Lock()  # one thing at a time is done with the keys of a secure aggregation
        self._stir = threading.Event()  # something for the hello or the courier to tell
        self._over = threading.Event()
        self._welcome: Welcome | None = None
        self._heard = 0.0
        self._terms, self._refused = "", ""
        self._runner: TaskRunner | None = None
        self._latest: tuple[int, Tensor] | None = None  # the newest model that came, and its version
        self._rows = -1
        self._store: ClientStore | None = None
        self._jobs: dict[int, _Job] = {}
        self._asked: set[int] = set()  # questions accepted, until their answers are delivered
        self._answers: dict[int, bytes] = {}
        self._delivered: set[int] = set()  # in this epoch
        self._assembly = Assembly()
        self._trainer: queue.Queue[int | None] = queue.Queue()
        self._answerer: queue.Queue[Task | None] = queue.Queue()
        self._courier = threading.Event()
        self._link = Link(
            credentials.party, (credentials.host, credentials.port), credentials.folder, SERVER.__eq__, log.warning
        )
        self._link.on("work", Piece, self._take)

    def run(self) -> str:
        """Stay until the run is over or `stop` is called; says why it ended."""
        threads = [
            threading.Thread(target=work, name=work.__name__, daemon=True)
            for work in (self._train, self._answer, self._deliver)
        ]
        for thread in threads:
            thread.start()
        self._link.start()
        try:
            while not self._over.is_set():
                self._stir.clear()
                self._greet()
                self._tell_status()
                self._stir.wait(BEAT if self._welcome is not None else BEAT / 4)
        finally:
            self.stop()
            self._link.stop()
        return "the run is over" if self._welcome is not None and self._welcome.over else "stopped"

    def stop(self) -> None:
        """Leave; what was finished stays in the outbox."""
        self._over.set()
        self._trainer.put(None)
        self._answerer.put(None)
        for event in (self._stir, self._courier):
            event.set()

    # -- hello

    def _greet(self) -> None:
        """Say hello, and do what the answer asks for."""
        with self._lock:
            held = sorted({*self._jobs, *(done.id for done in self._store.done)}) if self._store else []
            hello = Hello(
                protocol=PROTOCOL,
                version=__version__,
                incarnation=self._incarnation,
                run=self._welcome.run if self._welcome else "",
                ready=self._terms if self._runner is not None else "",
                refused=self._refused,
                held=held,
                rows=self._rows,
            )
        answer = self._link.request(SERVER, "hello", hello, timeout=5.0)
        if answer is None:
            return
        try:
            welcome, _ = decode(Welcome, answer)
        except Refused as error:
            return self._link.report(f"the server answered with {error}")
        self._heard = time.time()
        self._heed(welcome)

    def _heed(self, welcome: Welcome) -> None:
        with self._lock:
            before, self._welcome = self._welcome, welcome
            if welcome.run and (before is None or before.run != welcome.run):
                self._begin(welcome.run)
            if before is None or before.epoch != welcome.epoch:
                self._delivered.clear()
                self._asked.clear()
                self._answers.clear()
                self._courier.set()
            self._reconcile(welcome)
        if welcome.run and welcome.terms != self._terms:
            self._learn_terms(welcome)
        if welcome.over and (before is None or not before.over):
            self._take_home()
        if welcome.over and not self._stays:
            self._over.set()

    def _take_home(self) -> None:
        """Keep the model that the run ended with, private layers and all."""
        if self._runner is None or self._store is None or self._latest is None:
            return
        version, community = self._latest
        vector = self._runner.personalize(version, community, self._store.memory(before=1 << 53))
        path = self.credentials.folder / "model.safetensors"
        self._runner.work.layout.save(vector, path)
        path.chmod(0o600)
        with self._secrets:
            self._store.keep({})
        log.info("the model after commit %d is in %s", version, path)

    def _begin(self, run: str) -> None:
        """Another run: its own folder, and nothing of the one before."""
        self._store = ClientStore(self.credentials.folder / "state" / run)
        self._jobs.clear()
        self._asked.clear()
        self._answers.clear()
        self._runner, self._terms, self._refused, self._latest = None, "", "", None

    def _reconcile(self, welcome: Welcome) -> None:
        """Settle what the server has safe, and take over what its checkpoint knew."""
        if self._store is None:
            return
        for id, job in self._jobs.items():
            if id in welcome.unsafe and id <= welcome.restored:
                job.epoch = welcome.epoch
        for done in self._store.done:
            if self._forgotten(done.id, done.epoch, welcome) or done.id in welcome.unsafe:
                break  # those behind it build on it
            if done.id <= welcome.horizon:
                self._store.settle(done.id)

    @staticmethod
    def _forgotten(id: int, epoch: str, welcome: Welcome) -> bool:
        """Whether the server's process does not know of this training: an earlier one asked, and died too soon."""
        return epoch != welcome.epoch and id > welcome.restored

    def _learn_terms(self, welcome: Welcome) -> None:
        """Fetch the run's terms, and see whether this site can and will work under them."""
        body = self._fetch_terms(welcome)
        if body is None:
            return
        runner, rows, refused = None, -1, ""
        try:
            told = json.loads(bytes(body))
            prepared = self._prepare(told)
            refused = self._policy.reject_reason(prepared.work) or ""
            if not refused:
                signer = (
                    CertificateSigner(self.credentials.folder, told["sites"], welcome.run)
                    if prepared.work.masking
                    else None
                )
                runner = TaskRunner(
                    prepared, self._policy, self._device, secret(self.credentials.folder / "state"), signer
                )
                rows = len(prepared.clients.rows(prepared.client, "train"))
        except PiebaldError as error:
            refused = " ".join(str(error).split())[:300]
        except Exception as error:
            log.exception("the terms cannot be met")
            refused = f"{type(error).__name__}; the site's log says more"
        if refused:
            log.warning("this site does not take part: %s", refused)
        with self._lock:
            self._terms, self._runner, self._rows, self._refused = welcome.terms, runner, rows, refused
        self._stir.set()

    def _fetch_terms(self, welcome: Welcome) -> bytearray | None:
        assembly, start = Assembly(), 0
        while not self._over.is_set():
            answer = self._link.request(SERVER, "terms", Wish(start=start), timeout=WAIT)
            if answer is None:
                return None
            try:
                piece, data = decode(Piece, answer)
                _, body = assembly.take(piece, data, TERMS)
            except Refused as error:
                self._link.report(f"the server sent {error}")
                return None
            if body is not None:
                return body if digest(body) == welcome.terms else None
            start += len(data)
            if not data:
                return None
        return None

    # -- taking work

    def _take(self, origin: str, piece: Piece, data: memoryview) -> bytes:
        """A piece of a task came in."""
        with self._lock:
            welcome, runner, store = self._welcome, self._runner, self._store
            if welcome is None or runner is None or store is None or welcome.over:
                return encode(Word(word="not wanted"))
            if (piece.run, piece.epoch) != (welcome.run, welcome.epoch):  # its welcome is still on its way
                return encode(Word(word="not wanted"))
            if piece.start == 0 and self._has(piece, welcome, store):
                return encode(Word(word="known"))
            try:
                word, body = self._assembly.take(piece, data, _ROOM + 4 * _VECTORS * runner.work.layout.size)
                if body is not None:
                    task = unpack_task(body)
                    if task.client != runner.client or (task.query is None) != piece.trains:
                        raise Refused("a task that is not for this site")
                    self._accept(task, piece.digest, welcome.epoch)
            except Refused as error:  # the server need not try again
                self._link.report(f"{origin} sent {error}")
                word = Word(word="refused")
            return encode(word)

    def _has(self, piece: Piece, welcome: Welcome, store: ClientStore) -> bool:
        """Whether a task is here already; work that the server has forgotten about is taken back, or found
        again.
        """
        if not piece.trains:
            return piece.id in self._asked
        job = self._jobs.get(piece.id)
        if job is not None and job.asked == piece.digest:
            job.epoch = welcome.epoch
            return True
        if any(
            done.id == piece.id and done.asked == piece.digest and done.epoch == welcome.epoch for done in store.done
        ):
            return True
        forgotten = [done for done in store.done if self._forgotten(done.id, done.epoch, welcome)]
        if forgotten and forgotten[0].id == piece.id and forgotten[0].asked == piece.digest:
            store.adopt(piece.id, welcome.epoch)
            self._courier.set()
            return True
        known = [done for done in store.done if done.id == piece.id and done not in forgotten]
        if known:
            return True  # of the checkpoint: it waits in the outbox
        if forgotten:  # the server went another way since: this training never happened
            store.take_back(forgotten[0].id)
        return False

    def _accept(self, task: Task, asked: str, epoch: str) -> None:
        if task.query is None or task.query.kind == "evaluate":  # it brings the client's own group's model
            self._latest = (task.version, task.vectors["model"])
        if task.query is not None:
            self._asked.add(task.id)
            self._answerer.put(task)
            return
        self._jobs.clear()  # a client trains for one task at a time: what the server forgot is dropped
        self._jobs[task.id] = _Job(task, asked, epoch)
        self._trainer.put(task.id)

    # -- working

    def _train(self) -> None:
        """The training thread."""
        while (id := self._trainer.get()) is not None:
            with self._lock:
                job, runner, store = self._jobs.get(id), self._runner, self._store
                if job is None or runner is None or store is None:
                    continue
                memory = store.memory(before=id)
            update, failure, remembers = runner.serve(job.task, memory)
            if update is not None:
                with self._secrets:
                    update, failure = runner.mask(update, job.task, store)
                remembers = None if update is None else remembers
            body = pack_update(update, failure)
            with self._lock:
                if self._jobs.get(id) is not job or self._store is not store:
                    continue  # the server went another way meanwhile
                store.finish(FinishedTask(id, job.asked, job.epoch, len(body)), body, remembers)
                del self._jobs[id]
            self._courier.set()

    def _answer(self) -> None:
        """The answering thread."""
        while (task := self._answerer.get()) is not None:
            with self._lock:
                runner, store = self._runner, self._store
                if task.id not in self._asked or runner is None or store is None:
                    continue
                memory = store.memory(before=task.id)
            if isinstance(task.query, KeyQuery):
                with self._secrets:
                    update, failure = runner.reply(task, store)
            else:
                update, failure, _ = runner.serve(task, memory)
            body = pack_update(update, failure)
            with self._lock:
                if task.id in self._asked:
                    self._answers[task.id] = body
            self._courier.set()

    # -- delivering

    def _deliver(self) -> None:
        """The courier's thread."""
        while not self._over.is_set():
            self._courier.wait(BEAT)
            self._courier.clear()
            while not self._over.is_set() and (found := self._next_parcel()) is not None:
                if not self._hand_over(*found):
                    self._over.wait(0.5)  # the server is away: it will be told again
                    self._courier.set()
                    break

    def _next_parcel(self) -> tuple[int, bool, bytes] | None:
        """What is to be delivered next: number, whether it is training, body."""
        with self._lock:
            if self._welcome is None or self._store is None:
                return None
            for id, body in self._answers.items():
                return id, False, body
            for done in self._store.done:
                if done.id not in self._delivered and not self._forgotten(done.id, done.epoch, self._welcome):
                    return done.id, True, self._store.result(done.id)
        return None

    def _hand_over(self, id: int, trains: bool, body: bytes) -> bool:
        """Deliver one result; whether the server has taken notice."""
        assert self._welcome is not None
        run, epoch, start, again = self._welcome.run, self._welcome.epoch, 0, 0
        piece = Piece(run=run, epoch=epoch, id=id, trains=trains, start=0, size=len(body), digest=digest(body))
        while again < 3:
            data = pieces(body, start)
            head = piece.model_copy(update={"start": start})
            answer = self._link.request(SERVER, "result", head, data, timeout=WAIT)
            if answer is None:
                return False
            try:
                word = decode(Word, answer)[0].word
            except Refused as error:
                self._link.report(f"the server answered with {error}")
                return False
            if word == "go on":
                start += len(data)
            elif word == "again":
                start, again = 0, again + 1
            else:
                with self._lock:
                    self._asked.discard(id)
                    self._answers.pop(id, None)
                    if trains and self._welcome.epoch == epoch:
                        self._delivered.add(id)
                return True
        return False

    def _tell_status(self) -> None:
        """Write down how it stands, for `piebald status`."""
        with self._lock:
            welcome = self._welcome
            status = {
                "party": self.credentials.party,
                "version": __version__,
                "server_version": welcome.version if welcome else None,
                "run": welcome.run if welcome else None,
                "heard": self._heard or None,
                "refused": self._refused or None,
                "working": sorted(self._jobs),
                "outbox": [done.id for done in self._store.done if done.id not in self._delivered]
                if self._store
                else [],
                "sent": self._link.sent[SERVER],
                "received": self._link.received[SERVER],
            }
        private(self.credentials.folder / "status.json", json.dumps(status), lasting=False)
