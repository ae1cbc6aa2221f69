"""Several experiments of a queue at once: as many as the sites allow, in their turn, and none in the way of another."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
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
from piebald.federation.link.messaging import SERVER, Link, Unwelcome
from piebald.federation.link.wire_format import PROTOCOL, Hello, Needs
from piebald.federation.operate.experiment_queue import ExperimentQueue, Queued
from piebald.federation.operate.job_processes import IdleSites, Job, JobProcesses
from piebald.federation.operate.remote import Desk
from piebald.federation.operate.status import running_process, status_values
from piebald.federation.site.site_check import check_site
from piebald.federation.site.site_process import OtherSlots, site_work
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
    made._idle = IdleSites(made._server, lambda: False)

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


def test_what_a_site_said_last_counts_wherever_it_said_it(jobs: JobProcesses, tmp_path: Path) -> None:
    """Also while no run is at work, when it was started again with more; and one that takes nothing always has room."""
    states_of(jobs, jobs=2, gpus=0, heard=100.0)
    needs = "[runtime]\nkind = 'federation'\nneeds = {{ gpus = {} }}\n"
    for label, gpus in (("one", 1), ("none", 0)):
        jobs._queue.add(label, needs.format(gpus), tmp_path / label)
    for heard, gpus in ((99.0, 1), (101.0, 0)):
        jobs._idle.rows |= {
            site: {"site": site, "heard": heard, "jobs": 2, "gpus": gpus, "gigabytes": 0.0} for site in SITES
        }
        assert in_slots(jobs) == {0: "none"}
        assert "has gpus = 1, and this site states 0" in jobs._queue.entry(1).why
        jobs._jobs.clear()
        jobs._queue.change(jobs._queue.entry(2), state="waiting")
    jobs._idle.rows |= {site: row | {"gpus": 1, "heard": 102.0} for site, row in jobs._idle.rows.items()}
    assert in_slots(jobs) == {0: "one", 1: "none"}


def test_sites_are_heard_while_no_run_listens_and_connect_again_when_one_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = provisioned(tmp_path / "credentials")
    server = read(folder / "server")
    desk, theirs = Desk(server, ExperimentQueue(server.folder)), socket.socketpair()
    idle = IdleSites(server, lambda: desk.link.passes_on(""))
    desk.link.start(rest=idle.link)
    address = ("127.0.0.1", server.port)
    site = Link("site-1", address, folder / "site-1", SERVER.__eq__, lambda _: None)
    checks = check_site(site_work(folder / "site-2", None, None), patience=20)
    site.start()
    try:
        assert {"server": True, "run": None}.items() <= {check.what: check.fine for check in checks}.items()
        hello = Hello(protocol=PROTOCOL, version="0", incarnation="ab", jobs=3, gpus=2, gigabytes=1.5)
        until(lambda: site.request(SERVER, "hello", hello, timeout=0.2) is not None, 20)
        assert site.trouble == ""
        connection = site.peers[SERVER]
        assert [site.request(SERVER, "hello", hello, timeout=20) for _ in range(3)] == [b"", b"", b""]
        assert site.peers[SERVER] is connection
        assert {name: idle.rows["site-1"][name] for name in ("jobs", "gpus", "gigabytes")} == {
            "jobs": 3, "gpus": 2, "gigabytes": 1.5
        }  # fmt: skip
        desk.link.pass_on("", theirs[0])
        _, files, *_ = socket.recv_fds(theirs[1], 1, 1)
        assert len(files) == 1
        os.close(files[0])
        assert "a run begins" in caplog.text
        idle.rows.clear()
        with pytest.raises(Unwelcome, match="a run has begun"):
            idle._on_hello("site-1", hello, memoryview(b""))
        assert not idle.rows
    finally:
        site.stop()
        desk.link.stop()
        idle.link.stop()
        for end in theirs:
            end.close()


@pytest.mark.long
def test_an_experiment_waits_for_a_site_until_it_is_started_again_with_what_it_needs(tmp_path: Path) -> None:
    made = Sites(provisioned(tmp_path / "credentials"))
    queue, toml = ExperimentQueue(made.folder / "server"), made.folder / "site-1" / "site.toml"
    before, more = toml.read_text(), "[policy]\njobs = { gigabytes = 8 }\n"
    for name in SITES:
        (made.folder / name / "site.toml").write_text(before + (more if name != "site-1" else ""))
        made.start(name)
    queued(made, tmp_path, "a", 1)
    queued(made, tmp_path, "b", 1, needs={"gigabytes": 8})
    server = Process(made.folder / "server", tmp_path / "log")
    try:
        until(lambda: "site-1: runtime.needs has gigabytes = 8" in queue.entry(2).why)
        assert [entry.state for entry in queue.entries()] == ["finished", "waiting"]
        made.kill("site-1", signal.SIGTERM)
        toml.write_text(before + more)
        made.start("site-1")
        until(lambda: queue.entry(2).state != "waiting")
        until(lambda: queue.entry(2).over)
        assert (queue.entry(2).state, queue.entry(2).why) == ("finished", "")
    finally:
        server.end(signal.SIGTERM)
        for name in SITES:
            made.kill(name, signal.SIGTERM)


def test_less_priority_overtakes_nobody_and_what_never_fits_holds_up_nobody(jobs: JobProcesses, tmp_path: Path) -> None:
    states_of(jobs, jobs=2, gpus=1)
    needs = "[runtime]\nkind = 'federation'\nneeds = {{ gpus = {} }}\n"
    for label, gpus, priority in (("huge", 9, 9), ("first", 1, 0), ("urgent", 1, 5), ("light", 0, -1)):
        jobs._queue.add(label, needs.format(gpus), tmp_path / label, priority=priority)
    assert in_slots(jobs) == {0: "urgent"}
    assert "site-1: runtime.needs has gpus = 9, and this site states 1" in jobs._queue.entry(1).why
    jobs._jobs.clear()
    jobs._queue.change(jobs._queue.entry(3), state="finished")
    assert in_slots(jobs) == {0: "first", 1: "light"}


@pytest.mark.parametrize("text", ["[runtime]\nneeds = 3", "not toml", "[runtime]\npatience = -1"])
def test_settings_that_cannot_be_read_fail_alone(text: str, jobs: JobProcesses, tmp_path: Path) -> None:
    jobs._queue.add("bad", text, tmp_path / "bad")
    jobs._queue.add("good", "rounds = 1", tmp_path / "good")
    assert in_slots(jobs) == {0: "good"}
    assert jobs._queue.entry(1).state == "failed"


def test_what_the_last_process_of_a_slot_wrote_sets_no_experiment_aside(jobs: JobProcesses, tmp_path: Path) -> None:
    """An experiment that takes longer to load than its patience had its turns in vain, for ever."""
    jobs._queue.add("a", "", tmp_path / "a")
    in_slots(jobs)
    now = time.time()

    def stands_still(began: float, waits: float, state: str = "waiting for 2 sites") -> bool:
        """Return it for a process that began, and has waited, so many seconds ago."""
        activity = {"state": state, "since": now - waits}
        write_private(jobs._server.folder / "status.json", json.dumps({"sites": [], "activity": activity}))
        started = datetime.fromtimestamp(now - began, UTC).isoformat(timespec="seconds")
        job = replace(jobs._jobs[0], entry=replace(jobs._jobs[0].entry, started=started))
        return jobs._stands_still(0, job)

    assert stands_still(began=2000, waits=700)
    assert not stands_still(began=2000, waits=500)
    assert not stands_still(began=2000, waits=700, state="running")
    assert not stands_still(began=700, waits=2000)  # it is the last process that waited, and this one is loading


def test_an_experiment_whose_process_hangs_every_time_fails(
    jobs: JobProcesses, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is alone was started again for ever."""
    jobs._queue.add("a", "", tmp_path / "a")
    jobs._queue.add("b", "", tmp_path / "b")
    states = []
    for _ in range(3):
        jobs._queue.change(jobs._queue.entry(1), state="running", slot=0)
        job = Job(jobs._queue.entry(1), None, None, Needs(), None, 600.0, ends="hangs")  # type: ignore[arg-type]
        jobs._settle(job, -9)
        states.append(jobs._queue.entry(1).state)
    assert states == ["waiting", "waiting", "failed"]
    assert jobs._queue.entry(1).why.startswith("its process was lost 3 times: the last one hung and was killed")
    assert caplog.text.count("makes room for others") == 2
    assert jobs._queue.entry(2).state == "waiting"


@pytest.mark.long
@pytest.mark.parametrize("hangs", ["its process", "a site that it needs"])
def test_an_experiment_that_hangs_is_set_aside_and_goes_on_after_the_next(hangs: str, tmp_path: Path) -> None:
    """The next one is not in its place only because sites take part in one at a time."""
    made = Sites(provisioned(tmp_path / "credentials"))
    for name in SITES:
        made.start(name)
    queue, runs = ExperimentQueue(made.folder / "server"), [tmp_path / "a", tmp_path / "b"]
    first = queued(made, tmp_path, "a", 40, wait_for="all", patience=3.0)
    server, stopped = Process(made.folder / "server", tmp_path / "log"), list[int]()
    try:
        until(lambda: version(runs[0]) > 2)
        stopped = [made.running["site-3"].pid if "site" in hangs else running_process(runs[0]) or 0]
        os.kill(stopped[0], signal.SIGSTOP)
        queued(made, tmp_path, "b", 3, wait_for=2, patience=3.0)
        until(lambda: queue.entry(2).state == "finished")
        assert (queue.entry(1).state, queue.entry(1).set_aside > 0) == ("waiting", True)
        if "site" in hangs:
            os.kill(stopped.pop(), signal.SIGCONT)
        until(lambda: queue.entry(1).state == "finished")
    finally:
        for process in stopped:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
        server.end(signal.SIGTERM)
        for name in SITES:
            made.kill(name, signal.SIGTERM)
    trained = [(row["version"], row["client"]) for row in opened(runs[0]).results if row["kind"] == "train"]
    assert trained == [(step, client) for step in range(1, 41) for client in range(3)]
    assert torch.equal(opened(runs[0]).cluster_models[0], carry_out(first).cluster_models[0])


class Address:
    """The name under which sites reach the server: it leads to one address of this machine, or to another."""

    def __init__(self, port: int) -> None:
        self.host, self._target = "127.0.0.2", port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._open = list[socket.socket]()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            try:
                far = socket.create_connection((self.host, self._target))
            except OSError:
                near.close()
                continue
            self._open += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    @staticmethod
    def _carry(one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def leads_to(self, host: str) -> None:
        self.host = host
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.mark.long
@pytest.mark.parametrize("hangs", ["both processes", "the queue", "nothing"])
def test_a_second_server_takes_over_in_the_middle_of_a_step_and_the_first_writes_nothing_more(
    hangs: str, tmp_path: Path
) -> None:
    """From one that hangs, once it has given no sign of life for some seconds; from one that is killed, at once."""
    made = Sites(provisioned(tmp_path / "credentials"))
    credentials, out = made.folder / "server", tmp_path / "a"
    address = Address(read(credentials).port)
    for name in SITES:
        file = made.folder / name / "credentials.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"port": address.port}))
        made.start(name)
    experiment = queued(made, tmp_path, "a", 60, recipe="scaffold", wait_for="all")
    first = Process(credentials, tmp_path / "first", "--listen", "127.0.0.2")
    servers, stopped = [first], list[int]()
    try:
        until(lambda: version(out) > 2)
        servers.append(
            second := Process(credentials, tmp_path / "second", "--listen=127.0.0.3", "--standby", "--expiry=15")
        )
        until(lambda: "standing by until process" in second.log.read_text())
        made.running["site-1"].send_signal(signal.SIGSTOP)  # so a step is under way
        job = running_process(out) or 0
        stopped = {"both processes": [job, first.process.pid], "the queue": [first.process.pid], "nothing": []}[hangs]
        for process in stopped:
            os.kill(process, signal.SIGSTOP)
        if hangs == "nothing":
            first.process.kill()
            first.process.wait()
        until(lambda: "takes over" in second.log.read_text())
        address.leads_to("127.0.0.3")
        made.running["site-1"].send_signal(signal.SIGCONT)
        until(lambda: version(out) > 10)
        for process in stopped:
            os.kill(process, signal.SIGCONT)
        if hangs != "nothing":
            assert first.process.wait(60) == 1
            assert "another server has taken the lease" in first.log.read_text()
            assert "Traceback" not in first.log.read_text()
        until(lambda: ExperimentQueue(credentials).entry(1).state == "finished")
    finally:
        for process in stopped:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
        for server in servers:
            if server.process.poll() is None:
                server.end(signal.SIGTERM)
        for name in SITES:
            made.kill(name, signal.SIGTERM)
    run, calm = opened(out), carry_out(experiment)
    trained = [(row["version"], row["client"], row["status"]) for row in run.results if row["kind"] == "train"]
    assert trained == [(step, client, "ok") for step in range(1, 61) for client in range(3)]
    assert torch.equal(run.cluster_models[0], calm.cluster_models[0])
    for folder in (credentials, *(made.folder / name for name in SITES)):
        assert main(["audit", str(folder)]) in (None, 0)
