"""Certificates that were renewed, revoked, that have expired, or that stand beside the wrong key."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import pytest
from cryptography import x509

from piebald.cli import main
from piebald.core.errors import SettingError
from piebald.federation.credentials import certificates, provisioning, revocation
from piebald.federation.credentials.certificates import Authority, CertificateSigner, SignatureCheck
from piebald.federation.credentials.provisioning import Description
from piebald.federation.credentials.revocation import Admission, ExpiryWatch, name_in
from piebald.federation.hub.local_federation import free_port
from piebald.federation.link import tls
from piebald.federation.link.tls import SharedSocket
from tests.federation.conftest import until

from .server_entry import Entry


class Gate:
    """A server's listener, as a federation has it, and sites that connect to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, ("127.0.0.1", free_port())
        described = {"host": "127.0.0.1", "port": self.address[1], "days": 10, "sites": ["north", "south"]}
        self.described = Description.model_validate(described)
        provisioning.provision(self.described, folder)
        self.shut: list[str] = []
        self.opened: list[ssl.SSLSocket] = []
        self.start()

    def start(self) -> None:
        admission = Admission(self.folder / "server")

        def reject_reason(certificate: dict[str, object]) -> str | None:
            reason = admission.reject_reason(certificate)
            self.shut += [] if reason is None else [f"{name_in(certificate)}: {reason}"]
            return reason

        def echo(secured: ssl.SSLSocket) -> None:
            with suppress(OSError):
                while data := secured.recv(10):
                    secured.sendall(data)

        contexts = tls.RenewedContext(self.folder / "server", True)
        self.listener = tls.Listener(self.address, contexts, echo, lambda *_: None, reject_reason)
        threading.Thread(target=self.listener.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self.listener.shutdown()
        self.listener.server_close()

    def connect(self, folder: Path) -> ssl.SSLSocket:
        made = tls.context(folder, False)
        with closing(socket.create_connection(self.address)) as plain:  # which the other one takes over
            connection = made.wrap_socket(plain)
        self.opened.append(connection)
        connection.settimeout(20)
        return connection

    def served(self, connection: ssl.SSLSocket) -> bool:
        """Whether the server answers on a connection."""
        try:
            connection.sendall(b"x")
            return connection.recv(1) == b"x"
        except OSError:
            return False

    def admits(self, folder: Path) -> bool:
        try:
            return self.served(self.connect(folder))
        except OSError:
            return False


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "credentials")
    yield made
    made.stop()
    for connection in made.opened:
        connection.close()


def test_a_revoked_site_is_shut_out_at_once_and_after_a_restart_until_it_is_renewed(gate: Gate, tmp_path: Path) -> None:
    stolen = Path(shutil.copytree(gate.folder / "north", tmp_path / "stolen"))
    open_north, open_south = gate.connect(stolen), gate.connect(gate.folder / "south")
    assert gate.served(open_north)
    provisioning.revoke(gate.described, gate.folder, ["north"])
    until(lambda: not gate.served(open_north), 20)  # a connection that was open ends
    assert gate.served(open_south)
    assert not gate.admits(stolen)
    gate.stop()
    gate.start()
    assert not gate.admits(stolen)
    provisioning.renew(gate.described, gate.folder, ["north"])
    assert gate.admits(gate.folder / "north")
    assert not gate.admits(stolen)
    (gate.folder / "server" / "revoked.json").write_text("[")  # a list that cannot be read frees nobody
    assert not gate.admits(stolen)
    with pytest.raises(SettingError, match=r"revoked\.json cannot be read"):
        Admission(gate.folder / "server")
    assert all(line.startswith("north: its certificate was revoked on 20") for line in gate.shut)


def test_certificates_are_renewed_while_connections_are_open(gate: Gate, tmp_path: Path) -> None:
    """The authority's own certificate as well: it was made for as long as the others, and would end with them."""
    before = Path(shutil.copytree(gate.folder / "south", tmp_path / "before"))
    kept = gate.connect(gate.folder / "north")
    longer = gate.described.model_copy(update={"days": 20})
    made = provisioning.renew(longer, gate.folder)
    assert [one.party for one in made] == ["server", "north", "south"]
    assert all(one.expires > datetime.now(UTC) + timedelta(days=19) for one in made)
    assert gate.served(kept)
    assert gate.admits(gate.folder / "north")  # new on both sides
    assert gate.admits(before)  # not renewed yet: it has until it expires
    assert json.loads((gate.folder / "federation.json").read_text())["days"] == 20


def test_an_expired_certificate_ends_its_connections(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = gate.connect(gate.folder / "north")
    assert gate.served(connection)

    class Then(datetime):
        @classmethod
        def now(cls, zone: tzinfo | None = None) -> Then:
            return cls.fromtimestamp(time.time() - 20 * 86_400, zone)

    with monkeypatch.context() as patch:
        patch.setattr(certificates, "datetime", Then)
        Authority.at(gate.folder / "authority", "federation", 10).issue(gate.folder / "south", "south", "localhost", 10)
    assert not gate.admits(gate.folder / "south")  # it ended ten days ago
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 11 * 86_400)
    until(lambda: not gate.served(connection), 20)
    ends = provisioning.read(gate.folder / "north").expires
    assert set(gate.shut) == {f"north: its certificate expired on {ends:%Y-%m-%d at %H:%M} UTC"}


def test_nothing_is_read_from_a_party_whose_certificate_has_expired(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a connection to a server whose certificate had expired went on until it broke."""
    connection = gate.connect(gate.folder / "north")
    assert gate.served(connection)
    assert isinstance(connection, SharedSocket)
    connection.share(20.0, ends=True)
    now = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + 11 * 86_400)
        with pytest.raises(OSError, match="the certificate of the other end has expired"):
            connection.recv(1)


def test_a_new_certificate_with_the_old_key_is_refused_and_a_running_end_waits_for_both(gate: Gate) -> None:
    north = gate.folder / "north"
    contexts, old = tls.RenewedContext(north, False), (north / "key.pem").read_bytes()
    first = contexts.current()
    provisioning.renew(gate.described, gate.folder, ["north"])
    new = (north / "key.pem").read_bytes()
    (north / "key.pem").write_bytes(old)
    with pytest.raises(ssl.SSLError):
        gate.connect(north)
    with pytest.raises(SettingError, match="do not belong together: copy all files of the renewed credentials"):
        provisioning.read(north)
    assert contexts.current() is first
    (north / "key.pem").write_bytes(new)
    assert contexts.current() is not first


def test_signatures_are_made_with_the_renewed_key(gate: Gate) -> None:
    signer, check = CertificateSigner(gate.folder / "north", ["north"], "ab"), None
    before = signer.sign(b"keys")
    provisioning.renew(gate.described, gate.folder, ["north"])
    after = signer.sign(b"keys")
    check = SignatureCheck(gate.folder / "south", ["north"], "ab")
    assert before[:300] != after[:300]
    assert check.check(0, b"keys", before)
    assert check.check(0, b"keys", after)


def test_a_warning_comes_once_a_day_before_a_certificate_expires(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Authority.at(tmp_path / "a", "f", 400).issue(tmp_path, "north", "localhost", 100)
    found, watch = x509.load_pem_x509_certificate((tmp_path / "certificate.pem").read_bytes()), ExpiryWatch(tmp_path)
    now = found.not_valid_after_utc
    with caplog.at_level(logging.INFO, "piebald.federation"):
        for hours in (24 * 21, 24 * 19, 24 * 19 - 5, 24 * 18):
            watch.judge(found, now - timedelta(hours=hours))
        assert [record.args[2] for record in caplog.records if isinstance(record.args, tuple)] == [19, 18]
        Authority.at(tmp_path / "a", "f", 400).issue(tmp_path, "north", "localhost", 200)
        watch.look()
    assert "was renewed: it is valid until" in caplog.text


def test_a_certificate_is_looked_at_as_soon_as_it_is_another_one_or_has_expired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, up to a minute passed."""
    Authority.at(tmp_path / "a", "f", 400).issue(tmp_path, "north", "localhost", 100)
    watch, ends = ExpiryWatch(tmp_path), ends_at(tmp_path)
    with caplog.at_level(logging.INFO, "piebald.federation"):
        watch.look()
        assert caplog.messages == []
        then = [ends]

        class Clock(datetime):
            @classmethod
            def now(cls, zone: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return then[0]

        monkeypatch.setattr(revocation, "datetime", Clock)
        watch.look()
        watch.look()
        assert len(caplog.messages) == 1
        assert f"expired on {ends:%Y-%m-%d at %H:%M} UTC" in caplog.text
        Authority.at(tmp_path / "a", "f", 400).issue(tmp_path, "north", "localhost", 200)
        watch.look()
    assert "was renewed: it is valid until" in caplog.messages[-1]


def ends_at(folder: Path) -> datetime:
    return x509.load_pem_x509_certificate((folder / "certificate.pem").read_bytes()).not_valid_after_utc


def test_credentials_of_the_format_before_are_read_and_renewed_and_later_ones_refused(tmp_path: Path) -> None:
    described = Description.model_validate({"host": "localhost", "sites": ["north"]})
    provisioning.provision(described, tmp_path)
    assert provisioning.read(tmp_path / "north").party == "north"
    settings = (tmp_path / "north" / "site.toml").read_bytes()
    provisioning.renew(described, tmp_path, ["north"])
    assert json.loads((tmp_path / "north" / "credentials.json").read_text())["format"] == 1
    assert (tmp_path / "north" / "site.toml").read_bytes() == settings
    for name in ("north/credentials.json", "federation.json"):
        path = tmp_path / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    for use in (lambda: provisioning.read(tmp_path / "north"), lambda: provisioning.provision(described, tmp_path)):
        with pytest.raises(SettingError, match="have format 2, this Piebald reads 1: install the Piebald that"):
            use()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--party", "north"], "give it with --renew"),
        (["--renew", "--party", "nord"], "there is no party 'nord': did you mean 'north'?"),
        (["--revoke", "server"], "there is no site 'server'"),
        (["--renew", "--out", "elsewhere"], "is missing: give the folder that piebald provision made, with --out"),
        (["--revoke", "north", "--out", "elsewhere"], "is missing: give the folder that piebald provision made"),
    ],
    ids=str,
)
def test_what_cannot_be_renewed_or_revoked_is_said_in_one_sentence(
    options: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("federation.toml").write_text("sites = ['north']\n")
    assert main(["provision", "federation.toml"]) == 0
    assert main(["provision", "federation.toml", "--revoke", "north", "--renew"]) == 0
    before = sorted(os.listdir("credentials/north"))
    capsys.readouterr()
    assert main(["provision", "federation.toml", *options]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert sorted(os.listdir("credentials/north")) == before
    assert not Path("elsewhere").exists()


def test_the_run_goes_on_at_once_without_a_site_that_was_shut_out_until_it_is_back(tmp_path: Path) -> None:
    """Not after `patience`, for which a synchronous round waits for a site that is silent."""
    entry = Entry(tmp_path, {"name": "fedavg"})
    try:
        entry.join("site-1")
        entry.join("site-2")
        entry.task(client=1)
        entry.wire.shut["site-2"] = "its certificate was revoked"
        lost = until(entry.result, 30)
        assert (lost.update, lost.failure) == (None, "does not take part: its certificate was revoked")
        assert list(entry.server.clients()) == [0]
        entry.join("site-2")  # with a certificate that was issued later
        assert list(entry.server.clients()) == [0, 1]
    finally:
        entry.server.close()
    told = (tmp_path / "server" / "audit.jsonl").read_text()
    assert told.count('"event":"shut out","site":"site-2","reason":"its certificate was revoked"') == 1


@pytest.mark.parametrize(
    ("reason", "ends"), [(f"{revocation.EXPIRED} on 2030-01-01", False), ("its certificate was revoked", True)]
)
def test_a_run_waits_for_the_renewal_of_a_certificate_that_expired_and_not_for_one_that_was_revoked(
    reason: str, ends: bool, tmp_path: Path
) -> None:
    entry = Entry(tmp_path, {"name": "fedavg"})
    try:
        for site in ("site-1", "site-2", "site-3"):
            entry.join(site)
            entry.wire.shut[site] = reason
        until(lambda: all(member.refused == reason for member in entry.server.shared.members), 30)
        with pytest.raises(SettingError, match=reason) if ends else nullcontext(), entry.server._changed:
            entry.server._check()
    finally:
        entry.server.close()
