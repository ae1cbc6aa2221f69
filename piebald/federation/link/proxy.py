"""Connections through an HTTP proxy (CONNECT, RFC 9110, section 9.3.6), as the environment names it.

`HTTPS_PROXY` is used and `NO_PROXY` names hosts that are reached without it, as other programs read them.  The proxy
passes bytes on: the TLS connection is with the server, and the proxy can neither read nor change what is sent.
"""

from __future__ import annotations

import base64
import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from piebald.core.errors import SettingError

_LONGEST = 1 << 14  # bytes of a proxy's answer


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy.

    Attributes:
        host, port: its address.
        login: what it wants as `Proxy-Authorization`, "" for nothing.
    """

    host: str
    port: int
    login: str = ""

    @property
    def address(self) -> str:
        """HOST:PORT, for messages; its password is in none."""
        return f"{self.host}:{self.port}"


def proxy_for(host: str, port: int) -> Proxy | None:
    """Return the proxy through which a server is reached, None where there is none, as for this machine.

    Raises:
        SettingError: `HTTPS_PROXY` is not the address of an HTTP proxy.
    """
    setting = getproxies().get("https")
    if not setting or is_loopback(host) or proxy_bypass(f"{host}:{port}"):
        return None
    parts = urlsplit(setting if "://" in setting else f"http://{setting}")
    try:
        number = parts.port or 80
    except ValueError:
        number = 0
    if parts.scheme != "http" or not parts.hostname or not number:
        raise SettingError(
            f"HTTPS_PROXY must be http://HOST:PORT, got {parts.scheme}://{parts.hostname or ''}...: correct it, or "
            f"name {host} in NO_PROXY"
        )
    return Proxy(parts.hostname, number, _login(parts))


def connect(address: tuple[str, int], timeout: float) -> socket.socket:
    """Connect to a server, through a proxy where the environment names one.

    Args:
        address: the server's host and port.
        timeout: seconds for each step.

    Raises:
        OSError: there is no connection; the message says what the proxy has answered.
        SettingError: see `proxy_for`.
    """
    proxy = proxy_for(*address)
    if proxy is None:
        return socket.create_connection(address, timeout=timeout)
    try:
        connection = socket.create_connection((proxy.host, proxy.port), timeout=timeout)
    except OSError as error:
        raise ConnectionError(f"the proxy {proxy.address} cannot be reached: {error.strerror or error}") from None
    try:
        target = f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
        login = f"Proxy-Authorization: Basic {proxy.login}\r\n" if proxy.login else ""
        connection.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{login}\r\n".encode())
        answer = _answer(connection)
        words = answer.split(" ", 2)
        if not answer.startswith("HTTP/1.") or len(words) < 2 or not words[1].startswith("2"):
            raise ConnectionError(f"the proxy {proxy.address} answers {answer[:80]!r} for {target}")
    except BaseException:
        connection.close()
        raise
    return connection


def _answer(connection: socket.socket) -> str:
    """Return the first line of the proxy's answer, read byte by byte: the bytes after its end are the server's."""
    answer = bytearray()
    while not answer.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        if not byte or len(answer) > _LONGEST:
            raise ConnectionError("the proxy ended the connection" if not byte else "the proxy's answer is too long")
        answer += byte
    return answer.split(b"\r\n", 1)[0].decode("latin-1")


def _login(parts: SplitResult) -> str:
    if parts.username is None:
        return ""
    text = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return base64.b64encode(text.encode()).decode()


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host, given as a name or an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
