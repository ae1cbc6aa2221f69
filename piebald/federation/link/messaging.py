"""Messages between named parties: connections, requests that are paired with their replies, and handlers of topics.

The origin of a message is the name in the certificate of its connection, and sites exchange messages with the server
only.  A connection carries frames: requests, replies, and a last word (docs/reference/protocol.md).

    opening   b"piebald" and the version of the framing (1 byte), once in each direction
    frame     length of the rest (4 bytes), kind (1), number (8), length of the topic (1), topic, message

No frame claims the name of its sender.  One that claims to be longer than any message ends its connection.
"""

from __future__ import annotations

import itertools
import logging
import socket
import ssl
import struct
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

from piebald.core.errors import PiebaldError, SettingError
from piebald.core.files import os_reason
from piebald.core.plain_text import printable
from piebald.federation.credentials.revocation import Admission, name_in
from piebald.federation.link.tls import (
    QUIET,
    RECORD,
    Carry,
    Door,
    Listener,
    RenewedContext,
    SharedSocket,
    keep_connecting,
    reason,
    refusal,
)
from piebald.federation.link.wire_format import LONGEST, PIECE, WINDOW, Message, Refused, SomeMessage, decode, encode

FRAMING = 1  # version of the opening and of the head of a frame
FRAME = LONGEST + (1 << 16)  # bytes of a frame, at most; a message a little too long is dropped, and no more
_MAGIC = b"piebald"
# "<": little-endian and without padding on every machine
_HEAD = struct.Struct("<IBQB")
_LENGTH = 4  # bytes of the length, which does not count itself
_LAST_WORD = 2.0  # seconds in which the other end can read why the connection ends
_ANSWERS = 2 * WINDOW // PIECE  # that wait: no honest end has more pieces under way, and none of them is longer
_REASON = 300  # characters of a reason, at most


class FrameKind(IntEnum):
    """What a frame is."""

    REQUEST = 1
    REPLY = 2  # with the number of its request
    FAREWELL = 3  # the last frame: its message says why the sender ends the connection


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that has arrived.

    Attributes:
        kind: what it is.
        number: the number of a request, which its reply carries as well.
        topic: the topic of a request.
        message: its bytes.
    """

    kind: FrameKind
    number: int
    topic: str
    message: memoryview

    def __len__(self) -> int:
        """Bytes of its message."""
        return len(self.message)


def encode_frame(kind: FrameKind, number: int, topic: str, message: bytes | memoryview) -> bytes:
    """Return the bytes of a frame.

    Examples:
        >>> frame = decode_frame(bytearray(encode_frame(FrameKind.REQUEST, 7, "hello", b"bytes")))
        >>> frame.kind.name, frame.number, frame.topic, bytes(frame.message)
        ('REQUEST', 7, 'hello', b'bytes')
    """
    name = topic.encode("ascii")
    length = _HEAD.size - _LENGTH + len(name) + len(message)
    return b"".join((_HEAD.pack(length, kind, number, len(name)), name, message))


def decode_frame(data: bytearray) -> Frame:
    """Return the frame in these bytes.

    Raises:
        Refused: they are none.
    """
    if len(data) < _HEAD.size:
        raise Refused("a frame without a whole head")
    _, kind, number, name = _HEAD.unpack_from(data)
    # the ValueError of `FrameKind` would end the connection without a reason, a Refused is told to the other end
    if kind not in set(FrameKind):
        raise Refused(f"a frame of kind {kind}, which is not used here")
    start = _HEAD.size + name
    topic = bytes(data[_HEAD.size : start])
    # a slice past the end is short without an error
    if len(topic) < name or not topic.isascii():
        raise Refused("a frame without a whole topic")
    # a view: the message, often a piece of a model, is not copied again
    return Frame(FrameKind(kind), number, topic.decode("ascii"), memoryview(data)[start:])


class Connection(SharedSocket):
    """One connection to a party, over which several threads send frames while one reads.

    Attributes:
        name: the name in the other end's certificate.
        address: where it connected from, or the address that was connected to; "" where it has gone already.
        farewell: why the other end has ended it, "" as long as it has not.
        ended: whether this end has ended it: what still arrives is not handled.
    """

    farewell, address = "", ""
    ended = _is_greeted = _is_answering = False  # greeted: whether the opening was sent

    def share(self, patience: float, ends: bool = False) -> None:
        super().share(patience, ends)
        self._sending, self._answers, self._room = threading.Lock(), deque[tuple[int, bytes]](), threading.Condition()
        self.name = printable(name_in(self.certificate), 64) if self.certificate else ""
        with suppress(OSError):
            self.address = str(self.getpeername()[0])

    @property
    def expires(self) -> str:
        """When the other end's certificate expires, as a date."""
        return f"{datetime.fromtimestamp(ssl.cert_time_to_seconds(self.certificate['notAfter']), UTC):%Y-%m-%d}"

    def open(self) -> None:
        """Exchange the openings.

        Raises:
            OSError: the connection has ended.
            Refused: the other end speaks another protocol, or another version of it.
        """
        with self._sending:
            # sent before the other's is read, at both ends, so that neither waits for the other
            self._greet(QUIET)
        opening = bytearray()
        if not receive(self.recv, opening, len(_MAGIC) + 1):
            raise OSError("the connection was closed by the other end")
        if not opening.startswith(_MAGIC):
            raise Refused("bytes of another protocol than Piebald's")
        if opening[-1] != FRAMING:
            raise Refused(
                f"version {opening[-1]} of Piebald's framing, where this end speaks version {FRAMING}: "
                "install one version of Piebald at both ends"
            )

    def send_frame(self, kind: FrameKind, number: int, topic: str, message: bytes | memoryview) -> bool:
        """Send a frame, however long it takes while the network takes bytes; return whether it took all of it."""
        # outside the lock, since this copies the message while other threads may send
        frame = encode_frame(kind, number, topic, message)
        with self._sending:
            # nothing may follow a farewell
            if self.ended:
                return False
            try:
                self.sendall(frame, seconds=QUIET)
            except (OSError, ValueError):  # a frame that was sent in part leaves the connection unusable
                super().close()
                return False
        return True

    def answer(self, number: int, message: bytes) -> None:
        """Reply to a request; the network is waited for in a thread of its own, since the other end may wait as well.

        A member that sends and does not read what it is answered has `_ANSWERS` that wait, and nothing more of it is
        read until it does.
        """
        with self._room:
            # no time limit of its own: `send_frame` gives up after `QUIET`, and then the queue empties at once
            self._room.wait_for(lambda: len(self._answers) < _ANSWERS)
            self._answers.append((number, message))
            # one thread at a time keeps the order of the answers, and an idle connection costs none
            if self._is_answering:
                return
            self._is_answering = True
        threading.Thread(target=self._send_answers, name="answers", daemon=True).start()

    def _send_answers(self) -> None:
        while True:
            with self._room:
                if not self._answers:
                    # under the lock, so that `answer` finds either a thread that will take its message or none
                    self._is_answering = False
                    return
                number, message = self._answers.popleft()
                self._room.notify()
            # outside the lock: while the network is slow, requests are still read and answered
            self.send_frame(FrameKind.REPLY, number, "", message)

    def read_frame(self) -> Frame | None:
        """Return the next frame, None where the connection has ended.

        Raises:
            OSError: the connection broke, or nothing came for too long.
            Refused: the other end sent what is no frame.
        """
        data = bytearray()
        if not receive(self.recv, data, _LENGTH):
            return None
        length = int.from_bytes(data, "little")
        if not _HEAD.size - _LENGTH <= length <= FRAME:
            raise Refused(f"a frame that claims {length:,} bytes, where at most {FRAME:,} are allowed")
        if not receive(self.recv, data, _LENGTH + length):
            return None
        frame = decode_frame(data)
        if frame.kind is FrameKind.FAREWELL:
            # a character has at most 4 bytes in UTF-8; the text is the other end's, and goes to this end's terminal
            self.farewell = printable(bytes(frame.message[: 4 * _REASON]).decode("utf-8", "replace"), _REASON)
            return None
        return frame

    def end(self, reason: str) -> None:
        """Tell the other end why the connection ends, and close it once that was read, or some time has passed."""
        # first of all, so that no thread sends a frame behind the farewell
        self.ended = True
        until = time.monotonic() + _LAST_WORD
        with suppress(OSError, ValueError):
            if self._sending.acquire(timeout=_LAST_WORD / 2):  # else it does not read, so it reads no reason either
                try:
                    # without an opening the other end would take the reason for another protocol
                    self._greet(_LAST_WORD / 2)
                    word = encode_frame(FrameKind.FAREWELL, 0, "", reason[:_REASON].encode())
                    self.sendall(word, seconds=_LAST_WORD / 2)
                    # the other end sees the end of the stream and closes, which ends the loop below before its time
                    self.shutdown(socket.SHUT_WR)
                finally:
                    self._sending.release()
                # bytes that were not read when a connection is closed would take the last word with them
                while (rest := until - time.monotonic()) > 0 and self.recv(RECORD, seconds=rest):
                    pass
        super().close()

    def close(self) -> None:
        """Close it, unless `end` is about to."""
        # the thread that reads closes when it returns, while another may still be sending the last word
        if not self.ended:
            super().close()

    def _greet(self, seconds: float) -> None:
        if not self._is_greeted:
            self.sendall(_MAGIC + bytes([FRAMING]), seconds=seconds)
            self._is_greeted = True


def receive(recv: Callable[[int], bytes], frame: bytearray, length: int) -> bool:
    """Append to a frame until it has its length, and return whether it got there before the connection ended.

    Memory is taken for what has arrived, never for what is announced.
    """
    while len(frame) < length:
        piece = recv(min(RECORD, length - len(frame)))
        if not piece:
            return False
        frame += piece
    return True


SERVER = "server"  # the server's name in its certificate, whatever its host is called
_REPORTS = 100  # different sentences about a party, or about strangers: nobody fills the disk, or hides others, by them

log = logging.getLogger("piebald.federation")

Handler = Callable[[str, Any, memoryview], bytes | None]


class Unwelcome(PiebaldError):
    """A reason for which a handler has the connection ended over which a message came; the other end is told it."""


class Link:
    """One party's connection to the federation.

    Args:
        name: name of this party, as in its certificate.
        address: host and port of the server, which listens at `Listener.host` where it gives "" as host.
        credentials: folder with this party's certificate and key.
        knows: whether the party of a name may send messages to this one.
        report: called with a sentence about each kind of message that was refused, once.
        carry: takes a connection after its handshake, and returns when it ends, in place of the link's own messages.
        protocol: that its connections name; a server's that has one passes on those that name another (`tls.Door`).
        quiet: see `tls.RenewedContext`.

    Attributes:
        received, sent: bytes of messages, by party.
        peers: the last connection of each party, which may have ended.
        trouble: why a site is not connected to the server, "" where it is.
        shut: why parties were shut out, see `revocation.Admission`.
        last_word: why connections end when `stop` is called, for the other end.
    """

    def __init__(
        self,
        name: str,
        address: tuple[str, int],
        credentials: Path,
        knows: Callable[[str], bool],
        report: Callable[[str], None],
        carry: Carry | None = None,
        protocol: str = "",
        quiet: float = 0.0,
    ) -> None:
        self.name, self.knows, self._report = name, knows, report
        self._carry = carry or self._carry_messages
        self.received, self.sent = Counter[str](), Counter[str]()
        self.peers, self.shut = dict[str, Connection](), dict[str, str]()
        self.trouble = ""
        self._troubles: set[str] = set()  # those that were logged since the server answered last
        self._is_answered = True  # whether there was an answer over this connection
        self._address, self._stopping, self._lock = address, threading.Event(), threading.Lock()
        self._reported = defaultdict[str, set[str]](set)
        self._handlers: dict[str, tuple[type[Message], Handler]] = {}
        self._open = defaultdict[str, list[Connection]](list)  # by party, the oldest first
        # `next` of it is one step of the interpreter, so threads need no lock; 0 is the number of a farewell
        self._numbers = itertools.count(1)
        self._replies: dict[int, tuple[Connection, Future[memoryview]]] = {}  # that are waited for
        self._listener: Listener | None = None
        is_server = name == SERVER
        kind = Connection if carry is None else SharedSocket
        self._protocol, self._contexts = protocol, RenewedContext(credentials, is_server, kind, protocol, quiet)
        self._admission = Admission(credentials) if is_server else None
        self.last_word = "the server was stopped" if is_server else ""

    def on(
        self, topic: str, kind: type[SomeMessage], handler: Callable[[str, SomeMessage, memoryview], bytes | None]
    ) -> None:
        """Set the handler of a topic: it takes a message's origin, head and body, and returns the reply, if any."""
        self._handlers[topic] = (kind, handler)

    def start(self, rest: Link | None = None) -> None:
        """Connect to the server, or listen as the server.

        Args:
            rest: takes connections that name no protocol while they are not passed on.

        Raises:
            SettingError: the address cannot be listened on.
        """
        host, port = self._address
        handlers = self._contexts, self._carry, self._on_refused
        run = partial(keep_connecting, self._address, *handlers, self._stopping)
        if self._admission is not None:
            try:
                # bound in the caller's thread, so that a port in use is an error of `start` and not of a thread
                listen = partial(Door, own=self._protocol) if self._protocol else Listener
                self._listener = listen((host or Listener.host, port), *handlers, self._reject_reason)
            except OSError as error:
                raise SettingError(f"port {port} cannot be listened on: {os_reason(error)}: end what uses it") from None
            if rest is not None and isinstance(self._listener, Door):
                self._listener.rest = rest.behind()
            run = partial(self._listener.serve_forever)
        threading.Thread(target=run, name="federation", daemon=True).start()

    def behind(self) -> Listener:
        """Return what carries the connections that another link hands to this one, which does not listen."""
        handlers = self._contexts, self._carry, self._on_refused, self._reject_reason
        return Listener(self._address, *handlers, binds=False)

    def passes_on(self, protocol: str) -> bool:
        """Return whether connections that name a protocol are passed on."""
        return isinstance(self._listener, Door) and protocol in self._listener.routes

    def pass_on(self, protocol: str, route: socket.socket | None) -> None:
        """Pass connections that name a protocol on over a socket from now on, or no more (None)."""
        assert isinstance(self._listener, Door)
        if route is None:
            self._listener.routes.pop(protocol, None)
        else:
            self._listener.routes[protocol] = route
            if not protocol and self._listener.rest is not None:
                self._listener.rest.end_all("a run begins")

    def stop(self) -> None:
        """Disconnect.  Requests that still wait for a reply return None."""
        # before the connections are listed: `_carry` ends by itself those that register later
        self._stopping.set()
        if self._listener is not None:
            self._listener.shutdown()
            self._listener.server_close()
        with self._lock:
            connections = itertools.chain(*self._open.values())
            # side by side: each may take two seconds until the other end has read the reason
            ending = [threading.Thread(target=peer.end, args=(self.last_word,), daemon=True) for peer in connections]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join()

    def send(self, target: str, topic: str, head: Message, body: bytes | memoryview = b"") -> Future[memoryview]:
        """Send a request, and return its reply, which is cancelled where none can come any more."""
        number, reply, data = next(self._numbers), Future[memoryview](), encode(head, body)
        with self._lock:
            # the newest first: an older one may hang until its time limit after the site has connected again
            connection = next((one for one in reversed(self._open.get(target, ())) if not one.ended), None)
        if connection is not None:
            # before the frame is sent, as its reply may be read before `send_frame` returns
            self._replies[number] = connection, reply
            # an answer, a timeout and a cancellation all end here, so that `_replies` cannot grow
            reply.add_done_callback(lambda _: self._replies.pop(number, None))
        if connection is not None and connection.send_frame(FrameKind.REQUEST, number, topic, data):
            with self._lock:
                self.sent[target] += len(data)
        else:
            reply.cancel()
        return reply

    def request(
        self, target: str, topic: str, head: Message, body: bytes | memoryview = b"", timeout: float = 10.0
    ) -> memoryview | None:
        """Send a request and wait for the reply; None where none came, for any reason."""
        reply = self.send(target, topic, head, body)
        try:
            answer = reply.result(timeout)
        except (TimeoutError, CancelledError):
            return None
        finally:
            # without effect where it has come; after a timeout, its number would stay until the connection ends
            reply.cancel()
        self._is_answered = True
        with self._lock:
            self.trouble = ""
            # the same trouble is logged again when it comes back after an answer
            self._troubles.clear()
        return answer

    def connections(self, name: str) -> int:
        """Return how many connections of a party are open."""
        with self._lock:
            return sum(not connection.ended for connection in self._open.get(name, ()))

    def report(self, sentence: str) -> None:
        """Report what was refused, each sentence once; it begins with a party's name, an address, or a word of ours."""
        sentence = printable(sentence, 500)
        topic = sentence.partition(" ")[0]
        with self._lock:
            # strangers share one budget of sentences, or each address of theirs would bring a new one
            reported = self._reported[topic if topic.isalpha() or self.knows(topic) else ""]
            if sentence in reported or len(reported) >= _REPORTS:
                return
            reported.add(sentence)
        # outside the lock, which a slow log must not hold from the threads that send
        self._report(sentence)

    # -- one connection, from its handshake to its end

    def _carry_messages(self, connection: Connection) -> None:
        """Handle what arrives over a connection until it ends."""
        # a valid certificate proves who it is, not that it takes part here
        if not self.knows(connection.name):
            self.report(f"{connection.name or 'someone without a name'} is not one of this federation's parties")
            return connection.end(f"{connection.name!r} is not one of this federation's parties")
        try:
            connection.open()
            self._register(connection)
            if self._stopping.is_set():  # `stop` did not see this one any more
                return connection.end(self.last_word)
            while (frame := connection.read_frame()) is not None:
                self._take(connection, frame)
        except Refused as error:
            # after `end`, which reads what still comes: the rest of a frame is no frame, and nobody's fault
            if not connection.ended:
                self.report(f"{connection.name} sent {error}")
                connection.end(f"it sent {error}")
        except Unwelcome as error:
            connection.end(str(error))
        # a connection that breaks is no fault: a site connects again, and `_forget` says that it ended
        except OSError:
            pass
        finally:
            self._forget(connection)

    def _register(self, connection: Connection) -> None:
        with self._lock:
            self._open[connection.name].append(connection)
            self._is_answered = False
            self.peers[connection.name] = connection

    def _take(self, connection: Connection, frame: Frame) -> None:
        """Hand a frame to whoever waits for it, or answer it."""
        # frames that were under way when this end said farewell, after which no answer may follow
        if connection.ended:
            return
        with self._lock:
            self.received[connection.name] += len(frame)
        # dropped before a handler decodes it; the connection, whose framing is intact, goes on
        if len(frame) > LONGEST:
            self.report(f"{connection.name} sent {len(frame):,} bytes, where at most {LONGEST:,} are allowed")
        elif frame.kind is FrameKind.REPLY:
            receiver, reply = self._replies.get(frame.number, (None, None))
            # numbers can be guessed: no party may answer a request that went to another, or over an older connection
            if reply is not None and receiver is connection:
                with suppress(InvalidStateError):  # it is not waited for any more
                    reply.set_result(frame.message)
        elif frame.topic in self._handlers:
            answer = serve(self._handlers[frame.topic], connection.name, frame.message, self.report)
            if answer is not None:
                connection.answer(frame.number, answer)
        else:
            self.report(f"{connection.name} sent a message on {printable(frame.topic, 40)!r}, which is not used here")

    def _forget(self, connection: Connection) -> None:
        """Stop waiting for replies over a connection that has ended; a site says that it has."""
        with self._lock:
            if was_open := connection in self._open[connection.name]:
                self._open[connection.name].remove(connection)
        # a copy, as each cancellation removes its entry (`send`)
        for receiver, reply in list(self._replies.values()):
            if receiver is connection:
                reply.cancel()
        if self.name != SERVER and (was_open or connection.farewell):
            unanswered = "" if self._is_answered else " before it answered"
            why = f": {connection.farewell}" if connection.farewell else unanswered
            self._log_trouble(f"the server ended the connection{why}")

    # -- who may connect

    def _reject_reason(self, certificate: Any) -> str | None:
        """Return why a party is shut out, None where it is not; it is reported, and kept in `shut`."""
        assert self._admission is not None
        if (reason := self._admission.reject_reason(certificate)) is not None:
            self.shut[name_in(certificate)] = reason
            self.report(f"{name_in(certificate)} is shut out: {reason}")
        return reason

    def _on_refused(self, who: str, error: Exception) -> None:
        """Report a handshake that failed; a site says why it has no connection, each reason once until it has one."""
        is_site = self.name != SERVER
        if isinstance(error, ssl.SSLError) and not (is_site and isinstance(error, ssl.SSLEOFError)):
            self.report(trouble := refusal(who, error))
            if is_site:
                self.trouble = trouble
            return
        # anybody can connect to a server's port and break off, which is worth no line
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


def serve(
    topic: tuple[type[Message], Handler], origin: str, payload: Any, report: Callable[[str], None]
) -> bytes | None:
    """The reply to a message, or None where it is dropped.  Nothing that is in it raises an error.

    Args:
        topic: the kind of its head, and its handler.
        origin: who sent it.
        payload: its bytes.
        report: called with a sentence where it is dropped.

    Raises:
        Unwelcome: the handler wants the connection to end.
    """
    kind, handler = topic
    try:
        head, body = decode(kind, payload)
        return handler(origin, head, body)
    except Refused as error:
        report(f"{origin} sent {error}")
    except Unwelcome:
        raise
    except OSError as error:  # of the disk: the sender tries again
        report(f"a message of {origin} is not answered: {os_reason(error)}")
    except Exception as error:  # whatever a message raises ends that message, and nothing else
        log.debug("a message of %s raised an error", origin, exc_info=True)
        report(f"{origin} sent a message that raised {type(error).__name__}")
    return None
