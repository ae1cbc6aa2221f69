"""What a site makes of a server that died and came back: the same work is handed in again, other work is begun anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from piebald.contracts import Task
from piebald.runtimes.federation import provisioning
from piebald.runtimes.federation.client_runtime import FederationClient
from piebald.runtimes.federation.client_store import FinishedTask
from piebald.runtimes.federation.messages import Piece, Welcome, Word, decode
from piebald.runtimes.federation.policy import Policy
from piebald.runtimes.federation.task_runner import SiteClient, TaskRunner
from piebald.runtimes.federation.wire_format import digest, pack_task

from .conftest import provisioned
from .test_floor import prepared

RUN, TERMS = "ab", "cd"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FederationClient]:
    """A site that nobody talks to, and that has agreed to a run's terms; its threads do not run."""
    credentials = provisioning.read(provisioned(tmp_path / "credentials") / "site-1")
    made = FederationClient(credentials, lambda terms: pytest.fail("the terms are known"), policy=Policy())
    made._begin(RUN)
    made._welcome = welcome("aa", horizon=9, unsafe=[7])
    plan = prepared({"name": "fedavg"})
    made._terms, made._desk = TERMS, TaskRunner(SiteClient(plan.work, plan.clients, 0), Policy(), "cpu", 0)
    yield made
    made._link.stop()


def welcome(epoch: str, **more: object) -> Welcome:
    return Welcome(**{"version": "0", "run": RUN, "epoch": epoch, "terms": TERMS, **more})


def body(site: FederationClient, id: int, fill: float = 0.0) -> bytes:
    assert site._desk is not None
    model = torch.full((site._desk.work.layout.shared,), fill)
    return pack_task(Task(id, 0, 0, {"model": model}))


def bring(site: FederationClient, epoch: str, id: int, whole: bytes) -> str:
    """Bring a task of one piece; the site's word."""
    piece = Piece(run=RUN, epoch=epoch, id=id, trains=True, start=0, size=len(whole), digest=digest(whole))
    return decode(Word, site._take("server", piece, memoryview(whole)))[0].word


def finished(site: FederationClient, id: int, asked: bytes, epoch: str) -> None:
    assert site._vault is not None
    site._vault.finish(FinishedTask(id, digest(asked), epoch, 3), b"abc", {"private": torch.tensor([float(id)])})


def waiting(site: FederationClient) -> list[tuple[int, str]]:
    """What lies in the outbox, and for which process of the server."""
    assert site._vault is not None
    return [(done.id, done.epoch) for done in site._vault.done]


def test_work_comes_once(site: FederationClient) -> None:
    assert bring(site, "aa", 8, body(site, 8)) == "done"
    assert bring(site, "aa", 8, body(site, 8)) == "known"
    assert site._trainer.qsize() == 1


def test_work_of_a_process_whose_welcome_has_not_come_is_asked_for_again(site: FederationClient) -> None:
    finished(site, 7, body(site, 7), "aa")
    assert bring(site, "bb", 7, body(site, 7)) == "not wanted"  # "known" would leave it in the outbox for ever
    site._heed(welcome("bb"))
    assert bring(site, "bb", 7, body(site, 7)) == "known"
    assert waiting(site) == [(7, "bb")]
    found = site._next_parcel()
    assert found == (7, True, b"abc")


def test_what_a_dead_process_asked_for_is_not_delivered_to_the_next_until_it_asks(site: FederationClient) -> None:
    finished(site, 7, body(site, 7), "aa")
    assert site._next_parcel() is not None
    site._heed(welcome("bb", horizon=9, restored=6))
    assert site._next_parcel() is None
    assert waiting(site) == [(7, "aa")]


def test_work_that_the_next_process_asks_for_otherwise_never_happened(site: FederationClient) -> None:
    finished(site, 7, body(site, 7), "aa")
    site._heed(welcome("bb", restored=6))
    assert bring(site, "bb", 7, body(site, 7, fill=1.0)) == "done"
    assert waiting(site) == []
    assert site._vault is not None
    assert site._vault.memory(before=100) is None


def test_what_the_checkpoint_knew_is_delivered_again_and_what_it_held_is_settled(site: FederationClient) -> None:
    finished(site, 3, body(site, 3), "aa")
    finished(site, 7, body(site, 7), "aa")
    site._heed(welcome("bb", restored=8, horizon=8, unsafe=[7]))
    assert waiting(site) == [(7, "aa")]
    assert site._next_parcel() == (7, True, b"abc")
    site._heed(welcome("bb", restored=8, horizon=8))
    assert waiting(site) == []
    assert site._vault is not None
    memory = site._vault.memory(before=100)
    assert memory is not None
    assert memory["private"].tolist() == [7.0]


def test_another_run_begins_with_nothing(site: FederationClient) -> None:
    finished(site, 7, body(site, 7), "aa")
    site._learn_terms = lambda welcome: None  # type: ignore[method-assign]
    site._heed(welcome("bb").model_copy(update={"run": "ff"}))
    assert waiting(site) == []
    assert site._desk is None
