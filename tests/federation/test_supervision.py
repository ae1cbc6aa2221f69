"""No thread of a server or a site ends unseen: errors of the system are tried again, anything else ends the process."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from piebald import recipes
from piebald.contracts import Task
from piebald.core.errors import RuntimeFault
from piebald.experiments.run_settings import RunSettings
from piebald.federation.hub import member_list
from piebald.federation.hub.member_list import Member
from piebald.federation.hub.server_runtime import FederationServer
from piebald.federation.link import supervision
from piebald.federation.link.supervision import Supervision
from piebald.federation.link.wire_format import PROTOCOL, Hello
from piebald.federation.site.client_runtime import FederationClient
from piebald.federation.site.client_session import ClientSession
from piebald.federation.site.policy import Policy
from piebald.methods.queries import Evaluate
from piebald.runs.prepare import prepare
from tests.fakes import classified, seeded

from .conftest import until
from .site_threads import connected

NO_DESCRIPTOR = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
# reads and looks of every thread with work of its own, and what one of them does
PLACES = {
    "the delivery of results": (ClientSession, "next_delivery"),
    "training": (ClientSession, "start_training"),
    "answering": (ClientSession, "start_query"),
    "the sending of tasks": (Member, "ready"),
    "sending to": (Member, "next_delivery"),
    "the watch over sites": (Member, "silent"),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_FIRST", 0.02)


def failing(monkeypatch: pytest.MonkeyPatch, thread: str, error: Exception) -> list[int]:
    """Make what a thread calls raise an error in it as often as the number says that is returned."""
    kind, name = PLACES[thread]
    real, left = getattr(kind, name), [0]

    def method(self: Any, *given: Any) -> Any:
        if left[0] and threading.current_thread().name.startswith(thread):
            left[0] -= 1
            raise error
        return real(self, *given)

    monkeypatch.setattr(kind, name, method)
    return left


def asked(server: FederationServer, plan: Any, trains: bool) -> list[Any]:
    """The results of a task at each site."""
    vectors = {"model": plan.work.initial[: plan.work.layout.shared]}
    query = None if trains else Evaluate()
    server.submit([Task(10 + client, client, 0, vectors, query) for client in range(3)])
    return [server.next() for _ in range(3)]


def plan() -> Any:
    model = seeded(lambda: torch.nn.Linear(4, 2))
    return prepare(recipes.fedavg(lr=0.1), classified(12, 12, 12), model, RunSettings(seed=1))


@pytest.mark.parametrize(
    ("name", "trains"),
    [(name, trains) for name in PLACES for trains in (True, False) if name != ("answering" if trains else "training")],
)
def test_an_error_of_the_system_is_tried_again(
    name: str, trains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, the thread was gone and the process looked healthy, until a task was given up after an hour."""
    left, run = failing(monkeypatch, name, NO_DESCRIPTOR), plan()
    with connected(run, [Policy()] * 3, tmp_path) as server:
        server.clients()  # all are there
        left[0] = 3
        if name == "the watch over sites":  # which looks each second, whatever is asked
            until(lambda: not left[0])
        results = asked(server, run, trains)
    assert not left[0]
    assert [result.failure for result in results] == [None] * 3
    assert f"{name}" in caplog.text
    assert "failed (too many open files), and is tried again" in caplog.text


@pytest.mark.parametrize("error", [ValueError("a bug"), MemoryError()], ids=["a bug", "no memory"])
@pytest.mark.parametrize("name", ["the sending of tasks", "sending to", "the watch over sites"])
def test_anything_else_ends_a_server(
    name: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left, run = failing(monkeypatch, name, error), plan()
    with connected(run, [Policy()] * 3, tmp_path) as server:
        server.clients()
        left[0] = 1
        if name == "the watch over sites":
            until(lambda: not left[0])
        with pytest.raises(RuntimeFault, match=rf"{name}.* failed \({type(error).__name__}\), see the log"):
            asked(server, run, True)
    assert any(record.levelno == logging.CRITICAL and record.exc_info for record in caplog.records)


@pytest.mark.parametrize("error", [ValueError("a bug"), MemoryError()], ids=["a bug", "no memory"])
def test_anything_else_ends_a_process(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    over = threading.Event()
    threads = Supervision(over.wait, over.set)

    def work() -> None:
        raise error

    threads.start("work", work).join(10)
    assert over.is_set()
    with pytest.raises(RuntimeFault, match="work failed"):
        threads.check()
    assert any(record.levelno == logging.CRITICAL and record.exc_info for record in caplog.records)


def test_pauses_grow_and_an_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) == 9

    def work() -> None:
        raise NO_DESCRIPTOR

    Supervision(wait, lambda: None).steadily("work", work)
    assert pauses == [min(0.02 * 2**turn, 30.0) for turn in range(9)]


def hello(incarnation: str, held: list[int]) -> Hello:
    return Hello(protocol=PROTOCOL, version="1", incarnation=incarnation, ready="ab", held=held)


@pytest.mark.parametrize(("held", "owed"), [([], set()), ([7], {7}), ([8], set())])
def test_a_process_that_was_started_anew_owes_what_it_holds_alone(held: list[int], owed: set[int]) -> None:
    """A site that hung past its time, and was started again, got no task any more until the server was."""
    member = Member("site-1")
    member.hear(hello("aa", [7]), "")
    for _ in range(member_list.CHANCES):
        member.owe(7)
    member.hear(hello("aa", []), "")
    assert member.owed == {7}  # the same process, which hangs
    member.hear(hello("bb", held), "")
    assert member.owed == owed
    assert member.ready("ab", 60.0) is not owed


def test_the_site_ends_with_the_failure_of_its_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[BaseException] = []
    left, run = failing(monkeypatch, "training", ValueError("a bug")), plan()
    real: Callable[[Any], str] = FederationClient.run

    def watched(self: Any) -> str:
        try:
            return real(self)
        except RuntimeFault as error:
            ended.append(error)
            return "failed"

    monkeypatch.setattr(FederationClient, "run", watched)
    with connected(run, [Policy()] * 3, tmp_path) as server:
        server.clients()
        left[0] = 1
        vectors = {"model": run.work.initial[: run.work.layout.shared]}
        server.submit([Task(10, 0, 0, vectors)])
        until(lambda: bool(ended))
    assert "training failed (ValueError), see the log" in str(ended[0])
