"""A connection that breaks ends the wait for what was to come over it."""

from __future__ import annotations

import gc
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piebald.core.errors import SettingError
from piebald.federation.credentials import provisioning
from piebald.federation.credentials.revocation import write_revoked
from piebald.federation.link import tls
from piebald.federation.link.messaging import SERVER, FrameKind, Link, decode_frame, encode_frame
from piebald.federation.link.wire_format import Piece, Refused, Reply, TermsRequest, decode, encode
from tests import processes

from .conftest import ENVIRONMENT, provisioned, until

A_PIECE = Piece(run="ab", epoch="ab", id=1, trains=True, start=0, size=1, digest="ab")

# A server that says it was asked, and answers only if it is told to.
SERVER_SIDE = """
import sys, threading
from pathlib import Path
from piebald.federation.credentials import provisioning
from piebald.federation.link.messaging import Link
from piebald.federation.link.wire_format import Reply, TermsRequest, encode

def answer(origin, head, body):
    print("asked", flush=True)
    if sys.argv[2] == "silent":
        threading.Event().wait()
    return encode(Reply(status="known"))

credentials = provisioning.read(Path(sys.argv[1]))
link = Link(credentials.party, ("127.0.0.1", credentials.port), credentials.folder, {"site-1"}.__contains__, print)
link.on("hello", TermsRequest, answer)
link.start()
threading.Event().wait()
"""


def begin(folder: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SERVER_SIDE, str(folder / SERVER), how]
    return processes.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)


def link(folder: Path, party: str, knows: str, report: Callable[[str], None] = lambda _: None) -> Link:
    credentials = provisioning.read(folder / party)
    return Link(party, ("127.0.0.1", credentials.port), credentials.folder, knows.__eq__, report)


@pytest.fixture
def parties(tmp_path: Path) -> Iterator[tuple[Link, Link, Path]]:
    """A server that answers "known" to a hello, a site, and the folder of their credentials."""
    folder = provisioned(tmp_path / "credentials", ["site-1"])
    server, site = link(folder, SERVER, "site-1"), link(folder, "site-1", SERVER)
    server.on("hello", TermsRequest, lambda *_: encode(Reply(status="known")))
    server.start()
    site.start()
    until(lambda: site.request(SERVER, "hello", TermsRequest(start=0)) is not None)
    yield server, site, folder
    site.stop()
    server.stop()


def test_a_server_that_was_stopped_says_so_and_leaves_its_port(
    parties: tuple[Link, Link, Path], caplog: pytest.LogCaptureFixture
) -> None:
    server, site, folder = parties
    server.stop()
    until(lambda: "the server ended the connection: the server was stopped" in caplog.text)
    again = link(folder, SERVER, "site-1")
    again.on("hello", TermsRequest, lambda *_: encode(Reply(status="known")))
    again.start()
    try:
        until(lambda: site.request(SERVER, "hello", TermsRequest(start=0)) is not None)
        assert site.trouble == ""
    finally:
        again.stop()


@pytest.mark.full
def test_an_end_accuses_nobody_of_what_it_has_read_itself(tmp_path: Path) -> None:
    """Before, the thread that ended a connection read beside the one that handles frames, which then began in the
    middle of one: a site was said to have sent "a frame of kind 30", or one of 800 MB."""
    folder, said = provisioned(tmp_path / "credentials", ["site-1"]), list[str]()
    for _ in range(5):
        server, site = link(folder, SERVER, "site-1", said.append), link(folder, "site-1", SERVER)
        server.on("hello", Piece, lambda *_: encode(Reply(status="known")))
        server.start()
        site.start()
        until(lambda site=site: site.request(SERVER, "hello", A_PIECE) is not None)  # type: ignore[misc]
        over = threading.Event()

        def flood(site: Link = site, over: threading.Event = over) -> None:
            while not over.is_set():
                site.send(SERVER, "hello", A_PIECE, b"\x1e" * 50_000)

        floods = [threading.Thread(target=flood) for _ in range(2)]
        for thread in floods:
            thread.start()
        until(lambda server=server: server.received["site-1"] > 1_000_000)  # type: ignore[misc]
        server.stop()
        over.set()
        for thread in floods:
            thread.join()
        site.stop()
    assert said == []


def test_a_port_that_is_used_is_a_sentence(parties: tuple[Link, Link, Path]) -> None:
    with pytest.raises(SettingError, match=r"port \d+ cannot be listened on: address already in use"):
        link(parties[2], SERVER, "site-1").start()


def test_a_site_says_what_listens_where_its_server_should(parties: tuple[Link, Link, Path], tmp_path: Path) -> None:
    port, said = provisioning.read(parties[2] / SERVER).port, list[str]()
    foreign = provisioned(tmp_path / "foreign", ["site-1"], port=port)
    with socket.create_server(("127.0.0.1", 0)) as other:
        places = [("127.0.0.1", port), other.getsockname()[:2]]
        lost = [Link("site-1", place, foreign / "site-1", SERVER.__eq__, said.append) for place in places]
        for site in lost:
            site.start()
        try:
            taken, _ = other.accept()
            taken.sendall(b"HTTP/1.0 400 Bad request\r\n\r\n")
            until(lambda: all(site.trouble for site in lost))
        finally:
            for site in lost:
                site.stop()
            taken.close()
    why = "the server did not prove that it belongs to this federation:"
    certificate, protocol = (site.trouble for site in lost)
    assert certificate == f"{why} its certificate is of another federation: compare the credentials of both"
    assert protocol == f"{why} it does not speak TLS 1.3: compare host and port"
    assert {certificate, protocol} == set(said)


def test_a_site_that_is_shut_out_reads_the_reason_in_the_last_frame(parties: tuple[Link, Link, Path]) -> None:
    _, site, folder = parties
    write_revoked(folder / SERVER, ["site-1"])
    until(lambda: "the server ended the connection: its certificate was revoked on" in site.trouble)
    assert site.request(SERVER, "hello", TermsRequest(start=0)) is None


def test_a_party_that_the_server_does_not_list_reads_that_it_is_not_one(tmp_path: Path) -> None:
    folder, reports = provisioned(tmp_path / "credentials", ["site-1"]), list[str]()
    server, site = link(folder, SERVER, "site-2", reports.append), link(folder, "site-1", SERVER)
    server.start()
    site.start()
    try:
        until(lambda: "'site-1' is not one of this federation's parties" in site.trouble)
        assert reports == ["site-1 is not one of this federation's parties"]
    finally:
        site.stop()
        server.stop()


def test_another_version_of_the_framing_is_told_so_at_both_ends(
    parties: tuple[Link, Link, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, _, folder = parties
    port = provisioning.read(folder / SERVER).port
    made = tls.context(folder / "site-1", False)
    for opening, says in (
        (b"piebald\x63", b"version 99 of Piebald's framing, where"),
        (b"GET / HT", b"another protocol"),
    ):
        with made.wrap_socket(socket.create_connection(("127.0.0.1", port))) as secured:
            secured.settimeout(20)
            secured.sendall(opening)
            arrived = bytearray()
            with suppress(OSError):
                while piece := secured.recv(1 << 14):
                    arrived += piece
        assert says in bytes(arrived)


def test_a_reply_is_of_the_connection_that_was_asked_over(parties: tuple[Link, Link, Path]) -> None:
    """A party cannot answer what another one was asked: numbers alone do not pair replies."""
    server, site, _ = parties
    other, waiting = object(), Future[memoryview]()
    site._replies[2**40] = other, waiting  # type: ignore[assignment]
    server._open["site-1"][0].send_frame(FrameKind.REPLY, 2**40, "", b"forged")
    assert site.request(SERVER, "hello", TermsRequest(start=0)) is not None  # after it, on the same connection
    assert not waiting.done()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=600) | st.tuples(st.integers(0, 5), st.integers(0, 255), st.binary(max_size=300)))
def test_bytes_are_a_frame_or_refused(found: bytes | tuple[int, int, bytes]) -> None:
    if isinstance(found, tuple):
        kind, name, rest = found
        found = struct.pack("<IBQB", 10 + len(rest), kind, 1, name) + rest
    try:
        frame = decode_frame(bytearray(found))
    except Refused:
        return
    assert encode_frame(frame.kind, frame.number, frame.topic, frame.message)[4:] == found[4:]


@pytest.mark.full
def test_nobody_waits_for_a_server_that_died_and_the_one_after_it_is_reached(tmp_path: Path) -> None:
    folder = provisioned(tmp_path / "credentials", ["site-1"])
    credentials = provisioning.read(folder / "site-1")
    site = Link(
        credentials.party,
        (credentials.host, credentials.port),
        credentials.folder,
        SERVER.__eq__,
        lambda sentence: None,
    )
    site.start()
    over = threading.Event()

    def ask(timeout: float) -> memoryview:
        while (
            answer := site.request(SERVER, "hello", TermsRequest(start=0), timeout=timeout)
        ) is None and not over.is_set():
            over.wait(0.1)
        return answer

    server = begin(folder, "silent")
    with ThreadPoolExecutor(1) as pool:
        try:
            waiting = pool.submit(ask, 600.0)  # as long as nobody answers
            assert server.stdout is not None
            assert server.stdout.readline() == "asked\n"
            server.kill()
            server.communicate()
            server = begin(folder, "ready")
            assert decode(Reply, waiting.result(timeout=300))[0].status == "known"
        finally:
            over.set()
            server.kill()
            server.communicate()
            site.stop()


def test_a_server_that_ends_connections_unanswered_is_told_from_one_that_went_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = link(provisioned(tmp_path / "credentials", ["site-1"]), "site-1", SERVER)
    for answered in (True, False):
        connection = Mock(farewell="", ended=False, expires="2033-05-18", address="127.0.0.1")
        connection.name = SERVER
        site._register(connection)
        site._is_answered = answered
        site._forget(connection)
    first, second = (record.getMessage() for record in caplog.records)
    assert "ended the connection;" in first
    assert "ended the connection before it answered;" in second
    site._on_refused("the server", TimeoutError("_ssl.c:989: The handshake operation timed out"))
    assert "takes connections and does not answer" in caplog.text
    assert "_ssl" not in caplog.text


def test_a_connection_that_is_reset_before_its_handshake_is_closed(tmp_path: Path) -> None:
    """`ssl` took it over, and left it to whoever collects garbage."""
    contexts = tls.RenewedContext(provisioned(tmp_path) / "site-1", server=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        plain = socket.create_connection(server.getsockname())
        taken, _ = server.accept()
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        taken.close()  # with a reset
        until(lambda: not is_connected(plain))
        with pytest.raises(ConnectionResetError, match="reset"):
            contexts.secure(plain, "127.0.0.1")
    assert plain.fileno() == -1
    gc.collect()  # what is left open warns, which is an error


def is_connected(plain: socket.socket) -> bool:
    try:
        plain.getpeername()
    except OSError:
        return False
    return True
