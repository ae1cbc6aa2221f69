"""A site whose server died and came back: it delivers the same work again, and begins other work anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from piebald.contracts import Task
from piebald.core.errors import SettingError
from piebald.federation.credentials import provisioning
from piebald.federation.link.wire_format import Piece, Reply, Welcome, digest, encode, task_body
from piebald.federation.site.client_runtime import BEAT, FederationClient
from piebald.federation.site.client_store import FinishedTask
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_process import SiteSettings
from piebald.federation.site.site_rows import SiteClient
from piebald.federation.site.task_runner import TaskRunner

from .conftest import provisioned
from .test_policy import prepared

RUN, TERMS = "ab", "cd"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FederationClient]:
    """A site that nobody talks to, and that has agreed to a run's terms; its threads do not run."""
    credentials = provisioning.read(provisioned(tmp_path / "credentials") / "site-1")
    made = FederationClient(credentials, lambda terms: pytest.fail("the terms are known"), policy=Policy())
    made.session.begin_run(RUN)
    made.session.welcome = welcome("aa", last_id=9, unsaved=[7])
    plan = prepared({"name": "fedavg"})
    runner = TaskRunner(SiteClient(plan.work, plan.clients, 0), Policy(), "cpu")
    made.session.accept_terms(TERMS, runner, {}, "")
    yield made
    made._link.stop()


def welcome(epoch: str, **more: object) -> Welcome:
    return Welcome(**{"version": "0", "run": RUN, "epoch": epoch, "terms": TERMS, **more})


def body(site: FederationClient, id: int, fill: float = 0.0) -> bytes:
    assert site.session.runner is not None
    model = torch.full((site.session.runner.work.layout.shared,), fill)
    return bytes(task_body(Task(id, 0, 0, {"model": model})))


def bring(site: FederationClient, epoch: str, id: int, whole: bytes, counted: int = -1) -> str:
    """Bring a task of one piece; returns the site's reply."""
    piece = Piece(
        run=RUN, epoch=epoch, id=id, trains=True, start=0, size=len(whole), digest=digest(whole), counted=counted
    )
    reply = site._on_task_piece("server", piece, memoryview(whole))
    assert isinstance(reply, Reply)
    return reply.status


def finished(site: FederationClient, id: int, asked: bytes, epoch: str) -> None:
    assert site.session.store is not None
    site.session.store.finish(FinishedTask(id, digest(asked), epoch, 3), b"abc", {"private": torch.tensor([float(id)])})


def waiting(site: FederationClient) -> list[tuple[int, str]]:
    """What lies in the outbox, and for which process of the server."""
    assert site.session.store is not None
    return [(done.id, done.epoch) for done in site.session.store.done]


def test_work_comes_once(site: FederationClient) -> None:
    assert bring(site, "aa", 8, body(site, 8)) == "done"
    assert bring(site, "aa", 8, body(site, 8)) == "known"
    assert site._training_queue.qsize() == 1


def test_work_of_a_process_whose_welcome_has_not_come_is_asked_for_again(site: FederationClient) -> None:
    finished(site, 7, body(site, 7), "aa")
    assert bring(site, "bb", 7, body(site, 7)) == "not wanted"  # "known" would leave it in the outbox for ever
    site._on_welcome(welcome("bb"))
    assert bring(site, "bb", 7, body(site, 7)) == "known"
    assert waiting(site) == [(7, "bb")]
    found = site.session.next_delivery()
    assert found == (7, True, b"abc")


def test_what_a_dead_process_asked_for_is_not_delivered_to_the_next_until_it_asks(site: FederationClient) -> None:
    finished(site, 7, body(site, 7), "aa")
    assert site.session.next_delivery() is not None
    site._on_welcome(welcome("bb", last_id=9, restored=6))
    assert site.session.next_delivery() is None
    assert waiting(site) == [(7, "aa")]


def test_work_that_the_next_process_asks_for_otherwise_never_happened(site: FederationClient) -> None:
    finished(site, 7, body(site, 7), "aa")
    site._on_welcome(welcome("bb", restored=6))
    assert bring(site, "bb", 7, body(site, 7, fill=1.0)) == "done"
    assert waiting(site) == []
    assert site.session.store is not None
    assert site.session.store.state(before=100) is None


def test_what_the_checkpoint_knew_is_delivered_again_and_what_it_held_is_dropped(site: FederationClient) -> None:
    finished(site, 3, body(site, 3), "aa")
    finished(site, 7, body(site, 7), "aa")
    site._on_welcome(welcome("bb", restored=8, last_id=8, unsaved=[7]))
    assert waiting(site) == [(7, "aa")]
    assert site.session.next_delivery() == (7, True, b"abc")
    site._on_welcome(welcome("bb", restored=8, last_id=8))
    assert waiting(site) == []
    assert site.session.store is not None
    state = site.session.store.state(before=100)
    assert state is not None
    assert state["private"].tolist() == [7.0]


def state_after(site: FederationClient) -> list[float]:
    assert site.session.store is not None
    state = site.session.store.state(before=100)
    return [] if state is None else state["private"].tolist()


def test_work_that_was_given_up_is_delivered_once_and_never_happened(site: FederationClient) -> None:
    """Before, its site kept the state that it led to: control variates moved by an update that never counted."""
    finished(site, 3, body(site, 3), "aa")
    site._on_welcome(welcome("aa", last_id=7, unsaved=[7], counted=3))
    finished(site, 7, body(site, 7), "aa")
    site._on_welcome(welcome("aa", last_id=7, counted=3))
    found = site.session.next_delivery()
    assert found == (7, True, b"abc")  # so that the server knows that the site is free again
    assert waiting(site) == [(7, "aa")]
    site.session.mark_delivered(found, "aa")
    site._on_welcome(welcome("aa", last_id=7, counted=3))
    assert (waiting(site), state_after(site)) == ([], [3.0])


def test_the_next_task_says_what_was_given_up_before_a_welcome_does(site: FederationClient) -> None:
    finished(site, 3, body(site, 3), "aa")
    finished(site, 7, body(site, 7), "aa")
    assert bring(site, "aa", 8, body(site, 8), counted=3) == "done"
    assert (waiting(site), state_after(site)) == ([(3, "aa")], [3.0])


def test_work_under_way_is_not_taken_for_given_up(site: FederationClient) -> None:
    finished(site, 7, body(site, 7), "aa")
    site._on_welcome(welcome("aa", last_id=7, unsaved=[7], counted=3))
    assert waiting(site) == [(7, "aa")]
    site._on_welcome(welcome("aa", last_id=7, counted=7))
    assert (waiting(site), state_after(site)) == ([], [7.0])
    finished(site, 9, body(site, 9), "aa")
    site._on_welcome(welcome("aa", last_id=9))  # of a release that does not say what counted
    assert (waiting(site), state_after(site)) == ([], [9.0])


def test_another_run_begins_with_nothing(site: FederationClient) -> None:
    finished(site, 7, body(site, 7), "aa")
    site._review_terms = lambda welcome: None  # type: ignore[method-assign]
    site._on_welcome(welcome("bb").model_copy(update={"run": "ff"}))
    assert waiting(site) == []
    assert site.session.runner is None


def test_a_device_that_is_not_here_is_refused_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('device = "gpu"\n')
    with pytest.raises(SettingError, match=r"site\.toml:1: device must be 'auto', 'cpu', .*, got 'gpu'$"):
        SiteSettings.load(tmp_path / "site.toml")


def test_an_answer_without_a_word_says_that_no_experiment_is_at_work(
    site: FederationClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server of a queue hears sites between its runs; what a site has of the last one stays as it is."""
    caplog.set_level("INFO")
    before, answers = site.session.welcome, iter([None, b"", b"", encode(welcome("bb", last_id=9))])
    monkeypatch.setattr(site._outlet, "hello", lambda *_: next(answers))
    site._say_hello()
    assert "no experiment" not in site.waits_for()
    site._say_hello()
    assert "(no experiment is at work; last word 0 s ago)" in site.waits_for()
    assert site._activity()["ends"] == "an experiment begins"
    with monkeypatch.context() as begins:
        waits = list[float]()
        begins.setattr(site._link, "trouble", "the server ended the connection: a run begins")
        begins.setattr(site._hello_due, "wait", waits.append)
        site._await_next_hello()
        assert waits == [BEAT / 4]
    site._say_hello()
    assert [one.getMessage().split(":")[0].split(" to ")[0] for one in caplog.records].count("connected") == 1
    assert site.session.welcome is before
    site._say_hello()
    assert "no experiment" not in site.waits_for()
    assert site.session.welcome is not before
