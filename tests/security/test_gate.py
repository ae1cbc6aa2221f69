"""Nothing leaves a site that is no declared release: by its type, on the wire, and in what failures tell."""

from __future__ import annotations

import ast
import json
import math
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
from pydantic import Field

import piebald
from piebald import recipes
from piebald.contracts import SUM, Clients, Task, Update
from piebald.contracts.component import Component
from piebald.core.errors import CannotTrain, Declined
from piebald.data.partition import clients_from
from piebald.experiments.run_settings import RunSettings
from piebald.federation.credentials import provisioning
from piebald.federation.hub.server_runtime import FederationServer
from piebald.federation.link.messaging import SERVER, Connection, FrameKind, decode_frame
from piebald.federation.link.tls import SharedSocket
from piebald.federation.link.wire_format import (
    CheckRequest,
    Hello,
    Leaving,
    Piece,
    Release,
    Reply,
    TermsRequest,
    contents,
    decode,
    digest,
    unpack,
    unpack_update,
)
from piebald.federation.site import site_process, task_runner
from piebald.federation.site.gate import Declared, Gate, Mechanism, declared
from piebald.federation.site.policy import Policy
from piebald.federation.site.site_rows import SiteClient
from piebald.federation.site.task_runner import TaskRunner
from piebald.methods.client_work import ClientWork
from piebald.methods.queries import Evaluate
from piebald.methods.recipe import Recipe
from piebald.models import Logistic
from piebald.privacy import SecureAggregation
from piebald.runs.prepare import prepare
from piebald.runtimes.base import RuntimeSettings
from tests.federation.site_threads import connected
from tests.federation.test_consent import Offered

SITE = Path(task_runner.__file__).parent
TOPICS: Mapping[str, type[Release]] = {
    "hello": Hello,
    "terms": TermsRequest,
    "result": Piece,
    "check": CheckRequest,
    "": Reply,
}


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for below in kind.__subclasses__():
        yield below
        yield from subclasses(below)


# -- by type


def test_each_field_that_a_site_sends_is_declared() -> None:
    messages = [kind for kind in subclasses(Release) if kind.__module__.startswith("piebald.")]
    assert {*TOPICS.values()} < {*messages}
    told = {leaves for kind in messages for leaves in kind.leaving().values()}
    listed = {line.leaves for line in declared(Policy(queries=["evaluate"]))}
    assert told < listed == {*Leaving}
    for kind in messages:
        assert kind.leaving().keys() == kind.model_fields.keys()


@pytest.mark.parametrize("field", [int, Annotated[int, Field(ge=0)]])
def test_a_field_that_is_not_declared_cannot_be_written(field: Any) -> None:
    with pytest.raises(TypeError, match="undeclared"):
        type("Longer", (Hello,), {"__annotations__": {"seconds": field}, "__module__": __name__, "seconds": 0})


def test_nothing_at_a_site_sends_but_the_gate() -> None:
    sending = {"send_body", "fetch_terms", "encode", "encode_frame"}
    for path in SITE.glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        calls = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert path.name == "gate.py" or not calls & {"send", "send_frame", "sendall"}, path
        assert path.name == "gate.py" or not names & sending, path


@pytest.mark.long
def test_mypy_lets_nothing_else_through(tmp_path: Path) -> None:
    wrong = {
        "outlet.hello(welcome, 1.0)": "incompatible type",
        "outlet._request('hello', b'bytes', 1.0)": "incompatible type",
        "outlet._request('hello', welcome, 1.0)": "incompatible type",
        "outlet.deliver(welcome, 1, True, b'bytes')": "incompatible type",
        "outlet.send('server', 'hello', message)": "has no attribute",
        "site._link.send('server', 'hello', message)": "has no attribute",
    }
    (tmp_path / "wrong.py").write_text(
        "from piebald.federation.link.wire_format import Hello, Welcome\n"
        "from piebald.federation.site.client_runtime import FederationClient\n"
        "from piebald.federation.site.gate import Outlet\n\n\n"
        "def wrong(site: FederationClient, outlet: Outlet, message: Hello, welcome: Welcome) -> None:\n"
        + "".join(f"    {line}\n" for line in wrong)
    )
    # with the settings and the cache of `make check`, without which mypy would read the whole package again
    words = [sys.executable, "-m", "mypy", str(tmp_path / "wrong.py")]
    said = subprocess.run(words, capture_output=True, text=True, timeout=600).stdout
    lines = [line for line in said.splitlines() if "wrong.py" in line and " error: " in line]
    assert len(lines) == len(wrong), said
    assert all(why in line for why, line in zip(wrong.values(), lines, strict=True)), said


# -- on the wire

CONNECTED = list[Any]()  # addresses that sockets of this process have been connected to, or have sent datagrams to


def hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        CONNECTED.append(arguments[1])


sys.addaudithook(hear)


class SitesBehindTheGate(RuntimeSettings):
    """Sites in threads of this process, over mutual TLS on the loopback device."""

    simulates: ClassVar[bool] = False

    folder: str
    policy: dict[str, Any]

    def open(self, work: ClientWork, clients: Clients) -> Any:
        plan = SimpleNamespace(work=work, clients=clients)
        policies = [Policy.model_validate(self.policy)] * len(clients)
        context = connected(plan, policies, Path(self.folder))  # type: ignore[arg-type]
        server: FederationServer = context.__enter__()
        ended = server.close

        def close() -> None:
            server.close = ended  # type: ignore[method-assign]
            context.__exit__(None, None, None)

        server.close = close  # type: ignore[method-assign]
        return server


def tables() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    for _ in range(3):
        x = rng.normal(size=(40, 4)).astype("f4")
        yield x, (x[:, 0] > 0).astype(int)


def clients() -> Clients:
    return clients_from(list(tables()), classes=["no", "yes"], test=0.25, seed=0)


NOISE = {"kind": "gaussian", "clip": 1.0, "noise": 0.5, "where": "client"}
RUNS = {
    "in the open": (recipes.fedavg(lr=0.1, batch=10), {}),
    "vectors of the trainer": (recipes.scaffold(lr=0.1, batch=10), {}),
    "DP-SGD": (recipes.dp_sgd(lr=0.1, batch=10), {"queries": ["evaluate"]}),
    "noise on updates": (
        recipes.fedavg(lr=0.1, batch=10).with_(transforms=(NOISE,), aggregation="equal_weighted"),
        {"queries": ["evaluate"]},
    ),
    "masks": (
        recipes.fedavg(lr=0.1, batch=10).with_(transforms=(SecureAggregation(bits=64),), aggregation="equal_weighted"),
        {"queries": ["evaluate"]},
    ),
}
SLOW = ("vectors of the trainer", "noise on updates")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in SLOW else ()) for n in RUNS])
def test_every_frame_of_a_site_is_a_release(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes that sites hand to TLS are read again: each message, each of its fields, each tensor and number."""
    recipe, policy = RUNS[name]
    CONNECTED.clear()
    written = defaultdict[int, bytearray](bytearray)
    passed: dict[str, tuple[Task, ClientWork]] = {}
    send, result = SharedSocket.send, Gate.result

    def heard(self: SharedSocket, data: Any, *rest: Any, **more: Any) -> int:
        count = send(self, data, *rest, **more)
        if isinstance(self, Connection) and self.name == SERVER:
            written[id(self)] += bytes(data[:count])
        return count

    def noted(self: Gate, task: Task, *rest: Any) -> bytes:
        body = result(self, task, *rest)
        passed[digest(body)] = task, self._work
        return body

    monkeypatch.setattr(SharedSocket, "send", heard)
    monkeypatch.setattr(Gate, "result", noted)
    kept = list[Connection]()  # so that no two have one id
    share = Connection.share
    monkeypatch.setattr(Connection, "share", lambda self, *a, **k: (kept.append(self), share(self, *a, **k))[1])
    runtime = SitesBehindTheGate(folder=str(tmp_path / "credentials"), policy=policy)
    piebald.run(recipe, clients(), Logistic([4], 2), rounds=2, seed=1, runtime=runtime, evaluate_every=1)
    bodies = dict[str, bytearray]()
    assert len(written) >= 3
    port = provisioning.read(tmp_path / "credentials" / SERVER).port
    assert {*CONNECTED} == {("127.0.0.1", port)}  # nobody else is spoken to
    for stream in written.values():
        for kind, topic, message in frames(stream):
            head, data = decode(TOPICS[topic], message)
            assert {*json.loads(head.model_dump_json())} == head.leaving().keys()
            assert kind is (FrameKind.REQUEST if topic else FrameKind.REPLY)
            if isinstance(head, Piece):
                body = bodies.setdefault(head.digest, bytearray(head.size))
                body[head.start : head.start + len(data)] = data
            else:
                assert not len(data)
    assert bodies.keys() == passed.keys()  # all that came to the wire has passed the gate, and nothing else
    trained = 0
    for name_of_body, body in bodies.items():
        assert digest(body) == name_of_body
        task, work = passed[name_of_body]
        trained += task.query is None
        check_declared(body, task, declared(Policy.model_validate(policy), work))
    assert trained == 6


def check_declared(body: bytearray, task: Task, lines: list[Declared]) -> None:
    """Each tensor and number of a result is in the list that the owner of the site reads."""
    names, values = contents(body), unpack(body)[0]
    if names["failure"] is not None:
        return
    if task.query is not None and task.query.kind in {line.name for line in lines if line.leaves is Leaving.ANSWER}:
        return
    if task.query is not None:
        assert Leaving.KEYS in {line.leaves for line in lines}
        assert (names["numbers"], values["examples"], values["steps"]) == ([], 0, 0)
        return
    update = {line.name: line.mechanism for line in lines if line.leaves is Leaving.UPDATE}
    if Mechanism.MASKED in update.values():
        assert ({*names["tensors"]}, names["numbers"], values["examples"], values["steps"]) == ({SUM}, [], 0, 0)
        return
    assert names["tensors"].keys() == update.keys()
    assert bool(names["numbers"]) <= (Leaving.LOSS in {line.leaves for line in lines})


def frames(stream: bytearray) -> Iterator[tuple[FrameKind, str, memoryview]]:
    """The frames of a connection, but for its opening and its last word."""
    assert stream[:7] == b"piebald"
    start = 8
    while start < len(stream):
        (length,) = struct.unpack_from("<I", stream, start)
        frame = decode_frame(stream[start : start + 4 + length])
        start += 4 + length
        if frame.kind is not FrameKind.FAREWELL:
            yield frame.kind, frame.topic, frame.message


# -- failures


def hidden(recipe: Recipe) -> ClientWork:
    return prepare(recipe, clients(), Logistic([4], 2), RunSettings(seed=1)).work


HIDING = {"DP-SGD": RUNS["DP-SGD"][0], "noise on updates": RUNS["noise on updates"][0], "masks": RUNS["masks"][0]}


@pytest.mark.parametrize("name", HIDING)
def test_failures_tell_nothing_of_rows_where_rows_are_hidden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, "not finite", too few rows and the kind of an error were told beside DP-SGD."""
    work, all_clients = hidden(HIDING[name]), clients()
    runner = TaskRunner(SiteClient(work, all_clients, 0), Policy(), "cpu")
    task, gate, serve = Task(1, 0, 0, {"model": work.initial}), runner.gate, task_runner.serve

    def body() -> bytes:
        update, failure, _ = runner.serve(task, None)
        assert update is None
        return gate.result(task, update, failure)

    bodies = set()
    for error in (
        CannotTrain("cannot train on 2 rows"),
        ValueError("got 'Miller'"),
        Declined("it took long"),
        IndexError(),
    ):

        def fails(*_: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(task_runner, "serve", fails)
        bodies.add(body())

    def spoilt(*arguments: Any) -> Any:
        served = serve(*arguments)
        served.vectors["model"][:] = math.nan
        return served

    monkeypatch.setattr(task_runner, "serve", spoilt)
    bodies.add(body())
    assert len(bodies) == 1
    told = next(iter(bodies))
    for reason in ("refused by the site's policy: epsilon 7.9 of 8 is spent", "refused by the site's policy: 8 of 8"):
        counted = gate.result(task, None, reason)
        assert b"7.9" not in counted
        assert b"8 of" not in counted
        assert counted != told  # that a budget is spent is told, without a number


def test_numbers_that_are_not_finite_stay_at_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON has none, and the server would refuse the whole result."""
    work, serve = hidden(recipes.fedavg(lr=0.1)), task_runner.serve
    runner = TaskRunner(SiteClient(work, clients(), 0), Policy(), "cpu")

    def lacking(*arguments: Any) -> Any:
        return replace(serve(*arguments), metrics={"loss": np.array([math.nan])})

    monkeypatch.setattr(task_runner, "serve", lacking)
    task = Task(1, 0, 0, {"model": work.initial})
    update, failure, _ = runner.serve(task, None)
    told, reason = unpack_update(runner.gate.result(task, update, failure))
    assert reason is None
    assert told is not None
    assert told.metrics == {}


@pytest.mark.parametrize(("recipe", "told"), [("fedavg", True), ("dp_sgd", False)])
def test_a_refusal_tells_nothing_of_rows_where_rows_are_hidden(
    recipe: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a target out of range was told with the split that its row is in, also beside DP-SGD."""

    def check_targets(*_: Any) -> None:
        raise site_process._OtherForm("its targets must be whole numbers from 0 to 9, in test rows")

    monkeypatch.setattr(site_process, "_check_targets", check_targets)
    training = recipes.make(recipe).training.table()
    refused = Offered(tmp_path, None, training=training).offer().refused
    assert ("in test rows" in refused) is told
    assert told or refused == "its rows cannot be used for this run; the site's own log says why"


@pytest.mark.parametrize("name", ["DP-SGD", "noise on updates"])
def test_a_results_length_does_not_depend_on_rows_that_are_hidden(name: str) -> None:
    """Rows of other values, such with infinite gradients among them, and of other classes."""
    work, sizes = hidden(HIDING[name]), set()
    plain = next(iter(tables()))[0]
    odd = np.where(np.arange(40)[:, None] == 3, np.float32(3e38), plain)
    for x in (plain, 1e6 * plain, odd):
        clients_here = clients_from([(x, np.ones(40, int))] * 3, classes=["no", "yes"], test=0.25, seed=0)
        runner, task = (
            TaskRunner(SiteClient(work, clients_here, 0), Policy(), "cpu"),
            Task(1, 0, 0, {"model": work.initial}),
        )
        update, failure, _ = runner.serve(task, None)
        sizes.add(len(runner.gate.result(task, update, failure)))
        assert failure is None
    assert len(sizes) == 1


def test_without_protection_reasons_are_told() -> None:
    gate, task = gate_of(work := hidden(RUNS["in the open"][0])), Task(1, 0, 0, {"model": work.initial})
    assert contents(gate.result(task, None, "cannot train on 2 rows"))["failure"] == "cannot train on 2 rows"


@pytest.mark.full
def test_a_refusal_that_follows_from_the_policy_alone_is_told() -> None:
    work, policy = hidden(RUNS["DP-SGD"][0]), Policy()
    task = Task(1, 0, 0, {"model": work.initial}, Evaluate())
    reason = policy.query_reject_reason(Evaluate(), work)
    assert reason is not None
    assert contents(gate_of(work).result(task, None, reason))["failure"] == reason
    assert contents(gate_of(work).result(task, None, f"{reason} 3 rows"))["failure"] != f"{reason} 3 rows"


@pytest.mark.parametrize("name", RUNS)
def test_what_nobody_declared_stays(name: str) -> None:
    """A tensor or a number that a component adds, which no list names."""
    gate = gate_of(work := hidden(RUNS[name][0]))
    task = Task(1, 0, 0, {"model": work.initial})
    vectors = {one: work.initial[: work.layout.shared] for one in ("model", *work.uploads())}
    lossy, reason = gate.checked(task, Update(vectors, 0, 0, {"loss": 0.5}))
    assert reason is None
    noised = any(line.mechanism is Mechanism.NOISED for line in declared(Policy(), work))
    assert lossy is not None
    assert (lossy.metrics == {}) is noised  # which no noise covers
    for wrong in (
        Update({**vectors, "rows": work.initial}, 0, 0, {}),
        Update({name: vector[1:] for name, vector in vectors.items()}, 0, 0, {}),
        Update(vectors, 41, 0, {}),
        Update({name: vector / 0 for name, vector in vectors.items()}, 0, 0, {}),
    ):
        assert gate.checked(task, wrong)[0] is None
        left = contents(gate.result(task, wrong, None))
        assert left["tensors"].keys() <= vectors.keys()
    masked = {SUM: work.initial} if work.masking else vectors
    assert contents(gate.result(task, Update(masked, 0, 0, {}), None))["failure"] is None
    if work.masking:  # in the open, with a number, a loss, or rows beside it
        for wrong in (
            Update(vectors, 0, 0, {}), Update(masked, 3, 0, {}), Update(masked, 0, 3, {}),
            Update(masked, 0, 0, {"loss": 0.5}), Update({**masked, "rows": work.initial}, 0, 0, {}),
        ):  # fmt: skip
            assert contents(gate.result(task, wrong, None))["tensors"] == {}


def gate_of(work: ClientWork) -> Gate:
    return Gate(Policy(), work, clients(), 0, None)


# -- the list


def test_each_kind_of_question_has_a_mechanism() -> None:
    kinds = [kind for kind, query in Component.registry["query"].items() if query.asked_of == "clients"]
    for policy in (Policy(queries=kinds), Policy(queries=kinds, least_rows=10, budget={"epsilon": 1.0, "delta": 1e-6})):
        by_name = {line.name: line.mechanism for line in declared(policy) if line.leaves is Leaving.ANSWER}
        for kind in kinds:
            hiding = by_name.get(kind)
            assert (hiding is None) == (Component.registry["query"][kind].__module__.endswith("key_queries"))
            assert kind != "noisy_sums" or hiding is Mechanism.NOISED
            assert not kind.startswith("masked") or hiding is Mechanism.MASKED
            assert policy.least_rows is None or hiding is not Mechanism.OPEN or kind == "prepare_names"
