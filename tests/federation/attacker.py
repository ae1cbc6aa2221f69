"""An attacker in a process of its own: python attacker.py ATTACK CREDENTIALS NAME PORT; prints replies as JSON.

It speaks to the cell layer directly, without the filter that parties have.
"""

from __future__ import annotations

import faulthandler
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
from piebald.federation.link.flare_driver import SCHEME, make_driver
from piebald.federation.link.tls import context
from piebald.federation.link.wire_format import digest, pack_update, unpack_task
from piebald.federation.link.wire_messages import (
    LONGEST,
    PROTOCOL,
    Hello,
    Piece,
    Reply,
    TermsRequest,
    Welcome,
    decode,
    encode,
)

logging.getLogger("nvflare").setLevel(logging.CRITICAL + 1)
HELLO = encode(Hello(protocol=PROTOCOL, version=__version__, incarnation="ab"))
FILES = {"ca_cert": "authority.pem", "client_cert": "certificate.pem", "client_key": "key.pem"}


class Attacker:
    """A cell that sends what parties would not."""

    def __init__(self, credentials: Path, name: str, port: int) -> None:
        self.name, self.port = name, port
        self.files: dict[str, Any] = {key: str(credentials / file) for key, file in FILES.items()}
        communicator.driver_mgr.register(make_driver())
        self.cell = CoreCell(name, f"{SCHEME}://127.0.0.1:{port}", True, {**self.files, "connection_security": "mtls"})

    def start(self) -> None:
        self.cell.start()
        time.sleep(1.0)

    def ask(
        self, payload: Any, topic: str = "hello", target: str = "server", channel: str = "piebald", wait: float = 0.5
    ) -> str | None:
        """Send a request; returns the reply in hexadecimal, or None where none comes in a while."""
        reply = self.cell.send_request(channel, topic, target, new_cell_message({}, payload), timeout=wait)
        fine = reply is not None and reply.get_header("cn__return_code") in (None, "ok")
        return bytes(reply.payload).hex() if fine and reply.payload is not None else None

    def answer(self, payload: Any, topic: str = "hello") -> bytes:
        """The reply to a request that the server answers, however busy the machine is."""
        return bytes.fromhex(self.ask(payload, topic, wait=60.0) or "")

    def forge(self, **headers: Any) -> str | None:
        """Send a hello with forged headers."""
        self.cell.add_outgoing_request_filter("*", "*", lambda message: message.add_headers(headers))
        answer = self.ask(HELLO)
        self.cell.out_req_filter_reg.reg.clear()
        return answer

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
            "origin": self.forge(cn__origin="site-1"),
            "destination": self.forge(cn__destination="site-1"),
            "client to client": self.ask(HELLO, "task", "site-1"),
            "another channel": self.ask(HELLO, "hello", channel="admin"),
            "another topic": self.ask(HELLO, "shell"),
            "certificates": self.ask(HELLO, "certificate", channel="credential_manager"),
            "bulk": self.ask([{"target": "server"}], "bulk", channel="cellnet.channel"),
            "objects": self.ask({"a": [1, 2]}),
            "no head": self.ask(b"\x00"),
            "garbage": self.ask(os.urandom(5000)),
            "unknown field": self.ask(encode(Reply(status="done"))),
            "deep": self.ask(len(deep := b'{"protocol":' + b"[" * 100_000).to_bytes(4, "little") + deep),
            "long": self.ask(HELLO + bytes(LONGEST)),
        }
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

        def take(message: Any) -> Any:
            data = decode(Piece, message.payload)[1]
            tasks.append(bytes(data))
            return new_cell_message({}, encode(Reply(status="done")))

        self.cell.register_request_cb("piebald", "task", take)
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
        """A frame that claims to be two gigabytes long, on a connection that is otherwise fine."""
        made = context(self.files, server=False)
        with made.wrap_socket(socket.create_connection(("127.0.0.1", self.port))) as secured:
            secured.settimeout(60)
            secured.sendall((2_000_000_000).to_bytes(4, "big") + bytes(12))
            return self.closed(secured)

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
