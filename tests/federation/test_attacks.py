"""Strangers, and a site that sends what it is not allowed to: refused and reported once, while the run goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from piebald.federation.credentials import provisioning
from piebald.storage.store import RunStore
from tests import processes

from .conftest import ENVIRONMENT, Server, Sites, provisioned, settings, until


class Running:
    """A run in a process of its own, with one honest site and another one whose credentials the attacker has."""

    def __init__(self, folder: Path) -> None:
        self.sites = Sites(provisioned(folder / "credentials"))
        self.sites.start("site-1")
        self.port = provisioning.read(self.sites.folder / "server").port
        flags = {"kind": "federation", "wait_for": 1, "patience": 5.0}
        made = settings({"name": "fedasync", "epochs": 40}, rounds=100_000, runtime=flags, evaluate={"every": 0})
        self.server = Server(made, self.sites.folder / "server", folder / "run")

    def attack(self, attack: str, credentials: Path | None = None, name: str = "site-3") -> Any:
        """The replies that an attacker got."""
        arguments = [attack, str(credentials or self.sites.folder / "site-3"), name, str(self.port)]
        script = Path(__file__).with_name("attacker.py")
        done = processes.run(
            [sys.executable, str(script), *arguments], capture_output=True, text=True, env=ENVIRONMENT, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Rows of the run's tables."""
        with RunStore.open_read_only(self.server.out) as store:
            return store.query(sql)


@contextmanager
def started(folder: Path) -> Iterator[Running]:
    made = Running(folder)
    try:
        until(lambda: made.server.version() > 0)
        yield made
    finally:
        made.server.close()
        made.sites.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with started(tmp_path_factory.mktemp("attacked")) as made:
        yield made


@pytest.fixture
def short_run(tmp_path: Path) -> Iterator[Running]:
    """A run for an attack that leaves traces: the attacker's site is excluded."""
    with started(tmp_path) as made:
        yield made


@pytest.mark.full
def test_another_authority(running: Running, tmp_path: Path) -> None:
    foreign = provisioned(tmp_path / "foreign", name="test", port=running.port)
    before = running.server.log.read_text()
    assert running.attack("hello", foreign / "site-3") is None
    said = running.server.log.read_text()[len(before) :]  # other strangers may have been there before
    assert said.count("does not accept this end: this end's certificate is of another federation") == 1, said


@pytest.mark.full
def test_no_certificate_and_silent_strangers(running: Running) -> None:
    assert running.attack("nameless") == "closed"
    assert running.attack("hello") is not None


@pytest.mark.full
def test_frames_that_are_none_end_their_connection(running: Running) -> None:
    ended = running.attack("frame")
    assert len(ended) == 5
    assert ended == dict.fromkeys(ended, "closed")
    for sentence in ("a frame that claims 2,000,000,000 bytes", "a frame of kind 77", "a frame without a whole topic"):
        assert f"site-3 sent {sentence}" in running.server.log.read_text()


@pytest.mark.long
def test_an_insider(running: Running) -> None:
    found = running.attack("insider")
    assert found.pop("still served")
    assert found == dict.fromkeys(found), found
    for sentence in (
        "site-3 sent a message on 'shell', which is not used here",
        "site-3 sent a message on 'task', which is not used here",
        "site-3 sent a message on 'aaaa",
        "site-3 sent a message without a whole head",
        "site-3 sent a message that is no hello: protocol: missing",
        "site-3 sent a message that is no hello: its head: json_invalid",
    ):
        assert_reported_once(running, sentence)


@pytest.mark.full
def test_replayed_results_are_dropped(running: Running) -> None:
    assert running.attack("replay") == ["known"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("attack", "says"),
    [("garbage", "sent a body that"), ("wrong_form", "must send")],
)
def test_a_result_of_a_wrong_form_excludes_its_site(attack: str, says: str, short_run: Running) -> None:
    assert short_run.attack(attack) == "refused"
    (refused,) = until(lambda: short_run.query("SELECT client, reason FROM result WHERE status = 'refused'"))
    assert refused["client"] == 2
    assert says in refused["reason"]
    (note,) = short_run.query("SELECT value FROM note WHERE name = 'refused'")
    assert [one["client"] for one in json.loads(note["value"])] == [2]


@pytest.mark.full
def test_after_all_this_the_run_goes_on_with_the_honest_site(running: Running) -> None:
    before = running.server.version()
    until(lambda: running.server.version() > before + 3)
    assert not running.server.over()
    counted = running.query("SELECT DISTINCT client FROM result WHERE status = 'ok' ORDER BY client")
    assert [row["client"] for row in counted] == [0]


def assert_reported_once(running: Running, sentence: str) -> None:
    said = running.server.log.read_text()
    assert said.count(sentence) == 1, said
