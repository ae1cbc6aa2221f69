"""Experiments that a server takes one after another: killed, stopped, refused, and gone on with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

import piebald
from piebald.cli import main
from piebald.core.errors import SettingError
from piebald.experiments.file import ExperimentSettings
from piebald.federation.operate.experiment_queue import ExperimentQueue
from piebald.federation.operate.status import give_sign, status_values
from piebald.runs.run import opened
from piebald.runtimes.simulation.simulation import Simulation
from piebald.storage.lock import RunLock
from piebald.storage.store import RunStore
from tests import processes

from .conftest import ENVIRONMENT, Sites, carry_out, provisioned, settings, until


class Process:
    """A server that takes experiments from its queue."""

    def __init__(self, credentials: Path, log: Path, *options: str) -> None:
        self.log = log
        with log.open("ab") as file:
            command = processes.command("server", credentials, "--quiet", *options)
            self.process = processes.Popen(command, stdout=file, stderr=file, env=ENVIRONMENT)

    def end(self, how: int) -> int:
        self.process.send_signal(how)
        return self.process.wait(60)


def version(run: Path) -> int:
    if not (run / "run.db").exists():
        return 0
    with RunStore.open_read_only(run) as store:
        return store.version


@pytest.mark.long
def test_a_queue_goes_on_where_it_was_after_a_kill_a_stop_and_a_failure(
    sites: Sites, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    credentials = sites.folder / "server"
    long, short = settings({"name": "hdafl"}, rounds=40), settings({"name": "fedavg"}, rounds=1)
    (tmp_path / "long.toml").write_text(long.text())
    (tmp_path / "short.toml").write_text(short.text())

    def add(file: str, out: str, *more: str) -> None:
        assert main(["queue", "add", str(credentials), str(tmp_path / file), "--out", str(tmp_path / out), *more]) == 0

    def states() -> list[str]:
        capsys.readouterr()
        assert main(["queue", "list", str(credentials), "--json"]) == 0
        return [one["state"] for one in json.loads(capsys.readouterr().out)["experiments"]]

    add("long.toml", "a")
    add("short.toml", "b", "--from", str(tmp_path / "a"))
    add("short.toml", "c")
    server = Process(credentials, tmp_path / "log")
    try:
        until(lambda: version(tmp_path / "a") > 1)
        server.end(signal.SIGKILL)
        assert states() == ["interrupted", "waiting", "waiting"]
        server = Process(credentials, tmp_path / "log")
        before = version(tmp_path / "a")
        until(lambda: version(tmp_path / "a") > before)
        assert main(["queue", "stop", str(credentials), "1"]) == 0
        until(lambda: states() == ["stopped", "failed", "finished"])
        assert before < version(tmp_path / "a") < 40
        assert "is not finished, so nothing can go on from it" in ExperimentQueue(credentials).entry(2).why
        assert status_values(credentials)["state"] == "waiting for an experiment"
        assert main(["queue", "resume", str(credentials), "1"]) == 0
        add("long.toml", "d", "--from", str(tmp_path / "a"), "--set", "rounds=1")
        until(lambda: states()[3:] == ["finished", "finished"])
        until(lambda: "the server ended the connection: its run has ended" in sites.log("site-1"))
        assert server.end(signal.SIGTERM) == 130
        assert "the queue goes on with: piebald server" in server.log.read_text()
    finally:
        server.process.kill()
        server.process.wait()
        shutil.rmtree(ExperimentQueue(credentials).folder)
    undisturbed, disturbed = carry_out(long), opened(tmp_path / "a")
    assert disturbed.final["rounds"] == 40
    assert disturbed.final["mean"] == undisturbed.final["mean"]
    assert opened(tmp_path / "d").meta["lineage"]["federation"]


def test_a_run_whose_end_is_not_waited_for_is_closed_and_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a queue's server that was interrupted then went on listening beside the next one, and kept its sites."""
    closed = list[bool]()

    class Dismissed(Simulation):  # a class of its own: what `isinstance` says of a protocol is remembered by class
        def dismiss(self) -> None:
            raise KeyboardInterrupt

        def close(self) -> None:
            closed.append(True)
            super().close()

    monkeypatch.setattr("piebald.runtimes.simulation.simulator.Simulation", Dismissed)
    with pytest.raises(KeyboardInterrupt):
        carry_out(settings({"name": "fedavg"}, rounds=1), tmp_path / "run")
    assert closed == [True]
    monkeypatch.undo()
    assert piebald.resume(tmp_path / "run").final["status"] == "finished"  # by this process: it is not locked


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """The credentials of a server, and an experiment for its sites."""
    (tmp_path / "e.toml").write_text(settings({"name": "fedavg"}).text())
    return provisioned(tmp_path / "credentials") / "server"


def test_an_experiment_is_checked_before_it_waits(
    server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, site = str(tmp_path / "e.toml"), str(server.parent / "site-1")
    wrong: list[tuple[list[str], str]] = [
        ([str(server), file, "--set", "recipe.lr=-1"], "recipe.lr"),
        ([str(server), file, "--set", "partition.clients=7"], "provision one site for each client"),
        ([str(server), file, "--set", "seeds=[1,2]"], "seed"),
        ([str(server), file, "--from", str(tmp_path / "none")], "there is no run folder"),
        ([str(server), file, "--out", str(tmp_path)], "is not empty and holds no run"),
        ([site, file], "the queue is in those of the server"),
    ]
    for arguments, says in wrong:
        assert main(["queue", "add", *arguments]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1
    assert not ExperimentQueue(server).folder.exists()
    assert main(["queue", "add", str(server), file, "--out", str(tmp_path / "run")]) == 0
    assert main(["queue", "add", str(server), file, "--out", str(tmp_path / "run")]) == 2
    assert "experiment 1 of the queue has the run folder" in capsys.readouterr().err
    assert main(["queue", "add", str(server), file]) == 0
    assert main(["queue", "add", str(server), file]) == 0
    runs = [Path(one.out) for one in ExperimentQueue(server).entries()]
    assert runs == [tmp_path / "run", server / "runs" / "fedavg", server / "runs" / "fedavg-2"]
    assert main(["server", str(server), "--out", "run"]) == 2
    assert "give them to piebald queue add" in capsys.readouterr().err
    assert main(["server", str(server), file, "--plugin", "mylab"]) == 2
    assert "--plugin is for experiments of the queue" in capsys.readouterr().err


def test_what_waits_is_taken_off_and_what_was_stopped_is_put_back(
    server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = ExperimentQueue(server)
    for name in "ab":
        queue.add(name, "", tmp_path / name)
    assert main(["queue", "stop", str(server), "1"]) == 0
    assert main(["queue", "stop", str(server), "1"]) == 2
    assert "has ended already: it is stopped" in capsys.readouterr().err
    found = queue.next()
    assert found is not None
    assert found.number == 2
    assert queue.next() == ExperimentQueue(server).next()  # nothing is kept in memory
    queue.change(found, state="running")
    assert main(["queue", "resume", str(server), "1"]) == 0
    again = queue.entry(3)
    assert (again.out, again.again, again.state) == (str(tmp_path / "a"), True, "waiting")
    assert queue.next() == queue.entry(2)  # what runs goes first, after a kill
    for arguments, says in ((["resume", "2"], "is running"), (["stop", "9"], "its numbers are 1, 2, 3")):
        assert main(["queue", arguments[0], str(server), arguments[1]]) == 2
        assert says in capsys.readouterr().err
    (queue.folder / "0002.json").write_text('{"format": 9}')
    with pytest.raises(SettingError, match="has format 9, this Piebald reads 2"):
        queue.entries()


def test_an_experiment_for_any_sites_gets_those_that_are_there_when_its_turn_comes(
    server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = {"kind": "sites", "clients": "any", "inputs": [4], "classes": ["no", "yes"]}
    table = {name: value for name, value in settings({"name": "fedavg"}).table().items() if name != "data"}
    made = ExperimentSettings.of_table(table | {"partition": partition}, "the test's settings")
    (tmp_path / "any.toml").write_text(made.text())
    assert main(["queue", "add", str(server), str(tmp_path / "any.toml"), "--out", str(tmp_path / "run")]) == 0
    about = json.loads((server.parent / "federation.json").read_text())
    provisioned(server.parent, [*about["sites"], "site-4"], port=about["port"])
    given: list[ExperimentSettings] = []
    monkeypatch.setattr("piebald.cli.train.carry_out", lambda settings, *_, **__: given.append(settings))
    monkeypatch.setattr("piebald.federation.operate.job_processes.end_with_parent", lambda: None)
    monkeypatch.setattr("piebald.federation.operate.job_processes.take_connections", lambda door: None)
    assert main(["server", str(server), "--quiet", "--job", "1", "0", "0"]) == 0
    assert ExperimentQueue(server).entry(1).state == "finished"
    assert list(given[0].clients().names) == [*about["sites"], "site-4"]


def test_two_who_add_at_the_same_time_get_two_numbers(server: Path, tmp_path: Path) -> None:
    """The second one has listed the queue before the first one wrote to it."""
    first, second = ExperimentQueue(server), ExperimentQueue(server)
    second.entries = lambda: []  # type: ignore[method-assign]
    assert first.add("a", "", tmp_path / "a").number == 1
    assert second.add("b", "", tmp_path / "b").number == 2
    assert [one.label for one in first.entries()] == ["a", "b"]
    assert {path.name for path in first.folder.iterdir()} == {"0001.json", "0002.json"}


def test_health_is_a_process_that_gives_signs_of_life(server: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def healthy() -> int:
        return main(["status", str(server), "--check"])

    give_sign(server)
    assert healthy() == 2
    assert "nothing is running with" in capsys.readouterr().err
    lock = RunLock(server)
    try:
        assert healthy() == 0
        last = time.time() - 1000
        os.utime(server / "status.json", (last, last))
        assert healthy() == 0  # its process has just begun, after one that ended long ago
        os.utime(server / "run.lock", (last, last))
        assert healthy() == 2
        assert "has given no sign of life for 10" in capsys.readouterr().err
        give_sign(server)
        assert healthy() == 0
        queue = ExperimentQueue(server)
        entry = queue.add("a", "", server / "runs" / "a", server)
        os.utime(server / "run.lock", (1e9, 1e9))
        found = status_values(server)
        assert (found["state"], found["ends"]) == ("waiting for an experiment", "a is prepared")
        assert found["since"] == datetime.fromisoformat(entry.added).timestamp()
        assert (found["queue"], found["process"]) == ("1 waiting (1 a)", os.getpid())
        queue.change(entry, state="finished")
        found = status_values(server)
        assert found["ends"] == f"piebald queue add {server} FILE"
        assert found["since"] == datetime.fromisoformat(queue.entry(1).ended).timestamp()
        os.utime(server / "run.lock", (4e9, 4e9))  # its process began after that
        assert status_values(server)["since"] == 4e9
    finally:
        lock.release()
    code = "import sys, piebald.cli, piebald.federation.operate.status; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
