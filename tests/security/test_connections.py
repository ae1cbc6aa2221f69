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

from piebald.federation.hub.local_federation import free_port
from piebald.federation.link import messaging, tls
from piebald.federation.link.messaging import Link
from piebald.federation.link.tls import SharedSocket
from piebald.federation.link.wire_format import Reply, encode
from tests.federation.conftest import provisioned, until


@pytest.fixture
def open_listener(tmp_path: Path) -> Iterator[Callable[..., Callable[[], ssl.SSLSocket]]]:
    """Starts a listener over a function that handles connections; returns what connects to it as a site."""
    folder, running = provisioned(tmp_path), list[tls.Listener]()

    def start(
        carry: Callable[[Any], None],
        kind: type[SharedSocket] = SharedSocket,
        look: Callable[[Any], str | None] = lambda _: None,
    ) -> Callable[[], ssl.SSLSocket]:
        address = ("127.0.0.1", free_port())
        contexts = tls.RenewedContext(folder / "server", True, kind)
        listener = tls.Listener(address, contexts, carry, lambda *_: None, look)
        running.append(listener)
        threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True).start()
        made = tls.context(folder / "site-1", False)

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
    assert not messaging.receive(recv, frame, messaging.FRAME)
    assert len(frame) == 16 + 30
    assert max(asked) <= 1 << 16
    assert messaging.receive(recv, bytearray(16), 36)


def test_a_connection_whose_answers_are_not_read_is_read_no_further(open_listener: Any) -> None:
    """Before, each frame had a thread of a pool for all connections, and any number waited."""
    answered, go_on = threading.Semaphore(0), threading.Event()
    holding = threading.Event()

    class Stuck(messaging.Connection):
        def send_frame(self, *_: object) -> bool:
            holding.set()
            return go_on.wait(20)

    def carry(connection: Stuck) -> None:
        for number in range(200):
            connection.answer(number, b"x")
            answered.release()
        connection.close()

    with open_listener(carry, Stuck)() as connection:
        assert holding.wait(20)
        for _ in range(messaging._ANSWERS + 1):  # one of them is on its way
            assert answered.acquire(timeout=20)
        assert not answered.acquire(timeout=0.2)
        go_on.set()
        assert connection.recv(1) == b""
    assert sum(answered.acquire(blocking=False) for _ in range(200)) == 200 - messaging._ANSWERS - 1


def test_a_member_that_sends_and_does_not_read_stops_nobody_else(tmp_path: Path) -> None:
    """Before, answers that it did not take held all threads that handle messaging, and other sites got none."""
    folder, port = provisioned(tmp_path), free_port()
    server = Link("server", ("127.0.0.1", port), folder / "server", lambda _: True, lambda _: None)
    server.on("hello", Reply, lambda *_: encode(Reply(status="done")))
    site = Link("site-2", ("127.0.0.1", port), folder / "site-2", lambda _: True, lambda _: None)
    server.start()
    site.start()

    def answered(timeout: float) -> bool:
        return site.request("server", "hello", Reply(status="done"), timeout=timeout) is not None

    try:
        until(lambda: answered(1.0))
        with socket.socket() as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plain.connect(("127.0.0.1", port))
            with tls.context(folder / "site-1", False).wrap_socket(plain) as hostile:
                hostile.settimeout(0.5)
                request = messaging.encode_frame(messaging.FrameKind.REQUEST, 1, "hello", encode(Reply(status="done")))
                with suppress(TimeoutError):  # the server reads no more
                    hostile.sendall(b"piebald" + bytes([messaging.FRAMING]))
                    for _ in range(100):
                        hostile.sendall(200 * request)
                assert all(answered(10.0) for _ in range(3))
    finally:
        site.stop()
        server.stop()


def test_a_connection_that_is_closed_while_it_is_listed_does_not_end_the_listening(open_listener: Any) -> None:
    """Before, the look at its certificate raised in the thread that accepts, and the server was not reached again."""
    closed, looked = threading.Event(), threading.Event()

    def carry(secured: SharedSocket) -> None:
        secured.close()
        closed.set()
        assert looked.wait(20)

    def look(certificate: Any) -> None:
        if closed.is_set():
            looked.set()

    connect = open_listener(carry, look=look)
    with connect():
        assert closed.wait(20)
        assert looked.wait(20)
    with connect() as another:
        assert another.recv(1) == b""


def test_no_two_threads_are_in_one_connection_and_none_waits_in_it(
    open_listener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a thread waited inside OpenSSL for what would arrive while others wrote, which OpenSSL forbids."""
    inside, overlaps = threading.Lock(), list[str]()
    ended, length = threading.Event(), 1 << 20

    def watched(name: str) -> None:
        own = getattr(ssl.SSLSocket, name)

        def step(self: ssl.SSLSocket, *arguments: Any) -> Any:
            if not self.server_side:
                return own(self, *arguments)
            if not inside.acquire(blocking=False):
                overlaps.append(name)
                return own(self, *arguments)
            try:
                return own(self, *arguments)
            finally:
                inside.release()

        monkeypatch.setattr(ssl.SSLSocket, name, step)

    def carry(secured: ssl.SSLSocket) -> None:
        def read() -> None:
            while secured.recv(1 << 14):
                pass
            ended.set()

        threading.Thread(target=read, daemon=True).start()
        secured.sendall(bytes(length))
        assert ended.wait(20)

    watched("recv")
    watched("send")
    with open_listener(carry)() as connection:
        got = 0
        while got < length:
            connection.send(b"x" * 1000)
            got += len(connection.recv(1 << 14))
        connection.shutdown(socket.SHUT_WR)
        assert ended.wait(20)
    assert not overlaps
