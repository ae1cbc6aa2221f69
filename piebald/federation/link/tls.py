"""Connections: TLS 1.3 over TCP, with certificates of the federation's own authority on both ends.

That authority alone is trusted, not the operating system's roots, and a connection that sends nothing does not block
others.  Memory for a frame is taken as its bytes arrive.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Event
from typing import Any

from piebald.federation.credentials.party_files import stamp_of
from piebald.federation.link.proxy import connect
from piebald.federation.link.shared_socket import SharedSocket

HANDSHAKE = 10.0  # seconds for a connection to complete the handshake
IDLE = 120.0  # seconds without a byte after which the server ends a connection; sites say hello every second
QUIET = 30.0  # seconds without a byte after which a site does, and in which a byte that is sent must be on its way
CONNECTIONS = 4  # of one certificate at a time; the oldest ends where there are more
BACKLOG = 128
_RECORD = 1 << 14  # bytes that are handed to TLS at a time, or taken from it: no record is longer
_UNSENT = 1 << 17  # bytes that may wait in the system's buffer: a hello waits behind them
_KEEP_ALIVE = {  # a connection whose other end has vanished without a word is noticed within half a minute
    socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4, socket.TCP_USER_TIMEOUT: int(1000 * QUIET),
    socket.TCP_NOTSENT_LOWAT: _UNSENT,
}  # fmt: skip
_RETRY = (0.2, 1.0)  # seconds between attempts to connect: the first and the longest wait
_NOT_YET, _EXPIRED = 9, 10  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL
_ALERTS = {
    "CERTIFICATE_EXPIRED": "this end's certificate has expired: ask for new credentials, or set both clocks",
    "UNKNOWN_CA": "this end's certificate is of another federation: compare the credentials of both",
    "BAD_CERTIFICATE": "this end's certificate is not valid there: compare the credentials and the clocks of both",
    "CERTIFICATE_UNKNOWN": "this end's certificate is not accepted there: compare the credentials of both",
}

Carry = Callable[[SharedSocket], None]
Refusal = Callable[[str, Exception], None]
RejectReason = Callable[[Any], str | None]
End = Callable[[SharedSocket, str], None]


def context(credentials: Path, server: bool) -> ssl.SSLContext:
    """Return the TLS context of one end, from its folder of credentials."""
    tls_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    tls_context.sslsocket_class = SharedSocket
    tls_context.minimum_version = ssl.TLSVersion.TLSv1_3
    tls_context.check_hostname = False  # parties have names of the federation in their certificates, not those of hosts
    tls_context.verify_mode = ssl.CERT_REQUIRED
    if server:
        tls_context.num_tickets = 0  # sessions are not resumed, so nothing but frames follows the handshake
    authority, certificate, key = _files(credentials)
    tls_context.load_verify_locations(authority)
    tls_context.load_cert_chain(certificate, key)
    return tls_context


def _files(credentials: Path) -> list[Path]:
    return [credentials / name for name in ("authority.pem", "certificate.pem", "key.pem")]


class RenewedContext:
    """The TLS context of one end, made again when the files of its credentials change.

    So certificates are renewed without a stop: connections that are open go on, later ones use the new files.

    Args:
        credentials, server: as of `context`.
    """

    def __init__(self, credentials: Path, server: bool) -> None:
        self._credentials, self._server = credentials, server
        self._stamp, self._made = self._look(), context(credentials, server)

    def current(self) -> ssl.SSLContext:
        """Return the context for the next connection; while files are being replaced, the one before."""
        if (stamp := self._look()) != self._stamp:
            with suppress(OSError):  # an `ssl.SSLError` is one: a new certificate beside the old key
                self._made, self._stamp = context(self._credentials, self._server), stamp
        return self._made

    def _look(self) -> list[tuple[int, int] | None]:
        return [stamp_of(path) for path in _files(self._credentials)]


class _Handler(BaseRequestHandler):
    """Performs the handshake in the connection's own thread, so that connections do not wait for one another."""

    server: Listener

    def handle(self) -> None:
        keep_alive(self.request)
        self.request.settimeout(HANDSHAKE)
        try:
            wrapped = self.server.contexts.current().wrap_socket(self.request, server_side=True)
        except (OSError, ValueError) as error:
            return self.server.refusal(self.client_address[0], error)
        secured = shared(wrapped, IDLE)
        if (why := self.server.reject_reason_of(secured)) is not None:
            return self.server.end(secured, why)
        with self.server.admitted(secured):
            self.server.carry(secured)
        with suppress(OSError):
            secured.close()


class Listener(ThreadingTCPServer):
    """Accepts connections of parties with a valid certificate.

    Args:
        address: host and port.
        contexts: the TLS context.
        carry: handles a connection, and returns when it ends.
        refusal: called with the address of a connection that was refused, and the error.
        reject_reason: called with the certificate of a party, before its connection is carried and every second from
            then on; the connection ends where it returns a reason.
        end: ends a connection, after it has told the other end the reason.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = BACKLOG

    def __init__(
        self, address: tuple[str, int], contexts: RenewedContext, carry: Carry, refusal: Refusal,
        reject_reason: RejectReason = lambda _: None, end: End = lambda secured, _: secured.close(),
    ) -> None:  # fmt: skip
        self.contexts, self.carry, self.refusal = contexts, carry, refusal
        self._reject_reason, self.end = reject_reason, end
        self._looked = time.monotonic()
        self._open: dict[bytes, list[SharedSocket]] = {}  # by certificate, the oldest first
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    @contextmanager
    def admitted(self, secured: SharedSocket) -> Iterator[None]:
        """A connection, among the few of its certificate: a further one ends the oldest.

        One member cannot take all threads and files of the server, and a site whose old connections hang gets through.
        """
        certificate = secured.getpeercert(binary_form=True) or b""
        with self._lock:
            connections = self._open.setdefault(certificate, [])
            connections.append(secured)
            oldest = connections.pop(0) if len(connections) > CONNECTIONS else None
        if oldest is not None:
            self._end_soon(oldest, f"its certificate has more than {CONNECTIONS} connections, and this is the oldest")
        try:
            yield
        finally:
            with self._lock:
                if secured in connections:
                    connections.remove(secured)

    def service_actions(self) -> None:
        """Once a second, end the connections of parties that are not admitted any more (called by `serve_forever`)."""
        if time.monotonic() < self._looked + 1:
            return
        self._looked = time.monotonic()
        with self._lock:
            connections = [secured for sockets in self._open.values() for secured in sockets]
        for secured in connections:
            if (why := self.reject_reason_of(secured)) is not None:
                self._end_soon(secured, why)

    def reject_reason_of(self, secured: SharedSocket) -> str | None:
        """Return why the party at the other end is not admitted (any more), None where it is."""
        try:
            certificate = secured.getpeercert()
        except (OSError, ValueError):  # it has ended meanwhile
            return None
        return self._reject_reason(certificate) if certificate else None

    def _end_soon(self, secured: SharedSocket, why: str) -> None:
        """End a connection in a thread of its own, as the other end may take its time to read the reason."""
        with self._lock:
            for connections in self._open.values():
                if secured in connections:
                    connections.remove(secured)
        threading.Thread(target=self.end, args=(secured, why), name="farewell", daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing where a connection breaks off."""


def keep_connecting(
    address: tuple[str, int], contexts: RenewedContext, carry: Carry, refusal: Refusal, over: Event
) -> None:
    """Connect, and connect again whenever the connection ends, since the server may start later or restart."""
    wait = _RETRY[0]
    while not over.is_set():
        began = time.monotonic()
        try:
            plain = connect(address, HANDSHAKE)
            keep_alive(plain)
            # the name is for what passes TLS on by its name (SNI) before the server
            with contexts.current().wrap_socket(plain, server_hostname=address[0]) as wrapped:
                carry(
                    shared(wrapped, QUIET, ends=True)
                )  # a server ends those of its sites, and says whose (`Listener`)
        except (OSError, ValueError) as error:
            refusal("the server", error)
        wait = _RETRY[0] if time.monotonic() - began > 5 else min(2 * wait, _RETRY[1])
        over.wait(wait)


def shared(secured: ssl.SSLSocket, patience: float, ends: bool = False) -> SharedSocket:
    """Return a connection that `context` has made, for several threads to read and write from now on.

    Args:
        secured: the connection.
        patience, ends: see `SharedSocket.share`.
    """
    assert isinstance(secured, SharedSocket)
    secured.share(patience, ends)
    return secured


def keep_alive(plain: socket.socket) -> None:
    """Have the system notice that the other end is gone, and keep little in its buffer."""
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        plain.setsockopt(socket.IPPROTO_TCP, option, value)


def send(secured: ssl.SSLSocket, frame: bytes | bytearray) -> None:
    """Send a frame, however long it takes while the network takes bytes.

    Raises:
        TimeoutError: it has taken none for `QUIET` seconds.
        OSError: the connection has ended.
    """
    rest, ready = memoryview(frame), select.poll()
    ready.register(secured.fileno(), select.POLLOUT)  # `select.select` knows the first 1024 files of a process only
    while rest:
        if not ready.poll(1000 * QUIET):
            raise TimeoutError(f"nothing could be sent for {QUIET:g} seconds")
        rest = rest[secured.send(rest[:_RECORD]) :]


def receive(recv: Callable[[int], bytes], frame: bytearray, length: int) -> bool:
    """Append to a frame until it has its length, and return whether it got there before the connection ended.

    Memory is taken for what has arrived, never for what is announced.
    """
    while len(frame) < length:
        piece = recv(min(_RECORD, length - len(frame)))
        if not piece:
            return False
        frame += piece
    return True


def refusal(who: str, error: ssl.SSLError) -> str:
    """Return the sentence about a handshake that failed.

    Args:
        who: the other end.
        error: how it failed.
    """
    if any((error.reason or "").endswith(f"ALERT_{alert}") for alert in _ALERTS):
        return f"{who} does not accept this end: {reason(error)}"
    return f"{who} did not prove that it belongs to this federation: {reason(error)}"


def reason(error: ssl.SSLError) -> str:
    """Return why the other end did not prove that it belongs to the federation, or does not admit this one."""
    here = f"this machine's clock says {datetime.now(UTC):%Y-%m-%d}"
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == _EXPIRED:
            return f"its certificate has expired ({here})"
        if error.verify_code == _NOT_YET:
            return f"its certificate is not valid yet ({here}): set both clocks"
        return error.verify_message
    if isinstance(error, ssl.SSLEOFError):
        return "the connection broke off"
    name = error.reason or ""
    for alert, sentence in _ALERTS.items():
        if name.endswith(f"ALERT_{alert}"):
            return sentence
    return name or "the connection broke off"
