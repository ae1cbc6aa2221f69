"""Several experiments of a queue at once: as many as the sites allow, in their turn, and none in the way of another."""

from __future__ import annotations

import errno
import json
import os
import signal
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piebald.cli import main
from piebald.core.private_files import write_private
from piebald.experiments.file import ExperimentSettings
from piebald.federation.credentials.provisioning import read
from piebald.federation.credentials.slots import first_protocol, protocol_of, slot_folder
from piebald.federation.hub.settings import Federation
from piebald.federation.operate.experiment_queue import ExperimentQueue, Queued
from piebald.federation.operate.job_processes import Job, JobProcesses
from piebald.federation.operate.status import status_values
from piebald.federation.site.site_process import OtherSlots
from piebald.runs.run import opened

from .conftest import SITES, Sites, carry_out, provisioned, settings, until
from .test_queue import Process, version

TWO = "[policy]\njobs = { at_once = 2 }\n"


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    """Three sites that take part in two runs at once."""
    made = Sites(provisioned(tmp_path / "credentials"))
    for name in SITES:
        toml = made.folder / name / "site.toml"
        toml.write_text(toml.read_text() + TWO)
        made.start(name)
    yield made
    for name in SITES:
        made.kill(name, signal.SIGTERM)


def queued(
    sites: Sites, tmp_path: Path, name: str, rounds: int, *more: str, recipe: str = "fedavg", **runtime: Any
) -> ExperimentSettings:
    made = settings({"name": recipe}, rounds=rounds, evaluate={"every": 0}, runtime={"kind": "federation", **runtime})
    (tmp_path / f"{name}.toml").write_text(made.text())
    out = ["--out", str(tmp_path / name)]
    assert main(["queue", "add", str(sites.folder / "server"), str(tmp_path / f"{name}.toml"), *out, *more]) == 0
    return settings({"name": recipe}, rounds=rounds, evaluate={"every": 0})


def test_the_process_of_a_further_run_is_started_again_also_after_an_error_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a free descriptor no process starts: its thread must not end unseen while the site looks healthy."""
    started, real = list[int](), subprocess.Popen

    def popen(command: Any, **more: Any) -> Any:
        started.append(len(started))
        if len(started) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return real([sys.executable, "-c", "import time; time.sleep(60)"], **more)

    monkeypatch.setattr("piebald.federation.site.site_process.subprocess.Popen", popen)
    with OtherSlots([["any"]]):
        until(lambda: len(started) > 1)
    assert "too many open files" in caplog.text
    assert not any(thread.name.startswith("the process of run") for thread in threading.enumerate())


@pytest.mark.long
def test_two_jobs_at_once_on_three_sites(sites: Sites, tmp_path: Path) -> None:
    """A third one waits; one whose process is killed, and one that all sites refuse, keep no other from its turn."""
    queue = ExperimentQueue(sites.folder / "server")
    long = queued(sites, tmp_path, "a", 150)
    other = queued(sites, tmp_path, "b", 150, recipe="scaffold")
    queued(sites, tmp_path, "c", 2)

    def states() -> list[str]:
        return [entry.state for entry in queue.entries()]

    server = Process(sites.folder / "server", tmp_path / "log")
    try:
        until(lambda: version(tmp_path / "a") > 1 and version(tmp_path / "b") > 1)
        assert states()[:2] == ["running", "running"]
        assert {entry.slot for entry in queue.entries()[:2]} == {0, 1}
        process = status_values(tmp_path / "b")["process"]
        assert process != server.process.pid
        os.kill(process, signal.SIGKILL)  # the job, and not the server
        until(lambda: states() == ["finished"] * 3)
    finally:
        server.end(signal.SIGTERM)
    for name, made in (("a", long), ("b", other)):
        calm = carry_out(made)
        torch.testing.assert_close(
            opened(tmp_path / name).cluster_models[0], calm.cluster_models[0], atol=1e-4, rtol=1e-4
        )
    for folder in (sites.folder / "server", slot_folder(sites.folder / "server", 1)):
        assert main(["audit", str(folder)]) in (None, 0)
    for name in SITES:
        assert main(["audit", str(slot_folder(sites.folder / name, 1))]) in (None, 0)


def hello_naming(protocol: str) -> bytes:
    """The first bytes of a connection that names a protocol, as OpenSSL writes them."""
    context, incoming, outgoing = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO(), ssl.MemoryBIO()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if protocol:
        context.set_alpn_protocols([protocol, "another"])
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="hub.example.org").do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("slot", [0, 1, 15, "operate"])
def test_a_connection_is_known_by_the_protocol_that_it_names_once_its_hello_is_there(slot: Any) -> None:
    hello = hello_naming(protocol_of(slot))
    assert first_protocol(hello) == protocol_of(slot)
    assert {first_protocol(hello[:cut]) for cut in range(len(hello))} == {None}


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_no_bytes_of_a_stranger_raise_an_error(data: bytes, place: int, value: int) -> None:
    hello = bytearray(HELLO)
    hello[min(place, len(hello) - 1)] = value
    for text in (data, b"\x16\x03\x01" + struct.pack("!H", len(data)) + data, bytes(hello)):
        assert first_protocol(text) is None or isinstance(first_protocol(text), str)


HELLO = hello_naming("piebald/1")


def said(queue: ExperimentQueue) -> list[str]:
    return [entry.label for entry in queue.in_turn()]


def test_turns_follow_priority_and_then_whoever_has_waited_longest(tmp_path: Path) -> None:
    queue = ExperimentQueue(tmp_path)
    for label, by, priority in (
        ("a1", "ann", 0),
        ("a2", "ann", 0),
        ("b1", "bob", 0),
        ("c1", "cid", 5),
        ("a3", "ann", 0),
    ):
        queue.add(label, "", tmp_path / label, by=by, priority=priority)
    assert said(queue) == ["c1", "a1", "a2", "b1", "a3"]
    queue.change(queue.entry(1), state="running")
    assert said(queue) == ["a1", "c1", "b1", "a2", "a3"]  # ann has one at work
    queue.change(queue.entry(1), state="finished")
    assert said(queue) == ["c1", "b1", "a2", "a3"]  # and had the last turn
    queue.change(queue.entry(3), state="waiting", set_aside=1)  # it did not move, and goes on later
    assert said(queue) == ["c1", "a2", "a3", "b1"]
    assert queue.entry(3).begun


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobProcesses:
    """The processes of a queue, of which none is started."""
    folder = provisioned(tmp_path / "credentials") / "server"
    made = JobProcesses.__new__(JobProcesses)
    made._server, made._queue, made._jobs, made._lost = read(folder), ExperimentQueue(folder), {}, {}

    def start(slot: int, entry: Queued, runtime: Federation, names: list[str] | None) -> None:
        made._jobs[slot] = Job(
            made._queue.change(entry, state="running", slot=slot),
            None,
            None,
            runtime.needs,
            names,
            600.0,  # type: ignore[arg-type]
        )

    monkeypatch.setattr(made, "_start", start)
    return made


def states_of(queue: JobProcesses, **site: Any) -> None:
    """Have all sites say what they have."""
    rows = [{"site": name, "jobs": 1, "gpus": 0, "gigabytes": 0.0, **site} for name in SITES]
    write_private(queue._server.folder / "status.json", json.dumps({"sites": rows}))


def in_slots(jobs: JobProcesses) -> dict[int, str]:
    jobs._start_those_that_fit()
    return {slot: job.entry.label for slot, job in sorted(jobs._jobs.items())}


def test_the_queue_runs_what_fits(jobs: JobProcesses, tmp_path: Path) -> None:
    needs = "[runtime]\nkind = 'federation'\nneeds = {{ gpus = {}, gigabytes = {} }}\n"
    for label, gpus, gigabytes in (("one", 1, 4), ("two", 1, 4), ("small", 0, 4), ("tiny", 0, 1)):
        jobs._queue.add(label, needs.format(gpus, gigabytes), tmp_path / label)
    assert in_slots(jobs) == {0: "one"}  # nothing is known of the sites before a first run, which may need anything
    states_of(jobs, jobs=1, gpus=8, gigabytes=64.0)
    assert in_slots(jobs) == {0: "one"}
    states_of(jobs, jobs=8, gpus=1, gigabytes=9.0)
    assert in_slots(jobs) == {0: "one", 1: "small", 2: "tiny"}  # no second GPU; 9 GB are full
    del jobs._jobs[0]
    jobs._queue.change(jobs._queue.entry(1), state="finished")
    assert in_slots(jobs) == {0: "two", 1: "small", 2: "tiny"}


def test_less_priority_overtakes_nobody_and_what_never_fits_holds_up_nobody(jobs: JobProcesses, tmp_path: Path) -> None:
    states_of(jobs, jobs=2, gpus=1)
    needs = "[runtime]\nkind = 'federation'\nneeds = {{ gpus = {} }}\n"
    for label, gpus, priority in (("huge", 9, 9), ("first", 1, 0), ("urgent", 1, 5), ("light", 0, -1)):
        jobs._queue.add(label, needs.format(gpus), tmp_path / label, priority=priority)
    assert in_slots(jobs) == {0: "urgent"}
    assert "less than it needs" in jobs._queue.entry(1).why
    jobs._jobs.clear()
    jobs._queue.change(jobs._queue.entry(3), state="finished")
    assert in_slots(jobs) == {0: "first", 1: "light"}


@pytest.mark.parametrize("text", ["[runtime]\nneeds = 3", "not toml", "[runtime]\npatience = -1"])
def test_settings_that_cannot_be_read_fail_alone(text: str, jobs: JobProcesses, tmp_path: Path) -> None:
    jobs._queue.add("bad", text, tmp_path / "bad")
    jobs._queue.add("good", "rounds = 1", tmp_path / "good")
    assert in_slots(jobs) == {0: "good"}
    assert jobs._queue.entry(1).state == "failed"


@pytest.mark.full
def test_a_second_server_takes_over_in_the_middle_of_a_step_and_never_before(sites: Sites, tmp_path: Path) -> None:
    """While the first one only hangs, the second writes nothing; once it is killed, the run goes on where it was."""
    made, credentials = queued(sites, tmp_path, "a", 60), sites.folder / "server"
    first = Process(credentials, tmp_path / "first")
    second = None
    try:
        until(lambda: "experiment 1 of the queue" in first.log.read_text())
        second = Process(credentials, tmp_path / "second", "--standby")
        until(lambda: "standing by until process" in second.log.read_text() and version(tmp_path / "a") > 2)
        sites.running["site-1"].send_signal(signal.SIGSTOP)  # so a step is under way
        before = version(tmp_path / "a")
        first.process.send_signal(signal.SIGSTOP)
        time.sleep(2)
        assert "experiment 1 of the queue" not in second.log.read_text()
        assert version(tmp_path / "a") <= before + 1
        first.process.kill()
        first.process.wait()
        until(lambda: "experiment 1 of the queue" in second.log.read_text())
        sites.running["site-1"].send_signal(signal.SIGCONT)
        until(lambda: ExperimentQueue(credentials).entry(1).state == "finished")
    finally:
        for process in (first, second):
            if process is not None and process.process.poll() is None:
                process.process.send_signal(signal.SIGCONT)
                process.end(signal.SIGTERM)
    run = opened(tmp_path / "a")
    trained = [
        (row["version"], row["client"]) for row in run.results if row["kind"] == "train" and row["status"] == "ok"
    ]
    assert trained == [(step, client) for step in range(1, 61) for client in range(3)]
    calm = carry_out(made)
    torch.testing.assert_close(run.cluster_models[0], calm.cluster_models[0], atol=1e-4, rtol=1e-4)
    assert main(["audit", str(credentials)]) in (None, 0)
