"""An attacker in a process of its own: python attacker.py ATTACK KIT NAME PORT; prints what it got as JSON.

It speaks to the cell layer directly, without the guard that every party of ours has.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import ssl
import sys
import time
from pathlib import Path
from typing import Any

from nvflare.fuel.f3 import communicator
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.utils import new_cell_message

from piebald import __version__
from piebald.contracts import Update
from piebald.runtimes.federation.messages import LONGEST, Hello, Piece, Welcome, Wish, Word, decode, encode
from piebald.runtimes.federation.tls import SCHEME, context, make_driver
from piebald.runtimes.federation.wire_format import digest, pack_update, unpack_task

logging.getLogger("nvflare").setLevel(logging.CRITICAL + 1)
HELLO = encode(Hello(protocol=1, version=__version__, incarnation="ab"))
CREDENTIALS = {"ca_cert": "authority.pem", "client_cert": "certificate.pem", "client_key": "key.pem"}


class Attacker:
    """A cell that does as it likes."""

    def __init__(self, credentials: Path, name: str, port: int) -> None:
        self.credentials, self.name, self.port = credentials, name, port
        self.credentials: dict[str, Any] = {key: str(credentials / file) for key, file in CREDENTIALS.items()}
        communicator.driver_mgr.register(make_driver())
        self.cell = CoreCell(
            name, f"{SCHEME}://127.0.0.1:{port}", True, {**self.credentials, "connection_security": "mtls"}
        )

    def start(self) -> None:
        self.cell.start()
        time.sleep(1.0)

    def ask(self, payload: Any, topic: str = "hello", target: str = "server", channel: str = "piebald") -> str | None:
        """Send a request; what came back, in hexadecimal, or None."""
        reply = self.cell.send_request(channel, topic, target, new_cell_message({}, payload), timeout=0.5)
        fine = reply is not None and reply.get_header("cn__return_code") in (None, "ok")
        return bytes(reply.payload).hex() if fine and reply.payload is not None else None

    def forge(self, **headers: Any) -> str | None:
        """A hello with headers of somebody else's."""
        self.cell.add_outgoing_request_filter("*", "*", lambda message: message.add_headers(headers))
        answer = self.ask(HELLO)
        self.cell.out_req_filter_reg.reg.clear()
        return answer

    @staticmethod
    def piece(welcome: Welcome, id: int, body: bytes) -> Piece:
        """The head of a result."""
        more = {"start": 0, "size": len(body), "digest": digest(body)}
        return Piece(run=welcome.run, epoch=welcome.epoch, id=id, trains=True, **more)

    # -- what it does

    def hello(self) -> Any:
        """The harmless thing; whoever may not be here gets no answer."""
        return self.ask(HELLO)

    def insider(self) -> Any:
        """A site that tries what it may not."""
        found = {
            "origin": self.forge(cn__origin="site-1"),
            "destination": self.forge(cn__destination="site-1"),
            "client to client": self.ask(HELLO, "work", "site-1"),
            "another channel": self.ask(HELLO, "hello", channel="admin"),
            "another topic": self.ask(HELLO, "shell"),
            "certificates": self.ask(HELLO, "certificate", channel="credential_manager"),
            "bulk": self.ask([{"target": "server"}], "bulk", channel="cellnet.channel"),
            "objects": self.ask({"a": [1, 2]}),
            "no head": self.ask(b"\x00"),
            "garbage": self.ask(os.urandom(5000)),
            "unknown field": self.ask(encode(Word(word="done"))),
            "deep": self.ask(len(deep := b'{"protocol":' + b"[" * 100_000).to_bytes(4, "little") + deep),
            "long": self.ask(HELLO + bytes(LONGEST)),
        }
        return found | {"still served": self.ask(HELLO) is not None}

    def replay(self) -> Any:
        """Deliver results for every number there may be, one's own and others'."""
        welcome = decode(Welcome, bytes.fromhex(self.ask(HELLO) or ""))[0]
        body = pack_update(Update({}, 1, 1, {}), None)
        words = set()
        for id in range(1, 60):
            piece = self.piece(welcome, id, body)
            words.add(decode(Word, bytes.fromhex(self.ask(encode(piece, body), "result") or ""))[0].word)
        return sorted(words)

    def liar(self) -> Any:
        """Take part, and send a result of another shape."""
        tasks: list[bytes] = []

        def take(message: Any) -> Any:
            data = decode(Piece, message.payload)[1]
            tasks.append(bytes(data))
            return new_cell_message({}, encode(Word(word="done")))

        self.cell.register_request_cb("piebald", "work", take)
        welcome = decode(Welcome, bytes.fromhex(self.ask(HELLO) or ""))[0]
        self.ask(encode(Wish(start=0)), "terms")
        ready = Hello(protocol=1, version=__version__, incarnation="cd", run=welcome.run, ready=welcome.terms)
        return [self.lie(tasks, ready, welcome, wrong) for wrong in (True, False)]

    def lie(self, tasks: list[bytes], ready: Hello, welcome: Welcome, garbage: bool) -> str:
        """Wait for training, and answer with garbage or with a model of another length."""
        tasks.clear()
        until = time.monotonic() + 60
        while not any(unpack_task(task).query is None for task in tasks) and time.monotonic() < until:
            self.ask(encode(ready))
            time.sleep(0.1)
        task = next(one for one in map(unpack_task, tasks) if one.query is None)
        wrong = Update({"model": task.vectors["model"][:7]}, 10**9, 1, {"loss": 0.0}, 0.0, None, 10**12)
        body = b"not a result" if garbage else pack_update(wrong, None)
        answer = self.ask(encode(self.piece(welcome, task.id, body), body), "result")
        return decode(Word, bytes.fromhex(answer or ""))[0].word

    def frame(self) -> Any:
        """A frame that claims to be two gigabytes long, on a connection that is otherwise fine."""
        made = context(self.credentials, server=False)
        with made.wrap_socket(socket.create_connection(("127.0.0.1", self.port))) as secured:
            secured.settimeout(5)
            secured.sendall((2_000_000_000).to_bytes(4, "big") + bytes(12))
            return self.closed(secured)

    def nameless(self) -> Any:
        """No certificate at all, and a host that says nothing."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
        silent = [socket.create_connection(("127.0.0.1", self.port)) for _ in range(50)]
        try:
            with made.wrap_socket(socket.create_connection(("127.0.0.1", self.port))) as secured:
                secured.settimeout(5)
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
    attack, credentials, name, port = sys.argv[1:]
    attacker = Attacker(Path(credentials), name, int(port))
    if attack not in ("frame", "nameless"):
        attacker.start()
    print(json.dumps(getattr(attacker, attack)()), flush=True)
    os._exit(0)
