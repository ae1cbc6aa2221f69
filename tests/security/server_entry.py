"""The server of a federation without connections: messages enter as bytes, where the network layer hands them on."""

from __future__ import annotations

import functools
import json
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piebald.contracts import Query, Result, Task, Update
from piebald.experiments.run_settings import RunSettings
from piebald.federation.credentials import provisioning
from piebald.federation.hub.server_runtime import FederationServer
from piebald.federation.hub.server_state import Timeouts
from piebald.federation.link.messaging import serve
from piebald.federation.link.wire_format import (
    PROTOCOL,
    Hello,
    Piece,
    Reply,
    Welcome,
    decode,
    digest,
    encode,
    pack_update,
)
from piebald.runs.prepare import PreparedRun, prepare
from piebald.version import __version__
from tests.federation.conftest import provisioned, settings

ROWS = {"rows": 50, "validation_rows": 10, "test_rows": 10}
PATIENT = Timeouts(1, 600.0, 600.0, 600.0)


class Wire:
    """The server's connection: it keeps the handlers, and what is sent through it reaches nobody."""

    def __init__(self, *_: object) -> None:
        self.handlers: dict[str, Any] = {}
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.reports: list[str] = []
        self.peers: dict[str, Any] = {}
        self.shut: dict[str, str] = {}
        self.open: Counter[str] = Counter()

    def on(self, topic: str, kind: Any, handler: Any) -> None:
        self.handlers[topic] = (kind, handler)

    def connections(self, name: str) -> int:
        return self.open[name]

    def start(self) -> None:
        return

    def stop(self) -> None:
        return

    def report(self, sentence: str) -> None:
        self.reports.append(sentence)

    def request(self, *_: object, **__: object) -> None:
        return None

    def send(self, *_: object) -> Future[memoryview]:
        reply = Future[memoryview]()
        reply.set_result(memoryview(encode(Reply(status="again"))))
        return reply

    def deliver(self, origin: str, topic: str, payload: bytes) -> bytes | None:
        """What the messaging layer does with a message that has passed its filter."""
        return serve(self.handlers[topic], origin, payload, self.report)


class Entry:
    """A server with three sites, of which the tests speak the part.

    Attributes:
        plan: the run.
        server: its runtime.
        wire: the server's connection.
        welcome: the server's answer to the first site's last hello.
    """

    def __init__(self, folder: Path, recipe: Mapping[str, Any], timeouts: Timeouts = PATIENT) -> None:
        if not (folder / "server").exists():
            provisioned(folder)
        self.plan, table = prepared(json.dumps(recipe))
        self.wire = Wire()
        make_link: Callable[..., Any] = lambda *_: self.wire  # noqa: E731
        credentials = provisioning.read(folder / "server").folder
        self.server = FederationServer(credentials, timeouts, table, self.plan.work, self.plan.clients, None, make_link)
        self.server.shared.started = True
        self.welcome: Welcome | None = None

    def join(self, site: str, **fields: Any) -> Welcome:
        """Say hello for a site; `fields` are those of a hello."""
        ready = {"run": self.server.shared.run, "ready": self.server.shared.terms}
        hello = Hello(protocol=PROTOCOL, version=__version__, **{"incarnation": "ab", **ready, **ROWS, **fields})
        answer = self.wire.deliver(site, "hello", encode(hello))
        assert answer is not None
        self.welcome = decode(Welcome, answer)[0]
        return self.welcome

    def task(self, id: int = 1, client: int = 0, query: Query | None = None) -> Task:
        """Give a site a task."""
        layout, vectors = self.plan.work.layout, self.plan.work.server_vectors()
        model = self.plan.work.initial[: layout.shared]
        made = Task(id, client, 0, {"model": model, **(vectors if query is None else {})}, query)
        self.server.submit([made])
        return made

    def deliver(self, body: bytes, id: int = 1, site: str = "site-1", trains: bool = True, **head: Any) -> str | None:
        """Deliver a result; returns the status of the reply, None where none comes."""
        shared = self.server.shared
        fields: dict[str, Any] = {"run": shared.run, "epoch": shared.epoch, "id": id, "trains": trains, "start": 0}
        piece = Piece(**{**fields, "size": len(body), "digest": digest(body), **head})
        answer = self.wire.deliver(site, "result", encode(piece, body))
        return None if answer is None else decode(Reply, answer)[0].status

    def result(self) -> Result | None:
        """What the server loop gets of it."""
        return self.server.next(until=0.0)


@functools.cache
def prepared(recipe: str) -> tuple[PreparedRun, dict[str, Any]]:
    """A small run with this recipe, and the settings that it was made from."""
    made = settings(json.loads(recipe), model={"name": "mlp", "hidden": [4]})
    plan = made.plan()
    return prepare(next(iter(plan.recipes.values())), plan.clients, plan.model, RunSettings(seed=1)), made.table()


def true_update(entry: Entry, **fields: Any) -> Update:
    """An update as an honest site sends it; `fields` replace parts of it."""
    layout = entry.plan.work.layout
    vectors: dict[str, Tensor] = {"model": torch.full((layout.shared,), 0.01)}
    vectors |= {name: torch.zeros(layout.shared) for name in entry.plan.work.trainer.uploads()}
    return Update(**{"vectors": vectors, "examples": 50, "steps": 5, "metrics": {"loss": 0.5}, "nbytes": 100} | fields)


def rewritten(body: bytes, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> bytes:
    """A body whose values, and whose tensors' head, were changed in place by a function."""
    (size,) = struct.unpack_from("<I", body)
    (length,) = struct.unpack_from("<Q", body, 4 + size)
    start = 12 + size
    values, head = json.loads(body[4 : 4 + size]), json.loads(body[start : start + length])
    change(values, head)
    text, top = json.dumps(values).encode(), json.dumps(head).encode()
    parts = (struct.pack("<I", len(text)), text, struct.pack("<Q", len(top)), top, body[start + length :])
    return b"".join(parts)


def packed(entry: Entry, **fields: Any) -> bytes:
    """A result with this update as bytes."""
    return pack_update(true_update(entry, **fields), None)
