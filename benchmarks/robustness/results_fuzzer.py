"""A federation in one process, one of whose sites sends mutated results: does the server stay up?

Server and sites are the real ones, with real credentials and their real messages as bytes.  Only TLS and the messaging
layer below are replaced by function calls (`Wire`), since a fuzzer of those would test other people's code.

    python benchmarks/robustness/results_fuzzer.py 1000
"""

from __future__ import annotations

import json
import random
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `shared`

import torch
from hostile_bytes import mutated, mutated_head
from rows import Row

from piebald.experiments.file import ExperimentSettings
from piebald.experiments.run_settings import RunSettings
from piebald.federation.credentials import provisioning
from piebald.federation.hub.server_runtime import FederationServer
from piebald.federation.hub.server_state import Timeouts
from piebald.federation.link.messaging import SERVER, serve
from piebald.federation.link.wire_format import Piece, Reply, decode, digest, encode
from piebald.federation.site.client_runtime import FederationClient
from piebald.federation.site.policy import Policy
from piebald.federation.site.task_runner import SiteClient
from piebald.runs.prepare import prepare
from piebald.server import ServerLoop
from piebald.storage.store import RunStore

SITES = ["site-1", "site-2", "site-3", "site-4"]
HOSTILE = 3  # client number of the site whose results are mutated
TASK_TIMEOUT = 3.0  # seconds after which a result whose head was mutated is no longer waited for
HANG = 60.0  # seconds without a mutated result after which the server counts as hanging

_NOISE = {"kind": "gaussian", "clip": 1.0, "noise": 0.5, "where": "client"}
RECIPES: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "scaffold": {"name": "scaffold"},
    "distfl": {"name": "distfl", "training": {"kind": "with_moments", "layers": ["classifier"]},
               "clustering": {"kind": "distfl", "steps": 2, "probes": 10, "normal": "vote"}},
    "ifca": {"name": "ifca", "k": 2},
    "dvw": {"name": "async_dvw"},
    "sync_dvw": {"name": "sync_dvw"},
    "hdafl": {"name": "hdafl"},
    "fednova": {"name": "fednova"},
    "secure": {"name": "fedavg", "transforms": [{"kind": "secure_aggregation"}]},
    "dp": {"name": "fedavg", "transforms": [_NOISE]},
    "qfedavg": {"name": "qfedavg"},
    "fedamp": {"name": "fedamp"},
    "hierfavg": {"name": "hierfavg", "regions": [[0, 1], [2, 3]]},
    "fedproto": {"name": "fedproto"},
    "heterofl": {"name": "heterofl"},
    "packed": {"name": "fedavg", "transforms": [{"kind": "top_k", "share": 0.1}]},
    "packed, secure": {"name": "fedavg", "transforms": [
        {"kind": "random_k", "share": 0.1, "positions": "common"}, {"kind": "secure_aggregation"}]},
}  # fmt: skip


class Enough(Exception):
    """So many results were mutated."""


class Wire:
    """A connection that calls the receiver's handlers with the bytes of messages (instead of a `messaging.Link`)."""

    def __init__(self, name: str, address: Any, credentials: Any, knows: Any, report: Any, *, hub: Hub) -> None:
        self.name, self.hub = name, hub
        self.handlers: dict[str, Any] = {}
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.shut: dict[str, str] = {}
        self.peers: dict[str, Any] = {}
        self.trouble = ""
        self.reports: list[str] = []
        hub.wires[name] = self

    def on(self, topic: str, kind: Any, handler: Any) -> None:
        self.handlers[topic] = (kind, handler)

    def start(self) -> None:
        return

    def stop(self) -> None:
        self.hub.wires.pop(self.name, None)

    def report(self, sentence: str) -> None:
        self.reports.append(sentence)

    def send(self, target: str, topic: str, head: Any, body: bytes | memoryview = b"") -> Future[memoryview]:
        payload = encode(head, body)
        if topic == "result":
            payload = self.hub.result(self.name, head, bytes(body), payload)
        answer, reply = self.hub.carry(self.name, target, topic, payload), Future[memoryview]()
        if answer is None:
            reply.cancel()
        else:
            reply.set_result(memoryview(answer))
        return reply

    def request(
        self, target: str, topic: str, head: Any, body: bytes | memoryview = b"", timeout: float = 10.0
    ) -> memoryview | None:
        reply = self.send(target, topic, head, body)
        return None if reply.cancelled() else reply.result()


class Hub:
    """Carries messages between wires, and mutates the results of one site.

    Attributes:
        counts: what became of mutated results, by outcome.
        enough: how many results to mutate.
        errors: what handlers and threads raised.
    """

    def __init__(self, seed: int) -> None:
        self.wires: dict[str, Wire] = {}
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.last, self.enough = time.monotonic(), 0
        self._seen: set[int] = set()
        self._mutated: set[bytes] = set()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def result(self, origin: str, head: Piece, body: bytes, payload: bytes) -> bytes:
        """The message that leaves instead of a result; the second attempt of the hostile site is honest."""
        if origin != SITES[HOSTILE] or head.id in self._seen or self.total >= self.enough:
            return payload
        self._seen.add(head.id)
        if self.rng.random() < 0.1:
            text = mutated_head(head.model_dump_json().encode(), self.rng)
            made = struct.pack("<I", len(text)) + text + body
        else:
            new = mutated(body, self.rng)
            made = encode(head.model_copy(update={"size": len(new), "digest": digest(new)}), new)
        self._mutated.add(made)
        return made

    def carry(self, origin: str, target: str, topic: str, payload: bytes) -> bytes | None:
        """Deliver a message; returns the reply."""
        wire = self.wires.get(target)
        if wire is None:
            return None
        try:
            answer = serve(wire.handlers[topic], origin, payload, wire.report)
        except BaseException as error:
            self.errors.append(f"{topic}: {type(error).__name__}: {error}")
            answer = None
        if payload in self._mutated:
            self._mutated.remove(payload)
            status = "dropped" if answer is None else decode(Reply, answer)[0].status
            self.counts["accepted" if status == "done" else "refused" if status == "refused" else "dropped"] += 1
            self.last = time.monotonic()
        return answer


class Federation:
    """The parties of one run."""

    def __init__(self, recipe: dict[str, Any], folder: Path, seed: int) -> None:
        described = provisioning.Description(name="fuzzed", host="127.0.0.1", port=8400, days=2, sites=SITES)
        provisioning.provision(described, folder / "credentials")
        table = {
            "seed": seed,
            "data": {"name": "digits"},
            "model": {"name": "mlp", "hidden": [4]},
            "partition": {"kind": "iid", "clients": len(SITES), "validation": 0.2, "limit": 160},
            "recipe": {"lr": 0.1, "batch": 10, "limits": None} | recipe,
        }
        table["recipe"].pop("limits")
        settings = ExperimentSettings.of_table(table, "the fuzzer's settings")
        plan = settings.plan()
        options = RunSettings.of_keywords({"seed": seed, "evaluate_every": 7})
        self.plan = prepare(next(iter(plan.recipes.values())), plan.clients, plan.model, options)
        self.hub = Hub(seed)
        self.store = RunStore.create(folder / "run", self.plan.meta)
        work, clients = self.plan.work, self.plan.clients
        timeouts = Timeouts(None, 600.0, 300.0, TASK_TIMEOUT)
        self.runtime = FederationServer(
            folder / "credentials" / SERVER, timeouts, settings.table(), work, clients, None, self._link
        )
        self.sites = [
            FederationClient(
                provisioning.read(folder / "credentials" / name),
                lambda terms, number=number: SiteClient(work.of(number), clients, number),
                policy=Policy(),
                make_link=self._link,
            )
            for number, name in enumerate(SITES)
        ]
        self.threads = [threading.Thread(target=site.run, daemon=True) for site in self.sites]

    def _link(self, *arguments: Any) -> Any:
        return Wire(*arguments, hub=self.hub)

    def run(self, count: int) -> str:
        """Run until so many results were mutated; returns how the server ended, "" for well."""
        ended: list[str] = []
        server = threading.Thread(target=self._serve, args=(count, ended), daemon=True)
        for thread in (*self.threads, server):
            thread.start()
        while server.is_alive() and time.monotonic() - self.hub.last < HANG:
            server.join(0.2)
        hangs = server.is_alive()
        self.runtime.close()
        for site in self.sites:
            site.stop()
        for thread in self.threads:
            thread.join(20)
        return "hang" if hangs else next(iter(ended), "crash")

    def _serve(self, count: int, ended: list[str]) -> None:
        plan, honest = self.plan, list[int]()
        self.hub.enough = count

        def watch(progress: Any) -> None:
            # the hostile site is asked again, unlike in a real run, and so are those that a busy machine made slow
            loop.client_pool.excluded.clear()
            for member in self.runtime.shared.members:
                member.owed, member.overdue = set(), 0
            honest.extend([1] * (self.hub.total >= count))
            if len(honest) > 3:  # all that was refused is in the run folder
                raise Enough

        try:
            loop = ServerLoop(
                plan.recipe, self.runtime, plan.work, self.store, known=len(plan.clients), rounds=None,
                evaluation=plan.measuring, checkpoint_every=5, check=plan.check, watch=watch,
            )  # fmt: skip
            loop.run()
            ended.append("ended early")
        except Enough:
            ended.append(self._unbounded(loop))
        except BaseException as error:
            ended.append(f"crash: {type(error).__name__}: {error}")

    def _unbounded(self, loop: ServerLoop) -> str:
        """What is not as it must be after accepting results that were mutated, "" for nothing."""
        rows = self.store.query("SELECT max(examples) AS most, max(abs(loss)) AS loss FROM result WHERE status = 'ok'")
        known = max(len(self.plan.clients.rows(client, "train")) for client in range(len(SITES)))
        finite = all(bool(torch.isfinite(model).all()) for model in loop.cluster_models.models.values())
        if not finite or rows[0]["most"] > known:
            return f"accepted without bounds: a finite model: {finite}, at most {rows[0]['most']} rows of {known}"
        return ""

    def noted(self) -> int:
        """Refusals that the run folder holds."""
        rows = self.store.query("SELECT sum(json_array_length(value)) AS count FROM note WHERE name = 'refused'")
        return int(rows[0]["count"] or 0)


def run_class(name: str, count: int, seed: int) -> dict[str, Any]:
    """One row of the table: mutated results of one class of recipes."""
    died: list[str] = []
    before, threading.excepthook = threading.excepthook, lambda info: died.append(f"{info.exc_type}: {info.exc_value}")
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as place:
            made = Federation(RECIPES[name], Path(place), seed)
            ended = made.run(count)
            counts, errors, noted = made.hub.counts, made.hub.errors + died, made.noted()
            made.store.close()
    finally:
        threading.excepthook = before
    return {
        "recipe": name,
        "mutated": sum(counts.values()),
        "accepted": counts["accepted"],
        "refused": counts["refused"],
        "dropped": counts["dropped"],
        "noted": noted,
        "crashes": int(ended.startswith(("crash", "ended", "accepted"))),
        "raw exceptions": len(errors),
        "hangs": int(ended == "hang"),
        "seconds": round(time.monotonic() - began, 1),
        "why": "; ".join([ended, *errors[:3]]).strip("; "),
    }


def row_of(name: str, count: int, seed: int) -> Row:
    """Mutate so many results of one class; what was dropped before it was read counts as refused."""
    found = run_class(name, count, seed)
    refused, crashed = found["refused"] + found["dropped"], found["crashes"] + found["hangs"]
    why = (found["why"],) if found["why"] else ()
    subject = f"results of {name}"
    return Row(subject, found["mutated"], refused, found["accepted"], found["raw exceptions"], crashed, why)


if __name__ == "__main__":
    for name in sys.argv[2:] or RECIPES:
        print(json.dumps(run_class(name, int(sys.argv[1]), 0)), flush=True)
