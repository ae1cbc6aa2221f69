"""Messages between named parties over NVIDIA FLARE's cells, with a filter for incoming messages.

The cell layer connects, reconnects, and pairs requests with replies.  It does not check the origin that a message
claims, so each message passes a filter before it is handled: its origin must be the name in the certificate, sites
exchange messages with the server only, and bodies are bytes.
"""

from __future__ import annotations

import logging
import re
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from piebald.core.errors import SettingError
from piebald.core.plain_text import printable
from piebald.federation.credentials.revocation import Admission, name_in
from piebald.federation.link.tls import reason
from piebald.federation.link.wire_messages import LONGEST, Message, Refused, Reply, SomeMessage, decode, encode

SERVER = "server"  # the server's name in its certificate, whatever its host is called
CHANNEL = "piebald"
INSTALL = "a federation needs NVIDIA FLARE's messaging: pip install 'piebald[federation]'"
_IN_PIECES = ("task", "result")  # topics of long bodies, whose pieces are confirmed by receipts
_REPORTS = 1000  # different sentences that are reported, so that nobody can fill the disk with them

log = logging.getLogger("piebald.federation")

Handler = Callable[[str, Any, memoryview], bytes]


def check_installed() -> None:
    """Raise a `SettingError` where the extra is not installed."""
    try:
        import nvflare.fuel.f3.cellnet.core_cell  # noqa: F401
    except ImportError:
        raise SettingError(INSTALL) from None


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection.

    Attributes:
        name: the name in its certificate.
        address: where it connected from, or the address that was connected to.
        expires: when its certificate expires, as a date.
    """

    name: str
    address: str
    expires: str


class Link:
    """One party's connection to the federation.

    Args:
        name: name of this party, as in its certificate.
        address: host and port that the server listens on.
        credentials: folder with this party's certificate and key.
        knows: whether the party of a name may send messages to this one.
        report: called with a sentence about each kind of message that was refused, once.

    Attributes:
        received, sent: bytes of messages, by party.
        peers: the other ends that have connected, by name.
        trouble: why a site is not connected to the server, "" where it is.
        shut: why parties were shut out, see `revocation.Admission`.
    """

    def __init__(
        self,
        name: str,
        address: tuple[str, int],
        credentials: Path,
        knows: Callable[[str], bool],
        report: Callable[[str], None],
    ) -> None:
        check_installed()
        self.name, self.knows = name, knows
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.peers: dict[str, Peer] = {}
        self.trouble = ""
        self._troubles: set[str] = set()  # those that were logged since the server answered last
        self._answered = True  # whether there was an answer over this connection
        self._address, self._stopping = f"{address[0]}:{address[1]}", False
        self.shut: dict[str, str] = {}
        self._report, self._reported, self._lock = report, set[str](), threading.Lock()
        self._handlers: dict[str, tuple[type[Message], Handler]] = {}
        self._connections: Counter[str] = Counter()
        self._receipts: dict[tuple[str, str], Callable[[Reply], None]] = {}  # by receiver and digest
        self.on("receipt", Reply, self._on_receipt)
        self._cell = self._make(address, credentials)

    def _make(self, address: tuple[str, int], credentials: Path) -> Any:
        _silence_cell_log(self.report)
        from nvflare.fuel.f3 import communicator
        from nvflare.fuel.f3.cellnet.core_cell import CoreCell

        from piebald.federation.link.flare_driver import SCHEME, make_driver

        if communicator.driver_mgr.find_driver_class(SCHEME) is None:
            communicator.driver_mgr.register(make_driver())
        role = "server" if self.name == SERVER else "client"
        options = {
            "ca_cert": str(credentials / "authority.pem"),
            f"{role}_cert": str(credentials / "certificate.pem"),
            f"{role}_key": str(credentials / "key.pem"),
            "connection_security": "mtls",
            "reporter": self.report,
            # the server has many connections, so it goes by the silence of a site instead
            "lost": self._on_lost if role == "client" else None,
            "failed": self._on_failed if role == "client" else None,
            "connected": self._on_connected,
            "reject": self._reject(credentials) if role == "server" else None,
        }
        host, port = address
        cell = CoreCell(self.name, f"{SCHEME}://{host}:{port}", True, options, auth_identity_map={SERVER: SERVER})
        cell.ALL_CELLS.pop(self.name, None)  # parties of one process meet over connections, too, or in no other way
        cell.add_incoming_filter("*", "*", self._filter)  # runs before any callback
        cell.register_request_cb(CHANNEL, "*", self._serve)
        return cell

    def _reject(self, credentials: Path) -> Callable[[Any], bool]:
        """Return the test of whether a party is shut out; the reason is reported, and kept in `shut`."""
        admission = Admission(credentials)

        def reject(certificate: Any) -> bool:
            if (reason := admission.reject_reason(certificate)) is None:
                return False
            self.shut[name_in(certificate)] = reason
            self.report(f"{name_in(certificate)} is shut out: {reason}")
            return True

        return reject

    def on(self, topic: str, kind: type[SomeMessage], handler: Callable[[str, SomeMessage, memoryview], bytes]) -> None:
        """Set the handler of a topic: it takes a message's origin, head and body, and returns the reply."""
        self._handlers[topic] = (kind, handler)

    def start(self) -> None:
        """Connect to the server, or listen as the server."""
        self._cell.start()

    def stop(self) -> None:
        """Disconnect.  Requests that still wait for a reply return None."""
        from nvflare.fuel.f3.stats_pool import StatsPoolManager

        self._stopping = True
        self._cell.stop()
        StatsPoolManager.pools.clear()

    def request(
        self, target: str, topic: str, head: Message, body: bytes | memoryview = b"", timeout: float = 10.0
    ) -> memoryview | None:
        """Send a request and wait for the reply; None where none came, for any reason."""
        from nvflare.fuel.f3.cellnet.utils import new_cell_message

        data = encode(head, body)
        try:
            reply = self._cell.send_request(
                CHANNEL, topic, target, new_cell_message({}, data), timeout=timeout, optional=True
            )
        except Exception:  # the cell layer raises various errors when a connection breaks
            return None
        with self._lock:
            self.sent[target] += len(data)
        answer = reply.payload if reply is not None else None
        fine = reply is not None and reply.get_header(_key("return_code")) in (None, "ok")
        if not fine or not isinstance(answer, bytes | bytearray | memoryview):
            return None
        self._answered = True
        if self._troubles or self.trouble:
            with self._lock:
                self.trouble = ""
                self._troubles.clear()
        return memoryview(answer)

    def tell(self, target: str, topic: str, head: Message, body: bytes | memoryview = b"") -> bool:
        """Send a message without waiting for a reply, and return whether the connection took it.

        What its handler returns comes back as a receipt, where it is a `Reply`.
        """
        from nvflare.fuel.f3.cellnet.utils import new_cell_message

        data = encode(head, body)
        if not self._send(target, topic, new_cell_message({}, data)):
            return False
        with self._lock:
            self.sent[target] += len(data)
        return True

    @contextmanager
    def receipts(self, target: str, digest: str, take: Callable[[Reply], None]) -> Iterator[None]:
        """Call a function in the meantime with the receipts of a party for the pieces of a body."""
        self._receipts[target, digest] = take
        try:
            yield
        finally:
            self._receipts.pop((target, digest), None)

    def connection(self, target: str) -> int:
        """Return a number that changes when a party has connected anew: messages on their way to it are lost then."""
        return self._connections[target]

    def report(self, sentence: str) -> None:
        """Report what was refused, each sentence once."""
        sentence = printable(sentence, 500)
        with self._lock:
            if sentence in self._reported or len(self._reported) >= _REPORTS:
                return
            self._reported.add(sentence)
        self._report(sentence)

    # -- private

    def _on_connected(self, address: str, certificate: dict[str, Any]) -> None:
        """Remember who is at the other end of a new connection."""
        names = [value for entry in certificate.get("subject", ()) for key, value in entry if key == "commonName"]
        seconds = ssl.cert_time_to_seconds(str(certificate.get("notAfter")))
        name = printable(names[0] if names else "", 64)
        self._answered = False
        if self.knows(name):
            self._connections[name] += 1
            self.peers[name] = Peer(name, address, f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}")

    def _on_failed(self, error: Exception) -> None:
        """Log why the server cannot be connected to, each reason once until it answers."""
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):  # which is reported
            self.trouble = f"the other end is not this federation's: {reason(error)}"
            return
        trouble = (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).lower()
        if isinstance(error, ssl.SSLEOFError):  # a proxy whose server is away, or a server that is being stopped
            trouble = f"{reason(error)} before it was made"
        if "handshake operation timed out" in trouble:  # OpenSSL's words, behind a line of its source
            trouble = "it takes connections and does not answer as a federation's server does"
        self._log_trouble(trouble or type(error).__name__)

    def _log_trouble(self, trouble: str) -> None:
        if self._stopping:
            return
        with self._lock:
            self.trouble, is_logged = trouble, trouble in self._troubles
            self._troubles.add(trouble)
        if not is_logged:
            log.warning(
                "connecting to %(address)s: %(why)s; it is tried again every second",
                {"event": "disconnected", "address": self._address, "why": trouble},
            )

    def _on_lost(self) -> None:
        """Stop waiting for replies over a connection that has ended."""
        unanswered = "" if self._answered else " before it answered: its log says whether this site is shut out"
        self._log_trouble(f"the server ended the connection{unanswered}")
        for waiter in list(self._cell.waiters.values()):
            waiter.set()

    def _serve(self, message: Any) -> Any:
        """Reply to a request, or drop it."""
        from nvflare.fuel.f3.cellnet.utils import new_cell_message

        origin, topic = message.get_header(_key("origin")), message.get_header(_key("topic"))
        answer = serve(self._handlers[topic], origin, message.payload, self.report)
        if answer is None:
            return None
        if message.get_header(_key("reply_expected")):
            return new_cell_message({}, answer)
        if answer and topic in _IN_PIECES:
            self._send(origin, "receipt", new_cell_message({}, answer))
        return None

    def _send(self, target: str, topic: str, message: Any) -> bool:
        try:
            errors = self._cell.fire_and_forget(CHANNEL, topic, target, message, optional=True)
        except Exception:  # the cell layer raises various errors when a connection breaks
            return False
        return not errors.get(target)

    def _on_receipt(self, origin: str, reply: Reply, body: memoryview) -> bytes:
        if (take := self._receipts.get((origin, reply.digest))) is not None:
            take(reply)
        return b""

    def _filter(self, message: Any) -> Any:
        """Drop a message that is not allowed: the cell layer handles those for which this returns None."""
        name = message.get_prop(_key("common_name"))
        reject_reason = self._reject_reason(message, name)
        if reject_reason is None:
            with self._lock:
                self.received[name] += len(message.payload or b"")
            return None
        self.report(f"{name or 'someone without a certificate'} {reject_reason}")
        return message

    def _reject_reason(self, message: Any, name: str | None) -> str | None:
        """Return the reason to drop a message, or None."""
        get = _reader(message)
        if name is None or not self.knows(name):
            return "is not one of this federation's parties"
        if get("origin") != name:
            return f"sent a message in the name of {str(get('origin'))[:80]!r}"
        if get("destination") != self.name:
            return f"sent a message for {str(get('destination'))[:80]!r} here"
        goodbye = (get("channel"), get("topic")) == ("cellnet.channel", "bye")
        if not goodbye and (get("channel") != CHANNEL or get("topic") not in self._topics(get("msg_type"))):
            return f"sent a message on {str(get('channel'))[:40]!r}, {str(get('topic'))[:40]!r}, which is not used here"
        if get("msg_type") not in ("req", "reply") or get("secure") or get("conn_url"):
            return "sent a message of a kind that is not used here"
        if get("payload_encoding") not in (None, "bytes", "none") or get("encrypted"):
            return "sent a message that is not plain bytes"
        size = len(message.payload or b"")
        return f"sent {size:,} bytes, where at most {LONGEST:,} are allowed" if size > LONGEST else None

    def _topics(self, kind: str) -> Any:
        """Return the allowed topics: requests need a handler here, and the cell layer pairs replies with requests."""
        return self._handlers if kind == "req" else ("hello", "check", "terms", "task", "result")


def serve(
    topic: tuple[type[Message], Handler], origin: str, payload: Any, report: Callable[[str], None]
) -> bytes | None:
    """The reply to a message that has passed the filter, or None where it is dropped.  Nothing in it raises an error.

    Args:
        topic: the kind of its head, and its handler.
        origin: who sent it.
        payload: its bytes.
        report: called with a sentence where it is dropped.
    """
    kind, handler = topic
    try:
        head, body = decode(kind, payload)
        return handler(origin, head, body)
    except Refused as error:
        report(f"{origin} sent {error}")
    except OSError as error:  # of the disk: the sender tries again
        report(f"a message of {origin} is not answered: {(error.strerror or str(error)).lower()}")
    except Exception as error:  # whatever a message raises ends that message, and nothing else
        log.debug("a message of %s raised an error", origin, exc_info=True)
        report(f"{origin} sent a message that raised {type(error).__name__}")
    return None


class _NameClaims(logging.Handler):
    """Reports connections that claim another name than their certificate's; the cell layer closes them."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        match = re.search(r"authenticated as '([^']*)' but claimed endpoint '([^']*)'", record.getMessage())
        if match is not None:
            self._report(f"{match[1]} claimed to be {match[2]}")


def _silence_cell_log(report: Callable[[str], None]) -> None:
    """Silence the cell layer's log, except for wrong names; the filter reports everything else that matters."""
    logging.getLogger("nvflare").setLevel(logging.CRITICAL + 1)
    names = logging.getLogger("nvflare.fuel.f3.sfm.conn_manager")
    names.setLevel(logging.ERROR)
    names.propagate, names.handlers = False, [_NameClaims(report)]


def _key(name: str) -> str:
    """The cell layer's name of a header."""
    return f"cn__{name}"


def _reader(message: Any) -> Callable[[str], Any]:
    return lambda name: message.get_header(_key(name))
