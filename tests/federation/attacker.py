"""An attacker in a process of its own: python attacker.py ATTACK CREDENTIALS NAME PORT; prints replies as JSON.

It sends frames over a connection of its own, without what parties do to theirs.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from piebald import __version__
from piebald.contracts import Update
from piebald.federation.link.messaging import FRAMING, Connection, Frame, FrameKind
from piebald.federation.link.tls import context
from piebald.federation.link.wire_format import (
    LONGEST,
    PROTOCOL,
    Hello,
    Piece,
    Reply,
    TermsRequest,
    Welcome,
    decode,
    digest,
    encode,
    pack_update,
    unpack_task,
)

HELLO = encode(Hello(protocol=PROTOCOL, version=__version__, incarnation="ab"))


class Attacker:
    """A site that sends what parties would not."""

    def __init__(self, credentials: Path, name: str, port: int) -> None:
        self.credentials, self.name, self.port = credentials, name, port
        self.numbers = itertools.count(1)
        self.on_task: Callable[[memoryview], bytes] | None = None

    def start(self) -> None:
        """Connect; strangers may find their connection ended."""
        self.replies: dict[int, Frame] = {}
        self.arrived = threading.Condition()
        self.connection: Connection | None = None
        with suppress(OSError):
            made = context(self.credentials, False, Connection)
            secured = made.wrap_socket(socket.create_connection(("127.0.0.1", self.port)))
            assert isinstance(secured, Connection)
            secured.share(60.0)
            self.connection = secured
            self.connection.open()
            threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        assert self.connection is not None
        with suppress(OSError):
            while (frame := self.connection.read_frame()) is not None:
                if frame.kind is FrameKind.REPLY:
                    with self.arrived:
                        self.replies[frame.number] = frame
                        self.arrived.notify_all()
                elif self.on_task is not None and frame.topic == "task":
                    self.connection.answer(frame.number, self.on_task(frame.message))

    def ask(self, payload: bytes, topic: str = "hello", wait: float = 0.5) -> str | None:
        """Send a request; returns the reply in hexadecimal, or None where none comes in a while."""
        number = next(self.numbers)
        if self.connection is None:
            return None
        self.connection.send_frame(FrameKind.REQUEST, number, topic, payload)
        with self.arrived:
            self.arrived.wait_for(lambda: number in self.replies, wait)
            reply = self.replies.pop(number, None)
        return None if reply is None else bytes(reply.message).hex()

    def raw(self, data: bytes) -> str:
        """Send bytes as they are on a connection of their own, after the opening; returns whether it was ended."""
        with context(self.credentials, server=False).wrap_socket(
            socket.create_connection(("127.0.0.1", self.port))
        ) as secured:
            secured.settimeout(60)
            secured.sendall(b"piebald" + bytes([FRAMING]) + data)
            return self.closed(secured)

    def answer(self, payload: Any, topic: str = "hello") -> bytes:
        """The reply to a request that the server answers, however busy the machine is."""
        return bytes.fromhex(self.ask(payload, topic, wait=60.0) or "")

    @staticmethod
    def piece(welcome: Welcome, id: int, body: bytes) -> Piece:
        """The head of a result."""
        more = {"start": 0, "size": len(body), "digest": digest(body)}
        return Piece(run=welcome.run, epoch=welcome.epoch, id=id, trains=True, **more)

    # -- attacks

    def hello(self) -> Any:
        """Send a harmless hello, which strangers get no answer to."""
        return self.ask(HELLO)

    def insider(self) -> Any:
        """Send what a site is not allowed to send."""
        found = {
            "another topic": self.ask(HELLO, "shell"),
            "a topic of sites": self.ask(HELLO, "task"),
            "a long topic": self.ask(HELLO, "a" * 255),
            "no head": self.ask(b"\x00"),
            "garbage": self.ask(os.urandom(5000)),
            "unknown field": self.ask(encode(Reply(status="done"))),
            "deep": self.ask(len(deep := b'{"protocol":' + b"[" * 100_000).to_bytes(4, "little") + deep),
            "long": self.ask(HELLO + bytes(LONGEST)),
        }
        assert self.connection is not None
        for number in range(3):  # replies to nothing that was asked
            self.connection.send_frame(FrameKind.REPLY, number, "", HELLO)
        return found | {"still served": bool(self.answer(HELLO))}

    def replay(self) -> Any:
        """Deliver results for any task id, its own and those of others."""
        welcome = decode(Welcome, self.answer(HELLO))[0]
        body = pack_update(Update({}, 1, 1, {}), None)
        statuses = set()
        for id in range(1, 60):
            piece = self.piece(welcome, id, body)
            statuses.add(decode(Reply, self.answer(encode(piece, body), "result"))[0].status)
        return sorted(statuses)

    def garbage(self) -> Any:
        """Take part, and send a result that is none."""
        return self.liar(True)

    def wrong_form(self) -> Any:
        """Take part, and send a model of another length."""
        return self.liar(False)

    def liar(self, garbage: bool) -> str:
        """Take part, and send a result of a wrong form; returns the status of the reply."""
        tasks: list[bytes] = []

        def take(message: memoryview) -> bytes:
            _, data = decode(Piece, message)
            tasks.append(bytes(data))
            return encode(Reply(status="done", received=len(data)))

        self.on_task = take
        welcome = decode(Welcome, self.answer(HELLO))[0]
        self.answer(encode(TermsRequest(start=0)), "terms")
        ready = Hello(protocol=PROTOCOL, version=__version__, incarnation="cd", run=welcome.run, ready=welcome.terms)
        return self.lie(tasks, ready, welcome, garbage)

    def lie(self, tasks: list[bytes], ready: Hello, welcome: Welcome, garbage: bool) -> str:
        """Wait for training, and answer with garbage or with a model of another length."""
        tasks.clear()
        until = time.monotonic() + 300
        while not any(unpack_task(task).query is None for task in tasks) and time.monotonic() < until:
            self.ask(encode(ready))
            time.sleep(0.1)
        task = next(one for one in map(unpack_task, tasks) if one.query is None)
        wrong = Update({"model": task.vectors["model"][:7]}, 10**9, 1, {"loss": 0.0}, 0.0, None, 10**12)
        body = b"not a result" if garbage else pack_update(wrong, None)
        return decode(Reply, self.answer(encode(self.piece(welcome, task.id, body), body), "result"))[0].status

    def frame(self) -> Any:
        """Frames that are none, each on a connection that is otherwise fine."""
        head = struct.Struct("<IBQB")
        frames = {
            "two gigabytes": (2_000_000_000).to_bytes(4, "little") + bytes(12),
            "no head": (1).to_bytes(4, "little") + bytes(1),
            "unknown kind": head.pack(10, 77, 1, 0),
            "topic beyond the frame": head.pack(11, 1, 1, 200) + b"h",
            "topic that is no text": head.pack(11, 1, 1, 1) + b"\xff",
        }
        return {name: self.raw(data) for name, data in frames.items()}

    def nameless(self) -> Any:
        """No certificate at all, and a host that says nothing."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
        silent = [socket.create_connection(("127.0.0.1", self.port)) for _ in range(50)]
        try:
            with made.wrap_socket(socket.create_connection(("127.0.0.1", self.port))) as secured:
                secured.settimeout(60)
                secured.sendall(bytes(16))
                return self.closed(secured)
        except OSError:
            return "closed"
        finally:
            time.sleep(3.0)  # hold the silent ones open for a while
            del silent

    @staticmethod
    def closed(secured: ssl.SSLSocket) -> str:
        try:
            while secured.recv(1 << 16):
                pass
        except TimeoutError:
            return "open"
        except OSError:
            return "closed"
        return "closed"


if __name__ == "__main__":
    faulthandler.dump_traceback_later(240, exit=True)  # before the test gives up, so that it says where this waits
    attack, credentials, name, port = sys.argv[1:]
    attacker = Attacker(Path(credentials), name, int(port))
    if attack not in ("frame", "nameless"):
        attacker.start()
    print(json.dumps(getattr(attacker, attack)()), flush=True)
    os._exit(0)
