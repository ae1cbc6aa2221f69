"""A site that reaches its server through an HTTP proxy, which sees where to and nothing of what is sent."""

from __future__ import annotations

import dataclasses
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from piebald.core.errors import SettingError
from piebald.federation.link import tls
from piebald.federation.link.tls import Listener, Proxy, RenewedContext, connect, keep_connecting, proxy_for
from piebald.federation.site.site_check import site_machine
from piebald.federation.site.site_process import site_work

from .conftest import provisioned

SECRET = b"a model's parameters"


class ConnectProxy:
    """A proxy for one connection, which goes to `target` whatever name was asked for; `seen` is what it reads."""

    def __init__(
        self, target: int, answer: bytes = b"HTTP/1.1 200 Connection established\r\nVia: here\r\n\r\n"
    ) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.seen, self._target, self._answer = bytearray(), target, answer
        self.threads = [threading.Thread(target=self._serve, daemon=True)]
        self.threads[0].start()

    def _serve(self) -> None:
        with self.listening.accept()[0] as site:
            while not self.seen.endswith(b"\r\n\r\n"):
                self.seen += site.recv(1)
            site.sendall(self._answer)
            if b" 200 " not in self._answer:
                return
            with socket.create_connection(("127.0.0.1", self._target)) as server:
                back = threading.Thread(target=self._pass_on, args=(server, site), daemon=True)
                back.start()
                self._pass_on(site, server)
                back.join(10)

    def _pass_on(self, source: socket.socket, to: socket.socket) -> None:
        while data := source.recv(4096):
            self.seen += data
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.listening.close()
        self.threads[0].join(10)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[tuple[Listener, Path]]:
    """A server that takes what sites send into its attribute `got`, and the credentials of its federation."""
    folder = provisioned(tmp_path / "credentials", ["north"])

    def carry(secured: ssl.SSLSocket) -> None:
        made.got = secured.recv(100)  # type: ignore[attr-defined]
        secured.sendall(b"thanks")

    made = Listener(("127.0.0.1", 0), RenewedContext(folder / "server", True), carry, lambda *_: None)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield made, folder
    made.shutdown()
    thread.join()
    made.server_close()


def test_attempts_to_connect_come_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first 0.2 s after one another; anew once a connection has lasted."""
    clock, waits, lasted = [0.0], list[float](), iter([0, 0, 0, 0, 9, 0])

    class Over(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append(timeout)
            if len(waits) == 6:
                self.set()
            return self.is_set()

    def connected(*_: object) -> None:
        clock[0] += next(lasted)
        raise OSError("nobody is there")

    monkeypatch.setattr(tls, "connect", connected)
    monkeypatch.setattr(tls.time, "monotonic", lambda: clock[0])
    refused = list[Exception]()
    keep_connecting(("here", 1), SimpleNamespace(secure=print), print, lambda _, error: refused.append(error), Over())
    assert waits == [0.2, 0.4, 0.8, 1.0, 0.2, 0.4]
    assert len(refused) == 6


def test_tls_goes_through_a_proxy_that_reads_nothing(
    listener: tuple[Listener, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, folder = listener
    proxy = ConnectProxy(server.server_address[1])
    monkeypatch.setenv("HTTPS_PROXY", f"http://us%40er:p%3Ass@127.0.0.1:{proxy.port}")
    over, got = threading.Event(), list[bytes]()

    def carry(secured: ssl.SSLSocket) -> None:
        secured.sendall(SECRET)
        got.append(secured.recv(100))
        over.set()

    keep_connecting(("server.example", 8400), RenewedContext(folder / "north", False), carry, refuse, over)
    proxy.close()
    assert (server.got, got) == (SECRET, [b"thanks"])  # type: ignore[attr-defined]
    head, _, rest = bytes(proxy.seen).partition(b"\r\n\r\n")
    request, *headers = head.split(b"\r\n")
    assert request.startswith(b"CONNECT server.example:8400 HTTP/1.")
    assert headers == [
        b"Host: server.example:8400",
        b"Proxy-Authorization: Basic dXNAZXI6cDpzcw==",
    ]
    assert rest[:1] == b"\x16"  # a TLS handshake, whose name is there for those that pass TLS on by it
    assert b"server.example" in rest
    assert SECRET not in rest


def refuse(who: str, error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "failed: 407 Proxy Authentication Required"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "SSH-2.0-OpenSSH_9.2"),
        (b"HTTP/1.1 403 " + b"x" * 20_000, "403 x{,60}$"),
    ],
)
def test_a_proxy_that_refuses_is_quoted(answer: bytes, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = ConnectProxy(0, answer)
    monkeypatch.setenv("HTTPS_PROXY", f"127.0.0.1:{proxy.port}")
    with pytest.raises(OSError, match=f"the proxy 127.0.0.1:{proxy.port} does not connect to server.example.*{says}"):
        connect(("server.example", 8400), 10)
    proxy.close()
    with pytest.raises(OSError, match=f"the proxy 127.0.0.1:{proxy.port} cannot be reached: Connection refused"):
        connect(("server.example", 8400), 10)


@pytest.mark.parametrize(
    ("host", "given", "never", "found"),
    [
        ("a.example", None, None, None),
        ("a.example", "http://p:3128", None, Proxy("p", 3128)),
        ("a.example", "http://u:s@p:3128", None, Proxy("p", 3128, "Basic dTpz")),
        ("a.example", "p:3128", "b.example", Proxy("p", 3128)),
        ("a.example", "http://p:3128", "example", None),
        ("a.example", "http://p:3128", "*", None),
        ("localhost", "http://p:3128", None, None),
        ("127.0.0.2", "http://p:3128", None, None),
        ("::1", "http://p:3128", None, None),
        ("a.example", "https://p:3128", None, "got https://p..."),
        ("a.example", "socks5://p:3128", None, "got socks5://p..."),
        ("a.example", "http://name:secret@p:x", None, "got http://p..."),
    ],
)
def test_the_environment_names_the_proxy(
    host: str, given: str | None, never: str | None, found: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in (("HTTPS_PROXY", given), ("NO_PROXY", never)):
        if value is not None:
            monkeypatch.setenv(name, value)
    if not isinstance(found, str):
        assert proxy_for(host, 8400) == found
        return
    with pytest.raises(SettingError, match="HTTPS_PROXY must be http://HOST:PORT") as caught:
        proxy_for(host, 8400)
    assert found in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_site_looks_at_its_proxy_before_it_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = site_work(provisioned(tmp_path / "credentials", ["north"]) / "north", None, None)
    work = dataclasses.replace(work, credentials=dataclasses.replace(work.credentials, host="a.example"))
    for given, fine in ((None, []), ("http://p:3128", [True]), ("ftp://p", [False])):
        if given is not None:
            monkeypatch.setenv("HTTPS_PROXY", given)
        assert [one.fine for one in site_machine(work) if one.what == "proxy"] == fine
