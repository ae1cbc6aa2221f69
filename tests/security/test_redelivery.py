"""What a site sends again, what it sends anew, and that it counts what it sends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from piebald.contracts import Task
from piebald.core.errors import SettingError
from piebald.federation.credentials import provisioning
from piebald.federation.link.wire_format import Piece, Welcome, digest, task_body, unpack_update
from piebald.federation.site.client_runtime import FederationClient
from piebald.federation.site.client_session import ClientSession
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_rows import SiteClient
from piebald.federation.site.task_runner import TaskRunner
from piebald.privacy.ledger import FILE, RowLedger

from ..federation.conftest import provisioned
from ..federation.test_policy import noisy, prepared

RUN = "ab"


class Site:
    """A site without threads and without a server, whose process can end and start again."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        self.folder = provisioned(folder) / "site-1"
        plan = prepared(noisy())
        self.policy, self.site = policy, SiteClient(plan.work, plan.clients, 0)
        self.start()

    def start(self) -> None:
        credentials = provisioning.read(self.folder)
        self.runner = TaskRunner(self.site, self.policy, "cpu", ledger=self.site.ledger(self.folder / "state"))
        self.client = FederationClient(credentials, lambda _: pytest.fail("the terms are known"), policy=self.policy)
        self.session.begin_run(RUN)
        self.session.welcome = Welcome(version="0", run=RUN, epoch="aa", terms="cd", last_id=99, unsaved=[7])
        self.session.accept_terms("cd", self.runner, -1, "")

    @property
    def session(self) -> ClientSession:
        return self.client.session

    def train(self, id: int) -> bytes:
        """Train for version 0 under this id of a task, as its server asks; returns what is to be delivered."""
        model = self.runner.work.initial[: self.runner.work.layout.shared]
        body = bytes(task_body(Task(id, 0, 0, {"model": model})))
        piece = Piece(run=RUN, epoch="aa", id=id, trains=True, start=0, size=len(body), digest=digest(body))
        self.client._on_task_piece("server", piece, memoryview(body))
        self.client.stop()  # behind the task in the queue: the loop ends after it
        self.client._train()
        assert self.session.store is not None
        return self.session.store.result(id)

    def end(self) -> None:
        self.client._link.stop()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path / "credentials", Policy(updates=3))
    yield made
    made.end()


def test_a_crash_and_a_redelivery_send_the_same_bytes(site: Site) -> None:
    """Two draws of noise on one update would average out, so the result is what is kept, and not made again."""
    made = site.train(7)
    site.end()
    site.start()  # the process died after training, and before the server had the result
    found = site.session.next_delivery()
    assert found is not None
    assert found.body == made
    assert site.runner.ledger.updates == 1


def test_nothing_on_the_sites_disk_gives_the_noise(site: Site) -> None:
    """Before, the file `secret` and the version gave the noise of every upload for ever."""
    site.train(7)
    kept = sorted(path.name for path in (site.folder / "state").rglob("*") if path.is_file())
    assert kept == ["done-7.safetensors", FILE, f"{FILE}.lock", f"rows-{site.runner.ledger.rows}"]


def test_a_version_asked_for_twice_costs_two_updates_with_noise_of_their_own(site: Site) -> None:
    first, _ = unpack_update(site.train(7))
    site.end()
    site.start()
    again, _ = unpack_update(site.train(8))
    assert first is not None
    assert again is not None
    assert float((first.vectors["model"] - again.vectors["model"]).abs().max()) > 0.1
    assert site.runner.ledger.updates == 2


def test_a_site_sends_as_many_updates_as_its_policy_says(site: Site) -> None:
    for id in (7, 8, 9):
        assert unpack_update(site.train(id))[0] is not None
        site.end()
        site.start()
    update, refused = unpack_update(site.train(10))
    assert update is None
    assert refused is not None
    assert refused.startswith("refused by the site's policy")


def test_a_count_that_cannot_be_read_does_not_begin_anew(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("3x")
    with pytest.raises(SettingError, match="no ledger that can be read"):
        RowLedger(np.ones(1, dtype=np.uint64), [tmp_path])
