"""A connection that breaks ends the wait for what was to come over it."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from piebald.federation.credentials import provisioning
from piebald.federation.link.flare_driver import make_driver
from piebald.federation.link.flare_link import SERVER, Link
from piebald.federation.link.wire_messages import Reply, TermsRequest, decode
from tests import processes

from .conftest import ENVIRONMENT, provisioned

# A server that says it was asked, and answers only if it is told to.
SERVER_SIDE = """
import sys, threading
from pathlib import Path
from piebald.federation.credentials import provisioning
from piebald.federation.link.flare_link import Link
from piebald.federation.link.wire_messages import Reply, TermsRequest, encode

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


def test_a_server_that_is_closed_before_it_listens_ends(tmp_path: Path) -> None:
    """Its thread may come to listening after `shutdown`, which then has no listener to end."""
    folder = provisioned(tmp_path / "credentials", ["site-1"]) / SERVER
    names = {"ca_cert": "authority.pem", "server_cert": "certificate.pem", "server_key": "key.pem"}
    params = {"host": "127.0.0.1", "port": 0} | {name: str(folder / file) for name, file in names.items()}
    driver = make_driver()()
    driver.shutdown()
    connector = SimpleNamespace(params=params | {"reject": lambda certificate: False})
    listening = threading.Thread(target=driver.listen, args=(connector,), daemon=True)
    listening.start()
    listening.join(60)
    assert not listening.is_alive()


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
    credentials = provisioning.read(provisioned(tmp_path / "credentials", ["site-1"]) / "site-1")
    address = (credentials.host, credentials.port)
    site = Link(credentials.party, address, credentials.folder, SERVER.__eq__, lambda sentence: None)
    certificate = {"subject": ((("commonName", SERVER),),), "notAfter": "Nov 23 00:00:00 2027 GMT"}
    site._on_lost()
    site._on_connected("127.0.0.1", certificate)
    site._on_lost()  # as where the site's certificate was revoked: TLS itself tells a site nothing
    first, second = (record.getMessage() for record in caplog.records)
    assert "ended the connection;" in first
    assert "ended the connection before it answered: its log says whether this site is shut out;" in second
    site._on_failed(TimeoutError("_ssl.c:989: The handshake operation timed out"))
    assert "takes connections and does not answer" in caplog.text
    assert "_ssl" not in caplog.text
