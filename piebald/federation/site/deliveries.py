"""Delivery of a site's results: each is noted in the audit log before it leaves, and sent until the server has it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

from piebald.federation.credentials.audit import AuditLog
from piebald.federation.credentials.party_files import DiskWrites, Ended
from piebald.federation.link.wire_format import contents, digest
from piebald.federation.site import client_log
from piebald.federation.site.client_session import ClientSession, Delivery
from piebald.federation.site.gate import Outlet

LOOK = 1.0  # seconds between two looks for results, where nobody tells of one
PAUSE = 0.5  # seconds between two attempts, while the server is away

log = logging.getLogger("piebald.federation")


class Deliveries:
    """Delivers the results of a site.

    Args:
        outlet: the way to the server.
        session: holds finished results.
        audit: the site's audit log.
        policy: the digest of its policy, for the log.
        disk: tries writes again.
        over: set when the site ends.
        working: tells the heartbeat what the site does.
    """

    def __init__(
        self,
        outlet: Outlet,
        session: ClientSession,
        audit: AuditLog,
        policy: str,
        disk: DiskWrites,
        over: threading.Event,
        working: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._outlet, self._session, self._audit, self._policy = outlet, session, audit, policy
        self._disk, self._over, self._working = disk, over, working
        self._noted: set[tuple[str, int, str]] = set()

    def run(self) -> None:
        """Deliver results until the site ends: the loop of a thread."""
        event = self._session.has_deliveries
        with suppress(Ended):
            while not self._over.is_set():
                event.wait(LOOK)
                # before the look: a result that is finished meanwhile sets it again
                event.clear()
                while not self._over.is_set() and (delivery := self._session.next_delivery()) is not None:
                    if not self.deliver(delivery):
                        self._over.wait(PAUSE)
                        event.set()
                        break

    def deliver(self, delivery: Delivery) -> bool:
        """Deliver one result, and return whether the server has received it."""
        # read once: another may arrive while sending, and the result counts for the epoch that it was sent to
        welcome = self._session.welcome
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
        client_log.sent(delivery, time.monotonic() - began)
        self._session.mark_delivered(delivery, welcome.epoch)
        return True

    def _note_leaving(self, fields: Mapping[str, Any], body: bytes) -> bool:
        """Note once in the audit log what is about to leave; return whether this was written, else it stays."""
        this = (fields["run"], fields["task"], fields["body"])
        if this not in self._noted:
            try:
                self._audit.write("sent", **fields, bytes=len(body), policy=self._policy, **contents(body))
            except OSError as error:
                log.error("the audit log cannot be written, so nothing leaves this site: %s", error.strerror)
                return False
            # after the write, so that one that failed is tried again
            self._noted.add(this)
        return True
