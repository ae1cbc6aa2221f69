"""Messages between named parties: connections, requests that are paired with their replies, and handlers of topics.

The origin of a message is the name in the certificate of its connection.  Sites exchange messages with the server only.
"""

from __future__ import annotations

import itertools
import logging
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from piebald.core.errors import SettingError
from piebald.core.plain_text import printable
from piebald.federation.credentials.revocation import Admission, name_in
from piebald.federation.link.frame_queue import FrameQueue, FrameRoom
from piebald.federation.link.frames import Connection, Frame, FrameKind
from piebald.federation.link.shared_socket import SharedSocket
from piebald.federation.link.tls import Listener, RenewedContext, keep_connecting, reason, refusal
from piebald.federation.link.wire_messages import LONGEST, Message, Refused, Reply, SomeMessage, decode, encode

SERVER = "server"  # the server's name in its certificate, whatever its host is called
_IN_PIECES = ("task", "result")  # topics of long bodies, whose pieces are confirmed by receipts
_REPORTS = 100  # different sentences about a party, or about strangers: nobody fills the disk, or hides others, by them

log = logging.getLogger("piebald.federation")

Handler = Callable[[str, Any, memoryview], bytes]


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
        peers: the last connection of each party, which may have ended.
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
        self.name, self.knows = name, knows
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.peers: dict[str, Connection] = {}
        self.trouble = ""
        self._troubles: set[str] = set()  # those that were logged since the server answered last
        self._answered = True  # whether there was an answer over this connection
        self._address, self._stopping = address, threading.Event()
        self.shut: dict[str, str] = {}
        self._report, self._reported, self._lock = report, dict[str, set[str]](), threading.Lock()
        self._handlers: dict[str, tuple[type[Message], Handler]] = {}
        self._connections: Counter[str] = Counter()  # that there were, by party
        self._open: dict[str, list[Connection]] = {}  # by party, the oldest first
        self._numbers = itertools.count(1)
        self._replies: dict[int, tuple[Connection, Future[memoryview]]] = {}  # that are waited for
        self._receipts: dict[tuple[str, str], Callable[[Reply], None]] = {}  # by receiver and digest
        self._room = FrameRoom()
        self._listener: Listener | None = None
        self._contexts = RenewedContext(credentials, server=name == SERVER)
        self._admission = Admission(credentials) if name == SERVER else None
        self.on("receipt", Reply, self._on_receipt)

    def on(self, topic: str, kind: type[SomeMessage], handler: Callable[[str, SomeMessage, memoryview], bytes]) -> None:
        """Set the handler of a topic: it takes a message's origin, head and body, and returns the reply."""
        self._handlers[topic] = (kind, handler)

    def start(self) -> None:
        """Connect to the server, or listen as the server.

        Raises:
            SettingError: the address cannot be listened on.
        """
        host, port = self._address
        if self.name == SERVER:
            address = host or "0.0.0.0", port
            try:
                self._listener = Listener(
                    address, self._contexts, self._carry, self._on_refused, self._reject_reason, self._end
                )
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                raise SettingError(f"port {port} cannot be listened on: {reason}: end what uses it") from None
            run: Callable[[], None] = self._listener.serve_forever
        else:

            def run() -> None:
                keep_connecting((host, port), self._contexts, self._carry, self._on_refused, self._stopping)

        threading.Thread(target=run, name="federation", daemon=True).start()

    def stop(self) -> None:
        """Disconnect.  Requests that still wait for a reply return None."""
        self._stopping.set()
        if self._listener is not None:
            self._listener.shutdown()
            self._listener.server_close()
        with self._lock:
            connections = list(itertools.chain(*self._open.values()))
        ending = [threading.Thread(target=peer.end, args=(self._last_word,), daemon=True) for peer in connections]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join()

    def request(
        self, target: str, topic: str, head: Message, body: bytes | memoryview = b"", timeout: float = 10.0
    ) -> memoryview | None:
        """Send a request and wait for the reply; None where none came, for any reason."""
        number, reply = next(self._numbers), Future[memoryview]()
        if (connection := self._connection_to(target)) is None:
            return None
        self._replies[number] = connection, reply
        try:
            if not self._sent_over(connection, FrameKind.REQUEST, number, topic, encode(head, body)):
                return None
            answer = reply.result(timeout)
        except (TimeoutError, CancelledError):
            return None
        finally:
            self._replies.pop(number, None)
        self._answered = True
        if self._troubles or self.trouble:
            with self._lock:
                self.trouble = ""
                self._troubles.clear()
        return answer

    def tell(self, target: str, topic: str, head: Message, body: bytes | memoryview = b"") -> bool:
        """Send a message without waiting for a reply, and return whether the connection took it.

        What its handler returns comes back as a receipt, where it is a `Reply`.
        """
        connection = self._connection_to(target)
        return connection is not None and self._sent_over(connection, FrameKind.MESSAGE, 0, topic, encode(head, body))

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
        """Report what was refused, each sentence once; it begins with a party's name, an address, or a word of ours."""
        sentence = printable(sentence, 500)
        topic = sentence.partition(" ")[0]
        with self._lock:
            reported = self._reported.setdefault(topic if topic.isalpha() or self.knows(topic) else "", set())
            if sentence in reported or len(reported) >= _REPORTS:
                return
            reported.add(sentence)
        self._report(sentence)

    @property
    def _last_word(self) -> str:
        return "the server was stopped" if self.name == SERVER else ""

    # -- one connection, from its handshake to its end

    def _carry(self, secured: SharedSocket) -> None:
        """Handle what arrives over a connection until it ends."""
        connection = Connection(secured)
        if not self.knows(connection.name):
            self.report(f"{connection.name or 'someone without a name'} is not one of this federation's parties")
            return connection.end(f"{connection.name!r} is not one of this federation's parties")
        queue = FrameQueue[Frame](lambda frame: self._serve(connection, frame), self._room)
        try:
            connection.open()
            self._register(connection)
            if self._stopping.is_set():  # `stop` did not see this one any more
                return connection.end(self._last_word)
            while (frame := connection.read()) is not None:
                self._take(connection, frame, queue)
        except Refused as error:
            self.report(f"{connection.name} sent {error}")
            connection.end(f"it sent {error}")
        except OSError:
            pass
        finally:
            queue.end()
            self._forget(connection)
            connection.close()

    def _register(self, connection: Connection) -> None:
        with self._lock:
            self._open.setdefault(connection.name, []).append(connection)
            self._answered = False
            self._connections[connection.name] += 1
            self.peers[connection.name] = connection

    def _take(self, connection: Connection, frame: Frame, queue: FrameQueue[Frame]) -> None:
        """Hand a frame to whoever waits for it, or to the handler of its topic."""
        if connection.ended:
            return
        with self._lock:
            self.received[connection.name] += len(frame)
        if len(frame) > LONGEST:
            return self.report(f"{connection.name} sent {len(frame):,} bytes, where at most {LONGEST:,} are allowed")
        if frame.kind is FrameKind.REPLY:
            asked, reply = self._replies.get(frame.number, (None, None))
            if reply is not None and asked is connection:
                self._replies.pop(frame.number, None)
                reply.set_result(frame.message)
        elif frame.topic in self._handlers:
            queue.put(frame)
        else:
            self.report(f"{connection.name} sent a message on {printable(frame.topic, 40)!r}, which is not used here")

    def _serve(self, connection: Connection, frame: Frame) -> None:
        """Answer a request or a message, or drop it."""
        if connection.ended:
            return
        answer = serve(self._handlers[frame.topic], connection.name, frame.message, self.report)
        if answer is None:
            return
        if frame.kind is FrameKind.REQUEST:
            connection.send(FrameKind.REPLY, frame.number, "", answer)
        elif answer and frame.topic in _IN_PIECES:
            connection.send(FrameKind.MESSAGE, 0, "receipt", answer)

    def _forget(self, connection: Connection) -> None:
        """Stop waiting for replies over a connection that has ended; a site says that it has."""
        with self._lock:
            connections = self._open.get(connection.name, [])
            if was_open := connection in connections:
                connections.remove(connection)
        for number in [number for number, (asked, _) in list(self._replies.items()) if asked is connection]:
            if (waiting := self._replies.pop(number, None)) is not None:
                waiting[1].cancel()
        if self.name != SERVER and (was_open or connection.farewell):
            unanswered = "" if self._answered else " before it answered"
            reason = f": {connection.farewell}" if connection.farewell else unanswered
            self._log_trouble(f"the server ended the connection{reason}")

    def _connection_to(self, target: str) -> Connection | None:
        """Return the newest open connection to a party, None where there is none."""
        with self._lock:
            connections = [connection for connection in self._open.get(target, ()) if not connection.ended]
        return connections[-1] if connections else None

    def _sent_over(self, connection: Connection, kind: FrameKind, number: int, topic: str, data: bytes) -> bool:
        if not connection.send(kind, number, topic, data):
            return False
        with self._lock:
            self.sent[connection.name] += len(data)
        return True

    # -- who may connect

    def _reject_reason(self, certificate: Any) -> str | None:
        """Return why a party is shut out, None where it is not; it is reported, and kept in `shut`."""
        assert self._admission is not None
        if (reason := self._admission.reject_reason(certificate)) is not None:
            self.shut[name_in(certificate)] = reason
            self.report(f"{name_in(certificate)} is shut out: {reason}")
        return reason

    def _end(self, secured: SharedSocket, why: str) -> None:
        """End a connection of a party that is shut out, or has too many, and tell it why."""
        with self._lock:
            connections = itertools.chain(*self._open.values())
            connection = next((connection for connection in connections if connection.secured is secured), None)
        (connection or Connection(secured)).end(why)

    def _on_refused(self, who: str, error: Exception) -> None:
        """Report a handshake that failed; a site says why it has no connection, each reason once until it has one."""
        is_site = self.name != SERVER
        if isinstance(error, ssl.SSLError) and not (is_site and isinstance(error, ssl.SSLEOFError)):
            self.report(refusal(who, error))
            if is_site:
                self.trouble = f"the other end is not this federation's: {reason(error)}"
            return
        if not is_site:
            return
        trouble = (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).lower()
        if isinstance(error, ssl.SSLEOFError):  # a proxy whose server is away, or a server that is being stopped
            trouble = f"{reason(error)} before it was made"
        if "handshake operation timed out" in trouble:  # OpenSSL's words, behind a line of its source
            trouble = "it takes connections and does not answer as a federation's server does"
        self._log_trouble(trouble or type(error).__name__)

    def _log_trouble(self, trouble: str) -> None:
        if self._stopping.is_set():
            return
        with self._lock:
            self.trouble, is_logged = trouble, trouble in self._troubles
            self._troubles.add(trouble)
        if not is_logged:
            log.warning(
                "connecting to %(address)s: %(why)s; it is tried again every second",
                {"event": "disconnected", "address": f"{self._address[0]}:{self._address[1]}", "why": trouble},
            )

    def _on_receipt(self, origin: str, reply: Reply, body: memoryview) -> bytes:
        if (take := self._receipts.get((origin, reply.digest))) is not None:
            take(reply)
        return b""


def serve(
    topic: tuple[type[Message], Handler], origin: str, payload: Any, report: Callable[[str], None]
) -> bytes | None:
    """The reply to a message, or None where it is dropped.  Nothing in it raises an error.

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
