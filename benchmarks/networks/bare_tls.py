"""The same bytes over bare TLS on the same link: what a federation's messages are compared with."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from pathlib import Path

from piebald.federation.link.tls import context


def seconds(folder: Path, listening: socket.socket, port: int, size: int) -> float:
    """Seconds to send so many bytes down and up again, one after the other, with a byte of confirmation each.

    The handshake is over before.

    Args:
        folder: credentials of a federation.
        listening: the socket to which the link leads.
        port: the link's.
        size: bytes in each direction.
    """
    server = threading.Thread(target=_serve, args=(folder, listening, size), daemon=True)
    server.start()
    made = context(folder / "site-1", False)
    with made.wrap_socket(socket.create_connection(("127.0.0.1", port))) as secured:
        secured.sendall(b"x")
        began = time.monotonic()
        _take(secured, size)
        secured.sendall(bytes(size))
        _take(secured, 1)
        spent = time.monotonic() - began
    server.join()
    return spent


def _serve(folder: Path, listening: socket.socket, size: int) -> None:
    plain, _ = listening.accept()
    with context(folder / "server", True).wrap_socket(plain, server_side=True) as secured:
        _take(secured, 1)
        secured.sendall(bytes(size))
        _take(secured, size)
        secured.sendall(b"x")
        secured.settimeout(5)
        try:
            secured.recv(1)
        except OSError:
            return


def _take(secured: ssl.SSLSocket, size: int) -> None:
    while size > 0:
        found = len(secured.recv(min(size, 1 << 16)))
        if not found:
            raise OSError("the connection ended")
        size -= found
