"""The runtime of a real federation (`contracts.Runtime`): tasks go to sites, results come back, in real time.

A site has a task once it has confirmed that, and its result counts once, however often it is sent.  A finished training
task stays at the site until a checkpoint holds it, so a server that is killed and resumed gets the same result again.
"""

from __future__ import annotations

import ctypes
import json
import logging
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from piebald.contracts import SERVER_ID, Checkpoint, Clients, Result, SumRequest, Task, Update
from piebald.core.errors import SettingError, failure_reason
from piebald.engines.engine_choice import make_engine
from piebald.engines.outgoing import serve
from piebald.engines.sequential import SequentialEngine as Engine
from piebald.engines.stack import ClientStack
from piebald.federation.credentials import provisioning
from piebald.federation.credentials.certificates import SignatureCheck
from piebald.federation.credentials.party_files import DiskWrites
from piebald.federation.credentials.revocation import EXPIRED, ExpiryWatch
from piebald.federation.hub.local_federation import LocalFederation
from piebald.federation.hub.member_list import CHANCES, Member, OpenTask, client_names, sites_of
from piebald.federation.hub.run_terms import terms
from piebald.federation.hub.server_messages import ServerMessages
from piebald.federation.hub.server_state import FederationState, Timeouts
from piebald.federation.link.messaging import SERVER, Link
from piebald.federation.link.supervision import EVERY, Heartbeat
from piebald.federation.link.wire_format import Needs, digest
from piebald.federation.operate.status import lives
from piebald.methods.client_work import ClientWork
from piebald.storage import lease
from piebald.storage.lock import heed_stop
from piebald.version import __version__

_TOP_PAD, _MMAP_THRESHOLD = -2, -3  # of mallopt(3)
_LARGE = 1 << 15  # bytes, less than the shortest of the pieces of which many arrive at a time
_SPARE = 1 << 14  # bytes that the heap grows by beyond what is asked for: what fits there is not returned
_STATUS_SHARE = 20  # the status is written in one part of so many of the time, at most
_LAST_LOOK = 5.0  # seconds that the watching thread has to end, so that none runs while Python ends
_TICK = 0.25  # seconds between checks for silent sites
_SAVING = 60.0  # seconds in which a site on this machine saves its model

log = logging.getLogger("piebald.federation")


class FederationServer:
    """A running federation.

    Args:
        folder: the server's credentials.
        timeouts: how long to wait for sites.
        experiment: the experiment's settings, from which sites rebuild the model.
        work: what clients do.
        clients: the clients' names, and the server's own rows.
        local: the sites on this machine, or None where they are elsewhere.
        make_link: makes the server's connection to its sites.
        lineage: number of the run that this one goes on from, or None.
        needs: what the run takes of each site.

    Attributes:
        shared: what the server's threads share.
    """

    def __init__(
        self,
        folder: Path,
        timeouts: Timeouts,
        experiment: Mapping[str, Any],
        work: ClientWork,
        clients: Clients,
        local: LocalFederation | None,
        make_link: Callable[..., Link] = Link,
        lineage: str | None = None,
        needs: Needs | None = None,
    ) -> None:
        self.work, self._clients, self._local = work, clients, local
        return_freed_memory()
        open_many_files()
        self.credentials = provisioning.read(folder)
        self._disk = DiskWrites(self.credentials.folder, threading.Event())
        sites = sites_of(self.credentials, clients)
        body = terms(work, experiment, client_names(clients), sites, clients.classes, lineage, needs)
        self.shared = FederationState(sites, digest(body), timeouts, work.cut, self.credentials.folder)
        self._changed, self._lock = self.shared.changed, self.shared.lock
        self._writing = threading.Lock()  # of the status, by the watching thread and by the one that closes
        self._status_ended = False
        self._gathered = False
        self._seen: list[int] = []  # the clients that were present when the server loop last asked
        self._engine: Engine | None = None
        self._signatures: SignatureCheck | None = None
        self._messages = ServerMessages(self.shared, self.credentials, body, work, make_link)
        self._heartbeat = Heartbeat(self.waits_for)
        self._heartbeat.start()
        fields = {"piebald": __version__, "terms": self.shared.terms, "lineage": lineage, "sites": sites}
        # before it listens, so that the log has its first line before a site is heard
        self._messages.audit.write("started", party=SERVER, recipe=dict(experiment).get("recipe"), **fields)
        self._messages.start()
        listens = {"event": "listening", "port": self.credentials.port, "sites": len(sites)}
        log.info("listening on port %(port)d for %(sites)d sites", listens)
        self._watching = self.shared.threads.start("the watch over sites", self._watch)
        if local is not None:
            # last: these sites connect as soon as they run
            local.open()

    def waits_for(self) -> str:
        """Return what it waits for, and what its disk does not take, "" where its run has ended."""
        waits = self.shared.waits_for(self._gathered)
        return "; ".join(filter(None, (self._disk.trouble, waits))) if waits else ""

    @property
    def local(self) -> LocalFederation | None:
        """The sites on this machine, or None where they are elsewhere."""
        return self._local

    # -- the contract

    def submit(self, tasks: Sequence[Task], sum_request: SumRequest | None = None) -> None:
        """See `contracts.Runtime`.  Updates are never summed before they arrive."""
        self._wait_for_sites()
        with self._changed:
            for task in tasks:
                self.shared.version = max(self.shared.version, task.version)
                if task.client == SERVER_ID:
                    self.shared.add_result(OpenTask(task, self.shared.clock()), *self._serve_at_server(task))
                else:
                    self.shared.add(task)
            # those that are absent are not waited for until the watch looks again
            self._give_up()
            self._changed.notify_all()

    def next(self, until: float = float("inf")) -> Result | None:
        """See `contracts.Runtime`."""
        self._wait_for_sites()
        shared = self.shared
        with self._changed:
            while True:
                self._check()
                result = shared.pop_result()
                if result is not None:
                    return result
                if shared.clock() >= until:
                    shared.now = max(shared.now, until)
                    return None
                # nothing is under way that could arrive, and without a time limit this would wait for ever
                if until == float("inf") and not any(member.open for member in shared.members):
                    present = shared.belonging()
                    if present != self._seen:  # a site came or left, so there may be a client to ask
                        shared.now = shared.clock()
                        return None
                    # all are here, so no arrival is worth waiting for either
                    if len(present) == len(shared.members):
                        return None
                self._changed.wait(min(_TICK, max(until - shared.clock(), 0.0)))

    def clients(self) -> Sequence[int]:
        """See `contracts.Runtime`."""
        self._wait_for_sites()
        with self._lock:
            self._seen = self.shared.belonging()
            return list(self._seen)

    def absences(self) -> Mapping[int, str]:
        """See `contracts.TellsAbsences`."""
        with self._lock:
            reasons = enumerate(map(self.shared.absence, self.shared.members))
            return {number: reason for number, reason in reasons if reason}

    def stated_rows(self) -> Sequence[int]:
        """See `contracts.StatesRows`."""
        self._wait_for_sites()
        with self._lock:
            return [0 if member.rows is None else member.rows["train"] for member in self.shared.members]

    def now(self) -> float:
        return self.shared.now

    def state(self) -> Checkpoint:
        """See `contracts.Runtime`: the clock and the tasks under way."""
        with self._lock:
            return self.shared.checkpoint()

    def restore(self, checkpoint: Checkpoint, tasks: Mapping[int, Task]) -> None:
        with self._changed:
            self.shared.restore(checkpoint, tasks)

    def check_signature(self, client: int, text: bytes, signature: bytes) -> bool:
        """See `contracts.ChecksSignatures`."""
        if self._signatures is None:  # a resumed run has its own number again by now
            names = [member.name for member in self.shared.members]
            self._signatures = SignatureCheck(self.credentials.folder, names, self.shared.run, self.shared.terms)
        return self._signatures.check(client, text, signature)

    def dismiss(self) -> None:
        """Tell the sites that the run has ended, and wait until those that are present know.

        Sites on this machine, which end with this process, may save their models first, or choose them.
        """
        self._tell_the_end()
        if self._local is not None:
            self._local.wait(None if self.work.choice is not None else _SAVING)

    def _tell_the_end(self) -> None:
        with self._lock:
            fields = {"run": self.shared.run, "steps": self.shared.version}
            self._disk.attempt("the end of the run", lambda: self._messages.audit.write("ended", **fields))
            self.shared.dismiss()
            self._messages.link.last_word = "its run has ended"
            dismissed = time.monotonic()
        silence = self.shared.timeouts.silence
        until = dismissed + silence
        while time.monotonic() < until:
            with self._lock:
                present = [member for member in self.shared.members if member.silent() < silence]
                # in a run shorter than that, a site that is missing may only not have been heard yet
                complete = len(present) == len(self.shared.members) or dismissed - self.shared.began > silence
                if complete and all(member.heard is not None and member.heard > dismissed for member in present):
                    return
            time.sleep(0.02)

    def close(self) -> None:
        with self._changed:
            closed, self.shared.closing = self.shared.closing, True
            self._changed.notify_all()
        if closed:
            return
        self._messages.stop()
        self._messages.audit.log_head()
        self._heartbeat.stop()
        self._watching.join(_LAST_LOOK)
        # before a federation on this machine deletes its folder
        self._disk.attempt("the status", partial(self._write_status, last=True))
        if self._local is not None:
            self._local.close()

    # -- presence of sites

    def _check(self) -> None:
        """Raise what ends the waiting: a thread that has failed, somebody who asks to stop, sites that all refuse."""
        self.shared.threads.check()
        heed_stop()
        self._check_willing()

    def _wait_for_sites(self) -> None:
        """Wait until enough sites are present to begin, and later while too few of them belong to the run."""
        self.shared.started = True
        with self._changed:
            self._check_willing()
            if not self._gathered:
                self._gather()
            elif len(self.shared.belonging()) < self._sites_needed():
                self._gathered = False
                self._wait_until(lambda: len(self.shared.belonging()) >= self._sites_needed())
                self._gathered = True

    def _gather(self) -> None:
        """Wait for the sites that the run begins with."""
        timeouts, members = self.shared.timeouts, self.shared.members
        until = time.monotonic() + (timeouts.patience if timeouts.wait_for is None else float("inf"))

        def willing() -> int:
            return len(members) - sum(bool(member.refused) for member in members)

        def complete() -> bool:
            present = len(self.shared.ready_clients())
            needed = self._sites_needed() or (1 if timeouts.wait_for else max(willing(), 1))
            return present >= needed or (present > 0 and time.monotonic() > until)

        self._wait_until(complete)
        self._gathered = True
        self.shared.begin()
        present = self.shared.ready_clients()
        self._warn_of_outsized()
        if refusing := [member.name for member in members if member.refused]:
            log.warning("the run begins without %s", ", ".join(refusing))
        fields = {"event": "begins", "present": len(present), "sites": len(members)}
        log.info("the run begins with %(present)d of %(sites)d sites", fields)

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds of the sites, and say once which of them are missing."""
        warn_at = time.monotonic() + 5  # the heartbeat repeats it
        while not holds():
            self._check()
            if time.monotonic() > warn_at:
                warn_at, present = float("inf"), self.shared.ready_clients()
                missing = [member.name for number, member in enumerate(self.shared.members) if number not in present]
                log.warning("waiting for %s", ", ".join(missing))
            if self._local is not None:
                self._local.check()
            self._changed.wait(_TICK)

    def _warn_of_outsized(self) -> None:
        """Warn of a site that states more rows than all others together: nobody can check that it has them."""
        stated = {member.name: member.rows["train"] for member in self.shared.members if member.rows is not None}
        name = max(stated, key=lambda site: stated[site], default="")
        if len(stated) > 2 and 2 * stated[name] > sum(stated.values()):
            log.warning(
                "%s states %s of %s training rows, so where updates count by rows it outweighs all others: "
                "max_examples and max_weight limit that", name, f"{stated[name]:,}", f"{sum(stated.values()):,}",
            )  # fmt: skip

    def _sites_needed(self) -> int:
        """Return the number of sites that must belong to the run in each round, 0 where any number will do."""
        known, wait_for = len(self.shared.members), self.shared.timeouts.wait_for
        count = known if wait_for == "all" else min(wait_for or 0, known)
        return count if count > 1 else 0

    def _check_willing(self) -> None:
        """Refuse to go on where so many sites refuse that there will never be enough.

        Raises:
            SettingError: it says what one of them says.
        """
        members = self.shared.members
        refusing = [member for member in members if member.refuses_for_good]
        if len(members) - len(refusing) < max(self._sites_needed(), 1):
            refuser = refusing[0]
            raise SettingError(
                f"{len(refusing)} of {len(members)} sites do not take part, {refuser.name}: {refuser.refused}"
            )

    def _watch(self) -> None:
        """Loop of the watching thread: gives up tasks at sites that are silent or too slow, and writes the status."""
        expiry, rested = ExpiryWatch(self.credentials.folder), 0.0
        while not self.shared.closing:
            expiry.look()
            with self._changed:
                for member in self.shared.members:
                    if (shut := self._messages.link.shut.get(member.name, "")) and shut != member.refused:
                        fields = {"site": member.name, "reason": shut}
                        self._disk.attempt("the audit log", partial(self._messages.audit.write, "shut out", **fields))
                        member.refused = shut
                    member.expired = shut.startswith(EXPIRED)
                    self._log_presence(member)
                    if self._gathered:  # before, the heartbeat names all sites that are missing
                        self._messages.log_doing(member, EVERY)
                if self._gathered:
                    self._give_up()
            if time.monotonic() > rested:
                began = time.monotonic()
                self._disk.attempt("the status", self._write_status)
                rested = time.monotonic() + _STATUS_SHARE * (time.monotonic() - began)  # with thousands of sites
            with self._changed:
                # a plain `wait` would return at each change, and a look at thousands of sites would follow each result
                self._changed.wait_for(lambda: self.shared.closing, 1.0)

    def _log_presence(self, member: Member) -> None:
        """Log that a site has fallen silent, or is heard again, and note where rounds go on without it."""
        silent = member.heard is not None and member.silent() > self.shared.timeouts.silence
        if self.shared.dismissed:
            return
        if silent != member.missed:
            member.missed = silent
            fields = {"event": "silent" if silent else "back", "site": member.name}
            fields["patience"] = f"{self.shared.timeouts.patience:g}"
            if silent:
                log.warning("no word from %(site)s: it is waited for until %(patience)s s have passed", fields)
            else:
                log.info("%(site)s is heard again", fields)
        absence = self.shared.absence(member)
        if self._gathered and bool(absence) != bool(member.absent):
            member.absent = absence
            event = "absent" if absence else "takes part"
            facts: dict[str, Any] = {"site": member.name, "step": self.shared.version + 1, "reason": absence or None}
            self._disk.attempt("the audit log", partial(self._messages.audit.write, event, **facts))
            if absence:
                text = "rounds go on without %(site)s from step %(step)d on: %(reason)s"
                log.warning(text, facts | {"event": event})
            else:
                log.info("%(site)s takes part from step %(step)d on", facts | {"event": event})

    def _give_up(self) -> None:
        """Give up the tasks of sites that are absent, or too slow, unless so many sites are needed."""
        for member in self.shared.members:
            # a copy, as `end_task` removes from it
            for open_task in list(member.open.values()):
                if self._can_do_without(member) and (reason := self._give_up_reason(member, open_task)):
                    self.shared.end_task(member, open_task, None, reason)

    def _can_do_without(self, member: Member) -> bool:
        """Return whether enough other sites belong to the run."""
        needed = self._sites_needed()
        return not needed or sum(other is not member and other.belongs for other in self.shared.members) >= needed

    def _give_up_reason(self, member: Member, open_task: OpenTask) -> str | None:
        """Return the reason to stop waiting for a task, or None.

        Nothing that one site does, or does not do, keeps the others waiting for ever.
        """
        timeout, seconds = self.shared.timeouts.task_timeout, self.shared.clock() - open_task.sent
        if absence := self.shared.absence(member):
            return absence
        if seconds - open_task.transfer_time > timeout:
            return self._overdue(member, open_task, f"took more than {timeout:g} seconds")
        return None

    @staticmethod
    def _overdue(member: Member, open_task: OpenTask, reason: str) -> str:
        """Record and log that a present site has let a task pass."""
        if (doing := member.doing()) and member.overdue + 1 < CHANCES:  # started again, it may not have the task
            member.overdue += 1
            return doing
        member.owe(open_task.task.id)
        again = "until it delivers" if member.overdue < CHANCES else "in this run any more"
        fields = {"event": "overdue", "site": member.name, "why": reason, "again": again}
        log.warning("%(site)s %(why)s: the run goes on without it, and it gets no tasks %(again)s", fields)
        return reason

    def _write_status(self, last: bool = False) -> None:
        """Write the status file that `piebald status` reads; nothing once the last one has been written."""
        lives(self.credentials.folder)  # also where the disk takes nothing
        link = self._messages.link
        with self._lock:
            sites = [
                {"site": member.name, "state": member.presence(self.shared.terms, self.shared.timeouts.silence)}
                | member.table(self.shared.version)
                | {"received": link.received[member.name], "sent": link.sent[member.name]}
                for member in self.shared.members
            ]
            about = {"party": SERVER, "federation": self.credentials.federation, **self.shared.status()}
            activity = self.shared.activity(self._gathered)
            status = {**about, "activity": activity, "sites": sites, "audit": self._messages.audit.head}
        with self._writing:
            if self._status_ended:  # the watching thread was late, and the folder may be gone
                return
            self._status_ended = last
            lease.write(self.credentials.folder / "status.json", json.dumps(status), lasting=False)

    # -- the server's own rows

    def _serve_at_server(self, task: Task) -> tuple[Update | None, str | None]:
        """Answer a query on the server's own rows, or return why there is no answer."""
        if self._engine is None:
            self._engine = make_engine("sequential", self.work, self._clients, torch.device("cpu"), False)
        model = task.vectors["model"]
        stack = ClientStack([SERVER_ID], [task.version], [task.rng_version], [0], [model], {}, {}, task.query)
        try:
            return serve(self._engine, stack).update(0), None
        except Exception as error:
            # nobody else answers these, so the run ends with the error; other queries go on with the answers of sites
            if task.query is None or task.query.asked_of == "server":
                raise
            return None, failure_reason(error)


def return_freed_memory() -> None:
    """Have vectors returned to the system as soon as they are freed.

    GNU's C library keeps freed pieces of up to 32 MB once it has seen one, and gaps between them never close: a server
    with a model of 25 MB kept a dozen of them.  Pieces of results leave such gaps, too: a hundred sites with a model of
    1 MB left more than a hundred MB of them.  With other libraries nothing happens.
    """
    library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_TOP_PAD, _SPARE)
        library.malloc_trim(0)  # what was freed while the run was prepared


def open_many_files() -> None:
    """Allow as many open files as the system lets this process have: each site has a connection, each result a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # some systems have a limit of their own
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
