"""A site: it says hello, accepts tasks, trains, answers queries, and delivers results until the server has them.

Each of hello, training, answering and delivering has a thread of its own; messages arrive on the link's threads.  They
share a `ClientSession`.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor

from piebald.contracts import Split, Task, Update
from piebald.core.errors import PiebaldError
from piebald.core.private_files import write_private
from piebald.federation.credentials.audit import AuditLog
from piebald.federation.credentials.certificates import CertificateSigner
from piebald.federation.credentials.party_files import DiskWrites, Ended, raise_passing
from piebald.federation.credentials.provisioning import Credentials
from piebald.federation.credentials.revocation import ExpiryWatch
from piebald.federation.credentials.slots import protocol_of, slot_of
from piebald.federation.hub.run_terms import read_values
from piebald.federation.link.messaging import SERVER, Link
from piebald.federation.link.supervision import Heartbeat, Supervision, repeated
from piebald.federation.link.wire_format import Needs, Piece, Refused, Reply, Welcome, contents, decode, digest
from piebald.federation.site import client_session, site_choice
from piebald.federation.site.claims import claim
from piebald.federation.site.client_session import ClientSession, Delivery, StartedTask, TrainingJob
from piebald.federation.site.client_store import FILE, RowMemory
from piebald.federation.site.consent import Consent, recipe_in
from piebald.federation.site.gate import FAILED, Connected, Outlet, stated_rows
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_rows import SiteClient
from piebald.federation.site.task_runner import TaskRunner
from piebald.privacy.secure_aggregation.key_queries import KeyQuery
from piebald.storage.lock import heed_stop
from piebald.version import __version__

BEAT = 1.0  # seconds between two hellos
ANSWER = 10.0  # seconds to wait for the answer to one, which may come behind a piece of a model
LOOK = 1.0  # seconds between two looks for results, where nobody tells of one
PAUSE = 0.5  # seconds between two attempts, while the server is away

log = logging.getLogger("piebald.federation")


class FederationClient:
    """A running site.

    Args:
        credentials: the site's credentials.
        prepare: rebuilds a run from its terms, or raises a `PiebaldError` that says why this site cannot.
        policy: what the site allows.
        device: where it computes.
        stays: whether to wait for another run when one has ended.
        make_link: makes the site's connection.
    """

    def __init__(
        self,
        credentials: Credentials,
        prepare: Callable[[Mapping[str, Any]], SiteClient],
        *,
        policy: Policy,
        device: str = "cpu",
        stays: bool = False,
        make_link: Callable[..., Link] = Link,
    ) -> None:
        self.credentials, self._policy = credentials, policy
        self._prepare, self._device, self._stays = prepare, device, stays
        self._incarnation, jobs = secrets.token_hex(8), policy.jobs
        self._capacity = {"jobs": jobs.at_once, "gpus": jobs.gpus, "gigabytes": jobs.gigabytes}
        self._consent = Consent(credentials.folder, policy)
        self._audit = AuditLog(credentials.folder)
        self.session = ClientSession(credentials.folder / "state")
        self._secrets = threading.Lock()  # one thread at a time uses the keys of a secure aggregation
        self._terms = b""  # of the run, as they came
        self._hello_due = threading.Event()
        self._over = threading.Event()
        self._disk = DiskWrites(credentials.folder, self._over)
        self._threads = Supervision(self._over.wait, self.stop)
        self._heard, self._idle = 0.0, False  # idle: the server hears this site, and has no run to speak of
        self._at_work: dict[str, float] = {}  # what it does now, and since when
        self._state = "", 0.0  # what `_activity` said last, and since when
        self._ended = ""  # how it ended, "" while it runs
        self._training_queue: queue.Queue[int | None] = queue.Queue()
        self._query_queue: queue.Queue[Task | None] = queue.Queue()
        address = (credentials.host, credentials.port)
        self._address = f"{credentials.host}:{credentials.port}"
        if slot := slot_of(credentials.folder):
            make_link = partial(make_link, protocol=protocol_of(slot))
        link = make_link(credentials.party, address, credentials.folder, SERVER.__eq__, log.warning)
        self._link: Connected = link
        self._outlet = Outlet(link)
        self._outlet.on_task(self._on_task_piece)
        self._heartbeat = Heartbeat(self.waits_for)
        self._noted: set[tuple[str, int, str]] = set()  # results whose leaving is in the audit log

    def run(self) -> str:
        """Run until the run has ended or `stop` is called, and return why it ended."""
        values = {"piebald": __version__, "policy": self._policy.digest, "allows": self._policy.model_dump(mode="json")}
        # as any later write: the disk may have filled up since it was looked at
        started = partial(self._audit.write, "started", party=self.credentials.party, **values)
        try:
            self._disk.insist("the audit log", started)
        except Ended:
            return "stopped"
        self._heartbeat.start()
        fields = {"event": "connecting", "site": self.credentials.party, "address": self._address}
        log.info("%(site)s: connecting to %(address)s", fields)
        self._link.start()
        with self._busy("choosing the models of earlier runs"):  # that were left when the site was stopped
            self._choose()
        loops = {"training": self._train, "answering": self._answer, "the delivery of results": self._deliver_all}
        for name, loop in loops.items():
            self._threads.start(name, loop)
        expiry = ExpiryWatch(self.credentials.folder)
        try:
            while not self._over.is_set():
                expiry.look()
                heed_stop()
                # before the hello: what changes while it is said asks for another one at once
                self._hello_due.clear()
                self._disk.attempt("what the server says", self._say_hello)
                self._disk.attempt("the status", self._write_status)
                self._await_next_hello()
        except Ended:
            pass
        finally:
            self.stop()
            self._link.stop()
            self._audit.log_head()
            self._heartbeat.stop()
            over = self.session.welcome is not None and self.session.welcome.over
            self._ended = "finished" if over else "stopped"
            self._disk.attempt("the status", self._write_status)
        self._threads.check()
        return "the run is over" if over else "stopped"

    def _await_next_hello(self) -> None:
        until = time.monotonic() + (BEAT if self._idle or self.session.welcome is not None else BEAT / 4)
        while (left := until - time.monotonic()) > 0 and not self._hello_due.wait(min(left, BEAT / 4)):
            # its connection ends when a run begins, which waits for its hello
            if self._idle and self._link.trouble:
                return

    def waits_for(self) -> str:
        """Return what it does and waits for, "" where it has ended."""
        if self._over.is_set():
            return ""
        trouble = self._link.trouble or ("no experiment is at work" if self._idle else "")
        waits = self.session.waits_for(self._address, trouble, self._heard, dict(self._at_work))
        return "; ".join(filter(None, (self._disk.trouble, waits)))

    @contextmanager
    def _working(self, activity: str) -> Iterator[None]:
        """Tell the heartbeat what the site does."""
        self._at_work[activity] = time.time()
        try:
            yield
        finally:
            del self._at_work[activity]

    @contextmanager
    def _busy(self, activity: str) -> Iterator[None]:
        """Tell the heartbeat and the server what keeps the thread that says hello, and have hellos said meanwhile.

        What the server answers to them is not acted upon: it says so again when this has ended.
        """
        with self._working(activity), repeated(lambda: self._exchange(doing=activity), BEAT, patience=BEAT):
            yield

    def stop(self) -> None:
        """Stop the site.  Finished results stay on its disk until the server has them."""
        self._over.set()
        # wakes the loops that wait for a task, so that they end
        self._training_queue.put(None)
        self._query_queue.put(None)
        for event in (self._hello_due, self.session.has_deliveries):
            event.set()

    # -- hello and welcome

    def _say_hello(self) -> None:
        """Send a hello, and act on the server's welcome."""
        if (welcome := self._exchange()) is not None:
            self._on_welcome(welcome)

    def _exchange(self, doing: str = "") -> Welcome | None:
        """Send a hello, and return the server's welcome, None where none came."""
        # before the request, which clears it once there is an answer
        away = bool(self._link.trouble)
        changes = {"pending": self._consent.waits, "doing": doing, **self._capacity}
        hello = self.session.hello(self._incarnation).model_copy(update=changes)
        answer = self._outlet.hello(hello, ANSWER)
        self._idle = answer is not None and not answer
        if answer is None:
            return None
        try:
            welcome = None if self._idle else decode(Welcome, answer)[0]
        except Refused as error:
            self._link.report(f"the server answered with {error}")
            return None
        if away or not self._heard:
            client_session.connected(self._address, self._link.peers.get(SERVER), self.credentials.expires)
        self._heard = time.time()
        return welcome

    def _on_welcome(self, welcome: Welcome) -> None:
        before = self.session.take_welcome(welcome)
        if welcome.run and (welcome.terms != self.session.terms or self._consent.was_given()):
            self._review_terms(welcome)
        if welcome.over and (before is None or not before.over):
            with self._busy("saving its model"):
                self._disk.insist("the model", self._save_model)
            self._claim(Needs())
        if welcome.over and not self._stays:
            self.stop()

    def _save_model(self) -> None:
        """Save the client's model at the end of the run, with its private layers."""
        session = self.session
        if session.runner is None or session.store is None or session.latest is None:
            return
        version, global_model = session.latest
        if session.runner.work.choice is not None:
            models = {"model": global_model}
            models |= {} if session.latest_global is None else {"global": session.latest_global}
            site_choice.leave(session.store, self._terms, version, models)
            with self._secrets:
                # the run is over and nobody needs its keys: what is not kept cannot be taken
                session.store.save_secrets({})
            return self._choose()
        model = session.runner.personalize(version, global_model, session.store.state(before=1 << 53))
        path = self.credentials.folder / site_choice.WEIGHTS
        session.runner.work.layout.save(model, path)
        threshold = session.runner.threshold(version, model)
        site_choice.describe_model(self.credentials.folder, self._terms, version, threshold)
        with self._secrets:
            session.store.save_secrets({})
        log.info("the model after step %d is in %s", version, path)

    def _choose(self) -> None:
        """Make the choices among models that are to be made, of this run and of those before."""
        for path in site_choice.pending_choices(self.credentials.folder / "state"):
            try:
                prepared = self._prepare(site_choice.terms_of(path))
                site_choice.make(path, TaskRunner(prepared, self._policy, self._device), self.credentials.folder)
            except PiebaldError as error:
                log.warning("the model of the run %s could not be chosen: %s", path.parent.name, error)
            except Exception:  # it is tried again when the site is started again
                log.exception("the model of the run %s could not be chosen", path.parent.name)

    def _review_terms(self, welcome: Welcome) -> None:
        """Fetch the run's terms, and accept or refuse them."""
        with self._busy("fetching the run's terms"):
            body = self._fetch_terms(welcome)
        if body is None:
            return
        with self._busy("reading its rows"):
            self._accept_or_refuse(welcome, body)

    def _accept_or_refuse(self, welcome: Welcome, body: bytearray) -> None:
        runner, rows, refused, recipe = None, dict[Split, int](), "", None
        try:
            terms = read_values(body)
            recipe = recipe_in(terms)
            consent = self._consent.reject_reason(welcome.terms, terms)  # before rows are read, or anything is built
            prepared = self._prepare(terms) if consent is None else None
            refused = consent or (self._policy.reject_reason(prepared.work) if prepared else None) or ""
            if prepared is not None and not refused:
                # before rows are counted: a site that refuses tells no number of them
                refused = self._claim(Needs(**terms.get("needs", {})))
                if not refused:
                    runner = self._runner_for(prepared, terms, welcome)
                    rows = stated_rows(runner.work, runner.rows)
                    self._carry_over(terms.get("lineage"), runner)
                    client_session.joined(prepared, runner)
        except PiebaldError as error:
            raise_passing(error)  # the next welcome asks for the same terms
            message = str(error).replace(str(self.credentials.folder), "its credentials")  # the server is told this
            # a hello takes no longer one (`ShortText`), and without hellos the server would not hear of the refusal
            refused = " ".join(message.split())[:300]
        except Exception as error:  # its kind may tell of a row
            raise_passing(error)
            log.exception("the terms cannot be met")
            refused = FAILED
        if refused:
            log.warning("this site does not take part: %(why)s", {"event": "refused", "why": refused})
        elif self._consent.waits:
            log.warning("an experiment waits for approval: look at it with piebald approve %s", self.credentials.folder)
        values = {"terms": welcome.terms, "recipe": recipe, "policy": self._policy.digest, "rows": rows}
        # in the log before the hello that says so, which may bring the first task
        verdict = "declined" if refused else "waits for approval" if self._consent.waits else "accepted"
        self._disk.insist(
            "the audit log", lambda: self._audit.write(verdict, run=welcome.run, **values, reason=refused or None)
        )
        self._terms = bytes(body)
        self.session.accept_terms(welcome.terms, runner, rows, refused)
        self._hello_due.set()

    def _claim(self, needs: Needs) -> str:
        """Note what the run needs of this machine, and return why that is too much, "" where it is not."""
        reasons = list[str | None]()
        self._disk.insist("its needs", lambda: reasons.append(claim(self.credentials.folder, self._policy.jobs, needs)))
        return reasons[0] or ""

    def _carry_over(self, lineage: str | None, runner: TaskRunner) -> None:
        """Begin with the state that this site kept of the run that this one goes on from."""
        if lineage is None or not runner.state_form:
            return
        if not self._policy.carry:
            log.info("this site's policy has carry = false, so its state begins anew")
        elif runner.work.needs_protected_state:  # the server names the earlier run, and what it was is not kept
            log.info("this site's state begins anew, since an earlier run might not have protected it as this one does")
        else:
            self.session.carry_over(lineage, runner.state_form)

    def _runner_for(self, prepared: SiteClient, terms: Mapping[str, Any], welcome: Welcome) -> TaskRunner:
        folder, masks = self.credentials.folder, prepared.work.masking is not None
        return TaskRunner(
            prepared,
            self._policy,
            self._device,
            CertificateSigner(folder, terms["sites"], welcome.run, welcome.terms) if masks else None,
            welcome.terms,
            prepared.ledger(folder / "state", self.credentials.log, lambda: self._audit.head),
            partial(self._audit.write, "asked", run=welcome.run),
            RowMemory(folder / "state" / FILE),
        )

    def _fetch_terms(self, welcome: Welcome) -> bytearray | None:
        return self._outlet.fetch_terms(welcome.terms, wanted=lambda: not self._over.is_set())

    # -- tasks

    def _on_task_piece(self, origin: str, piece: Piece, data: memoryview) -> Reply:
        try:
            reply, task = self.session.receive(piece, data)
        except Refused as error:  # the server need not try again
            self._link.report(f"{origin} sent {error}")
            return Reply(status="refused")
        if task is not None and task.query is None:
            self._training_queue.put(task.id)
        elif task is not None:
            self._query_queue.put(task)
        return reply

    def _train(self) -> None:
        """Loop of the training thread."""
        while (id := self._training_queue.get()) is not None:
            self._threads.steadily("training", partial(self._train_task, id))

    def _train_task(self, id: int) -> None:
        with suppress(Ended):
            if (begun := self.session.start_training(id)) is not None:
                self._train_for(*begun)

    def _train_for(self, job: TrainingJob, started: StartedTask) -> None:
        """Train for a task, and keep the result until it is delivered."""
        began = time.monotonic()
        with self._working(client_session.training(started)):
            update, failure, state = self._trained(started)
        client_session.trained(started, failure, time.monotonic() - began)
        body = started.runner.gate.result(started.task, update, failure)
        steps, update = 0 if update is None else update.steps, None  # its numbers are in the body
        self._disk.insist("a result", lambda: self.session.finish_training(job, started, body, state, steps))

    def _trained(self, started: StartedTask) -> tuple[Update | None, str | None, dict[str, Tensor] | None]:
        """Train, and return the update that may leave or the reason why there is none, and the new client state."""
        update, failure, state = started.runner.serve(started.task, started.state, self._disk.insist)
        if update is None:
            return None, failure, None
        with self._secrets:
            update, failure = started.runner.mask(update, started.task, started.store)
        return update, failure, None if update is None else state

    def _answer(self) -> None:
        """Loop of the thread that answers queries."""
        while (task := self._query_queue.get()) is not None:
            self._threads.steadily("answering", partial(self._answer_task, task))

    def _answer_task(self, task: Task) -> None:
        if (started := self.session.start_query(task)) is None:
            return
        client_session.answering(started)
        if isinstance(task.query, KeyQuery):
            with self._secrets:
                update, failure = started.runner.answer_key_query(task, started.store)
            client_session.declined(started, failure)
        else:
            update, failure = self._answered(task, started)
        self.session.finish_query(task, started.runner.gate.result(task, update, failure))

    def _answered(self, task: Task, started: StartedTask) -> tuple[Update | None, str | None]:
        """The answer to a query as it may leave, or why there is none."""
        update, failure, _ = started.runner.serve(task, started.state)
        hidden = None if task.query is None else task.query.hiding()
        if update is None or hidden is None or not hidden.masked:
            return update, failure
        with self._secrets:
            return started.runner.mask(update, task, started.store)

    # -- results

    def _deliver_all(self) -> None:
        """Deliver results until the site ends: the loop of a thread."""
        event = self.session.has_deliveries
        with suppress(Ended):
            while not self._over.is_set():
                event.wait(LOOK)
                # before the look: a result that is finished meanwhile sets it again
                event.clear()
                while not self._over.is_set() and (delivery := self.session.next_delivery()) is not None:
                    if not self.deliver(delivery):
                        self._over.wait(PAUSE)
                        event.set()
                        break

    def deliver(self, delivery: Delivery) -> bool:
        """Deliver one result, and return whether the server has received it."""
        # read once: another may arrive while sending, and the result counts for the epoch that it was sent to
        welcome = self.session.welcome
        assert welcome is not None
        fields = {
            "run": welcome.run, "task": delivery.id, "trains": delivery.trains, "body": digest(delivery.body),
        }  # fmt: skip
        if not self._note_leaving(fields, delivery.body):
            return False
        began = time.monotonic()
        with self._working(f"sending {len(delivery.body) / 1e6:.1f} MB"):
            status = self._outlet.deliver(welcome, delivery.id, delivery.trains, delivery.body)
        if status is None:
            return False
        if status == "done":
            self._disk.insist("the audit log", lambda: self._audit.write("delivered", **fields))
        client_session.sent(delivery, time.monotonic() - began)
        self.session.mark_delivered(delivery, welcome.epoch)
        return True

    def _note_leaving(self, fields: Mapping[str, Any], body: bytes) -> bool:
        """Note once in the audit log what is about to leave; return whether this was written, else it stays."""
        this = (fields["run"], fields["task"], fields["body"])
        if this not in self._noted:
            try:
                self._audit.write("sent", **fields, bytes=len(body), policy=self._policy.digest, **contents(body))
            except OSError as error:
                log.error("the audit log cannot be written, so nothing leaves this site: %s", error.strerror)
                return False
            # after the write, so that one that failed is tried again
            self._noted.add(this)
        return True

    # -- status

    def _activity(self) -> dict[str, Any]:
        """Return what the site does, since when, and what would end it; see `FederationState.activity`."""
        if self._at_work:
            state, ends = "training", "its task is done"
        elif self._consent.waits:
            state, ends = "waiting for approval", f"somebody says piebald approve {self.credentials.folder}"
        else:
            trouble, event = self._link.trouble, "an experiment begins" if self._idle else "the server sends a task"
            state, ends = "waiting for the server", f"it answers ({trouble})" if trouble else event
        if state != self._state[0]:
            self._state = state, time.time()
        return {"state": state, "since": self._state[1], "ends": ends}

    def _write_status(self) -> None:
        """Write the status file that `piebald status` reads."""
        ledger = None if self.session.runner is None else self.session.runner.ledger
        status = {
            "party": self.credentials.party,
            "federation": self.credentials.federation,
            "state": self._ended or "running",
            "activity": self._activity(),
            "version": __version__,
            **self.session.status(),
            "updates": None if ledger is None else ledger.updates,
            "questions": None if ledger is None else ledger.summary or None,
            "audit": self._audit.head,
            "heard": self._heard or None,
            "sent": self._link.sent[SERVER],
            "received": self._link.received[SERVER],
        }
        write_private(self.credentials.folder / "status.json", json.dumps(status), lasting=False)
