"""Which of several servers works with the same credentials, and what one that takes over does with what it finds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from piebald.cli import main
from piebald.cli.predicting import name_run, serving
from piebald.core.errors import RunFolderError, SettingError
from piebald.federation.operate import takeover
from piebald.federation.operate.experiment_queue import ExperimentQueue
from piebald.federation.operate.takeover import leased
from piebald.storage import lease
from piebald.storage.lease import Lease
from piebald.storage.store import RunStore

from .conftest import provisioned, settings, until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Credentials of a server whose process was killed: nobody has given its lease back."""
    monkeypatch.setattr(takeover, "_QUIET", 0.05)
    monkeypatch.setattr(takeover, "_LOOK", 0.01)
    monkeypatch.setattr(takeover, "BEAT", 0.01)
    made = provisioned(tmp_path / "credentials") / "server"
    assert Lease.take(made, None) is not None
    yield made
    Lease.current = None


def run(folder: Path) -> int:
    """Make a run, and return the number of its file."""
    RunStore.create(folder, {"recipe": {"name": "fedavg"}}).close()
    return (folder / "run.db").stat().st_ino


class Clock:
    """A clock that stands still but for pauses; the holder of a lease gives a sign of life in each, for a while."""

    def __init__(self, holder: Lease, lives: float) -> None:
        self.now, self._holder, self._lives = 0.0, holder, lives

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now <= self._lives:
            self._holder.beat()


@pytest.mark.parametrize(("process", "expiry", "waits"), [(7, 30.0, 30.0), (7, 5.0, 5.0), (None, 30.0, 3.0)])
def test_a_holder_that_lives_is_never_taken_for_dead_and_one_that_hangs_is_after_the_expiry(
    process: int | None, expiry: float, waits: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a process as long as its lock is held; without one, a shared disk may only have no locks."""
    first = Lease.current
    assert first is not None
    clock = Clock(first, lives=300.0)
    for name, value in (("time", clock), ("running_process", lambda _: process), ("_LOOK", 0.5), ("_QUIET", 3.0)):
        monkeypatch.setattr(takeover, name, value)
    monkeypatch.setattr(lease, "seize", lambda _: None)
    with leased(folder, expiry):
        assert not first.held()
        assert 300.0 + waits < clock.now <= 300.0 + waits + 1.0


def test_a_run_that_is_broken_fails_alone_when_a_server_takes_over(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue, before = ExperimentQueue(folder), dict[str, int]()
    for name in ("broken", "sound", "none yet", "not readable"):
        queue.change(queue.add(name, "", tmp_path / name), state="running", slot=0)
    before = {name: run(tmp_path / name) for name in ("broken", "sound", "without a queue", "not readable")}
    (tmp_path / "broken" / "run.db").write_bytes(b"no database at all" * 1000)
    (tmp_path / "not readable" / "run.lock").unlink()
    (tmp_path / "not readable" / "run.lock").mkdir()
    name_run(folder, tmp_path / "without a queue")
    with leased(folder) as held:
        assert held.token == 2
        assert [entry.state for entry in queue.entries()] == ["failed", "running", "running", "failed"]
        assert "restore the folder" in queue.entry(1).why
        assert "not readable cannot be taken over: is a directory" in queue.entry(4).why
        for name in ("sound", "without a queue"):
            assert (tmp_path / name / "run.db").stat().st_ino != before[name]
    assert "broken is not taken over" in caplog.text
    assert lease.newest(folder) is None


def test_a_takeover_that_fails_is_left_to_the_next_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the lease given back, the next one would use the files that a holder which hangs has open."""
    seized, real = list[Path](), lease.seize

    def seize(place: Path) -> None:
        seized.append(place)
        if len(seized) == 2:
            raise RunFolderError("the disk is full")
        real(place)

    monkeypatch.setattr(lease, "seize", seize)
    with pytest.raises(RunFolderError, match="full"), leased(folder):
        raise AssertionError
    assert Lease.current is None
    with leased(folder):
        pass
    assert seized[2:] == [folder, folder / "queue"]


def test_a_server_that_copies_for_long_gives_signs_of_life(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seize(place: Path) -> None:
        before = lease.newest(folder)
        until(lambda: lease.newest(folder) != before, 10)

    monkeypatch.setattr(lease, "seize", seize)
    with leased(folder) as held:
        assert held.held()


def test_a_server_of_one_experiment_holds_the_lease_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that two machines share without locks, nothing else keeps them apart."""
    old = run(tmp_path / "run")
    name_run(folder, tmp_path / "run")
    with serving(folder, tmp_path / "run"):
        assert (tmp_path / "run" / "run.db").stat().st_ino != old
        monkeypatch.setattr(takeover, "running_process", lambda _: None)
        first = lease.newest(folder)
        until(lambda: lease.newest(folder) != first, 10)
        with pytest.raises(SettingError, match="is held by process"), leased(folder):
            raise AssertionError
        taken = Lease.take(folder, lease.newest(folder))
        assert taken is not None
        ended = list[Any]()
        monkeypatch.setattr(Lease, "_end", lambda held: ended.append(held))
        until(lambda: ended, 10)  # it finds out, whatever else it does
        assert ended[0] is not taken
    assert os.listdir(folder).count("lease-3") == 1


@pytest.mark.parametrize("file", [[], ["experiment.toml"]])
def test_expiry_is_of_a_server_that_stands_by(
    file: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = settings({"name": "fedavg"}, runtime={"kind": "federation"})
    (tmp_path / "experiment.toml").write_text(made.text())
    assert main(["server", str(folder), *[str(tmp_path / name) for name in file], "--expiry", "60"]) == 2
    assert "--expiry 60 is how long" in capsys.readouterr().err
