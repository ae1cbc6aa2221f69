"""The server loop, over a fake runtime whose answers and delays are known."""

from __future__ import annotations

import gc
import math
import weakref
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.contracts import (
    Checkpoint,
    ClientContext,
    Cohort,
    ServerContext,
    StepContext,
    Task,
    TrainInput,
    TrainOutput,
    Update,
)
from piebald.core.errors import RuntimeFault
from piebald.methods.aggregation import EqualWeighted, ExampleWeighted
from piebald.methods.clustering import SingleCluster
from piebald.methods.recipe import Recipe
from piebald.methods.scheduling import Asynchronous, Buffered, Synchronous
from piebald.methods.server_optimizer import Adam, Momentum, ServerSgd
from piebald.methods.sharing import Full
from piebald.methods.training import Scaffold, Sgd
from piebald.methods.transforms.base import Transform
from piebald.server import ResultChecks, records
from piebald.server.cluster_models import _rebase
from piebald.testing.components import plain_network, uneven_clients
from tests.fakes import (
    SGD,
    ByParity,
    FakeRuntime,
    MemoryRecorder,
    classified,
    make_server,
    parameters,
    seeded,
    simulate,
    update,
)

COMPONENTS: dict[str, Any] = {
    "training": SGD,
    "sharing": Full(),
    "clustering": SingleCluster(),
    "aggregation": EqualWeighted(),
}


def recipe(**components: Any) -> Recipe:
    return Recipe(**COMPONENTS | {"scheduling": Synchronous(cohort=1.0), "server_optimizer": ServerSgd()} | components)


def towards(client: int, model: Tensor) -> Update:
    """A client that walks halfway to its own number."""
    return update(*(0.5 * (client - model)).tolist(), examples=client + 1)


def answer(task: Task) -> Update:
    if task.query is not None:
        return Update({}, 1, 0, {"global/accuracy": 0.5})
    return towards(task.client, task.vectors["model"])


# ----------------------------------------------------------------------------------------------------------- scheduling


def test_synchronous_waits_for_the_slowest() -> None:
    runtime = FakeRuntime(3, answer, delay=lambda a: [1.0, 5.0, 2.0][a.client])
    server, recorder = make_server(recipe(), runtime, rounds=2)
    server.run()
    assert [(step["time"], step["arrived"]) for step in recorder.steps] == [(5.0, 3), (10.0, 3)]
    # the mean of the clients' numbers is 1: halfway there, and again
    assert server.cluster_models.cluster(0).model.tolist() == pytest.approx([0.75] * 3)
    assert [row["client"] for row in recorder.rows] == [0, 1, 2, 0, 1, 2]
    assert all(row["staleness"] == 0 for row in recorder.rows)


def test_asynchronous_steps_at_each_result() -> None:
    """Delays 1 and 2.5: results of client 0 at 1, 2, 3, 4, 5 and of client 1 at 2.5, 5."""
    runtime = FakeRuntime(2, answer, delay=lambda a: [1.0, 2.5][a.client])
    server, recorder = make_server(recipe(scheduling=Asynchronous()), runtime, rounds=7)
    server.run()
    assert [(row["time"], row["client"]) for row in recorder.rows] == [
        (1.0, 0), (2.0, 0), (2.5, 1), (3.0, 0), (4.0, 0), (5.0, 1), (5.0, 0)
    ]  # fmt: skip
    assert [row["staleness"] for row in recorder.rows] == [0, 0, 2, 1, 0, 2, 1]
    model = torch.zeros(3)
    sent = {0: model, 1: model}
    for row in recorder.rows:
        client = row["client"]
        model = model + 0.5 * (client - sent[client])
        sent[client] = model
    torch.testing.assert_close(server.cluster_models.cluster(0).model, model)


def test_results_at_one_instant_come_in_the_order_of_their_tasks() -> None:
    for every in (0, 1):
        runtime = FakeRuntime(4, answer)
        server, recorder = make_server(recipe(scheduling=Asynchronous()), runtime, rounds=12, every=every)
        server.run()
        ids = [row["id"] for row in recorder.rows]
        assert ids == sorted(ids)
        assert [row["client"] for row in recorder.rows[:4]] == [0, 1, 2, 3]
        assert {row["time"] for row in recorder.rows} == {0.0}


def test_asynchronous_never_asks_a_client_twice_at_once() -> None:
    runtime = FakeRuntime(5, answer, delay=lambda a: 1.0 + a.client)
    server, recorder = make_server(recipe(scheduling=Asynchronous(cohort=3)), runtime, rounds=20)
    server.run()
    ended = {row["id"]: row["time"] for row in recorder.rows}
    spans = [(row["sent"], ended[row["id"]], row["client"]) for row in recorder.rows]
    for sent, end, client in spans:
        assert not any(s < end and sent < e for s, e, c in spans if c == client and (s, e) != (sent, end))
    for time in sorted(ended.values()):
        assert sum(sent < time <= end for sent, end, _ in spans) <= 3


@pytest.mark.parametrize("scheduling", [Synchronous(cohort=1.0), Asynchronous()], ids=str)
def test_a_lost_task_does_not_hang_the_run(scheduling: Any) -> None:
    lost = {2, 5, 6}
    runtime = FakeRuntime(3, lambda a: None if a.id in lost else answer(a), delay=lambda a: 1.0 + a.client)
    server, recorder = make_server(recipe(scheduling=scheduling), runtime, rounds=16)
    server.run()
    assert {row["id"] for row in recorder.rows if row["status"] == "lost"} == lost
    assert all(row["reason"] == "lost" and row["weight"] == 0 for row in recorder.rows if row["status"] == "lost")
    assert (
        len({row["client"] for row in recorder.rows if row["id"] > 6}) == 3
    )  # clients whose tasks were lost are asked again
    for step in recorder.steps:
        rows = [row for row in recorder.rows if row["version"] == step["version"]]
        assert step["failed"] == sum(row["status"] == "lost" for row in rows)
        assert sum(row["weight"] for row in rows) == pytest.approx(1.0 if step["arrived"] else 0.0)


@pytest.mark.parametrize("scheduling", [Asynchronous(), Buffered(buffer_size=2)], ids=str)
def test_without_rounds_a_failure_makes_no_step(scheduling: Any) -> None:
    """Client 2 fails three times as often as it answers; steps, and the staleness of others, count updates only."""
    runtime = FakeRuntime(
        3, lambda a: None if a.client == 2 and a.id % 4 else answer(a), delay=lambda a: 0.6 + 0.2 * (a.client != 2)
    )
    server, recorder = make_server(recipe(scheduling=scheduling), runtime, rounds=12)
    server.run()
    assert len(recorder.steps) == 12
    assert all(step["arrived"] for step in recorder.steps)
    assert sum(step["failed"] for step in recorder.steps) > 3
    sent = {row["id"]: row["sent_version"] for row in recorder.rows}
    assert all(row["staleness"] == row["version"] - 1 - sent[row["id"]] for row in recorder.rows)


def test_a_stale_update_makes_no_other_update_staler() -> None:
    """Four clients of one speed: of each wave one update is fresh, the others are asked again and none is starved."""
    runtime = FakeRuntime(4, answer, delay=lambda a: 1.0)
    server, recorder = make_server(recipe(scheduling=Asynchronous(max_staleness=2)), runtime, rounds=40)
    server.run()
    assert all(step["arrived"] == 1 for step in recorder.steps)
    assert {row["staleness"] for row in recorder.rows if row["status"] == "ok"} <= {0, 1, 2}


@pytest.mark.parametrize("scheduling", [Asynchronous(), Buffered(buffer_size=2), Buffered(buffer_size=9)], ids=str)
def test_a_run_without_rounds_ends_where_every_task_fails(scheduling: Any) -> None:
    server, recorder = make_server(recipe(scheduling=scheduling), FakeRuntime(3, lambda _: None), rounds=4)
    with pytest.raises(RuntimeFault, match="in 4 rounds no update counted"):
        server.run()
    assert [step["failed"] for step in recorder.steps] == [3, 3, 3, 3]


def test_a_run_of_which_no_update_counted_says_why() -> None:
    runtime = FakeRuntime(3, lambda _: update(math.nan, 1.0, 1.0))
    server, _ = make_server(recipe(), runtime, rounds=1)
    with pytest.raises(
        RuntimeFault,
        match=r"^training failed on 3 of 3 clients in round 1, the first one is client 0: not finite; a lower learning",
    ):
        server.run()


def test_a_round_whose_tasks_are_all_lost_moves_nothing() -> None:
    runtime = FakeRuntime(3, lambda _: None)
    server, recorder = make_server(recipe(server_optimizer=Momentum(beta=0.9)), runtime, rounds=3)
    with pytest.raises(RuntimeFault, match="in 3 rounds no update counted"):
        server.run()
    assert not server.cluster_models.cluster(0).model.any()
    assert [step["arrived"] for step in recorder.steps] == [0, 0, 0]


# ---------------------------------------------------------------------------------------------------------------- check


def crooked(**changes: Any) -> Update:
    sound = update(1.0, 1.0, 1.0)
    return Update(**{"vectors": sound.vectors, "examples": 1, "steps": 1, "metrics": {}, "norm": 1.0} | changes)


BAD: dict[str, tuple[Update, str]] = {
    "too short": (crooked(vectors={"model": torch.ones(2)}), "must send 3 float32 numbers, sent torch.float32 [2]"),
    "too long": (crooked(vectors={"model": torch.ones(4)}), "sent torch.float32 [4]"),
    "a matrix": (crooked(vectors={"model": torch.ones(1, 3)}), "sent torch.float32 [1, 3]"),
    "double": (crooked(vectors={"model": torch.ones(3).double()}), "sent torch.float64 [3]"),
    "nothing": (crooked(vectors={}), "sent nothing"),
    "a vector that is not declared": (
        crooked(vectors={"model": torch.ones(3), "extra": torch.tensor(math.nan)}),
        "sent 'extra', which its trainer does not declare",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("scheduling", [Synchronous(cohort=1.0), Asynchronous()], ids=["synchronous", "asynchronous"])
def test_a_bad_update_is_refused_and_its_client_excluded(case: str, scheduling: Any) -> None:
    bad, reason = BAD[case]
    crooked_client = 1
    runtime = FakeRuntime(3, lambda a: bad if a.client == crooked_client else answer(a), delay=lambda a: 1.0 + a.client)
    server, recorder = make_server(recipe(scheduling=scheduling), runtime, rounds=9)
    server.run()
    refused = [row for row in recorder.rows if row["status"] != "ok"]
    assert [(row["client"], row["status"], row["weight"]) for row in refused] == [(crooked_client, "refused", 0.0)]
    assert reason in refused[0]["reason"]
    assert [a.client for a in runtime.sent].count(crooked_client) == 1
    # as if it had never been there
    alone = FakeRuntime(3, lambda a: None if a.client == crooked_client else answer(a), delay=lambda a: 1.0 + a.client)
    alone.answer, alone.clients = answer, lambda: [0, 2]  # type: ignore[method-assign]
    other, _ = make_server(recipe(scheduling=scheduling), alone, rounds=9)
    other.run()
    torch.testing.assert_close(server.cluster_models.cluster(0).model, other.cluster_models.cluster(0).model)


NOT_FINITE = {
    "not a number": ({"model": torch.tensor([1.0, math.nan, 0.0]), "control": torch.ones(3)}, "not finite"),
    "infinite": ({"model": torch.tensor([1.0, 0.0, -math.inf]), "control": torch.ones(3)}, "not finite"),
    "beside the model": ({"model": torch.ones(3), "control": torch.tensor([0.0, math.inf, 0.0])}, "control is not"),
}


@pytest.mark.parametrize("case", NOT_FINITE)
def test_an_update_that_is_not_finite_is_left_out_of_its_step_and_its_client_is_asked_again(case: str) -> None:
    vectors, reason = NOT_FINITE[case]
    sound = {"model": torch.ones(3), "control": torch.ones(3)}

    def reply(task: Task) -> Update:
        return crooked(vectors=vectors if task.client == 1 and task.version == 0 else sound)

    server, recorder = make_server(recipe(training=Scaffold()), FakeRuntime(4, reply), rounds=3)
    server.run()
    (lost,) = [row for row in recorder.rows if row["status"] != "ok"]
    assert (lost["client"], lost["version"], lost["status"], lost["weight"]) == (1, 1, "lost", 0.0)
    assert lost["reason"].startswith(reason)
    assert [row["version"] for row in recorder.rows if row["client"] == 1] == [1, 2, 3]
    assert server.cluster_models.cluster(0).model.tolist() == pytest.approx([3.0] * 3)


@pytest.mark.parametrize(
    ("variate", "reason"),
    [
        (None, "must send control, sent nothing"),
        (torch.zeros(2), "must send control like the torch.float32 [3] it got, sent torch.float32 [2]"),
        (torch.zeros(3).double(), "sent torch.float64 [3]"),
    ],
)
def test_what_a_trainer_sends_beside_the_model_is_checked_too(variate: Any, reason: str) -> None:
    def reply(task: Task) -> Update:
        good = torch.ones(3)
        sent = variate if task.client == 1 else good
        return update(1.0, 1.0, 1.0, **({} if sent is None else {"control": sent}))

    server, recorder = make_server(recipe(training=Scaffold()), FakeRuntime(3, reply), rounds=2)
    server.run()
    refused = [row for row in recorder.rows if row["status"] == "refused"]
    assert [row["client"] for row in refused] == [1]
    assert reason in refused[0]["reason"]
    # C <- c + |S| / N * mean: twice 2/3 of one
    assert server.cluster_models.cluster(0).server_vectors["control"].tolist() == pytest.approx([4 / 3] * 3)


def test_the_error_when_all_clients_are_excluded() -> None:
    runtime = FakeRuntime(3, lambda _: BAD["too short"][0])
    server, recorder = make_server(recipe(), runtime, rounds=5)
    with pytest.raises(RuntimeFault, match=r"no client is left to ask: all 3 were excluded .* as must send 3 float32"):
        server.run()
    assert len(recorder.rows) == 3
    assert not server.cluster_models.cluster(0).model.any()


def test_the_error_when_no_client_is_available() -> None:
    server, _ = make_server(recipe(), FakeRuntime(0, answer), rounds=5)
    with pytest.raises(RuntimeFault, match="no client can be asked and none is under way"):
        server.run()


@pytest.mark.parametrize("scheduling", [Synchronous(cohort=1.0), Asynchronous()], ids=["synchronous", "asynchronous"])
def test_a_step_that_is_too_long_is_left_out_and_its_client_asked_again(scheduling: Any) -> None:
    """In its first task only: what it sends afterwards counts."""
    leap, leaps = crooked(vectors={"model": torch.full((3,), 1e6)}), list[int]()

    def work(task: Task) -> Update:
        leaps.extend([task.id] if task.client == 1 and not leaps else [])
        return leap if task.id in leaps else answer(task)

    server, recorder = make_server(recipe(scheduling=scheduling), FakeRuntime(3, work, lambda a: 1.0), rounds=9)
    server.run()
    (left_out,) = [row for row in recorder.rows if row["status"] != "ok"]
    reason = "the step is longer than longest_step allows"
    assert (left_out["client"], left_out["status"], left_out["reason"]) == (1, "lost", reason)
    assert any(row["client"] == 1 and row["status"] == "ok" for row in recorder.rows)


def test_the_longest_step_is_that_of_the_model_it_started_from() -> None:
    """The limit comes from the model that the client was sent, however short the model is by now."""
    towards = {0: 40.0, 1: -0.5, 2: -0.5}
    runtime = FakeRuntime(3, lambda a: update(*[towards[a.client]] * 3), lambda a: 5.0 if a.client == 0 else 1.0)
    server, recorder = make_server(recipe(scheduling=Asynchronous()), runtime, rounds=9)
    server.check = ResultChecks(longest_step=10.0)
    server.cluster_models.cluster(0, torch.full((3,), 7.0))
    server.run()
    slow = next(row for row in recorder.rows if row["client"] == 0)
    assert slow["status"] == "ok"
    assert recorder.steps[slow["version"] - 2]["norm"] * 10 < slow["norm"] < 70 * math.sqrt(3)


# ------------------------------------------------------------------------------------------------------------- clusters


def test_clusters_are_like_separate_federations() -> None:
    clustered, recorder = make_server(
        recipe(clustering=ByParity(), server_optimizer=Adam(lr=0.1)), FakeRuntime(6, answer), rounds=4
    )
    clustered.run()
    for parity in (0, 1):

        def own(task: Task, parity: int = parity) -> Update:
            return towards(2 * task.client + parity, task.vectors["model"])

        alone, _ = make_server(recipe(server_optimizer=Adam(lr=0.1)), FakeRuntime(3, own), rounds=4)
        alone.run()
        torch.testing.assert_close(
            clustered.cluster_models.cluster(parity).model, alone.cluster_models.cluster(0).model
        )
    assert [row["cluster"] for row in recorder.rows] == [0, 1, 0, 1, 0, 1] * 4
    assert all(step["clusters"] == 2 for step in recorder.steps)
    for step in recorder.steps:
        weights = [row["weight"] for row in recorder.rows if row["version"] == step["version"]]
        assert sum(weights) == pytest.approx(2.0)


class WatchesMembers(EqualWeighted):
    """Notes who is in the cluster of each step."""

    seen: ClassVar[list[tuple[list[int], list[int]]]] = []

    def prepare(self, cohort: Cohort, context: ServerContext) -> Cohort:
        self.seen.append((list(cohort.clients), list(context.members)))
        return cohort


def test_the_members_of_a_cluster_are_all_its_clients_that_can_be_asked() -> None:
    WatchesMembers.seen.clear()
    refused = FakeRuntime(5, lambda task: update(*[1.0] * (2 if task.client == 4 else 3)))
    make_server(recipe(aggregation=WatchesMembers(), clustering=ByParity()), refused, rounds=2)[0].run()
    assert WatchesMembers.seen == [([0, 2], [0, 2]), ([1, 3], [1, 3])] * 2


def test_clusters_in_the_simulator_too() -> None:
    """Where the default scheduler summed updates before they are clustered, clusters would be mixed."""
    sizes = (5, 6, 7, 8)
    clients = classified(*sizes)
    model = seeded(lambda: nn.Linear(4, 2))
    clustered = recipes.fedavg(batch=9).with_(clustering=ByParity())
    run = simulate(clustered, clients, model, rounds=3)

    class Even(type(clients)):  # type: ignore[misc]
        def __len__(self) -> int:
            return 2

        def indices(self, client: int, split: Any) -> Any:
            return super().indices(2 * client, split)

    even = Even(clients.x, clients.y, clients._parts, classes=clients.classes)
    alone = simulate(recipes.fedavg(batch=9), even, model, rounds=3)
    torch.testing.assert_close(run.model().weight, alone.model().weight)


# ----------------------------------------------------------------------------------------------------------- transforms


class Doubled(Transform):
    """Doubles changes at clients, and halves the average."""

    def on_client(self, vectors: Any, keys: Any, clients: Any) -> Any:
        return {**vectors, "model": vectors["model"] * 2}

    def on_server(self, average: Tensor, context: StepContext) -> Tensor:
        return average / 2


class Shifted(Transform):
    """Adds one at clients, and subtracts one from the average."""

    def on_client(self, vectors: Any, keys: Any, clients: Any) -> Any:
        return {**vectors, "model": vectors["model"] + 1}

    def on_server(self, average: Tensor, context: StepContext) -> Tensor:
        return average - 1


class Sixteen(Transform):
    """Sends two bytes for each number."""

    def nbytes(self, vectors: Any) -> int:
        return 2 * sum(vector.numel() for vector in vectors.values())


@pytest.mark.parametrize("aggregation", [ExampleWeighted(), EqualWeighted()], ids=str)
@pytest.mark.parametrize("scheduling", [Synchronous(cohort=2), Asynchronous(cohort=2)], ids=lambda one: one.kind)
def test_transforms_run_forwards_at_the_client_and_backwards_at_the_server(aggregation: Any, scheduling: Any) -> None:
    """2x + 1 is undone by (x - 1) / 2 and by nothing else; in both orders, so that neither is a special case."""
    clients, model = classified(5, 9, 4), seeded(lambda: nn.Linear(4, 2))
    plain = recipes.fedavg(lr=0.2).with_(scheduling=scheduling, aggregation=aggregation)
    expected = simulate(plain, clients, model, rounds=4)
    for transforms in ((Doubled(), Shifted()), (Shifted(), Doubled()), (Doubled(), Doubled(), Shifted())):
        transformed = simulate(plain.with_(transforms=transforms), clients, model, rounds=4)
        torch.testing.assert_close(transformed.model().weight, expected.model().weight, atol=1e-5, rtol=1e-4)
    backwards = simulate(plain.with_(transforms=(Doubled(),)), clients, model, rounds=4)
    assert backwards.results[0]["norm"] == pytest.approx(2 * expected.results[0]["norm"], rel=1e-4)


def test_the_last_transform_determines_the_bytes_sent() -> None:
    clients, model = classified(5, 9), nn.Linear(4, 2)
    for transforms, each in (((Sixteen(),), 2), ((Doubled(), Sixteen()), 2), ((Sixteen(), Doubled()), 4)):
        run = simulate(recipes.fedavg().with_(transforms=transforms), clients, model, rounds=1)
        assert [row["bytes_up"] for row in run.results] == [10 * each] * 2


# --------------------------------------------------------------------------------------------- measuring, first contact


@pytest.mark.parametrize(("every", "versions"), [(0, []), (1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (9, [0, 5])])
def test_when_models_are_measured(every: int, versions: list[int]) -> None:
    server, recorder = make_server(recipe(), FakeRuntime(3, answer), rounds=5, every=every)
    server.run()
    assert sorted({row["version"] for row in recorder.measured}) == versions
    assert len(recorder.measured) == 3 * len(versions)


def test_private_numbers_go_out_until_the_client_has_answered_once() -> None:
    model = nn.Module()
    model.shared, model.own = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.full((2,), 7.0))
    lost = {1, 3}  # two rounds of two clients: client 0 is lost twice
    runtime = FakeRuntime(2, lambda a: None if a.id in lost else answer(a))
    make_server(recipe(), runtime, model=model, private=["own"], rounds=4)[0].run()
    sent = {client: [a.vectors.get("private") for a in runtime.sent if a.client == client] for client in (0, 1)}
    assert [private is not None for private in sent[0]] == [True, True, True, False]
    assert [private is not None for private in sent[1]] == [True, False, False, False]
    assert sent[0][0].tolist() == [7.0, 7.0]
    assert all(a.vectors["model"].shape == (3,) for a in runtime.sent)


# --------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("lasts", [True, False])
def test_checkpoints_are_made_only_where_they_outlive_the_run(lasts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    server, recorder = make_server(recipe(), FakeRuntime(3, answer), rounds=3)
    monkeypatch.setattr(recorder, "lasts", lasts)
    made, state = [], server.state
    monkeypatch.setattr(server, "state", lambda: made.append(1) or state())
    server.run()
    assert [checkpoint is not None for checkpoint in recorder.checkpoints] == [lasts] * 3
    assert len(made) == 3 * lasts


@pytest.mark.parametrize("version", range(1, 8))
@pytest.mark.parametrize("delays", [[0.0] * 4, [1.0, 1.0, 2.0, 2.0]], ids=["instant", "two by two"])
def test_queued_results_are_in_the_checkpoint(version: int, delays: list[float]) -> None:
    """Training that ends while models are measured is queued; a run cut off then must not lose it."""

    def fresh() -> tuple[Any, Any]:
        runtime = FakeRuntime(4, answer, delay=lambda a: delays[a.client])
        return make_server(recipe(scheduling=Asynchronous(), server_optimizer=Momentum()), runtime, rounds=9, every=1)

    whole, recorder = fresh()
    whole.run()
    checkpoint = recorder.checkpoints[version - 1]
    if version > 1 and not any(delays):
        assert checkpoint.values["queued"]
    again, rest = fresh()
    again.restore(checkpoint)
    again.run()
    ids = [(row["id"], row["client"], row["version"], row["staleness"]) for row in recorder.rows]
    resumed = [(row["id"], row["client"], row["version"], row["staleness"]) for row in rest.rows]
    assert [row[1:] for row in resumed] == [row[1:] for row in ids if row[2] > version]
    assert torch.equal(whole.cluster_models.cluster(0).model, again.cluster_models.cluster(0).model)


def test_what_components_keep_is_in_the_checkpoint() -> None:
    """Tensors and plain values, for each cluster."""
    one, other = (make_server(recipe(), FakeRuntime(2, answer))[0].cluster_models for _ in range(2))
    one.kept["aggregation", 1] = {"weights": torch.arange(3.0), "rounds": 4}
    other.restore(one.state(), 0)
    assert other.kept["aggregation", 1]["rounds"] == 4
    assert torch.equal(other.kept["aggregation", 1]["weights"], torch.arange(3.0))


def test_saving_takes_at_most_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a checkpoint that took two seconds the next one is due when a hundred have gone by."""
    clock = [1000.0]
    monkeypatch.setattr(records.time, "perf_counter", lambda: clock[0])

    def state() -> Checkpoint:
        clock[0] += 2.0
        return Checkpoint({}, {})

    writer = records.StepWriter(MemoryRecorder(), None)
    assert writer.due(1, 0.0)
    writer.write({}, [], [], state)
    assert [writer.due(2, elapsed) for elapsed in (0.0, 99.9, 100.0)] == [False, False, True]
    assert [records.StepWriter(MemoryRecorder(), 3).due(version, 0.0) for version in (1, 2, 3)] == [0, 0, 1]


def test_the_users_model_is_not_touched() -> None:
    model = parameters()
    make_server(recipe(), FakeRuntime(3, answer), model=model)[0].run()
    assert not model.w.any()


@pytest.mark.parametrize("name", ["fedavg", "async_fedavg", "hdafl"])
def test_a_finished_run_releases_its_clients(name: str) -> None:
    """Without waiting for the garbage collector: a comparison would pile up data sets meanwhile."""
    clients = classified(12, 9)
    kept = weakref.ref(clients)
    gc.collect()
    gc.disable()
    try:
        simulate(recipes.make(name), clients, nn.Linear(4, 2)).close()
        del clients
        assert kept() is None
    finally:
        gc.enable()


class Slow(Sgd):
    """Takes a hundred seconds of a clock that only it moves."""

    clock: ClassVar[list[float]] = [0.0]

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        self.clock[0] += 100.0
        return super().train(inputs, context)


def test_the_real_time_of_the_last_round_is_counted_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piebald.server.loop.time.perf_counter", lambda: Slow.clock[0])
    slow = recipes.fedavg(cohort=2).with_(training=Slow(lr=0.1, batch=10))
    where = piebald.Simulator(engine="vmapped", stack=2, workers=0)
    run = piebald.run(slow, uneven_clients(), plain_network, rounds=3, seed=1, runtime=where)
    walls = [row["wall"] for row in run.rounds]
    assert [after - before for before, after in pairwise(walls)] == [100.0, 100.0]


def test_changes_from_models_of_earlier_versions_count_from_the_newest() -> None:
    """Two clients started from one earlier model, a third from another, the last from the newest."""
    newest, earlier, first = (torch.full((3,), value) for value in (1.0, 2.0, 5.0))
    shares = [0.1, 0.2, 0.3, 0.4]
    average = torch.zeros(3)
    _rebase(average, newest, shares, [earlier, first, earlier, newest], slice(0, 2))
    assert average.tolist() == pytest.approx([(0.1 + 0.3) * 1.0 + 0.2 * 4.0] * 2 + [0.0])
