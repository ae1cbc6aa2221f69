"""A TLS connection that one thread reads while others write.

OpenSSL forbids two threads in one connection at a time, and Python locks connections only from 3.13 on: a read beside a
write ends healthy connections now and then ("EOF occurred in violation of protocol"), and may do worse where the other
end asks for new keys, which a read writes.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self, TypeVar

T = TypeVar("T")


class SharedSocket(ssl.SSLSocket):
    """Hands its connection to one thread at a time; nobody waits for the network meanwhile.

    Until `share` is called it is as any other, with a time limit for the handshake.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """A socket; `ssl` makes it without calling its own `__init__`."""
        shared = super().__new__(cls, *args, **kwargs)
        shared._turn, shared._ended, shared._patience, shared._expires = threading.Lock(), False, math.inf, math.inf
        return shared

    _turn: threading.Lock
    _ended: bool
    _patience: float
    _expires: float

    def share(self, patience: float, ends: bool = False) -> None:
        """From now on, read and write in any threads.

        Args:
            patience: seconds without a byte, at most.
            ends: whether nothing is read or sent any more once the certificate of the other end has expired.
        """
        if ends and (certificate := self.getpeercert()):
            self._expires = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
        self._patience = patience
        self.settimeout(0)

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Bytes that have arrived, none where the connection has ended.

        Raises:
            TimeoutError: nothing came for too long.
        """
        return self._in_turn(lambda: super(SharedSocket, self).recv(buflen, flags), self._patience)

    def send(self, data: Any, flags: int = 0) -> int:
        """Send some bytes; returns how many.

        Raises:
            TimeoutError: nothing could be sent for too long.
        """
        return self._in_turn(lambda: super(SharedSocket, self).send(data, flags), self._patience)

    def recv_within(self, most: int, seconds: float) -> bytes:
        """As `recv`, with a time limit of its own."""
        return self._in_turn(lambda: super(SharedSocket, self).recv(most), seconds)

    def send_within(self, data: Any, seconds: float) -> int:
        """As `send`, with a time limit of its own."""
        return self._in_turn(lambda: super(SharedSocket, self).send(data), seconds)

    def shutdown(self, how: int) -> None:
        """End the connection.

        Python's own forgets the encryption first, so what another thread sends at that moment would leave in clear.
        """
        socket.socket.shutdown(self, how)

    def close(self) -> None:
        """Close it, and send nothing from then on."""
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)
        with self._turn:
            self._ended = True
            super().close()

    def _in_turn(self, step: Callable[[], T], seconds: float) -> T:
        while True:
            with self._turn:
                if self._ended:
                    raise OSError("the connection is closed")
                if time.time() > self._expires:
                    raise OSError("the certificate of the other end has expired")
                try:
                    return step()
                except ssl.SSLWantReadError:
                    event = select.POLLIN
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
                ready = select.poll()
                ready.register(self.fileno(), event)
            if not ready.poll(None if seconds == math.inf else 1000 * seconds):
                raise TimeoutError(f"no byte was transferred for {seconds:g} seconds")
