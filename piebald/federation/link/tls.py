"""Connections: TLS 1.3 over TCP, with certificates of the federation's own authority on both ends.

That authority alone is trusted, not the operating system's roots, and a connection that sends nothing does not block
others.
"""

from __future__ import annotations

import base64
import errno
import ipaddress
import math
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from piebald.core.errors import SettingError
from piebald.federation.credentials.party_files import stamp_of
from piebald.federation.credentials.slots import first_protocol

T = TypeVar("T")

RECORD = 1 << 14  # bytes that are handed to TLS at a time, or taken from it: no record is longer


class SharedSocket(ssl.SSLSocket):
    """Hands its connection to one thread at a time; nobody waits for the network meanwhile.

    `ssl` makes it without calling `__init__`; until `share` is called it is as any other, with a time limit for the
    handshake.

    Attributes:
        certificate: the other end's, as of `getpeercert`, which must not be asked of a connection that may be closed.
    """

    certificate: Any
    _turn: threading.Lock | nullcontext[None] = nullcontext()
    _ended, _patience, _expires = False, math.inf, math.inf

    def share(self, patience: float, ends: bool = False) -> None:
        """From now on, read and write in any threads.

        Args:
            patience: seconds without a byte, at most.
            ends: whether nothing is read or sent any more once the certificate of the other end has expired.
        """
        self.certificate = self.getpeercert() or {}
        if ends and self.certificate:
            self._expires = ssl.cert_time_to_seconds(self.certificate["notAfter"])
        self._turn, self._patience = threading.Lock(), patience
        # nobody may hold the turn while waiting for the network: `_in_turn` polls without it
        self.settimeout(0)

    def recv(self, buflen: int = 1024, flags: int = 0, seconds: float | None = None) -> bytes:
        """Bytes that have arrived, none where the connection has ended.

        Raises:
            TimeoutError: nothing came for so many seconds, by default those of `share`.
        """
        return self._in_turn(lambda: super(SharedSocket, self).recv(buflen, flags), seconds)

    def send(self, data: Any, flags: int = 0, seconds: float | None = None) -> int:
        """Send some bytes, and return how many.

        Raises:
            TimeoutError: nothing could be sent for so many seconds, by default those of `share`.
        """
        return self._in_turn(lambda: super(SharedSocket, self).send(data, flags), seconds)

    def sendall(self, data: Any, flags: int = 0, seconds: float | None = None) -> None:
        """Send bytes record by record, between which the other direction gets its turn; see `send`."""
        rest = memoryview(data)
        while rest:
            rest = rest[self.send(rest[:RECORD], flags, seconds) :]

    def shutdown(self, how: int) -> None:
        """End the connection.

        Python's own forgets the encryption first, so what another thread sends at that moment would leave in clear.
        """
        socket.socket.shutdown(self, how)

    def close(self) -> None:
        """Close it, and send nothing from then on."""
        # before the turn: it wakes the threads that poll, which closing the file would leave waiting
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)
        with self._turn:
            # in turn: no thread is inside OpenSSL when the connection's memory and file number are given back
            self._ended = True
            super().close()

    def end(self, reason: str) -> None:
        """Close it; a connection with frames tells the other end the reason before."""
        self.close()

    def _in_turn(self, step: Callable[[], T], seconds: float | None) -> T:
        seconds = self._patience if seconds is None else seconds
        while True:
            with self._turn:
                if self._ended:
                    raise OSError("the connection is closed")
                # the handshake has checked it once, and a connection may last for weeks
                if time.time() > self._expires:
                    raise OSError("the certificate of the other end has expired")
                try:
                    return step()
                except ssl.SSLWantReadError:
                    event = select.POLLIN
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
                ready = select.poll()  # `select.select` knows the first 1024 files of a process only
                # still in turn: after `close`, the number is -1 or that of another file
                ready.register(self.fileno(), event)
            if not ready.poll(None if seconds == math.inf else 1000 * seconds):
                raise TimeoutError(f"no byte was transferred for {seconds:g} seconds")


class Proxy(NamedTuple):
    """An HTTP proxy, with what it wants as `Proxy-Authorization`, "" for nothing."""

    host: str
    port: int
    login: str = ""

    def __str__(self) -> str:
        """HOST:PORT, for messages; its password is in none."""
        return f"{self.host}:{self.port}"


def proxy_for(host: str, port: int) -> Proxy | None:
    """Return the proxy through which a server is reached, None where there is none, as for this machine.

    Raises:
        SettingError: `HTTPS_PROXY` is not the address of an HTTP proxy.
    """
    setting = getproxies().get("https")
    # with the port, as an entry of NO_PROXY may name one
    if not setting or is_loopback(host) or proxy_bypass(f"{host}:{port}"):
        return None
    # curl and others take HOST:PORT for an HTTP proxy too
    parts = urlsplit(setting if "://" in setting else f"http://{setting}")
    try:
        # `port` raises where it is no number up to 65535
        number = parts.port or 80
    except ValueError:
        number = 0
    if parts.scheme != "http" or not parts.hostname or not number:
        # the setting may hold a login, so only its scheme and host are repeated
        raise SettingError(
            f"HTTPS_PROXY must be http://HOST:PORT, got {parts.scheme}://{parts.hostname or ''}...: correct it, or "
            f"name {host} in NO_PROXY"
        )
    login = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    basic = f"Basic {base64.b64encode(login.encode()).decode()}"
    return Proxy(parts.hostname, number, "" if parts.username is None else basic)


def connect(address: tuple[str, int], timeout: float) -> socket.socket:
    """Connect to a server, through a proxy where the environment names one.

    Args:
        address: the server's host and port.
        timeout: seconds for each step.

    Raises:
        OSError: there is no connection; the message says what the proxy has answered.
        SettingError: see `proxy_for`.
    """
    host, port = address
    if (proxy := proxy_for(host, port)) is None:
        return socket.create_connection(address, timeout=timeout)
    # an IPv6 address has brackets before a port (RFC 3986, section 3.2.2)
    host = f"[{host}]" if ":" in host else host
    headers = {"Host": f"{host}:{port}"} | ({"Proxy-Authorization": proxy.login} if proxy.login else {})
    through = HTTPConnection(proxy.host, proxy.port, timeout=timeout)
    through.set_tunnel(host, port, headers)
    try:
        through.connect()
    except (OSError, HTTPException) as error:
        through.close()
        strerror = getattr(error, "strerror", None)
        problem = "cannot be reached" if strerror else f"does not connect to {host}:{port}"
        raise ConnectionError(f"the proxy {proxy} {problem}: {strerror or str(error).strip()[:80]}") from None
    return through.sock


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host, given as a name or an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


HANDSHAKE = 10.0  # seconds for a connection to complete the handshake
HANDSHAKES = 16  # that are under way at a time: a process may have as few as 64 files open
IDLE = 120.0  # seconds without a byte after which the server ends a connection; sites say hello every second
QUIET = 30.0  # seconds without a byte after which a site does, and in which a byte that is sent must be on its way
CONNECTIONS = 4  # of one certificate at a time; the oldest ends where there are more
_KEEP_ALIVE = {  # a connection whose other end has vanished without a word is noticed within half a minute
    socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4, socket.TCP_USER_TIMEOUT: int(1000 * QUIET),
    socket.TCP_NOTSENT_LOWAT: 1 << 17,  # bytes that may wait in the system's buffer: a hello waits behind them
}  # fmt: skip
_HELLO, _PEEK = 1 << 14, 0.02  # bytes of a ClientHello, at most; seconds before its rest is looked for again
LISTENS, LISTENS_NO_MORE = b"1", b"0"  # said to the process that passes connections on
_RETRY = (0.2, 1.0)  # seconds between attempts to connect: the first and the longest wait
_NOT_YET, _EXPIRED = 9, 10  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL
_STRANGE = (18, 19, 20, 21)  # signed by itself or by an authority that is not known here
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNSUPPORTED_PROTOCOL", "RECORD_LAYER_FAILURE")
_ALERTS = {
    "CERTIFICATE_EXPIRED": "this end's certificate has expired: ask for new credentials, or set both clocks",
    "UNKNOWN_CA": "this end's certificate is of another federation: compare the credentials of both",
    "BAD_CERTIFICATE": "this end's certificate is not valid there: compare the credentials and the clocks of both",
    "CERTIFICATE_UNKNOWN": "this end's certificate is not accepted there: compare the credentials of both",
}

Carry = Callable[[Any], None]
Refusal = Callable[[str, Exception], None]


def context(
    credentials: Path, server: bool, kind: type[SharedSocket] = SharedSocket, protocol: str = ""
) -> ssl.SSLContext:
    """Return the TLS context of one end, from its folder of credentials.

    Args:
        credentials: the folder.
        server: whether it is the server's end.
        kind: of the connections that it makes.
        protocol: that its connections name (ALPN), "" for none.
    """
    tls_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    tls_context.sslsocket_class = kind
    tls_context.minimum_version = ssl.TLSVersion.TLSv1_3
    tls_context.check_hostname = False  # parties have names of the federation in their certificates, not those of hosts
    tls_context.verify_mode = ssl.CERT_REQUIRED
    if protocol:
        tls_context.set_alpn_protocols([protocol])
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
        credentials, server, kind, protocol: as of `context`.
        quiet: seconds without a byte after which this end ends a connection, 0 for what is usual.
    """

    def __init__(
        self,
        credentials: Path,
        server: bool,
        kind: type[SharedSocket] = SharedSocket,
        protocol: str = "",
        quiet: float = 0.0,
    ) -> None:
        self._arguments, self._quiet = (credentials, server, kind, protocol), quiet or (IDLE if server else QUIET)
        self._stamp, self._context = self._look(), context(*self._arguments)

    def current(self) -> ssl.SSLContext:
        """Return the context for the next connection; while files are being replaced, the one before."""
        if (stamp := self._look()) != self._stamp:
            with suppress(OSError):  # an `ssl.SSLError` is one: a new certificate beside the old key
                # the stamp is older than what is read: files that are replaced meanwhile are read again next time
                self._context, self._stamp = context(*self._arguments), stamp
        return self._context

    def secure(
        self, plain: socket.socket, host: str | None = None, begun: Callable[[SharedSocket], None] | None = None
    ) -> SharedSocket:
        """Return a connection after its handshake, for several threads to read and write.

        Args:
            plain: the connection before it.
            host: what a site calls the server, for what passes TLS on by its name (SNI).
            begun: called with the connection before its handshake.

        Raises:
            OSError: the handshake has failed.
        """
        is_server = self._arguments[1]
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            plain.setsockopt(socket.IPPROTO_TCP, option, value)
        plain.settimeout(HANDSHAKE)
        try:
            plain.getpeername()
        except OSError:  # `ssl` would notice after it has taken it over, and leave it open
            plain.close()
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)) from None
        secured = self.current().wrap_socket(
            plain, server_side=is_server, server_hostname=host, do_handshake_on_connect=False
        )
        assert isinstance(secured, SharedSocket)
        try:
            if begun is not None:
                begun(secured)
            secured.do_handshake()
        except (OSError, ValueError):
            secured.close()
            raise
        # a server ends those of its sites whose certificates expire, and says whose (`Listener`)
        secured.share(self._quiet, ends=not is_server)
        return secured

    def _look(self) -> list[tuple[int, int] | None]:
        return [stamp_of(path) for path in _files(self._arguments[0])]


class Listener(ThreadingTCPServer):
    """Accepts connections of parties with a valid certificate.

    Args:
        address: host and port.
        contexts: the TLS context.
        carry: handles a connection, and returns when it ends.
        refusal: called with the address of a connection that was refused, and the error.
        reject_reason: called with the certificate of a party, before its connection is carried and every second from
            then on; the connection ends where it returns a reason.
        binds: whether it listens; else it carries what a `Door` hands it.
    """

    # a server that restarts gets its port although old connections linger in TIME_WAIT
    allow_reuse_address = daemon_threads = True
    block_on_close = False
    # all sites connect again at once when a server restarts, and socketserver's default is 5
    request_queue_size = 128
    host = "0.0.0.0"  # the address of this machine that a server listens at
    passed: socket.socket | None = None  # where another process accepts connections, and passes them on over this

    def __init__(
        self, address: tuple[str, int], contexts: RenewedContext, carry: Carry, refusal: Refusal,
        reject_reason: Callable[[Any], str | None] = lambda _: None, *, binds: bool = True,
    ) -> None:  # fmt: skip
        self._contexts, self._carry, self._refusal, self._reject_reason = contexts, carry, refusal, reject_reason
        self._looked = time.monotonic()
        self._open = list[SharedSocket]()  # the oldest first
        self._handshakes = dict[int, socket.socket]()  # by the thread of its handshake, the oldest first
        self._lock = threading.Lock()
        super().__init__(address, BaseRequestHandler, bind_and_activate=binds and self.passed is None)
        if self.passed is not None:
            self.socket.close()
            self.socket = self.passed.dup()
            self.socket.send(LISTENS)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Return the next connection, and the address of the other end."""
        if self.passed is None:
            return super().get_request()
        _, files, *_ = socket.recv_fds(self.socket, 1, 1)
        if not files:  # the process that passed them on has ended, and so will this one
            time.sleep(_RETRY[0])
            raise OSError("no connection was passed on")
        connection = socket.socket(fileno=files[0])
        return connection, connection.getpeername()

    def server_close(self) -> None:
        """Take no further connections."""
        if self.passed is not None:
            with suppress(OSError):  # the process that passes them on has ended
                self.socket.send(LISTENS_NO_MORE)
        super().server_close()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Carry a connection, in its own thread, among the few of its certificate: a further one ends the oldest.

        One member cannot take all threads and files of the server, and a site whose old connections hang gets through.
        """
        try:
            # the handshake is in this thread as well, so that who stalls in it holds up no other connection
            secured = self._contexts.secure(request, begun=self._begin_handshake)
        except (OSError, ValueError) as error:
            return self._refusal(client_address[0], error)
        finally:
            with self._lock:
                self._handshakes.pop(threading.get_ident(), None)
        if (why := self._reject_reason(secured.certificate)) is not None:
            return secured.end(why)
        with self._lock:
            self._open.append(secured)
            of_party = [one for one in self._open if one.certificate == secured.certificate]
        for oldest in of_party[:-CONNECTIONS]:
            self._end_soon(oldest, f"its certificate has more than {CONNECTIONS} connections, and this is the oldest")
        try:
            with secured:
                self._carry(secured)
        finally:
            self._drop(secured)

    def _begin_handshake(self, secured: socket.socket) -> None:
        """Count a connection whose handshake begins, and end the oldest where there are too many of them.

        Silent strangers would else hold all files that the process may have open; a handshake takes milliseconds.
        """
        with self._lock:
            self._handshakes[threading.get_ident()] = secured
            # shut down and not closed: the thread of its handshake reads from it, and closes it itself
            for oldest in list(self._handshakes.values())[:-HANDSHAKES]:
                with suppress(OSError):  # it has ended by itself
                    oldest.shutdown(socket.SHUT_RDWR)

    def service_actions(self) -> None:
        """Once a second, end the connections of parties that are not admitted any more (called by `serve_forever`)."""
        # `serve_forever` calls this after each connection too
        if time.monotonic() < self._looked + 1:
            return
        self._looked = time.monotonic()
        with self._lock:
            connections = list(self._open)
        for secured in connections:
            if (why := self._reject_reason(secured.certificate)) is not None:
                self._end_soon(secured, why)

    def end_all(self, why: str) -> None:
        """End all its connections; the other ends connect again."""
        with self._lock:
            connections = list(self._open)
        for secured in connections:
            self._end_soon(secured, why)

    def _drop(self, secured: SharedSocket) -> None:
        with self._lock:
            # `_end_soon` and the thread that carries it both drop it, in either order
            if secured in self._open:
                self._open.remove(secured)

    def _end_soon(self, secured: SharedSocket, why: str) -> None:
        """End a connection in a thread of its own, as the other end may take its time to read the reason."""
        self._drop(secured)
        threading.Thread(target=secured.end, args=(why,), name="farewell", daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing where a connection breaks off."""


class Door(Listener):
    """Accepts connections for several processes, and passes each on by the protocol (ALPN) that it names.

    Args:
        address, contexts, carry, refusal, reject_reason: see `Listener`; for connections of its own protocol.
        own: the protocol whose connections it carries itself.

    Attributes:
        routes: the sockets (Unix) over which connections are passed on, by protocol.
        rest: carries those that name no protocol while nobody takes them; None where they end.
    """

    def __init__(self, address: tuple[str, int], *handlers: Any, own: str) -> None:
        self.own, self.routes = own, dict[str, socket.socket]()
        self.rest: Listener | None = None
        super().__init__(address, *handlers)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Carry a connection, or pass it on before its handshake; one that nobody waits for ends."""
        protocol = self._protocol(request)
        if protocol == self.own:
            return super().finish_request(request, client_address)
        if (route := self.routes.get(protocol)) is None:
            return None if protocol or self.rest is None else self.rest.finish_request(request, client_address)
        # never waits: a process that takes none for long loses some, and sites connect again
        with suppress(OSError):
            socket.send_fds(route, [b"c"], [request.fileno()], socket.MSG_DONTWAIT)
            # its own file is closed, and not the connection, which another process has now
            request.close()

    def service_actions(self) -> None:
        """See `Listener`."""
        super().service_actions()
        if self.rest is not None:
            self.rest.service_actions()

    def server_close(self) -> None:
        """See `Listener`."""
        super().server_close()
        if self.rest is not None:
            self.rest.server_close()

    def _protocol(self, request: socket.socket) -> str:
        """Return what a connection names, "" where it says nothing in time."""
        request.settimeout(HANDSHAKE)
        until, protocol, seen = time.monotonic() + HANDSHAKE, None, 0
        try:
            self._begin_handshake(request)
            while protocol is None and time.monotonic() < until:
                hello = request.recv(_HELLO, socket.MSG_PEEK)
                protocol = first_protocol(hello) if hello and len(hello) < _HELLO else ""
                if protocol is None and len(hello) == seen:
                    time.sleep(_PEEK)
                seen = len(hello)
        except OSError:
            return "none"
        finally:
            with self._lock:
                self._handshakes.pop(threading.get_ident(), None)
        return "none" if protocol is None else protocol


def keep_connecting(
    address: tuple[str, int], contexts: RenewedContext, carry: Carry, refusal: Refusal, over: threading.Event
) -> None:
    """Connect, and connect again whenever the connection ends, since the server may start later or restart."""
    wait = _RETRY[0]
    while not over.is_set():
        began = time.monotonic()
        try:
            with contexts.secure(connect(address, HANDSHAKE), address[0]) as secured:
                carry(secured)
        except (OSError, ValueError) as error:
            refusal("the server", error)
        if time.monotonic() - began > 5:
            wait = _RETRY[0]
        over.wait(wait)
        wait = min(2 * wait, _RETRY[1])


def refusal(who: str, error: ssl.SSLError) -> str:
    """Return the sentence about a handshake that failed.

    Args:
        who: the other end.
        error: how it failed.
    """
    # OpenSSL's names begin with SSLV3_ or TLSV1_, by the age of the alert
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
        if error.verify_code in _STRANGE:
            return "its certificate is of another federation: compare the credentials of both"
        return error.verify_message
    name = "" if isinstance(error, ssl.SSLEOFError) else error.reason or ""
    if name in _NO_TLS:
        return "it does not speak TLS 1.3: compare host and port"
    sentences = [sentence for alert, sentence in _ALERTS.items() if name.endswith(f"ALERT_{alert}")]
    return sentences[0] if sentences else name or "the connection broke off"
