"""Connections through an HTTP proxy (CONNECT, RFC 9110, section 9.3.6), as the environment names it.

`HTTPS_PROXY` is used and `NO_PROXY` names hosts that are reached without it, as other programs read them.  The proxy
passes bytes on: the TLS connection is with the server, and the proxy can neither read nor change what is sent.
"""

from __future__ import annotations

import base64
import ipaddress
import socket
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from piebald.core.errors import SettingError


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
