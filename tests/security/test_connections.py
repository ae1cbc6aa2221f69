"""Connections of a member that wants to use up the server's memory, threads and files."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from piebald.runtimes.federation import tls
from piebald.runtimes.federation.local_federation import free_port
from tests.federation.conftest import provisioned

Carry = Callable[[ssl.SSLSocket], None]


def files(folder: Path, role: str) -> dict[str, Any]:
    names = {"ca_cert": "authority.pem", f"{role}_cert": "certificate.pem", f"{role}_key": "key.pem"}
    return {name: str(folder / file) for name, file in names.items()}


@pytest.fixture
def open_listener(tmp_path: Path) -> Iterator[Callable[[Carry], Callable[[], ssl.SSLSocket]]]:
    """Starts a listener over a function that handles connections; returns what connects to it as a site."""
    folder, running = provisioned(tmp_path), list[tls.Listener]()

    def start(carry: Carry) -> Callable[[], ssl.SSLSocket]:
        address = ("127.0.0.1", free_port())
        listener = tls.Listener(
            address, tls.RenewedContext(files(folder / "server", "server"), True), carry, lambda *_: None
        )
        running.append(listener)
        threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True).start()
        made = tls.context(files(folder / "site-1", "client"), False)

        def connect() -> ssl.SSLSocket:
            connection = made.wrap_socket(socket.create_connection(address))
            connection.settimeout(20)
            return connection

        return connect

    yield start
    for listener in running:
        listener.shutdown()
        listener.server_close()


def test_one_certificate_has_few_connections(open_listener: Any) -> None:
    """Before, a member could open any number, each with a thread of the server.  The oldest one ends."""
    opened = threading.Semaphore(0)

    def carry(secured: ssl.SSLSocket) -> None:
        opened.release()
        with suppress(OSError):
            secured.recv(1)

    connect, connections = open_listener(carry), []
    for _ in range(tls.CONNECTIONS + 2):
        connections.append(connect())
        assert opened.acquire(timeout=20)
    for connection in connections[:2]:
        with suppress(OSError):  # some systems reset it
            assert connection.recv(1) == b""
    for connection in connections[2:]:
        connection.settimeout(0.01)
        with pytest.raises(TimeoutError):
            connection.recv(1)
    for connection in connections:
        connection.close()


def test_a_connection_that_sends_nothing_ends(open_listener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it was kept for ever."""
    monkeypatch.setattr(tls, "IDLE", 0.05)
    ended: list[type[BaseException]] = []

    def carry(secured: ssl.SSLSocket) -> None:
        try:
            secured.recv(1)
        except BaseException as error:
            ended.append(type(error))

    with open_listener(carry)() as connection:
        assert connection.recv(1) == b""
    until = time.monotonic() + 20
    while not ended and time.monotonic() < until:
        time.sleep(0.01)
    assert ended == [TimeoutError]


def test_memory_is_taken_as_bytes_arrive() -> None:
    """Before, a frame's whole announced length, up to 5 MB for each connection, was taken at once."""
    asked: list[int] = []

    def recv(most: int) -> bytes:
        asked.append(most)
        return b"" if len(asked) == 4 else bytes(10)

    frame = bytearray(16)
    assert not tls.receive(recv, frame, tls.FRAME)
    assert len(frame) == 16 + 30
    assert max(asked) <= 1 << 16
    assert tls.receive(recv, bytearray(16), 36)
