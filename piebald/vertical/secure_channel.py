"""An encrypted connection between two parties of a federation, who prove their identities by certificates.

One party has the server's credentials and listens, the other has a site's credentials and connects.  Either of them may
hold the labels.
"""

from __future__ import annotations

import logging
import math
import queue
import ssl
import threading
from collections.abc import Callable
from typing import Any

from piebald.core.errors import RuntimeFault, SettingError, unknown
from piebald.federation.credentials.provisioning import Credentials
from piebald.federation.credentials.revocation import Admission, name_in
from piebald.federation.link.messaging import SERVER
from piebald.federation.link.tls import Listener, RenewedContext, SharedSocket, keep_connecting
from piebald.federation.link.tls import refusal as handshake_refusal
from piebald.vertical.channel import SocketChannel
from piebald.vertical.party_messages import MessageFault, PartyEnded

log = logging.getLogger("piebald.vertical")


class SecureChannel(SocketChannel):
    """Channel between two processes, over TLS.

    Args:
        connection: the connection.
        partner: the name in the other party's certificate.

    Attributes:
        certificate: the other party's, as of `ssl.SSLSocket.getpeercert`.
        over: event that is set when the connection has ended here.
        unwelcome: the reason why the other party is not admitted any more, "" as long as it is.
        listener: the listener that admitted it and checks every second that it is still admitted; None where this party
            connected.
    """

    def __init__(self, connection: SharedSocket, partner: str) -> None:
        self._secured, self.partner = connection, partner
        self.certificate = connection.certificate
        self.over = threading.Event()
        self.unwelcome = ""
        self.listener: Listener | None = None
        super().__init__(connection)

    def receive(self, most: int, timeout: float) -> bytes:
        try:
            return super().receive(most, timeout)
        except (PartyEnded, MessageFault):
            # the connection broke because the partner was refused, which is what its user must hear
            if self.unwelcome:
                raise PartyEnded(self.unwelcome) from None
            raise

    def _put(self, frame: bytes) -> None:
        # the partner may compute for long before it reads; the timeout of `receive` decides when it is gone
        self._secured.sendall(frame, seconds=math.inf)

    def _take(self, most: int, seconds: float) -> bytes:
        return self._secured.recv(most, seconds=seconds)

    def close(self) -> None:
        super().close()
        self.over.set()
        if self.listener is not None:
            self.listener.shutdown()
            self.listener.server_close()
            self.listener = None


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
    channels: queue.Queue[SecureChannel] = queue.Queue()
    over = threading.Event()
    partners = credentials.sites() if credentials.party == SERVER else [SERVER]
    if not partners:
        raise SettingError(f"the credentials in {credentials.folder} list no site that could be the other party")
    if partner is not None and partner not in partners:
        raise unknown(f"party in {credentials.folder} called", partner, partners)
    partners = partners if partner is None else [partner]

    def carry(connection: SharedSocket) -> None:
        """Take the first connection of a listed party, and hold it until it ends."""
        name = name_in(connection.certificate)
        # the first connection stays: a later one, even of a listed party, must not take its place in the run
        if name not in partners or over.is_set():
            log.warning("refused a connection from %s: expected %s", name, " or ".join(partners))
            return
        over.set()
        log.info("the other party is %s, by its certificate", name)
        channel = SecureChannel(connection, name)
        channels.put(channel)
        channel.over.wait()

    def refusal(who: str, error: Exception) -> None:
        if isinstance(error, ssl.SSLError):
            log.warning("%s", handshake_refusal(who, error))

    address = f"{credentials.host}:{credentials.port}"
    if credentials.party == SERVER:
        return _listen(credentials, carry, refusal, channels, timeout)
    contexts = RenewedContext(credentials.folder, server=False)
    arguments = (credentials.host, credentials.port), contexts, carry, refusal, over
    threading.Thread(target=keep_connecting, args=arguments, name="transfer connection", daemon=True).start()
    try:
        return channels.get(timeout=timeout)
    except queue.Empty:
        # ends the thread that goes on trying
        over.set()
        raise RuntimeFault(f"the other party was not at {address} for {timeout:g} seconds") from None


def _listen(
    credentials: Credentials, carry: Callable[[SharedSocket], None], refusal: Callable[[str, Exception], None],
    channels: queue.Queue[SecureChannel], timeout: float,
) -> SecureChannel:  # fmt: skip
    """Wait for the other party, and go on looking whether it is still admitted until the channel is closed."""
    address = f"{credentials.host}:{credentials.port}"
    host = credentials.host if credentials.host in ("127.0.0.1", "localhost") else "0.0.0.0"
    admission = Admission(credentials.folder)
    channel: SecureChannel | None = None

    def reject_reason(certificate: Any) -> str | None:
        if (reason := admission.reject_reason(certificate)) is not None:
            log.warning("refused %s: %s", name_in(certificate), reason)
            if channel is not None and certificate == channel.certificate:
                channel.unwelcome = f"the other party, {channel.partner}, is not admitted any more: {reason}"
        return reason

    try:
        contexts = RenewedContext(credentials.folder, server=True)
        listener = Listener((host, credentials.port), contexts, carry, refusal, reject_reason)
    except OSError as error:
        raise SettingError(f"cannot listen on address {address!r}: {(error.strerror or str(error)).lower()}") from None
    threading.Thread(target=listener.serve_forever, args=(0.1,), name="transfer listener", daemon=True).start()
    try:
        channel = channels.get(timeout=timeout)
    except queue.Empty:
        listener.shutdown()
        listener.server_close()
        raise RuntimeFault(f"the other party did not come to {address} within {timeout:g} seconds") from None
    channel.listener = listener
    return channel
