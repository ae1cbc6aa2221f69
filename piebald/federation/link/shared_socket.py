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
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

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
