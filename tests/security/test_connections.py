"""Connections of a member that wants to use up the server's memory, threads and files."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from piebald.federation.hub.local_federation import free_port
from piebald.federation.link import frame_queue, frames, tls
from piebald.federation.link.frame_queue import FrameQueue, FrameRoom
from piebald.federation.link.messaging import Link
from piebald.federation.link.wire_messages import Reply, encode
from tests.federation.conftest import provisioned, until

Carry = Callable[[ssl.SSLSocket], None]


@pytest.fixture
def open_listener(tmp_path: Path) -> Iterator[Callable[[Carry], Callable[[], ssl.SSLSocket]]]:
    """Starts a listener over a function that handles connections; returns what connects to it as a site."""
    folder, running = provisioned(tmp_path), list[tls.Listener]()

    def start(carry: Carry) -> Callable[[], ssl.SSLSocket]:
        address = ("127.0.0.1", free_port())
        listener = tls.Listener(address, tls.RenewedContext(folder / "server", True), carry, lambda *_: None)
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
    assert not tls.receive(recv, frame, frames.FRAME)
    assert len(frame) == 16 + 30
    assert max(asked) <= 1 << 16
    assert tls.receive(recv, bytearray(16), 36)


@contextmanager
def released(event: threading.Event) -> Iterator[None]:
    """Sets an event at the end, also where a test fails."""
    try:
        yield
    finally:
        event.set()


def test_frames_of_one_connection_hold_few_threads_and_little_memory() -> None:
    """Before, each frame had a thread of a pool for all connections, and any number waited."""
    begun, go_on, read = threading.Semaphore(0), threading.Event(), list[int]()

    def handle(frame: bytes | bytearray) -> None:
        begun.release()
        go_on.wait(20)

    with released(go_on):
        queue = FrameQueue[bytes](handle, FrameRoom())

        def read_frames() -> None:
            for number in range(100):
                queue.put(bytes(frame_queue.MOST_BYTES // 10))
                read.append(number)

        reader = threading.Thread(target=read_frames)
        reader.start()
        for _ in range(frame_queue.THREADS):
            assert begun.acquire(timeout=20)
        reader.join(0.2)  # it waits, so that nothing more is read from the network
        assert reader.is_alive()
        assert len(read) <= frame_queue.THREADS + 11
        assert not begun.acquire(blocking=False)
        go_on.set()
        reader.join(20)
        assert len(read) == 100
    queue.end()
    queue.put(b"after the end")  # dropped, and nobody waits


def test_frames_of_all_connections_have_one_room_from_which_nobody_is_kept_out() -> None:
    """Before, a server held the results of all sites that sent at once; results of many were as many models."""
    room, go_on, read = FrameRoom(most=10), threading.Event(), threading.Semaphore(0)
    with released(go_on):
        full, other = (FrameQueue[bytes](lambda _: go_on.wait(20), room) for _ in range(2))
        for _ in range(10):
            full.put(b"x")

        def read_frames() -> None:
            for _ in range(50):
                other.put(b"x")
                read.release()

        reader = threading.Thread(target=read_frames)
        reader.start()
        assert read.acquire(timeout=20)  # the first of its own
        reader.join(0.2)
        assert reader.is_alive()  # the second waits for room
        assert not read.acquire(blocking=False)
        go_on.set()
        reader.join(20)
        assert not reader.is_alive()
    until(lambda: room.take(full, 10, always=False))  # all of it was given back
    full.end()
    other.end()


def test_what_waits_when_a_connection_ends_gives_its_room_back() -> None:
    room, go_on = FrameRoom(most=10), threading.Event()
    with released(go_on):
        queue = FrameQueue[bytes](lambda _: go_on.wait(20), room)
        for _ in range(10):
            queue.put(b"x")
        waiting = threading.Thread(target=queue.put, args=(b"x",))
        waiting.start()
        queue.end()
        waiting.join(20)
        assert not waiting.is_alive()
    until(lambda: room.take(queue, 10, always=False))


def test_a_member_that_sends_and_does_not_read_stops_nobody_else(tmp_path: Path) -> None:
    """Before, answers that it did not take held all threads that handle frames, and other sites got none."""
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
                request = frames.encode_frame(frames.FrameKind.REQUEST, 1, "hello", encode(Reply(status="done")))
                with suppress(TimeoutError):  # the server reads no more
                    hostile.sendall(b"piebald" + bytes([frames.FRAMING]))
                    for _ in range(100):
                        hostile.sendall(200 * request)
                assert all(answered(10.0) for _ in range(3))
    finally:
        site.stop()
        server.stop()


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
        tls.send(secured, bytes(length))
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
