"""Messages between named parties over NVIDIA FLARE's cells, with a guard in front.

The cell layer connects, reconnects, and pairs requests with replies.  By itself it would hand a message on for whoever
claims any origin, so every message passes the guard before anything else looks at it: the name in the certificate must
be the origin, sites talk to the server and nobody else, and bodies are bytes.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from piebald.errors import SettingError
from piebald.runtimes.federation.messages import LONGEST, Message, Refused, SomeMessage, decode, encode

SERVER = "server"  # the server's name in its certificate, whatever its host is called
CHANNEL = "piebald"
INSTALL = "a federation needs NVIDIA FLARE's messaging: pip install 'piebald[federation]'"
_REPORTS = 1000  # different things that are reported, so that nobody can fill a disk with them

Handler = Callable[[str, Any, memoryview], bytes]


def check_installed() -> None:
    """Refuse to begin without the extra."""
    try:
        import nvflare.fuel.f3.cellnet.core_cell  # noqa: F401
    except ImportError:
        raise SettingError(INSTALL) from None


class Link:
    """One party's end of the federation.

    Args:
        name: of this party, as in its certificate.
        address: host and port that the server listens on.
        credentials: the folder with this party's certificate and key.
        knows: whether a name may talk to this party.
        report: takes a sentence about something that was refused; each is told once.

    Attributes:
        received, sent: bytes of messages by party.
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
        self._report, self._reported, self._lock = report, set[str](), threading.Lock()
        self._handlers: dict[str, tuple[type[Message], Handler]] = {}
        self._cell = self._make(address, credentials)

    def _make(self, address: tuple[str, int], credentials: Path) -> Any:
        _quieten(self.report)
        from nvflare.fuel.f3 import communicator
        from nvflare.fuel.f3.cellnet.core_cell import CoreCell

        from piebald.runtimes.federation.tls import SCHEME, make_driver

        if communicator.driver_mgr.find_driver_class(SCHEME) is None:
            communicator.driver_mgr.register(make_driver())
        role = "server" if self.name == SERVER else "client"
        options = {
            "ca_cert": str(credentials / "authority.pem"),
            f"{role}_cert": str(credentials / "certificate.pem"),
            f"{role}_key": str(credentials / "key.pem"),
            "connection_security": "mtls",
            "reporter": self.report,
            "lost": self._give_up if role == "client" else None,  # a server has many connections: it goes by silence
        }
        host, port = address
        cell = CoreCell(self.name, f"{SCHEME}://{host}:{port}", True, options, auth_identity_map={SERVER: SERVER})
        cell.add_incoming_filter("*", "*", self._guard)  # before any callback
        cell.register_request_cb(CHANNEL, "*", self._serve)
        return cell

    def on(self, topic: str, kind: type[SomeMessage], handler: Callable[[str, SomeMessage, memoryview], bytes]) -> None:
        """Answer messages of a topic: the handler gets who sent it, its head and its body."""
        self._handlers[topic] = (kind, handler)

    def start(self) -> None:
        """Connect, or listen."""
        self._cell.start()

    def stop(self) -> None:
        """Say goodbye and disconnect.  Threads that still wait in a request get None."""
        from nvflare.fuel.f3.stats_pool import StatsPoolManager

        self._cell.stop()
        self._cell.ALL_CELLS.pop(self.name, None)  # or a second run in this process would find the names taken
        StatsPoolManager.pools.clear()

    def request(
        self, target: str, topic: str, head: Message, body: bytes | memoryview = b"", timeout: float = 10.0
    ) -> memoryview | None:
        """Ask, and wait for the answer; None where none came, for whatever reason."""
        from nvflare.fuel.f3.cellnet.utils import new_cell_message

        data = encode(head, body)
        try:
            reply = self._cell.send_request(
                CHANNEL, topic, target, new_cell_message({}, data), timeout=timeout, optional=True
            )
        except Exception:  # the layer below raises what it likes when a connection breaks
            return None
        with self._lock:
            self.sent[target] += len(data)
        answer = reply.payload if reply is not None else None
        fine = reply is not None and reply.get_header(_key("return_code")) in (None, "ok")
        return memoryview(answer) if fine and isinstance(answer, bytes | bytearray | memoryview) else None

    def report(self, sentence: str) -> None:
        """Say what was refused, once."""
        with self._lock:
            if sentence in self._reported or len(self._reported) >= _REPORTS:
                return
            self._reported.add(sentence)
        self._report(sentence)

    # -- inside

    def _give_up(self) -> None:
        """The connection has ended: end the waits for answers that were to come over it."""
        for waiter in list(self._cell.waiters.values()):
            waiter.set()

    def _serve(self, message: Any) -> Any:
        """Answer one request, or say nothing."""
        from nvflare.fuel.f3.cellnet.utils import new_cell_message

        origin, topic = message.get_header(_key("origin")), message.get_header(_key("topic"))
        kind, handler = self._handlers[topic]
        try:
            head, body = decode(kind, message.payload)
            return new_cell_message({}, handler(origin, head, body))
        except Refused as error:
            self.report(f"{origin} sent {error}")
            return None

    def _guard(self, message: Any) -> Any:
        """Drop what may not be; whatever this returns but None ends a message's way."""
        name = message.get_prop(_key("common_name"))
        reject_reason = self._reject_reason(message, name)
        if reject_reason is None:
            with self._lock:
                self.received[name] += len(message.payload or b"")
            return None
        self.report(f"{name or 'somebody without a certificate'} {reject_reason}")
        return message

    def _reject_reason(self, message: Any, name: str | None) -> str | None:
        """Why a message is dropped, or None."""
        get = _reader(message)
        if name is None or not self.knows(name):
            return "is not one of this federation's parties"
        if get("origin") != name:
            return f"sent a message in the name of {str(get('origin'))[:80]!r}"
        if get("destination") != self.name:
            return f"sent a message for {str(get('destination'))[:80]!r} here"
        goodbye = (get("channel"), get("topic")) == ("cellnet.channel", "bye")
        if not goodbye and (get("channel") != CHANNEL or get("topic") not in self._topics(get("msg_type"))):
            return (
                f"sent a message on {str(get('channel'))[:40]!r}, {str(get('topic'))[:40]!r}, which is not spoken here"
            )
        if get("msg_type") not in ("req", "reply") or get("secure") or get("conn_url"):
            return "sent a message of a kind that is not spoken here"
        if get("payload_encoding") not in (None, "bytes", "none") or get("encrypted"):
            return "sent a message that is not plain bytes"
        size = len(message.payload or b"")
        return f"sent {size:,} bytes, where at most {LONGEST:,} are allowed" if size > LONGEST else None

    def _topics(self, kind: str) -> Any:
        """Topics of requests that are answered here; replies are paired with requests by the cell itself."""
        return self._handlers if kind == "req" else ("hello", "terms", "work", "result")


class _Claims(logging.Handler):
    """Reports who connects with one name in the certificate and another on the lips; the cell layer ends that."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = report

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r"authenticated as '([^']*)' but claimed endpoint '([^']*)'", record.getMessage())
        if found is not None:
            self._tell(f"{found[1]} claimed to be {found[2]}")


def _quieten(report: Callable[[str], None]) -> None:
    """Silence what the cell layer logs, but for wrong names: what matters is reported by the guard."""
    logging.getLogger("nvflare").setLevel(logging.CRITICAL + 1)
    names = logging.getLogger("nvflare.fuel.f3.sfm.conn_manager")
    names.setLevel(logging.ERROR)
    names.propagate, names.handlers = False, [_Claims(report)]


def _key(name: str) -> str:
    """What the cell layer calls a header."""
    return f"cn__{name}"


def _reader(message: Any) -> Callable[[str], Any]:
    return lambda name: message.get_header(_key(name))
