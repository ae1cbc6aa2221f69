"""A site that reads its rows for long: it goes on being present, and both ends say what it is doing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from piebald.contracts import Task
from piebald.federation.credentials import provisioning
from piebald.federation.hub import server_runtime
from piebald.federation.hub.member_list import Member, OpenTask
from piebald.federation.hub.server_messages import ServerMessages
from piebald.federation.hub.server_runtime import FederationServer
from piebald.federation.hub.server_state import Timeouts
from piebald.federation.link.supervision import repeated
from piebald.federation.link.wire_format import Hello
from piebald.federation.site import client_runtime
from piebald.federation.site.client_runtime import FederationClient
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_rows import SiteClient

from .conftest import SITES, provisioned
from .test_policy import prepared

PATIENCE = 60.0  # seconds to wait for what must happen, however busy the machine is
READING = Hello(protocol=3, version="0", incarnation="ab", doing="reading its rows")


def wait_until(holds: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


class SlowReader:
    """A server whose first site reads its rows until it is told to stop."""

    def __init__(self, folder: Path) -> None:
        plan = prepared({"name": "fedavg"})
        provisioned(folder)
        self.reading, self.read = threading.Event(), threading.Event()

        def prepare(terms: Mapping[str, Any]) -> SiteClient:
            self.reading.set()
            assert self.read.wait(4 * PATIENCE)
            return SiteClient(plan.work, plan.clients, 0)

        self.site = FederationClient(provisioning.read(folder / SITES[0]), prepare, policy=Policy())
        limits = Timeouts(wait_for=1, patience=600.0, silence=30.0, task_timeout=600.0)
        self.server = FederationServer(folder / "server", limits, {}, plan.work, plan.clients, None)
        self.member = self.server.shared.members[0]
        self.gathering = threading.Thread(target=self.server.clients, daemon=True)
        self._thread = threading.Thread(target=self.site.run, daemon=True)

    @contextmanager
    def started(self) -> Iterator[None]:
        try:
            self.gathering.start()
            self._thread.start()
            yield
        finally:
            self.read.set()
            self.gathering.join(PATIENCE)
            self.site.stop()
            self._thread.join(PATIENCE)
            self.server.close()


def test_a_site_that_reads_its_rows_says_hello_meanwhile_and_both_ends_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, nothing was heard of it until it had read them: its connection ended after 30 seconds, and it was told
    that it may be shut out."""
    caplog.set_level(logging.INFO, "piebald.federation")
    monkeypatch.setattr(client_runtime, "BEAT", 0.02)
    made = SlowReader(tmp_path)
    with made.started():
        assert made.reading.wait(PATIENCE)
        wait_until(lambda: made.member.doing().startswith("reading its rows for "))
        for _ in range(3):  # each later than the one before, while the rows are still read
            heard = made.member.heard
            wait_until(lambda heard=heard: made.member.heard > heard)  # type: ignore[misc]
        assert not made.member.ready(made.server.shared.terms, 30.0)
        assert "site-1 (reading its rows for " in made.server.waits_for()
        assert made.site.waits_for().startswith("reading its rows for ")
        assert sum(line.startswith("site-1: reading its rows for ") for line in caplog.messages) == 1
        made.read.set()
        made.gathering.join(PATIENCE)
        assert made.server.shared.ready_clients() == [0]
        assert made.member.doing() == ""
    assert not [line for line in caplog.messages if "ended the connection" in line or "shut out" in line]


def test_during_a_run_the_log_says_again_and_again_what_keeps_a_site(caplog: pytest.LogCaptureFixture) -> None:
    """The heartbeat is quiet then, since the other sites' tasks fill the log."""
    caplog.set_level(logging.INFO, "piebald.federation")
    member = Member("north")
    ServerMessages.log_doing(member, 0.0)
    assert caplog.messages == []
    member.hear(READING, "")
    ServerMessages.log_doing(member)
    ServerMessages.log_doing(member)
    assert caplog.messages == ["north: reading its rows for 0 s"]
    assert member.told
    member.told -= server_runtime.EVERY + 1
    ServerMessages.log_doing(member, server_runtime.EVERY)
    assert len(caplog.messages) == 2
    member.hear(READING.model_copy(update={"doing": ""}), "")
    ServerMessages.log_doing(member, 0.0)
    assert len(caplog.messages) == 2


def test_a_task_of_a_site_that_was_started_again_and_reads_for_too_long_is_given_up_and_not_owed(
    tmp_path: Path,
) -> None:
    """A site that owes a task gets no other until it delivers, and one that was started again may not have it."""
    made = SlowReader(tmp_path)
    try:
        server, member, said = made.server, made.member, list[str]()
        member.hear(READING, "")
        member.belongs = True  # it was ready before
        for id in (1, 2, 3):
            assert member.owed == set()
            one = OpenTask(Task(id, 0, 0, {}), sent=server.shared.clock() - 10_000)
            with server.shared.lock:
                said.append(str(server._give_up_reason(member, one)))
        assert all(reason.startswith("reading its rows for ") for reason in said[:2])
        assert said[2] == "took more than 600 seconds"
        assert member.owed == {3}  # nobody keeps the others waiting for ever
    finally:
        made.server.close()


def test_what_is_said_meanwhile_ends_before_what_is_said_next() -> None:
    said, two = list[str](), threading.Event()

    def say() -> None:
        said.append("meanwhile")
        if len(said) == 2:
            two.set()

    with repeated(say, 0.01):
        assert two.wait(PATIENCE)
    count = len(said)
    time.sleep(0.05)
    assert len(said) == count
