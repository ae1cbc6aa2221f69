"""Messages of the server: answers to its sites, and tasks for them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from piebald.contracts import Split, Update
from piebald.core.files import os_reason
from piebald.core.parameters import nbytes
from piebald.core.plain_text import printable
from piebald.core.tensor_store import LARGE, StoredVectors
from piebald.federation.credentials.audit import AuditLog
from piebald.federation.credentials.party_files import remedy
from piebald.federation.credentials.provisioning import Credentials
from piebald.federation.hub.member_list import Member, OpenTask, stated_rows
from piebald.federation.hub.server_state import FederationState
from piebald.federation.link.messaging import SERVER, Link, Unwelcome
from piebald.federation.link.transfer import WAIT, piece_at, send_body
from piebald.federation.link.wire_format import (
    PROTOCOL,
    SAME_PROTOCOL,
    CheckReply,
    CheckRequest,
    Hello,
    Piece,
    Refused,
    Reply,
    StoredBody,
    TermsRequest,
    contents,
    encode,
    release,
    task_body,
    unpack_update,
)
from piebald.methods.client_work import ClientWork
from piebald.version import __version__

_OVERHEAD = 1 << 20  # bytes of a result besides its vectors, at most
_VECTORS = 8  # vectors of a whole model's size in a result, at most

log = logging.getLogger("piebald.federation")


class ServerMessages:
    """Answers the sites' messages, sends them their tasks, and notes both in the audit log.

    Args:
        state: the server's state.
        credentials: the server's credentials.
        terms: the run's terms.
        work: what clients do, and so what their results may hold.
        make_link: makes the server's connection.
    """

    def __init__(
        self,
        state: FederationState,
        credentials: Credentials,
        terms: bytes,
        work: ClientWork,
        make_link: Callable[..., Link] = Link,
    ) -> None:
        self._state, self._terms, self._work = state, terms, work
        self._folder = credentials.folder
        self.audit = AuditLog(credentials.folder)
        # 4 bytes for a value in float32
        self._longest_result = _OVERHEAD + 4 * _VECTORS * work.layout.size
        address = ("", credentials.port)
        self.link = make_link(SERVER, address, credentials.folder, state.number.__contains__, log.warning)
        self.link.on("hello", Hello, self._on_hello)
        self.link.on("check", CheckRequest, self._on_check)
        self.link.on("terms", TermsRequest, self._on_terms_request)
        self.link.on("result", Piece, self._on_result_piece)

    def start(self) -> None:
        """Listen, and start the thread that sees to it that sites get their tasks."""
        self.link.start()
        self._state.threads.start("the sending of tasks", self._dispatch)

    def stop(self) -> None:
        """Disconnect; the threads end with `FederationState.closing`."""
        self.link.stop()

    # -- messages of sites

    def _member(self, origin: str) -> Member:
        return self._state.members[self._state.number[origin]]

    def _on_hello(self, origin: str, hello: Hello, body: memoryview) -> bytes:
        member = self._member(origin)
        with self._state.lock:
            self._turn_rival_away(member, hello)
            self.link.shut.pop(origin, None)  # it is here, with a certificate that is admitted
            refused = _refusal(hello, self._state.run, member.rows if hello.ready == self._state.terms else None)
            if refused and refused != member.refused and member.worth_a_line():
                fields = {"event": "refused", "site": origin, "why": refused}
                log.warning("%(site)s does not take part: %(why)s", fields)
                self.audit.write("does not take part", site=origin, reason=refused)
            if hello.pending and not (member.hello and member.hello.pending) and member.worth_a_line():
                log.warning("%s waits until somebody there approves the experiment", origin)
            # `take_hello` changes both
            before, here, is_other = member.hello, member.rows is not None, member.is_other(hello)
            welcome = self._state.take_hello(member, hello, refused)
            if member.rows is not None and not here:
                try:
                    self.audit.write("joined", site=origin, piebald=hello.version, rows=member.rows)
                except OSError:  # it joins with a later hello
                    member.rows = None
                    raise
        if is_other and member.worth_a_line():
            self._log_connected(origin)
        if hello.doing and (before is None or before.doing != hello.doing) and member.worth_a_line():
            self.log_doing(member)
        joins = not refused and hello.ready == self._state.terms and (before is None or before.ready != hello.ready)
        if joins and member.worth_a_line():
            place = {"client": self._state.number[origin] + 1, "clients": len(self._state.members)}
            log.info(
                "%(site)s joined as client %(client)d of %(clients)d", {"event": "joined", "site": origin, **place}
            )
        return encode(welcome)

    def _turn_rival_away(self, member: Member, hello: Hello) -> None:
        """End the connection of a further process with a site's credentials, while the one before it lives.

        Two processes that took turns would each get a part of the site's tasks, and none of its state would be whole.
        """
        origin, silence = member.name, self._state.timeouts.silence
        # the connection of a process that was killed has ended, and one that hangs is silent
        if not member.is_other(hello) or member.silent() > silence or self.link.connections(origin) < 2:
            return
        if member.rival != hello.incarnation and member.worth_a_line():
            fields = {"event": "doubled", "site": origin}
            log.warning("a second process with the credentials of %(site)s is turned away: the first one runs", fields)
            self.audit.write("doubled", site=origin)
        member.rival = hello.incarnation
        raise Unwelcome(
            f"another process runs with these credentials (heard {member.silent():.0f} s ago): end it, or this one"
        )

    @staticmethod
    def log_doing(member: Member, every: float = math.inf) -> None:
        """Log the work that keeps a site from tasks, if it was not logged in the last `every` seconds."""
        if (doing := member.doing()) and (not member.told or time.monotonic() - member.told > every):
            member.told = time.monotonic()
            log.info("%(site)s: %(doing)s", {"event": "busy", "site": member.name, "doing": doing})

    def _log_connected(self, origin: str) -> None:
        """Log that a process of a site is heard for the first time."""
        peer = self.link.peers.get(origin)
        fields = {"event": "connected", "site": origin, "address": "", "expires": ""}
        if peer is not None:
            fields |= {"address": peer.address, "expires": peer.expires}
        log.info("%(site)s connected from %(address)s: its certificate is valid until %(expires)s", fields)

    def _on_check(self, origin: str, request: CheckRequest, body: memoryview) -> bytes:
        if self._member(origin).worth_a_line():
            log.info("%(site)s looks whether it could take part", {"event": "check", "site": origin})
        return encode(CheckReply(protocol=PROTOCOL, version=__version__, time=time.time(), terms=self._state.terms))

    def _on_terms_request(self, origin: str, request: TermsRequest, body: memoryview) -> bytes:
        piece = Piece(
            run=self._state.run, epoch=self._state.epoch, id=0, trains=False, start=request.start,
            size=len(self._terms), digest=self._state.terms,
        )  # fmt: skip
        return encode(piece, piece_at(self._terms, request.start))

    def _on_result_piece(self, origin: str, piece: Piece, data: memoryview) -> bytes:
        member, state = self._member(origin), self._state
        with state.lock:
            member.sign()
            open_task = member.open.get(piece.id)
            ours = (piece.run, piece.epoch) == (state.run, state.epoch)
            if not ours or open_task is None or open_task.trains != piece.trains:
                # counted by its first piece, as all pieces of a late result come here
                member.late += piece.start == 0
                member.settle(piece.id)
                return encode(Reply(status="known"))
            if member.rows is None:  # it has restarted, and has not said yet what its results are held to
                return encode(Reply(status="again"))
            try:
                reply, body = member.assembly.take(piece, data, self._longest_result)
                open_task.receive(reply.received)
                outcome = None if body is None else self._unpacked(member, open_task, body)
                if outcome is not None and body is not None:
                    # noted before it counts: if the log cannot be written, the site keeps the result and sends it again
                    fields = {"trains": piece.trains, "bytes": len(body), "body": piece.digest, **contents(body)}
                    self.audit.write("received", site=origin, run=state.run, task=piece.id, **fields)
            except Refused as error:  # a second attempt would bring the same
                self.link.report(f"{origin} sent {error}")
                reason = printable(f"sent {error}", 300)
                self.audit.write("refused", site=origin, run=state.run, task=piece.id, reason=reason)
                state.end_task(member, open_task, None, reason, refused=True)
                return encode(Reply(status="refused"))
            except OSError as error:  # the site keeps it and sends it again
                self.link.report(
                    f"results cannot be taken, {self._folder} cannot be written ({os_reason(error)}): {remedy(error)}"
                )
                return encode(Reply(status="again"))
            if outcome is not None:
                state.end_task(member, open_task, *outcome)
                self._log_result(member, open_task, outcome[1], piece.size)
        return encode(reply)

    def _log_result(self, member: Member, open_task: OpenTask, failure: str | None, size: int) -> None:
        """Log that a site has delivered a result, or the reason why there is none."""
        fields = {
            "event": "received",
            "site": member.name,
            "task": open_task.task.id,
            "step": open_task.task.version + 1,
        }
        fields |= {"bytes": size, "megabytes": size / 1e6, "seconds": round(self._state.clock() - open_task.sent, 3)}
        if failure is not None:
            fields |= {"event": "failed", "why": printable(failure, 300)}
            level = logging.WARNING if open_task.trains else logging.DEBUG
            log.log(level, "task %(task)d of step %(step)d: nothing from %(site)s: %(why)s", fields)
        elif open_task.trains:
            log.info("task %(task)d of step %(step)d: %(megabytes).2f MB from %(site)s after %(seconds).1f s", fields)

    def _unpacked(
        self, member: Member, open_task: OpenTask, body: bytearray | StoredBody
    ) -> tuple[Update | None, str | None]:
        """Return a result that has the form of its task's results, with its long vectors in a file.

        Raises:
            Refused: it has not.
            OSError: the file cannot be written.
        """
        try:
            packed = open_task.task.query is None and self._work.compressor is not None and self._work.masking is None
            decompress = partial(self._work.decompress, task=open_task.task) if packed else None
            update, failure = unpack_update(body, self._work.result_form(open_task.task, member.rows or {}), decompress)
            if update is not None and open_task.task.query is None:
                update = self._stored(self._work.expanded(update, open_task.task))
            return update, failure
        except (Refused, OSError):
            raise
        except Exception as error:  # whatever its bytes raise: the site must be answered, or it sends them for ever
            log.debug("a result of %s raised an error", member.name, exc_info=True)
            raise Refused(f"a result that raised {type(error).__name__}") from None

    def _stored(self, update: Update) -> Update:
        """Return an update with its vectors in a file, where they are long and not in one yet."""
        if isinstance(update.vectors, StoredVectors) or nbytes(update.vectors) <= LARGE:
            return update
        return replace(update, vectors=StoredVectors.keep(self._folder, update.vectors))

    # -- messages for sites

    def _dispatch(self) -> None:
        """Loop of the thread that has tasks sent: a site has a thread of its own while there is something for it.

        So a site that is registered and away costs no thread, and a slow one keeps nobody waiting.
        """
        state = self._state
        with state.changed:
            while not state.closing:
                for member in state.members:
                    if member.open and not member.sending and self._next(member) is not None:
                        # here and not in the thread, or the next look might start a second
                        member.sending = True
                        state.threads.start(f"sending to {member.name}", partial(self._send_tasks, member))
                # at least every second: that a site has fallen silent is a matter of the clock, which notifies nobody
                state.changed.wait(1.0)

    def _next(self, member: Member) -> OpenTask | None:
        """Return the next task to send to a site, None where there is none or it is not ready."""
        return member.next_delivery() if member.ready(self._state.terms, self._state.timeouts.silence) else None

    def _send_tasks(self, member: Member) -> None:
        """Send a site its tasks until it has them, in a thread of its own."""
        state = self._state
        while True:
            with state.lock:
                open_task = None if state.closing else self._next(member)
                if open_task is None:
                    # under the lock in which nothing was found, or a task added in between would wait for the next look
                    member.sending = False
                    return
                # before it is sent: a process that starts meanwhile does not have the task
                incarnation = member.hello.incarnation if member.hello else ""
            if self._send_task(member, open_task):
                with state.lock:
                    open_task.delivered_to, open_task.delivered_at = incarnation, time.monotonic()
            else:
                # the site is away or not ready, and the loop must not spin meanwhile
                time.sleep(0.2)

    def _send_task(self, member: Member, open_task: OpenTask) -> bool:
        """Send one task, and return whether it need not be sent again."""
        state, id, body = self._state, open_task.task.id, task_body(self._work.cut(open_task.task))
        head = Piece(
            run=state.run,
            epoch=state.epoch,
            id=id,
            trains=open_task.trains,
            start=0,
            size=len(body),
            digest=body.digest(),
            counted=member.counted if open_task.trains else -1,
        )
        began = time.monotonic()
        status = send_body(
            self.link, member.name, "task", head, body, timeout=WAIT,
            wanted=lambda: id in member.open and not state.closing, confirmed=open_task.confirm,
        )  # fmt: skip
        if status == "done" and open_task.trains:
            fields = {
                "event": "sent",
                "site": member.name,
                "task": id,
                "step": open_task.task.version + 1,
                "bytes": len(body),
            }
            fields |= {"megabytes": len(body) / 1e6, "seconds": round(time.monotonic() - began, 3)}
            log.info("task %(task)d of step %(step)d: sent %(megabytes).2f MB to %(site)s in %(seconds).1f s", fields)
        if status != "refused":
            return status in ("done", "known")
        with state.lock:
            # its result may have arrived, or the server given it up, before the refusal did
            if id in member.open:
                state.end_task(member, open_task, None, "refused by the site, whose log says why")
        return True


def _refusal(hello: Hello, run: str, joined_with: Mapping[Split, int] | None) -> str:
    """Return why a site does not take part, "" where it does.

    Args:
        hello: its hello.
        run: this run; a site that stays says of the run before, at first, that it refuses that.
        joined_with: the rows that it stated when it joined, None before.
    """
    if hello.protocol != PROTOCOL:
        return f"it has {release(hello)}, the server {release()}: {SAME_PROTOCOL}"
    for split, count in stated_rows(hello).items():
        if joined_with is not None and joined_with[split] != count:
            return (
                f"it stated {joined_with[split]} {split} rows when it joined and {count} now: start it with the rows "
                "that it joined with, or start a new run"
            )
    return hello.refused if hello.run in ("", run) else ""
