"""Connections: TLS 1.3 over TCP, where both ends show a certificate of the federation's own authority.

A driver for NVIDIA FLARE's cells.  Unlike the one that comes along it trusts nobody but that authority (no roots of the
operating system), a stranger who connects and says nothing holds up nobody else, and a frame that claims to be longer
than any message of ours ends the connection before room is made for it.
"""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

from nvflare.fuel.f3.comm_error import CommError
from nvflare.fuel.f3.drivers.base_driver import BaseDriver
from nvflare.fuel.f3.drivers.driver import ConnectorInfo
from nvflare.fuel.f3.drivers.driver_params import DriverCap, DriverParams
from nvflare.fuel.f3.drivers.socket_conn import SocketConnection
from nvflare.fuel.f3.sfm.prefix import PREFIX_LEN, Prefix

from piebald.runtimes.federation.messages import LONGEST

SCHEME = "piebald"
HANDSHAKE = 10.0  # seconds for a connection to prove who it is
FRAME = LONGEST + (1 << 16)  # a message with the cell's own headers
BACKLOG = 128
_RETRY = (0.25, 2.0)  # seconds between attempts to connect, at first and at most


def context(params: dict[str, Any], server: bool) -> ssl.SSLContext:
    """What a connection must prove; `params` name the files of a kit."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # the name in the certificate is compared with the name of the cell, by the cell
    made.verify_mode = ssl.CERT_REQUIRED
    role = "SERVER" if server else "CLIENT"
    made.load_verify_locations(params[DriverParams.CA_CERT.value])
    made.load_cert_chain(params[DriverParams[f"{role}_CERT"].value], params[DriverParams[f"{role}_KEY"].value])
    return made


class Frames(SocketConnection):  # type: ignore[misc]
    """A connection that refuses frames which no message of ours can fill."""

    def read_frame(self) -> bytearray:
        head = bytearray(PREFIX_LEN)
        self.read_into(head, 0, PREFIX_LEN)
        length = Prefix.from_bytes(head).length
        if not PREFIX_LEN <= length <= FRAME:
            raise CommError(CommError.BAD_DATA, f"a frame that claims {length} bytes")
        frame = bytearray(length)
        frame[:PREFIX_LEN] = head
        self.read_into(frame, PREFIX_LEN, length - PREFIX_LEN)
        return frame


class _Handler(BaseRequestHandler):
    """Shakes hands in the connection's own thread, so that nobody waits for somebody else's."""

    server: _Listener

    def handle(self) -> None:
        self.request.settimeout(HANDSHAKE)
        try:
            secured = self.server.context.wrap_socket(self.request, server_side=True)
        except (OSError, ValueError) as error:
            self.server.driver.refused(self.client_address[0], error)
            return
        secured.settimeout(None)
        self.server.driver.carry(Frames(secured, self.server.connector, True))
        with suppress(OSError):
            secured.close()


class _Listener(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = BACKLOG

    def __init__(self, address: tuple[str, int], driver: Driver, connector: ConnectorInfo) -> None:
        self.driver, self.connector = driver, connector
        self.context = context(connector.params, server=True)
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks off is nothing to print."""


class Driver(BaseDriver):  # type: ignore[misc]
    """Connections for cells whose address begins with ``piebald://``."""

    def __init__(self) -> None:
        super().__init__()
        self._listener: _Listener | None = None
        self._over = False

    @staticmethod
    def supported_transports() -> list[str]:
        return [SCHEME]

    @staticmethod
    def capabilities() -> dict[str, Any]:
        return {DriverCap.SEND_HEARTBEAT.value: True, DriverCap.SUPPORT_SSL.value: True}

    @staticmethod
    def get_urls(scheme: str, resources: dict[str, Any]) -> tuple[str, str]:
        raise CommError(CommError.NOT_SUPPORTED, "only listeners with a fixed address")

    def listen(self, connector: ConnectorInfo) -> None:
        self.connector = connector
        with _Listener(_address(connector), self, connector) as self._listener:
            self._listener.serve_forever(poll_interval=0.1)

    def connect(self, connector: ConnectorInfo) -> None:
        """Connect, again and again: the server may come later, or come back."""
        self.connector = connector
        made, wait = context(connector.params, server=False), _RETRY[0]
        while not self._over:
            began = time.monotonic()
            try:
                plain = socket.create_connection(_address(connector), timeout=HANDSHAKE)
                with made.wrap_socket(plain) as secured:
                    secured.settimeout(None)
                    self.carry(Frames(secured, connector, True))
            except (OSError, ValueError) as error:
                self.refused("the server", error)
            wait = _RETRY[0] if time.monotonic() - began > 5 else min(2 * wait, _RETRY[1])
            connector.stopped.wait(wait)

    def carry(self, connection: Frames) -> None:
        """Hand frames on until the connection ends."""
        self.add_connection(connection)
        connection.read_loop()
        self.close_connection(connection)

    def refused(self, who: str, error: Exception) -> None:
        """Somebody could not prove who they are, or nobody was there."""
        reporter = self.connector.params.get("reporter")
        if reporter is not None and isinstance(error, ssl.SSLError):
            reporter(f"{who} did not prove that it belongs to this federation: {error.reason or 'it broke off'}")

    def shutdown(self) -> None:
        self._over = True
        self.close_all()
        if self._listener is not None:
            self._listener.shutdown()


def _address(connector: ConnectorInfo) -> tuple[str, int]:
    params = connector.params
    return str(params[DriverParams.HOST.value]) or "0.0.0.0", int(params[DriverParams.PORT.value])
