"""What an operator meets in months: full and read-only disks, clocks, certificates.  Nothing is lost by them."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from piebald.cli import main, queueing
from piebald.cli.app import SharedOptions
from piebald.contracts import Task
from piebald.core.errors import RunFolderError, SettingError
from piebald.experiments.run_settings import RunSettings
from piebald.federation.credentials import audit, party_files, provisioning
from piebald.federation.credentials.audit import AuditLog
from piebald.federation.credentials.party_files import DiskWrites, Ended
from piebald.federation.credentials.revocation import ExpiryWatch
from piebald.federation.hub.run_terms import terms
from piebald.federation.link import tls
from piebald.federation.link.messaging import Link, serve
from piebald.federation.link.tls import context
from piebald.federation.link.wire_format import CheckRequest, encode
from piebald.federation.operate import machine_checks
from piebald.federation.operate.experiment_queue import ExperimentQueue
from piebald.federation.operate.machine_checks import Check, check_certificate
from piebald.federation.site import client_store
from piebald.federation.site.client_runtime import FederationClient
from piebald.federation.site.client_session import ClientSession
from piebald.federation.site.client_store import ClientStore
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_check import check_site, site_machine
from piebald.federation.site.site_process import site_work
from piebald.privacy.ledger import RowLedger
from piebald.runs.prepare import prepare
from piebald.storage.lock import RunLock
from piebald.storage.store import RunStore

from .conftest import provisioned, settings, until
from .test_deploy import described
from .test_policy import prepared
from .test_site_choice import RUN, bring, site, welcome

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Full:
    """A disk that takes nothing while it is full."""

    def __init__(self) -> None:
        self.full, self.refused = False, 0

    def of(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def written(*given: Any, **more: Any) -> Any:
            if self.full:
                self.refused += 1
                raise OSError(*FULL.args)
            return write(*given, **more)

        return written


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Full:
    """The disk of a site."""
    made = Full()
    monkeypatch.setattr(party_files, "PAUSE", 0.01)
    for kind, names in ((ClientStore, ("finish", "confirm")), (RowLedger, ("add_update",)), (AuditLog, ("write",))):
        for name in names:
            monkeypatch.setattr(kind, name, made.of(getattr(kind, name)))
    return made


def test_a_site_whose_disk_is_full_trains_and_keeps_its_result_until_there_is_room(
    tmp_path: Path, disk: Full, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, its training thread ended with the first write that failed, and the site never trained again."""
    made = site(provisioned(tmp_path / "credentials"), prepared({"name": "fedavg"}))
    threading.Thread(target=made._train, daemon=True).start()
    assert made.session.runner is not None
    model = made.session.runner.work.initial[: made.session.runner.work.layout.shared]
    disk.full = True
    bring(made, Task(1, 0, 0, {"model": model}))
    until(lambda: disk.refused > 3)
    assert made.session.next_delivery() is None  # no update leaves that is not counted
    assert "cannot be written" in made.waits_for()
    assert "no space left on device" in made.waits_for()
    disk.full = False
    delivery = until(made.session.next_delivery)
    assert (delivery.id, made.session.runner.ledger.updates) == (1, 1)
    bring(made, Task(2, 0, 1, {"model": model}))  # and it goes on
    until(lambda: made.session.runner.ledger.updates == 2)
    made.stop()
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    (line,) = [one for one in said if "the ledger cannot be written" in one]
    assert line.endswith("(no space left on device): make room, or mend it; it is tried again every 0.01 seconds")
    assert "cannot be written" not in made.waits_for()


def test_a_site_that_is_stopped_while_its_disk_is_full_ends(tmp_path: Path, disk: Full) -> None:
    made = site(provisioned(tmp_path / "credentials"), prepared({"name": "fedavg"}))
    thread = threading.Thread(target=made._train, daemon=True)
    thread.start()
    assert made.session.runner is not None
    disk.full = True
    bring(made, Task(1, 0, 0, {"model": made.session.runner.work.initial[: made.session.runner.work.layout.shared]}))
    until(lambda: disk.refused)
    made.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_a_site_whose_disk_is_full_before_its_first_line_waits(tmp_path: Path, disk: Full) -> None:
    """Before, it ended, with a code with which its service does not start it again."""
    made = site(provisioned(tmp_path / "credentials"), prepared({"name": "fedavg"}))
    disk.full = True
    ended = list[str]()
    thread = threading.Thread(target=lambda: ended.append(made.run()), daemon=True)
    thread.start()
    until(lambda: disk.refused > 3)
    assert not made._audit.path.exists()
    disk.full = False
    until(lambda: made._audit.path.exists() and "started" in made._audit.path.read_text())
    made.stop()
    thread.join(60)
    assert ended == ["stopped"]


def test_a_site_without_free_descriptors_reads_its_files_and_its_rows_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, its process ended, or it refused the run for as long as it lived."""
    none, folder = OSError(errno.EMFILE, os.strerror(errno.EMFILE)), provisioned(tmp_path / "credentials")
    made = site(folder, prepared({"name": "fedavg"}))
    bring(made, Task(1, 0, 0, {"model": made.session.runner.work.initial[: made.session.runner.work.layout.shared]}))
    found = made.session.start_training(1)
    assert found is not None
    made._train_for(*found)
    with monkeypatch.context() as short:
        short.setattr(client_store, "opened_tensors", raising(none))
        short.setattr(audit, "read_text", raising(none))
        with pytest.raises(OSError, match="Too many open files"):
            ClientStore(folder / "site-1" / "state" / RUN)
        with pytest.raises(OSError, match="Too many open files"):
            audit.noted_head(made._audit.path)
    assert [done.id for done in ClientStore(folder / "site-1" / "state" / RUN).done] == [1]
    terms_of_run, prepare_run = made._terms, made._prepare
    made.session.accept_terms("", None, {}, "")
    with monkeypatch.context() as short:
        short.setattr(made, "_prepare", raising(SettingError("its rows cannot be used"), none))
        with pytest.raises(OSError, match="Too many open files"):
            made._accept_or_refuse(welcome(), bytearray(terms_of_run))
    assert (made.session.terms, made.session.refused) == ("", "")
    assert made._prepare == prepare_run
    made._accept_or_refuse(welcome(), bytearray(terms_of_run))
    assert made.session.runner is not None


def raising(error: Exception, cause: Exception | None = None) -> Callable[..., Any]:
    def called(*_: Any, **__: Any) -> Any:
        raise error from cause

    return called


def test_a_result_that_the_server_has_is_noted_when_there_is_room(
    tmp_path: Path, disk: Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the thread that delivers ended, and no further result left the site."""
    made = site(provisioned(tmp_path / "credentials"), prepared({"name": "fedavg"}))

    def sent(*_: Any, **__: Any) -> str:
        disk.full = True
        return "done"

    monkeypatch.setattr("piebald.federation.site.gate.send_body", sent)
    done = threading.Thread(target=lambda: made.deliver(delivery), daemon=True)
    assert made.session.runner is not None
    bring(made, Task(1, 0, 0, {"model": made.session.runner.work.initial[: made.session.runner.work.layout.shared]}))
    found = made.session.start_training(1)
    assert found is not None
    made._train_for(*found)
    delivery = made.session.next_delivery()
    assert delivery is not None
    done.start()
    until(lambda: disk.refused > 2)
    disk.full = False
    done.join(60)
    events = [json.loads(line)["event"] for line in made._audit.path.read_text().splitlines()]
    assert events == ["sent", "delivered"]


def test_a_welcome_that_cannot_be_written_down_is_taken_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a site that could not make the folder of a run went on with that of the run before."""
    session, full = ClientSession(tmp_path / "state"), Full()
    session.take_welcome(welcome(run="aa"))
    monkeypatch.setattr(Path, "mkdir", full.of(Path.mkdir))
    full.full = True
    with pytest.raises(OSError, match="No space left"):
        session.take_welcome(welcome(run="bb", over=True))
    assert session.welcome is not None
    assert session.welcome.run == "aa"
    full.full = False
    before = session.take_welcome(welcome(run="bb", over=True))
    assert before is not None
    assert not before.over  # so what is done at the end of a run is done now
    assert session.store is not None
    assert session.store.folder.name == "bb"


def test_writes_are_tried_again_and_told_once_by_what_they_are_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(party_files, "PAUSE", 0.01)
    over, reasons = threading.Event(), [FULL, FULL, OSError(errno.EROFS, os.strerror(errno.EROFS))]
    writes = DiskWrites(tmp_path, over)

    def write() -> None:
        if reasons:
            raise reasons.pop(0)

    with caplog.at_level(logging.INFO):
        writes.insist("a result", write)
        assert writes.attempt("the status", lambda: None)  # another write that succeeds says nothing of the first
    said = [record.getMessage() for record in caplog.records]
    assert [one.partition(" cannot")[0] for one in said[:2]] == ["a result", "a result"]
    assert "no space left on device" in said[0]
    assert "read-only file system" in said[1]
    assert said[2:] == [f"a result is written to {tmp_path} again"]
    assert writes.trouble == ""
    over.set()
    with pytest.raises(Ended):
        writes.insist("a result", Full.of(_always_full(), lambda: None))
    assert writes.trouble == f"{tmp_path} cannot be written (no space left on device): make room, or mend it"
    reasons.append(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert not writes.attempt("a result", write)
    assert "make room" not in writes.trouble  # which would not help
    assert "limit of open files" in writes.trouble
    with pytest.raises(ZeroDivisionError):  # what is no matter of the disk is not hidden
        writes.attempt("a result", lambda: 1 // 0)


def _always_full() -> Full:
    made = Full()
    made.full = True
    return made


def test_a_message_that_meets_a_full_disk_is_dropped_with_a_reason() -> None:
    said = list[str]()

    def fails(*_: Any) -> bytes:
        raise OSError(*FULL.args)

    assert serve((CheckRequest, fails), "north", encode(CheckRequest(version="0")), said.append) is None
    assert said == ["a message of north is not answered: no space left on device"]


def test_a_queue_ends_at_a_full_disk_and_keeps_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it failed one experiment after another."""
    own = provisioning.read(provisioned(tmp_path / "credentials") / "server")
    waiting = ExperimentQueue(own.folder)
    first = waiting.add("fedavg", "", tmp_path / "a")

    def part(*_: Any) -> None:
        waiting.change(first, state="running")
        raise RunFolderError("server step 3 could not be recorded in a: the disk is full: make room and try again")

    monkeypatch.setattr(queueing, "_carry_out", part)
    lacks = Check("disk", False, "1 MB are free in /srv, 105 MB may be needed")
    monkeypatch.setattr("piebald.federation.operate.machine_checks.check_space", lambda _: lacks)
    jobs = "piebald.federation.operate.job_processes"
    for name in ("end_with_parent", "take_connections"):  # which this process is not to do
        monkeypatch.setattr(f"{jobs}.{name}", lambda *_: None)
    with pytest.raises(SettingError, match=r"step 3 could not be .*1 MB are free in /srv.* piebald server"):
        queueing.serve_job(own.folder, 1, 0, 0, SharedOptions(quiet=True))
    assert waiting.entry(1).state == "running"  # which the next start goes on with
    room = Check("disk", True, "there is room")
    monkeypatch.setattr("piebald.federation.operate.machine_checks.check_space", lambda _: room)
    queueing.serve_job(own.folder, 1, 0, 0, SharedOptions(quiet=True))
    assert waiting.entry(1).state == "failed"  # where there is room, it was something else


@pytest.mark.parametrize(("code", "says"), [(errno.ENOSPC, "no space left"), (errno.EROFS, "read-only file system")])
def test_a_disk_that_cannot_be_written_is_one_sentence_with_exit_code_2(
    code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, it was an unexpected error with exit code 1, after which a service is started again and again."""
    credentials = provisioned(tmp_path / "credentials") / "site-1"

    def fails(*_: Any) -> None:
        raise OSError(code, os.strerror(code), str(credentials / "x"))

    monkeypatch.setattr("piebald.cli.predicting.clear_parts", fails)
    assert main(["client", str(credentials)]) == 2
    assert f"{credentials / 'x'} cannot be written or read ({says}" in capsys.readouterr().err
    monkeypatch.setattr(RunLock, "__init__", fails)
    assert main(["client", str(credentials)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{credentials} cannot be used: ")
    assert "unexpected" not in said


def remade(folder: Path, authority: Path, begins: datetime, ends: datetime) -> None:
    """Replace a party's certificate by one of other times."""
    found = x509.load_pem_x509_certificate((folder / "certificate.pem").read_bytes())
    key: Any = serialization.load_pem_private_key((authority / "key.pem").read_bytes(), None)
    made = x509.CertificateBuilder().subject_name(found.subject).issuer_name(found.issuer)
    made = made.public_key(found.public_key()).serial_number(found.serial_number)
    made = made.not_valid_before(begins).not_valid_after(ends)
    for extension in found.extensions:
        made = made.add_extension(extension.value, critical=extension.critical)
    signed = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    (folder / "certificate.pem").write_bytes(signed)


TIMES = {  # days from now
    "expired": (-3, -1, r"it expired on .*, and here it is .*: ask for new credentials"),
    "not yet": (1, 3, r"it is valid from .* on, and here it is .*: set the clock"),
}


@pytest.mark.parametrize("party", ["server", "site-1"])
@pytest.mark.parametrize("case", TIMES)
def test_a_certificate_out_of_its_time_is_refused_at_the_start_and_by_check(
    party: str, case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    credentials, now = provisioned(tmp_path / "credentials"), datetime.now(UTC).replace(microsecond=0)
    first, last, says = TIMES[case]
    remade(credentials / party, credentials / "authority", now + timedelta(days=first), now + timedelta(days=last))
    found = check_certificate(credentials / party)
    assert found.fine is False
    assert re.fullmatch(says, found.told)
    (tmp_path / "experiment.toml").write_text(settings({"name": "fedavg"}).text())
    command = ["client", str(credentials / party)]
    if party == "server":
        command = [
            "server",
            str(credentials / party),
            str(tmp_path / "experiment.toml"),
            "--out",
            str(tmp_path / "run"),
        ]
        assert main([*command, "--check"]) == 2
        assert found.told in capsys.readouterr().out
    assert main(command) == 2
    assert f"certificate: {found.told}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("party", "case", "says"),
    [
        ("server", "expired", "its certificate has expired (this machine's clock says 2"),
        ("server", "not yet", "its certificate is not valid yet (this machine's clock says 2"),
        ("site-1", "expired", "its certificate has expired (this machine's clock says 2"),
        ("site-1", "not yet", "its certificate is not valid yet (this machine's clock says 2"),
    ],
)
def test_a_handshake_says_what_is_wrong_with_the_other_end_s_certificate(
    party: str, case: str, says: str, tmp_path: Path
) -> None:
    """Before, both ends logged CERTIFICATE_VERIFY_FAILED."""
    credentials, now = provisioned(tmp_path / "credentials"), datetime.now(UTC).replace(microsecond=0)
    first, last, _ = TIMES[case]
    remade(credentials / party, credentials / "authority", now + timedelta(days=first), now + timedelta(days=last))
    told = [tls.reason(error) for error in handshake(credentials)]
    assert any(one.startswith(says) for one in told), told


def handshake(credentials: Path) -> list[ssl.SSLError]:
    """Connect a site to a server in memory; returns the errors of both ends."""
    there, back, errors = ssl.MemoryBIO(), ssl.MemoryBIO(), list[ssl.SSLError]()
    made = [context(credentials / "site-1", False), context(credentials / "server", True)]
    for one in made:
        one.sslsocket_class = ssl.SSLSocket
    pair = [made[0].wrap_bio(back, there), made[1].wrap_bio(there, back, server_side=True)]
    for end in pair * 3:
        with suppress(ssl.SSLWantReadError):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                raise
            except ssl.SSLError as error:
                errors.append(error)
    return errors


def test_what_alerts_say_is_told_in_words() -> None:
    error = ssl.SSLError(1, "[SSL: SSLV3_ALERT_CERTIFICATE_EXPIRED] sslv3 alert certificate expired")
    error.reason = "SSLV3_ALERT_CERTIFICATE_EXPIRED"
    assert tls.reason(error).startswith("this end's certificate has expired")
    assert tls.refusal("hub", error).startswith("hub does not accept this end: this end's certificate has")
    error.reason = "TLSV1_ALERT_UNKNOWN_CA"
    assert "another federation" in tls.reason(error)
    error.reason = ""
    assert tls.reason(error) == "the connection broke off"
    error = ssl.SSLEOFError(8, "EOF occurred in violation of protocol")
    error.reason = "UNEXPECTED_EOF_WHILE_READING"
    assert tls.reason(error) == "the connection broke off"


def test_a_proxy_whose_server_is_away_is_no_other_federation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before, a site said that the other end is not this federation's: UNEXPECTED_EOF_WHILE_READING."""
    folder, reported = provisioned(tmp_path), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = proxy.getsockname()[:2]
        link = Link("site-1", address, folder / "site-1", lambda _: True, reported.append)
        link.start()
        try:
            while not link.trouble:
                taken, _ = proxy.accept()
                taken.recv(1 << 14)
                taken.shutdown(socket.SHUT_RDWR)
                taken.close()
        finally:
            link.stop()
    assert link.trouble == "the connection broke off before it was made"
    assert "the connection broke off before it was made; it is tried again every second" in caplog.text
    assert reported == []


def test_a_process_says_when_its_own_certificate_has_expired(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = provisioned(tmp_path) / "site-1"
    found = x509.load_pem_x509_certificate((folder / "certificate.pem").read_bytes())
    watch, ends_at = ExpiryWatch(folder), found.not_valid_after_utc
    for when in (ends_at - timedelta(hours=1), ends_at + timedelta(hours=1), ends_at + timedelta(hours=2)):
        watch.judge(found, when)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "expires on" in said[0]
    assert "expired on" in said[1]
    assert "nobody accepts it" in said[1]


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    """The command of a server whose credentials and experiment are there."""
    credentials = provisioned(tmp_path / "credentials") / "server"
    (tmp_path / "experiment.toml").write_text(settings({"name": "fedavg"}).text())
    return ["server", str(credentials), str(tmp_path / "experiment.toml"), "--out", str(tmp_path / "run")]


def test_a_second_server_is_refused_before_it_listens(
    three: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the same credentials, on the same run folder, and on the same port."""
    lock = RunLock(Path(three[1]))
    for more in ([], ["--check"]):
        assert main([*three, *more]) == 2
        assert f"{three[1]} is being written to by process {os.getpid()}" in capsys.readouterr().err
    lock.release()
    with RunStore.create(tmp_path / "run", {"label": "fedavg", "seed": 0, "rounds": 3}):
        assert main([*three, "--check"]) == 2
        assert "run folder" in capsys.readouterr().out
        assert main(three) == 2
        assert str(tmp_path / "run") in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", provisioning.read(Path(three[1])).port))
        taken.listen()
        assert main([*three, "--check"]) == 2
        assert "cannot be listened on (address already in use): stop what uses it" in capsys.readouterr().out
        assert main([*three[:-1], str(tmp_path / "other")]) == 2
        assert "port: port" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert not (Path(three[1]) / "audit.jsonl").exists()  # none of them began


class Elsewhere:
    """A folder that no other one shares a disk with."""

    def __init__(self, folder: Path) -> None:
        self.st_dev = len(folder.parts)

    def stat(self) -> Elsewhere:
        """Return what is looked at of a status of a file."""
        return self


def test_both_disks_of_a_server_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "credentials").mkdir()
    assert len(machine_checks.server_disks(tmp_path / "credentials", tmp_path / "runs" / "new")) == 1
    monkeypatch.setattr(machine_checks, "_existing", Elsewhere)
    monkeypatch.setattr(machine_checks, "check_space", lambda folder: Check("disk", False, str(folder)))
    found = machine_checks.server_disks(tmp_path / "credentials", tmp_path / "runs" / "new")
    assert [one.told for one in found] == [str(tmp_path / "runs" / "new"), str(tmp_path / "credentials")]


def test_a_name_that_is_not_found_is_said_so_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, tries = provisioned(tmp_path / "credentials") / "site-1", list[int]()

    def unknown(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    (cross,) = [one for one in check_site(site_work(folder, None, None), patience=60.0) if one.what == "server"]
    assert cross.fine is False
    assert "does not answer (name or service not known): compare host and port" in cross.told
    made = FederationClient(provisioning.read(folder), lambda _: None, policy=Policy())  # type: ignore[arg-type,return-value]
    thread, before = threading.Thread(target=made.run, daemon=True), len(tries)
    thread.start()
    until(lambda: len(tries) > before + 2)
    assert "name or service not known" in made.waits_for()
    made.stop()
    thread.join(60)
    said = [one.getMessage() for one in caplog.records if "name or service not known" in one.getMessage()]
    assert said[-1].endswith("name or service not known; it is tried again every second")


def test_rows_that_disappear_are_one_sentence_at_both_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A site that stays for a further run, whose file has gone since the last one."""
    folder, rows = provisioned(tmp_path / "credentials", ["north", "south", "east"]) / "north", tmp_path / "rows.npz"
    np.savez(rows, x=np.random.default_rng(0).normal(size=(60, 30)).astype("f4"), y=np.arange(60) % 2)
    work = site_work(folder, str(rows), None)
    assert all(one.fine for one in site_machine(work))
    made = described("fedavg")
    plan = made.plan()
    run = prepare(
        next(iter(plan.recipes.values())), plan.clients, plan.model, RunSettings(seed=1, runtime="federation")
    )
    names = ["north", "south", "east"]
    values = json.loads(terms(run.work, made.table(), names, names, plan.clients.classes))
    assert work(values).client == 0
    rows.unlink()
    (cross,) = [one for one in site_machine(work) if one.fine is False]
    assert "there is no file or folder" in cross.told
    with pytest.raises(SettingError, match="its rows cannot be used for this run; the site's own log says why"):
        work(values)
    said = caplog.records[-1].getMessage()
    assert f"cannot be used: there is no file or folder {str(rows)!r}" in said
    assert said.endswith("; mend them, and start this site again")
