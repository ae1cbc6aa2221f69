"""Calls of people from elsewhere: each may do what the role allows, all is noted, and what arrives is data."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from piebald.cli import main
from piebald.core.errors import SettingError
from piebald.federation.credentials import provisioning
from piebald.federation.credentials.audit import verify
from piebald.federation.credentials.provisioning import Description, read
from piebald.federation.hub.local_federation import free_port
from piebald.federation.link.messaging import SERVER, Link
from piebald.federation.operate import remote
from piebald.federation.operate.experiment_queue import MOST_OPEN, ExperimentQueue
from piebald.federation.operate.remote import MOST_SETTINGS, Call, Desk, called, is_person, pieces, refuse_places
from piebald.runs.run import opened
from piebald.settings.toml_document import Document
from piebald.storage.store import RunStore

from .conftest import SITES, Sites, settings, until
from .test_queue import Process

PEOPLE = {"ann": "researcher", "ben": "researcher", "olga": "operator", "nora": "administrator"}
OPERATIONS = ("submit", "status", "logs", "abort", "fetch")


def federation(folder: Path, name: str = "test", port: int = 0) -> Path:
    """A federation with people; returns the folder with the credentials of all."""
    about = Description(name=name, host="127.0.0.1", port=port or free_port(), days=2, sites=SITES, people=PEOPLE)
    provisioning.provision(about, folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return federation(tmp_path / "credentials")


@pytest.fixture
def desk(folder: Path) -> Iterator[Desk]:
    server = read(folder / "server")
    made = Desk(server, ExperimentQueue(server.folder))
    made.link.start()
    yield made
    made.link.stop()


def noted(desk: Desk) -> list[dict[str, Any]]:
    path = desk._server.folder / "jobs" / "operate" / "audit.jsonl"
    assert verify(path).noted
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_people_have_credentials_and_are_no_sites(folder: Path) -> None:
    assert read(folder / "server").people() == PEOPLE
    assert [name for name in sorted(path.name for path in folder.iterdir()) if is_person(folder / name)] == sorted(
        PEOPLE
    )
    assert read(folder / "server").sites() == SITES
    for text, says in (('North = "operator"', "have the same name"), ('ann = "root"', "researcher")):
        (folder.parent / "f.toml").write_text(f'sites = ["north"]\npeople = {{ {text} }}\n')
        with pytest.raises(SettingError, match=says):
            provisioning.describe(folder.parent / "f.toml")


@pytest.mark.parametrize("name", PEOPLE)
def test_each_may_do_what_the_role_allows_and_no_more(name: str, desk: Desk, folder: Path, tmp_path: Path) -> None:
    desk._queue.add("of ann", "rounds = 1", tmp_path / "run", by="ann")
    allowed = {
        "ann": {"status", "logs", "abort"}, "ben": {"status"}, "olga": {"status", "logs", "abort"}, "nora": {"status"}
    }  # fmt: skip
    for what in OPERATIONS:
        if what in allowed[name]:
            called(read(folder / name), what, number=0 if what == "status" else 1)  # type: ignore[arg-type]
            continue
        with pytest.raises(SettingError) as refused:
            called(read(folder / name), what, b"\x00", number=1)  # type: ignore[arg-type]
        says = {"ann": ["control", "there is no run folder", "no run"], "ben": ["no experiment 1 of yours", "control"]}
        says |= {"olga": [f"olga is operator here, who may not {what}"]}
        says |= {"nora": [f"nora is administrator here, who may not {what}"]}
        assert any(text in str(refused.value) for text in [*says[name], "experiment"]), str(refused.value)
    lines = noted(desk)
    assert {(line["by"], line["role"]) for line in lines} == {(name, PEOPLE[name])}
    assert {line["what"] for line in lines} == set(OPERATIONS)


def test_whoever_is_no_longer_listed_may_nothing(desk: Desk, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert called(read(folder / "olga"), "status")
    (folder / "server" / "people.json").write_text('{"ann": "researcher"}')
    monkeypatch.setattr(remote, "_CONNECTING", 0.5)
    with pytest.raises(SettingError, match="not one of this federation's parties"):
        called(read(folder / "olga"), "status")
    assert json.loads(desk.answer("olga", Call(what="status"), memoryview(b""))[4:].split(b"}")[0] + b"}")["refused"]


def test_a_stranger_and_a_site_cannot_call(
    desk: Desk, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another federation's researcher, and a site of this one; and a person cannot pose as a site."""
    monkeypatch.setattr(remote, "_CONNECTING", 1.0)
    strangers = federation(tmp_path / "other", port=desk._server.port)
    for credentials, says in (
        (strangers / "ann", "does not answer"),
        (folder / "site-1", "not one of this federation's parties"),
    ):
        with pytest.raises(SettingError, match=says):
            called(read(credentials), "status")
    assert not (desk._server.folder / "jobs" / "operate" / "audit.jsonl").exists()
    site = Link("ann", ("127.0.0.1", desk._server.port), folder / "ann", SERVER.__eq__, lambda _: None)
    site.start()
    assert site.request(SERVER, "hello", Call(what="status"), timeout=1.0) is None  # there is no slot for it
    site.stop()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[data]\nsource = 'patients.csv'", "data.source"),
        ("[data]\npublic = 'patients'", "data.public"),
        ("[data]\nname = '/etc/passwd'", "data.name"),
        ("[data]\nname = 'os:system'", "data.name"),
        ("[data]\nname = 'evil.py'", "data.name"),
        ("out = 'elsewhere'", "out"),
        ("plugins = ['mylab']", "plugins"),
        ("loss = 'mylab:loss'", "loss"),
        ("[model]\nname = 'pretrained'\nweights = '../secrets'", "model.weights"),
        ("[model.clients.a]\nweights = 'C:\\\\secrets'", "model.clients.a.weights"),
        ("[[recipes]]\nname = '~root'", "recipes.name"),
        ("[runtime]\ncredentials = 'credentials'", "runtime.credentials"),
        ("[runtime]\nkind = 'federation'\nfolder = 'x'", "runtime.folder"),
        ("[runtime]\nworkers = 1000000", "runtime.workers"),
        ("a = [[[{ b = ['/x'] }]]]", "a.b"),
    ],
)
def test_what_is_submitted_names_nothing_of_the_servers_machine(text: str, says: str) -> None:
    with pytest.raises(SettingError) as refused:
        refuse_places(Document(text, "it").values)
    assert str(refused.value).startswith(says)


def test_settings_of_a_real_experiment_pass() -> None:
    made = settings({"name": "fedavg"}, runtime={"kind": "federation", "wait_for": 2, "needs": {"gpus": 1}})
    refuse_places(Document(made.text(), "it").values)


def test_a_check_may_take_longer_than_a_connection_is_silent_otherwise(
    desk: Desk, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("piebald.federation.link.tls.QUIET", 0.3)
    monkeypatch.setattr(remote, "_CONNECTING", 0.5)
    monkeypatch.setattr(remote, "_ran", lambda *_: [time.sleep(1), '{"number": 7}'][1])
    assert json.loads(called(read(folder / "ann"), "submit", b"rounds = 1")) == {"number": 7}


def test_a_run_that_is_packed_anew_between_two_pieces_is_not_put_together(
    desk: Desk, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two would have the beginning of one archive and the end of another."""
    desk._queue.add("of ann", "rounds = 1", tmp_path / "run", by="ann")
    RunStore.create(tmp_path / "run", {"recipe": {"name": "fedavg"}}).close()
    monkeypatch.setattr(remote, "PIECE", 10_000)
    first, second = (pieces(read(folder / "ann"), "fetch", number=1) for _ in range(2))
    assert len(next(first)) == len(next(second)) == 10_000
    with pytest.raises(SettingError, match="has changed meanwhile"):
        next(first)
    assert sum(len(piece) for piece in second) > 0


@pytest.mark.long
def test_what_is_submitted_is_checked_as_a_file_is(desk: Desk, folder: Path) -> None:
    ann = read(folder / "ann")
    good = settings({"name": "fedavg"}).text()
    wrong = [
        (b"\xff\xfe", "UTF-8"),
        (b"a = ", "the experiment"),
        (b"x" * (MOST_SETTINGS + 1), "at most"),
        (good.replace("fedavg", "fedavgg").encode(), "fedavg"),
        (b"rounds = 1e400\n", "rounds"),
        (good.replace("clients = 3", "clients = 7").encode(), "provision one site"),
    ]
    for body, says in wrong:
        with pytest.raises(SettingError, match=says) as refused:
            called(ann, "submit", body)
        assert str(folder) not in str(refused.value)
        assert "Traceback" not in str(refused.value)
    assert not desk._queue.entries()
    number = json.loads(called(ann, "submit", good.encode(), priority=7))["number"]
    entry = desk._queue.entry(number)
    assert (entry.by, entry.priority, entry.out) == ("ann", 7, str(folder / "server" / "runs" / "fedavg"))
    for row in range(MOST_OPEN - 1):
        desk._queue.add("more", "", folder / str(row), by="ann")
    with pytest.raises(SettingError, match=f"ann has {MOST_OPEN} experiments"):
        called(ann, "submit", good.encode())
    assert [line["event"] for line in noted(desk)].count("refused") == len(wrong) + 1


@pytest.mark.long
def test_a_researcher_operates_a_federation_from_elsewhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a folder that has nothing but the researcher's credentials and the experiment."""
    sites, ann = Sites(folder), str(folder / "ann")
    for name in SITES:
        sites.start(name)
    made = settings({"name": "fedavg"}, rounds=3)
    (tmp_path / "e.toml").write_text(made.text())
    server = Process(folder / "server", tmp_path / "log")

    def asked(*words: str) -> Any:
        capsys.readouterr()
        assert main([*words]) in (None, 0), capsys.readouterr().err
        return capsys.readouterr().out

    def states() -> list[str]:
        return [row["state"] for row in json.loads(asked("status", ann, "--json"))["experiments"]]

    try:
        until(lambda: main(["status", ann]) == 0)
        assert json.loads(asked("submit", ann, str(tmp_path / "e.toml"), "--json")) == {"number": 1}
        assert asked("submit", ann, str(tmp_path / "e.toml"), "--set", "rounds=100000") == "experiment 2 of the queue\n"
        until(lambda: states() == ["finished", "running"])
        run = json.loads(asked("status", ann, "--json"))["runs"]["2"]
        assert {row["site"] for row in run.get("sites", [])} <= set(SITES)
        assert str(folder) not in json.dumps(run)
        until(lambda: "step 5/100000" in asked("logs", ann, "2"))
        assert "experiment 2 is being stopped" in asked("abort", ann, "2")
        until(lambda: states() == ["finished", "stopped"])
        assert main(["abort", ann, "2"]) == 2
        assert "has ended already" in capsys.readouterr().err
        asked("fetch", ann, "1", "--out", str(tmp_path / "run.tar"))
        assert main(["fetch", ann, "1", "--out", str(tmp_path / "run.tar")]) == 2
        asked("restore", str(tmp_path / "run.tar"), str(tmp_path / "mine"))
        mine, theirs = opened(tmp_path / "mine"), opened(folder / "server" / "runs" / "fedavg")
        assert (mine.cluster_models[0] == theirs.cluster_models[0]).all()
        assert main(["submit", str(folder / "olga"), str(tmp_path / "e.toml")]) == 2
        assert "olga is operator here, who may not submit" in capsys.readouterr().err
        assert main(["submit", str(folder / "site-1"), str(tmp_path / "e.toml")]) == 2
        assert main(["audit", str(folder / "server" / "jobs" / "operate")]) in (None, 0)
    finally:
        server.end(signal.SIGTERM)
        sites.close()
