"""The driver with which NVIDIA FLARE's cells use the federation's connections (`tls`).

A frame that claims to be longer than any message ends its connection.  Classes are made by functions, since their
bases need the extra `federation`.
"""

from __future__ import annotations

import ssl
import threading
import time
from threading import Event
from typing import Any

from piebald.federation.link.frame_queue import FrameQueue, FrameRoom
from piebald.federation.link.shared_socket import SharedSocket
from piebald.federation.link.tls import (
    Carry,
    Listener,
    Refusal,
    RenewedContext,
    keep_connecting,
    receive,
    send,
)
from piebald.federation.link.tls import refusal as handshake_refusal
from piebald.federation.link.wire_messages import LONGEST

SCHEME = "piebald"
FRAME = LONGEST + (1 << 16)  # a message with the cell's own headers


def _make_connection() -> Any:
    """Make the class of connections, which needs the extra `federation`."""
    from nvflare.fuel.f3.comm_error import CommError
    from nvflare.fuel.f3.drivers.socket_conn import SocketConnection
    from nvflare.fuel.f3.sfm.prefix import PREFIX_LEN, Prefix

    class Frames(SocketConnection):  # type: ignore[misc]
        """A connection that refuses frames longer than any message, and takes the time that a slow link takes.

        Its frames are handled by few threads at a time, and it reads no more while many wait (`frame_queue`).
        """

        queue: FrameQueue | None = None
        room: FrameRoom

        def register_frame_receiver(self, receiver: Any) -> None:
            super().register_frame_receiver(receiver)
            manager, connection = receiver.conn_manager, receiver.conn
            self.queue = FrameQueue(
                manager.frame_mgr_executor.submit,
                lambda frame: manager.process_frame_task(connection, frame),
                self.room,
            )

        def process_frame(self, frame: bytes | bytearray) -> None:
            if self.queue is not None:
                self.frame_receiver.conn.last_activity = time.time()
                self.queue.put(frame)

        def close(self) -> None:
            if self.queue is not None:
                self.queue.end()
            super().close()

        def send_frame(self, frame: bytes | bytearray) -> None:
            try:
                send(self.sock, frame)
            except (OSError, ValueError) as error:  # a frame that was sent in part leaves the connection unusable
                self.close()
                raise CommError(CommError.CLOSED, f"the connection ended while a frame was sent: {error}") from None

        def read_frame(self) -> bytearray:
            head = bytearray()
            if not receive(self.sock.recv, head, PREFIX_LEN):
                raise CommError(CommError.CLOSED, "the connection was closed by the other end")
            length = Prefix.from_bytes(head).length
            if not PREFIX_LEN <= length <= FRAME:
                raise CommError(CommError.BAD_DATA, f"a frame that claims {length} bytes")
            if not receive(self.sock.recv, head, length):
                raise CommError(CommError.CLOSED, "the connection was closed by the other end")
            return head

    return Frames


def make_driver() -> Any:
    """Make the driver class for cells whose address begins with ``piebald://``."""
    from nvflare.fuel.f3.drivers.base_driver import BaseDriver
    from nvflare.fuel.f3.drivers.driver import ConnectorInfo

    connection_class = _make_connection()

    class PiebaldDriver(_DriverBase, BaseDriver):  # type: ignore[misc]
        """Listens and connects."""

        def listen(self, connector: ConnectorInfo) -> None:
            contexts, reject = RenewedContext(connector.params, server=True), connector.params["reject"]
            with Listener(
                _address(connector), contexts, self._carrier(connector), self._refusal(connector), reject
            ) as listener:
                with self.starting:
                    if self.over.is_set():  # by a server that was closed before this thread came here
                        return
                    self.listener = listener
                listener.serve_forever(poll_interval=0.1)

        def connect(self, connector: ConnectorInfo) -> None:
            contexts, over = RenewedContext(connector.params, server=False), self.over
            keep_connecting(_address(connector), contexts, self._carrier(connector), self._refusal(connector), over)

        def _carrier(self, connector: ConnectorInfo) -> Carry:
            def carry(secured: SharedSocket) -> None:
                if (connected := connector.params.get("connected")) is not None:
                    connected(_peer(secured), secured.getpeercert() or {})
                connection = connection_class(secured, connector, True)
                connection.room = self.room
                self.add_connection(connection)
                connection.read_loop()
                self.close_connection(connection)
                if (lost := connector.params.get("lost")) is not None:
                    lost()

            return carry

    return PiebaldDriver


class _DriverBase:
    """The methods of a driver that do not depend on frames."""

    def __init__(self) -> None:
        super().__init__()
        self.over, self.room, self.starting = Event(), FrameRoom(), threading.Lock()
        self.listener: Listener | None = None

    @staticmethod
    def supported_transports() -> list[str]:
        return [SCHEME]

    @staticmethod
    def capabilities() -> dict[str, Any]:
        return {"send_heartbeat": True, "support_ssl": True}

    @staticmethod
    def get_urls(scheme: str, resources: dict[str, Any]) -> tuple[str, str]:
        raise NotImplementedError("only listeners with a fixed address are supported")

    @staticmethod
    def _refusal(connector: Any) -> Refusal:
        def refusal(who: str, error: Exception) -> None:
            reporter, failed = connector.params.get("reporter"), connector.params.get("failed")
            if failed is not None:
                failed(error)
            is_logged = failed is not None and isinstance(error, ssl.SSLEOFError)
            if reporter is not None and isinstance(error, ssl.SSLError) and not is_logged:
                reporter(handshake_refusal(who, error))

        return refusal

    def shutdown(self) -> None:
        """Stop listening and connecting, and end all connections."""
        self.over.set()
        self.close_all()  # type: ignore[attr-defined]
        with self.starting:
            listener = self.listener
        if listener is not None:
            listener.shutdown()


def _peer(secured: ssl.SSLSocket) -> str:
    """The address of the other end, "" where it has gone already."""
    try:
        return str(secured.getpeername()[0])
    except OSError:
        return ""


def _address(connector: Any) -> tuple[str, int]:
    return str(connector.params["host"]) or "0.0.0.0", int(connector.params["port"])
