"""Channels that carry frames between two threads, or between two processes over a federation's link.

A channel sends whole frames and never waits for the other side to read them, so both parties may send at once.  Over a
link, one party has the server's credentials and listens, the other has a site's and connects; certificates say who they
are.  Either of them may hold the labels.
"""

from __future__ import annotations

import logging
import math
import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress

from piebald.core.errors import RuntimeFault, SettingError, unknown
from piebald.federation.credentials.provisioning import Credentials
from piebald.federation.credentials.revocation import name_in
from piebald.federation.link.messaging import SERVER, Link
from piebald.federation.link.tls import SharedSocket, is_loopback
from piebald.vertical.party_messages import HEADER, MessageFault, PartyEnded, body_length

log = logging.getLogger("piebald.vertical")

SLOWEST = 8_000  # bytes a second: while a frame arrives faster than that, the other party is not silent
TAKEN, BUSY, SAME = b"+", b"-", b"="  # what the listening party sends first; who is not taken connects again
REFUSALS = {
    BUSY: "was at work with another party, or waited for one",
    SAME: "had a connection already by a certificate of this party's name: another process, or an older connection",
}
GONE = "the other party is gone: its process ended or the connection broke"


class Channel(ABC):
    """One end of a connection between two parties.

    Attributes:
        sent: number of bytes sent so far.
        received: number of bytes received so far.
    """

    def __init__(self) -> None:
        self.sent = self.received = 0

    @abstractmethod
    def send(self, frame: bytes) -> None:
        """Send a frame without waiting until it is read."""

    @abstractmethod
    def receive(self, most: int, timeout: float) -> bytes:
        """Wait for the next frame.

        Args:
            most: largest number of bytes allowed after the header.
            timeout: seconds to wait; bytes that arrive at a fair rate extend them.

        Raises:
            PartyEnded: the other side is gone, or silent for too long.
            MessageFault: the bytes are not a frame, or the frame is too long.
        """

    @abstractmethod
    def close(self) -> None:
        """Send all waiting frames and end the connection.  May be called twice."""


class InMemoryChannel(Channel):
    """Channel between two threads of one process; `pair` makes both ends."""

    def __init__(self, inbox: queue.Queue[bytes | None], outbox: queue.Queue[bytes | None]) -> None:
        super().__init__()
        self._inbox, self._outbox = inbox, outbox

    @classmethod
    def pair(cls) -> tuple[InMemoryChannel, InMemoryChannel]:
        """Return the two ends of one connection."""
        to_first: queue.Queue[bytes | None] = queue.Queue()
        to_second: queue.Queue[bytes | None] = queue.Queue()
        return cls(to_first, to_second), cls(to_second, to_first)

    def send(self, frame: bytes) -> None:
        self.sent += len(frame)
        self._outbox.put(frame)

    def receive(self, most: int, timeout: float) -> bytes:
        try:
            frame = self._inbox.get(timeout=timeout)
        except queue.Empty:
            raise PartyEnded(f"the other party was silent for {timeout:g} seconds") from None
        if frame is None:
            raise PartyEnded(GONE)
        # the same refusals as over a socket, so that both kinds of runs behave alike
        body_length(frame[: HEADER.size], most)
        self.received += len(frame)
        return frame

    def close(self) -> None:
        self._outbox.put(None)


class SocketChannel(Channel):
    """Channel between two processes, over a connected socket."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._socket = connection
        # a writer of its own, so that no party waits for the other one to read: both may send at once
        self._waiting: queue.Queue[bytes | None] = queue.Queue()
        self._writer = threading.Thread(target=self._write, name="transfer writer", daemon=True)
        self._writer.start()

    def _write(self) -> None:
        while (frame := self._waiting.get()) is not None:
            try:
                self._put(frame)
            except OSError:  # the reader will notice
                return

    def send(self, frame: bytes) -> None:
        self.sent += len(frame)
        self._waiting.put(frame)

    def receive(self, most: int, timeout: float) -> bytes:
        until = time.monotonic() + timeout
        head = self._read(HEADER.size, until, timeout)
        body = self._read(body_length(head, most), until, timeout)
        self.received += len(head) + len(body)
        return head + body

    def _read(self, count: int, until: float, timeout: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                # a MB at a time, so that memory grows with what has come and not with what a header claims; a timeout
                # of 0 would make the socket non-blocking
                piece = self._take(min(count - len(data), 1 << 20), max(until - time.monotonic(), 0.001))
            except TimeoutError:
                raise PartyEnded(f"the other party was silent for {timeout:g} seconds") from None
            except OSError:
                raise PartyEnded(GONE) from None
            if not piece:
                if data:
                    raise PartyEnded(f"{GONE} in the middle of a message")
                raise PartyEnded(GONE)
            data += piece
            until += len(piece) / SLOWEST  # a slow link takes its time; a trickle does not
        return bytes(data)

    def _put(self, frame: bytes) -> None:
        """Send all of a frame."""
        self._socket.sendall(frame)

    def _take(self, most: int, seconds: float) -> bytes:
        """Receive some bytes; none when the other side has ended."""
        self._socket.settimeout(seconds)
        return self._socket.recv(most)

    def close(self) -> None:
        self._waiting.put(None)
        # frames that wait are sent first, but a partner that does not read must not hold this process
        self._writer.join(timeout=5)
        with suppress(OSError):  # the other side may have gone first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class SecureChannel(SocketChannel):
    """Channel between two processes, over a federation's link.

    Args:
        connection: the connection.
        link: this party's link, which made it and, where this party listens, ends it once the other one is not admitted
            any more.

    Attributes:
        partner: the name in the other party's certificate.
        over: event that is set when the connection has ended here.
    """

    def __init__(self, connection: SharedSocket, link: Link) -> None:
        self._secured, self._link, self.partner = connection, link, name_in(connection.certificate)
        self.over = threading.Event()
        super().__init__(connection)

    def receive(self, most: int, timeout: float) -> bytes:
        try:
            return super().receive(most, timeout)
        except (PartyEnded, MessageFault):
            # the connection broke because the partner was refused, which is what its user must hear
            if why := self._link.shut.get(self.partner):
                raise PartyEnded(f"the other party, {self.partner}, is not admitted any more: {why}") from None
            raise

    def _put(self, frame: bytes) -> None:
        # the partner may compute for long before it reads; the timeout of `receive` decides when it is gone
        self._secured.sendall(frame, seconds=math.inf)

    def _take(self, most: int, seconds: float) -> bytes:
        return self._secured.recv(most, seconds=seconds)

    def close(self) -> None:
        super().close()
        self._link.stop()  # before the thread that carries it returns, which would connect again
        self.over.set()


def partners_of(credentials: Credentials) -> list[str]:
    """Return the names of the parties that the owner of credentials may meet.

    Raises:
        SettingError: they list none.
    """
    partners = list(credentials.sites()) if credentials.party == SERVER else [SERVER]
    if not partners:
        raise SettingError(f"the credentials in {credentials.folder} list no site that could be the other party")
    return partners


def open_channel(credentials: Credentials, timeout: float, partner: str | None = None) -> SecureChannel:
    """Connect to the other party, waiting until it is there.

    Args:
        credentials: this party's.
        timeout: seconds to wait.
        partner: the name in the other party's certificate; None for whichever listed party connects first.

    Raises:
        SettingError: the credentials do not list the other party, or the address cannot be listened on.
        RuntimeFault: the other party did not connect, or is not there.
    """
    listens = credentials.party == SERVER
    known = partners_of(credentials)
    if partner is not None and partner not in known:
        raise unknown(f"party in {credentials.folder} called", partner, known)
    partners = known if partner is None else [partner]
    channels: queue.Queue[SecureChannel] = queue.Queue()
    taken, partner_now, refusal = threading.Lock(), "", b""

    def carry(connection: SharedSocket) -> None:
        """Take the first connection of a listed party, and hold it until it ends."""
        nonlocal partner_now, refusal
        name = name_in(connection.certificate)
        # the first connection stays: a later one, even of a listed party, must not take its place in the run
        if name not in partners or not taken.acquire(blocking=False):
            if listens and name in known:
                with suppress(OSError):
                    connection.sendall(SAME if name == partner_now else BUSY, seconds=timeout)
            return link.report(f"{name} was refused a connection: it is that of {partner_now or ' or '.join(partners)}")
        try:
            if listens:
                connection.sendall(TAKEN, seconds=timeout)
            # a listening party that is at work with another one ends the connection, and is asked again
            elif (answer := connection.recv(len(TAKEN), seconds=timeout)) != TAKEN:
                refusal = answer  # none where it ended without a word, of which nothing can be said
                return taken.release()
        except OSError:
            return taken.release()
        partner_now = name
        log.info("the other party is %s, by its certificate", name)
        channel = SecureChannel(connection, link)
        channels.put(channel)
        channel.over.wait()

    host = "" if listens and not is_loopback(credentials.host) else credentials.host
    address = (host, credentials.port)
    link = Link(credentials.party, address, credentials.folder, partners.__contains__, log.warning, carry)
    link.start()
    try:
        return channels.get(timeout=timeout)
    except queue.Empty:
        link.stop()
        place = f"{credentials.host}:{credentials.port}"
        missed = f"did not come to {place} within" if listens else f"was not at {place} for"
        why = (
            f"at {place} took no connection in {timeout:g} seconds; when it was last asked, it {REFUSALS.get(refusal)}"
        )
        raise RuntimeFault(
            f"the other party {why if refusal in REFUSALS else f'{missed} {timeout:g} seconds'}"
        ) from None
