"""Schedulers without rounds, the model cache, validation weighting and adaptive frequency, by plain definitions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import piebald
from piebald import recipes
from piebald.contracts import Device, Task, Update
from piebald.core.errors import SettingError
from piebald.core.tensor_store import TensorStore
from piebald.data.partition import FastSlow, Lists, PooledClients
from piebald.data.partition.devices import Devices
from piebald.methods.aggregation import Dvw, EqualWeighted, ExampleWeighted, StalenessWeighted
from piebald.methods.aggregation.classification_scores import SCORES
from piebald.methods.clustering import SingleCluster
from piebald.methods.queries import Validate
from piebald.methods.recipe import Recipe
from piebald.methods.scheduling import Asynchronous, Buffered, Deadline, Synchronous
from piebald.methods.server_optimizer import CachedAverage, Mixing, ServerSgd
from piebald.methods.sharing import Full
from piebald.methods.training import AdaptiveFrequency, Sgd
from piebald.server.cluster_state import ModelCache
from tests.fakes import SGD, ByParity, FakeRuntime, classified, few, make_server, simulate, update

COMPONENTS: dict[str, Any] = {
    "training": SGD,
    "sharing": Full(),
    "clustering": SingleCluster(),
    "aggregation": EqualWeighted(),
}


def recipe(**components: Any) -> Recipe:
    return Recipe(**COMPONENTS | {"scheduling": Asynchronous(), "server_optimizer": ServerSgd()} | components)


def ones(task: Task) -> Update:
    return update(1.0, 1.0, 1.0)


def steps(recorder: Any) -> list[tuple[float, list[int]]]:
    """The time of each step and the clients whose updates counted in it."""
    rows = [row for row in recorder.rows if row["status"] == "ok"]
    return [
        (step["time"], [row["client"] for row in rows if row["version"] == step["version"]]) for step in recorder.steps
    ]


# ----------------------------------------------------------------------------------------------------------- scheduling


def test_last_models_on_disk_change_nothing() -> None:
    model, ends = nn.Linear(4, 2), []
    for memory in (0, 1 << 30):
        kept = recipes.async_fedavg().with_(server_optimizer=CachedAverage(memory=memory))
        ends.append(simulate(kept, classified(5, 6, 7), model, rounds=9).model().weight)
    assert ends[0].equal(ends[1])


def test_buffered_steps_at_every_k_results() -> None:
    """Delays 1, 2 and 5: results at 1 (0), 2 (0, 1), 3 (0), 4 (0, 1), 5 (0, 2)."""
    runtime = FakeRuntime(3, ones, delay=lambda a: [1.0, 2.0, 5.0][a.client])
    server, recorder = make_server(recipe(scheduling=Buffered(buffer_size=3)), runtime, rounds=3)
    server.run()
    assert [time for time, _ in steps(recorder)] == [2.0, 4.0, 6.0]
    assert sorted(client for _, clients in steps(recorder) for client in clients) == [0] * 5 + [1] * 3 + [2]


def test_a_client_that_trains_twice_on_one_version_draws_other_numbers() -> None:
    runtime = FakeRuntime(2, ones, delay=lambda a: [1.0, 10.0][a.client])
    server, _ = make_server(recipe(scheduling=Buffered(buffer_size=4)), runtime, rounds=2)
    server.run()
    quick = [(a.version, a.attempt, a.rng_version) for a in runtime.sent if a.client == 0]
    assert quick[:5] == [(0, 0, 0), (0, 1, "0.1"), (0, 2, "0.2"), (0, 3, "0.3"), (1, 0, 1)]
    assert len({moment for _, _, moment in quick}) == len(quick)


def test_deadline_keeps_late_updates_with_their_staleness() -> None:
    """Delays 1, 2, 5, a step every 3 seconds: the slow one counts in the second round, which ends when all are in."""
    runtime = FakeRuntime(3, ones, delay=lambda a: [1.0, 2.0, 5.0][a.client])
    server, recorder = make_server(recipe(scheduling=Deadline(seconds=3.0)), runtime, rounds=4)
    server.run()
    assert steps(recorder) == [(3.0, [0, 1]), (5.0, [0, 1, 2]), (8.0, [0, 1]), (10.0, [0, 1, 2])]
    assert [row["staleness"] for row in recorder.rows if row["client"] == 2] == [1, 1]


def test_deadline_waits_for_the_first_result_where_none_is_in_time() -> None:
    runtime = FakeRuntime(2, ones, delay=lambda a: [7.0, 8.0][a.client])
    server, recorder = make_server(recipe(scheduling=Deadline(seconds=3.0)), runtime, rounds=2)
    server.run()
    assert steps(recorder) == [(7.0, [0]), (10.0, [1])]


def test_over_selection_leaves_stragglers_out() -> None:
    """Four are asked for a cohort of three; the slowest is not used, and is asked again only when it is done."""
    runtime = FakeRuntime(4, ones, delay=lambda a: [1.0, 2.0, 3.0, 10.0][a.client])
    server, recorder = make_server(recipe(scheduling=Synchronous(cohort=3, over_selection=4 / 3)), runtime, rounds=4)
    server.run()
    assert steps(recorder) == [(3.0, [0, 1, 2]), (6.0, [0, 1, 2]), (9.0, [0, 1, 2]), (12.0, [0, 1, 2])]
    late = [row for row in recorder.rows if row["status"] == "late"]
    assert [(row["client"], row["time"], row["weight"]) for row in late] == [(3, 10.0, 0.0)]
    assert sum(a.client == 3 for a in runtime.sent) == 1


@pytest.mark.parametrize(
    "scheduling",
    [Asynchronous(max_staleness=2), Buffered(buffer_size=1, max_staleness=2)],
    ids=lambda one: one.kind,
)
def test_updates_that_are_too_old_are_not_used(scheduling: Any) -> None:
    runtime = FakeRuntime(2, ones, delay=lambda a: [1.0, 4.5][a.client])
    server, recorder = make_server(recipe(scheduling=scheduling), runtime, rounds=8)
    server.run()
    slow = [row for row in recorder.rows if row["client"] == 1]
    assert slow
    assert all(row["status"] == "late" and "above the limit of 2" in row["reason"] for row in slow)
    assert all(row["reason"].startswith(f"missed {row['staleness']} server steps") for row in slow)
    assert all(row["staleness"] <= 2 for row in recorder.rows if row["status"] == "ok")


def test_clients_that_leave_return_and_join_late() -> None:
    """Client 1 is there from 0 to 2.5 and from 10; client 2 joins at 5.  The run goes on, one task is lost."""
    clients = classified_federation()
    run = piebald.run(
        recipes.async_fedavg(lr=0.1),
        clients,
        nn.Linear(3, 2),
        rounds=40,
        evaluate_every=0,
        runtime=piebald.Simulator(engine="sequential", workers=0, fleet=ComingAndGoing()),
    )
    rows = [row for row in run.results if row["client"] == 1]
    gone = [row for row in rows if row["status"] == "lost"]
    assert [(row["time"], row["reason"]) for row in gone] == [(2.5, "the client went away before it was done")]
    assert all(row["sent"] < 2.5 or row["sent"] >= 10 for row in rows)
    assert any(row["sent"] >= 10 and row["status"] == "ok" for row in rows)
    assert min(row["sent"] for row in run.results if row["client"] == 2) >= 5


class ComingAndGoing(Devices):
    """One client is always there, one leaves and returns, one joins late."""

    def device(self, client: int) -> Device:
        on = [None, ((0.0, 2.5), (10.0, 1e9)), ((5.0, 1e9),)][client]
        return Device(seconds_per_step=1.0, on=on)

    def available(self, clients: int, now: float) -> list[int]:
        return [c for c in range(clients) if there_at(self.device(c).on, now)]


def there_at(on: Any, now: float) -> bool:
    return on is None or any(start <= now < stop for start, stop in on)


def classified_federation(
    sizes: tuple[int, ...] = (20, 20, 20), validation: int = 5, classes: int = 2
) -> PooledClients:
    """Clients with training, validation and test rows of classes that a linear model can separate."""
    draw = np.random.default_rng(3)
    whole = sum(sizes) + len(sizes) * (validation + 5)
    y = draw.integers(0, classes, whole)
    x = draw.normal(size=(whole, 3)).astype(np.float32)
    x[:, 0] += 2 * y
    lists, start = {}, 0
    for split, counts in (("train", sizes), ("validation", [validation] * len(sizes)), ("test", [5] * len(sizes))):
        lists[split] = Lists(np.arange(start, start + sum(counts)), np.cumsum([0, *counts]))
        start += sum(counts)
    return PooledClients(torch.from_numpy(x), torch.from_numpy(y), lists, classes=list("abcdef"[:classes]))


# --------------------------------------------------------------------------------------------------------- aggregation


def test_staleness_functions_are_those_of_the_paper() -> None:
    """Xie et al. 2019, section 5.2."""
    polynomial, hinge = StalenessWeighted(a=0.5), StalenessWeighted(function="hinge", a=10, b=4)
    assert [polynomial.damping(t) for t in (0, 3, 8)] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert [hinge.damping(t) for t in (0, 4, 5, 6)] == [1.0, 1.0, pytest.approx(1 / 11), pytest.approx(1 / 21)]
    assert StalenessWeighted(function="constant").damping(99) == 1.0


def test_fedasync_mixes_models() -> None:
    """w <- (1 - alpha s) w + alpha s w_k, with w_k where the client came to from the model it was sent."""
    runtime = FakeRuntime(2, lambda a: update(*[1.0 + a.client] * 3), delay=lambda a: [1.0, 2.5][a.client])
    server, recorder = make_server(
        recipe(server_optimizer=Mixing(alpha=0.5), aggregation=StalenessWeighted(a=1.0)), runtime, rounds=6
    )
    server.run()
    models, sent = [0.0], {a.id: a.version for a in runtime.sent}
    for row in recorder.rows:
        local = models[sent[row["id"]]] + 1.0 + row["client"]
        alpha = 0.5 / (row["staleness"] + 1)
        models.append((1 - alpha) * models[-1] + alpha * local)
    assert server.cluster_models.cluster(0).model.tolist() == pytest.approx([models[-1]] * 3)


def test_a_stale_update_moves_the_global_model_less() -> None:
    runtime = FakeRuntime(2, ones, delay=lambda a: [1.0, 2.5][a.client])
    server, recorder = make_server(recipe(aggregation=StalenessWeighted(a=1.0)), runtime, rounds=5)
    server.run()
    assert [row["weight"] for row in recorder.rows] == [
        pytest.approx(1 / (row["staleness"] + 1)) for row in recorder.rows
    ]
    assert server.cluster_models.cluster(0).model.tolist() == pytest.approx(
        [sum(r["weight"] for r in recorder.rows)] * 3
    )


@few
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.floats(0, 100) | st.none(), st.floats(-8, 8, width=32)), min_size=1, max_size=60
    ),
    st.integers(1, 300_000),
)
def test_the_cache_is_the_mean_of_last_models(swaps: list[tuple[int, float | None, float]], size: int) -> None:
    """Of the clients that are there: those without a weight leave."""
    cache, last, out = ModelCache(size, TensorStore()), dict[int, tuple[float, float]](), torch.full((size,), 7.0)
    for client, weight, value in swaps:
        if weight is None:
            cache.drop(client, out)
            last.pop(client, None)
        else:
            cache.swap(client, weight, torch.full((size,), value), out)
            last[client] = weight, value
    whole = math.fsum(weight for weight, _ in last.values())
    if whole > 1e-9:
        mean = math.fsum(weight * value for weight, value in last.values()) / whole
        assert out[[0, size // 2, -1]].tolist() == pytest.approx([mean] * 3, rel=1e-5, abs=1e-5)


def test_the_cache_does_not_drift() -> None:
    """20,000 swaps of weights that differ by a factor of a million, against one sum over the last models."""
    draw = np.random.default_rng(0)
    cache, out, models, weights = ModelCache(50, TensorStore()), torch.empty(50), {}, {}
    for _ in range(20_000):
        client, weight = int(draw.integers(20)), float(10 ** draw.uniform(-3, 3))
        models[client] = torch.from_numpy(draw.normal(size=50).astype(np.float32))
        weights[client] = weight
        cache.swap(client, weight, models[client], out)
    whole = sum(weights.values())
    mean = sum(weights[client] * models[client].double() for client in models) / whole
    assert float((cache.sums / cache.whole - mean).norm() / mean.norm()) < 1e-9


def test_a_client_that_changes_its_cluster_takes_its_model_along() -> None:
    """Clusters by parity, after one cluster of all: the cache of a cluster forgets clients that left it."""

    def answer(task: Task) -> Update:
        return update(*(task.client - task.vectors["model"]).tolist())

    runtime = FakeRuntime(3, answer, delay=lambda a: 1.0 + a.client / 10)
    server, _ = make_server(recipe(server_optimizer=CachedAverage(), clustering=ByParity()), runtime, rounds=9)
    server.run()
    clusters = server.cluster_models.clusters
    assert clusters[0].model.tolist() == pytest.approx([1.0] * 3)  # of clients 0 and 2
    assert clusters[1].model.tolist() == pytest.approx([1.0] * 3)
    assert {number: sorted(one.cache.weights) for number, one in clusters.items() if one.cache} == {
        0: [0, 2],
        1: [1],
    }


@pytest.mark.parametrize(
    ("components", "words"),
    [
        ({"transforms": [{"kind": "gaussian", "clip": 1.0, "where": "server"}]}, "gaussian acts on averages"),
        ({"aggregation": {"kind": "first_update"}}, "first_update weighs updates together"),
    ],
)
def test_what_a_cache_cannot_be_combined_with(components: Mapping[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        recipes.async_fedavg().with_(**components)


# ------------------------------------------------------------------------------------------------------------------ dvw


@few
@given(st.lists(st.lists(st.integers(0, 30), min_size=3, max_size=3), min_size=3, max_size=3))
def test_scores_are_those_of_scikit_learn(rows: list[list[int]]) -> None:
    from sklearn import metrics

    matrix = torch.tensor(rows, dtype=torch.float32)
    true = [i for i in range(3) for j in range(3) for _ in range(rows[i][j])]
    predicted = [j for i in range(3) for j in range(3) for _ in range(rows[i][j])]
    found = {name: score(matrix) for name, score in SCORES.items()}
    if len({*true, *predicted}) < 2:  # no row or one class only: scikit-learn does not define all scores
        assert found["accuracy"] == float(bool(true))
        return
    assert found["accuracy"] == found["micro_f1"] == pytest.approx(metrics.accuracy_score(true, predicted))
    assert found["macro_f1"] == pytest.approx(
        metrics.f1_score(true, predicted, average="macro", zero_division=0), abs=1e-6
    )
    assert found["matthews"] == pytest.approx(metrics.matthews_corrcoef(true, predicted), abs=1e-6)
    recalls = [rows[i][i] / sum(rows[i]) for i in range(3) if sum(rows[i])]
    assert found["geometric_mean"] == pytest.approx(math.prod(recalls) ** (1 / len(recalls)), abs=1e-6)


def test_weights_are_scores_on_all_clients_validation_rows() -> None:
    """Scores from one batched pass equal those of N evaluators one by one, recomputed with plain torch."""
    clients = classified_federation((30, 12, 7), classes=3)
    done = piebald.run(
        recipes.sync_dvw(lr=0.2), clients, nn.Linear(3, 3), rounds=1, evaluate_every=0,
        runtime=piebald.Simulator(engine="sequential", workers=0),
    )  # fmt: skip
    trained = [row for row in done.results if row["kind"] == "train"]
    answers = [row for row in done.results if row["kind"] == "validate"]
    assert len(answers) == 6  # three models, each at the other two clients
    assert all(row["client"] != sender for sender, row in zip([0, 0, 1, 1, 2, 2], answers, strict=True))
    assert [row["raw_weight"] for row in trained] == [pytest.approx(score) for score in separate_scores(clients, done)]
    shares = np.array([row["raw_weight"] for row in trained])
    assert [row["weight"] for row in trained] == pytest.approx((shares / shares.sum()).tolist())


@pytest.mark.parametrize("waits", [True, False], ids=["sync_dvw", "async_dvw"])
def test_every_commit_of_dvw_is_that_of_a_program_of_its_own(waits: bool) -> None:
    """Eqs. 4 to 6 in NumPy: gradient descent by hand, micro F1 on all validation rows, the mean of last models."""
    clients, name = classified_federation((30, 12, 7), classes=3), "sync_dvw" if waits else "async_dvw"
    start = nn.Linear(3, 3)
    rounds, lr = (3, 0.4) if waits else (8, 0.4)

    def committed(version: int) -> Any:
        return piebald.run(
            piebald.recipes.make(name, lr=lr, epochs=2, batch=30), clients, start, rounds=version,
            evaluate_every=0, runtime=piebald.Simulator(engine="sequential", workers=0, fleet=FastSlow(slow_factor=3)),
        )  # fmt: skip

    def rows_of(client: int, split: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        rows = clients.rows(client, split)
        return np.c_[rows.x.double().numpy(), np.ones(len(rows.y))], rows.y.numpy()

    def trained(w: np.ndarray[Any, Any], client: int) -> np.ndarray[Any, Any]:
        x, y = rows_of(client, "train")
        for _ in range(2):
            shares = np.exp(x @ w.T)
            w = w - lr * (shares / shares.sum(1, keepdims=True) - np.eye(3)[y]).T @ x / len(y)
        return w

    def micro_f1(w: np.ndarray[Any, Any]) -> float:
        held = [rows_of(client, "validation") for client in range(3)]
        return float(np.mean(np.concatenate([(x @ w.T).argmax(1) == y for x, y in held])))

    whole = committed(rounds)
    done = [row for row in whole.results if row["kind"] == "train" and row["status"] == "ok"]
    models = [np.c_[start.weight.detach().double().numpy(), start.bias.detach().double().numpy()]]
    last: dict[int, tuple[float, np.ndarray[Any, Any]]] = {}
    for version in range(1, rounds + 1):
        for row in (row for row in done if row["version"] == version):
            model = trained(models[row["sent_version"]], row["client"])
            last[row["client"]] = micro_f1(model), model
            assert row["raw_weight"] == pytest.approx(last[row["client"]][0], abs=1e-6)
        models.append(sum(score * model for score, model in last.values()) / sum(score for score, _ in last.values()))
        module = (whole if version == rounds else committed(version)).model()
        found = np.c_[module.weight.detach().numpy(), module.bias.detach().numpy()]
        np.testing.assert_allclose(found, models[-1], rtol=0, atol=2e-6)
    assert len(last) > 1
    assert waits or {row["staleness"] for row in done} > {0}


def separate_scores(clients: PooledClients, done: Any) -> list[float]:
    """Each client's model, trained alone from the same start, scored evaluator by evaluator."""
    scores = []
    for client in range(3):
        module = trained_alone(clients, done, client)
        hits = rows = 0
        for evaluator in range(3):
            own = clients.rows(evaluator, "validation")
            hits += int((module(own.x).argmax(1) == own.y).sum())
            rows += len(own)
        scores.append(hits / rows)
    return scores


def trained_alone(clients: PooledClients, done: Any, client: int) -> nn.Module:
    """One client's trained model, from a run in which only its update counts."""

    class Only(EqualWeighted):
        """The update of the client with so many rows counts, and no other."""

        def weight(self, update: Update, staleness: int = 0) -> float:
            return float(update.examples == clients.size(client, "train"))

    run = piebald.run(
        recipes.fedavg(lr=0.2).with_(aggregation=Only()), clients, done.work.model, rounds=1, evaluate_every=0,
        runtime=piebald.Simulator(engine="sequential", workers=0),
    )  # fmt: skip
    return run.model()


def test_the_exchange_is_counted_as_in_the_paper() -> None:
    """Metis, figure 9: an update costs one model up, nine to the evaluators and the new one down, so eleven in all.

    Before, a model also went back to its own sender: twelve.  The matrices of counts are small.
    """
    clients = classified_federation((12,) * 10)
    model = nn.Linear(3, 2)
    run = piebald.run(
        recipes.async_dvw(lr=0.2), clients, model, rounds=5, evaluate_every=0,
        runtime=piebald.Simulator(engine="sequential", workers=0, fleet=FastSlow()),
    )  # fmt: skip
    size = 4 * sum(p.numel() for p in model.parameters())
    assert sum(row["bytes_down"] for row in run.results) == 5 * 10 * size
    assert sum(row["bytes_up"] for row in run.results) == 5 * size + 5 * 10 * 4 * 4
    senders = {row["version"]: row["client"] for row in run.results if row["kind"] == "train"}
    asked = [(row["version"], row["client"]) for row in run.results if row["kind"] == "validate"]
    assert len(asked) == 5 * 9
    assert all(client != senders[version] for version, client in asked)


@pytest.mark.parametrize("simulator", [{"engine": "vmapped", "stack": 3}, {"engine": "batched", "stack": 3}], ids=str)
def test_own_answers_are_the_same_on_every_engine(simulator: dict[str, Any]) -> None:
    """The matrix that comes with an update is that of the model that was sent, on whatever engine it was trained."""
    clients, model, weights = classified_federation((30, 12, 7), classes=3), nn.Linear(3, 3), []
    for where in ({"engine": "sequential"}, simulator):
        done = piebald.run(
            recipes.sync_dvw(lr=0.2), clients, model, rounds=1, evaluate_every=0,
            runtime=piebald.Simulator(workers=0, **where),
        )  # fmt: skip
        weights.append([row["raw_weight"] for row in done.results if row["kind"] == "train"])
        assert weights[-1] == [pytest.approx(score) for score in separate_scores(clients, done)]
    assert weights[0] == weights[1]


def test_where_transforms_change_updates_the_model_that_arrived_is_judged() -> None:
    """Then it differs from what its client trained, so its client is asked like the others."""
    clients = classified_federation((30, 12, 7), classes=3)
    noisy = recipes.sync_dvw(lr=0.2).with_(transforms=[{"kind": "sign_flip", "clients": [0]}])
    run = piebald.run(
        noisy, clients, nn.Linear(3, 3), rounds=1, evaluate_every=0,
        runtime=piebald.Simulator(engine="sequential", workers=0),
    )  # fmt: skip
    assert sum(row["kind"] == "validate" for row in run.results) == 9


# of another length, it is refused with the update, as everything is that was not declared
@pytest.mark.parametrize("bad", [[3e38] * 4, [1.0, -1.0, 1.0, 1.0], [0.5, 0.5, 1.0, 1.0]], ids=str)
def test_an_own_answer_that_cannot_be_used_is_asked_for(bad: list[float]) -> None:
    """It is as if it had not come: its client is asked about its model like the others."""

    def answer(task: Task) -> Update | None:
        if task.query is None:
            return update(1.0, 1.0, 1.0, confusion=torch.tensor(bad))
        return Update({"confusion": torch.tensor([2.0, 1.0, 0.0, 1.0])}, 4, 0, {})

    runtime = FakeRuntime(3, answer, delay=lambda a: 1.0 + a.client)
    server, recorder = make_server(recipe(aggregation=Dvw(), server_optimizer=CachedAverage()), runtime, rounds=3)
    object.__setattr__(server.work, "outputs", (2,))
    server._intake._uploads = ("confusion",)
    server.run()
    counted = [row for row in recorder.rows if row["kind"] == "train" and row["status"] == "ok"]
    assert all(row["raw_weight"] == pytest.approx(0.75) for row in counted)
    asked = [row for row in recorder.rows if row["kind"] == "validate"]
    assert len(asked) == 3 * len(counted)


def test_validation_takes_time_beside_training() -> None:
    """A model is validated by a slow device: the step waits for the answer, and the device's training goes on."""
    clients = classified_federation((20, 20), validation=6)
    fleet = FastSlow(fast=1.0, slow_factor=60.0, share_slow=0.5, first="fast")
    run = piebald.run(
        recipes.async_dvw(lr=0.2, batch=20), clients, nn.Linear(3, 2), rounds=3, evaluate_every=0,
        runtime=piebald.Simulator(engine="sequential", workers=0, fleet=fleet),
    )  # fmt: skip
    # a step takes 1 and 60 seconds, the slow one's 6 rows 6 seconds: server steps at 1 + 6, 1 + 6 later, ...
    assert [row["time"] for row in run.rounds] == pytest.approx([7.0, 14.0, 21.0])


BAD_ANSWERS = {
    "no answer": None,
    "a wrong shape": (torch.ones(9), 9),
    "negative counts": (torch.tensor([5.0, -1.0, 0.0, 1.0]), 5),
    "halves": (torch.tensor([0.5, 0.5, 0.0, 0.0]), 1),
    "not a number": (torch.tensor([math.nan, 1.0, 1.0, 1.0]), 4),
    "another number of rows": (torch.tensor([1.0, 1.0, 1.0, 1.0]), 7),
}


@pytest.mark.parametrize("case", BAD_ANSWERS)
def test_an_evaluator_without_a_usable_answer_is_left_out_and_recorded(case: str) -> None:
    """Evaluators 0 and 1 count 3 of 4 right; evaluator 2 sends no usable answer."""

    def answer(task: Task) -> Update | None:
        if task.query is None:
            return update(1.0, 1.0, 1.0)
        sent = (torch.tensor([2.0, 1.0, 0.0, 1.0]), 4) if task.client < 2 else BAD_ANSWERS[case]
        return None if sent is None else Update({"confusion": sent[0]}, sent[1], 0, {})

    runtime = FakeRuntime(3, answer, delay=lambda a: 1.0 + a.client)
    server, recorder = make_server(recipe(aggregation=Dvw(), server_optimizer=CachedAverage()), runtime, rounds=3)
    object.__setattr__(server.work, "outputs", (2,))
    server.run()
    answers = [row for row in recorder.rows if row["kind"] == "validate"]
    assert {(row["client"], row["status"]) for row in answers} == {
        (0, "ok"), (1, "ok"), (2, "lost" if BAD_ANSWERS[case] is None else "refused")
    }  # fmt: skip
    assert all(row["raw_weight"] == pytest.approx(0.75) for row in recorder.rows if row["kind"] == "train")
    assert sum(step["failed"] for step in recorder.steps) == 3  # one evaluator a step


def test_a_subset_of_evaluators_is_a_seeded_choice() -> None:
    clients = classified_federation((12,) * 8)
    run = piebald.run(
        recipes.sync_dvw(lr=0.2, evaluators=3), clients, nn.Linear(3, 2), rounds=4, evaluate_every=0, seed=2,
        runtime=piebald.Simulator(engine="sequential", workers=0),
    )  # fmt: skip
    asked = [
        {row["client"] for row in run.results if row["kind"] == "validate" and row["version"] == version}
        for version in range(1, 5)
    ]
    assert all(len(clients) == 3 for clients in asked)
    assert len({tuple(sorted(clients)) for clients in asked}) > 1


def test_above_chance_and_power_sharpen() -> None:
    plain, sharp = Dvw(), Dvw(above_chance=True, power=2.0)
    assert plain._sharpened(0.75, 4) == 0.75
    assert sharp._sharpened(0.75, 4) == pytest.approx(0.25)
    assert sharp._sharpened(0.2, 4) == 0.0


def test_weights_of_regression_are_inverse_errors() -> None:
    assert Validate(classes=0).reject_reason(Update({}, 3, 0, {}), None) == "sent no loss"  # type: ignore[arg-type]
    answers = [Update({}, 4, 0, {"loss": 0.5}), Update({}, 12, 0, {"loss": 0.1})]
    assert Dvw()._scored(answers, 0) == pytest.approx(1 / 0.2)
    assert Dvw()._scored([], 0) == 0.0


def test_without_validation_rows_the_run_is_refused() -> None:
    clients = classified_federation(validation=0)
    for made in (recipes.sync_dvw(), recipes.adaptive_dvw().with_(aggregation=ExampleWeighted())):
        with pytest.raises(SettingError, match=r"set validation = 0\.05 in "):
            piebald.run(made, clients, nn.Linear(3, 2), rounds=1)


# ------------------------------------------------------------------------------------------------- staleness in steps


def test_staleness_in_a_grouped_run_counts_the_clusters_own_steps() -> None:
    """Clusters by parity: client 1 is alone in its cluster, so its updates miss nothing, however slow it is.

    Before, the steps of the other cluster made them 15 and more steps stale, and FedAsync damped them to a quarter.
    """
    runtime = FakeRuntime(3, ones, delay=lambda a: [1.0, 10.0, 1.5][a.client])
    server, recorder = make_server(
        recipe(aggregation=StalenessWeighted(a=0.5), clustering=ByParity()), runtime, rounds=60
    )
    server.run()
    slow = [row for row in recorder.rows if row["client"] == 1]
    assert len(slow) > 2
    assert [(row["staleness"], row["weight"]) for row in slow] == [(0, 1.0)] * len(slow)
    made = {0: 0, 1: 0, 2: 0}  # steps of the cluster of the even when each of them was sent its model
    steps = 0
    for row in recorder.rows:
        if row["client"] == 1:
            continue
        assert row["staleness"] == steps - made[row["client"]]
        steps += 1
        made[row["client"]] = steps


def test_a_limit_on_staleness_counts_the_clusters_own_steps_too() -> None:
    """Client 1 is quick once, so that it is in its cluster, and slow from then on."""
    runtime = FakeRuntime(3, ones, delay=lambda a: [1.0, 10.0 if a.version else 0.5, 1.5][a.client])
    server, recorder = make_server(
        recipe(scheduling=Asynchronous(max_staleness=3), clustering=ByParity()), runtime, rounds=60
    )
    server.run()
    slow = [(row["status"], row["staleness"]) for row in recorder.rows if row["client"] == 1]
    assert slow == [("ok", 0)] * len(slow)
    assert len(slow) > 2


def test_a_resumed_grouped_run_knows_the_steps_of_its_clusters() -> None:
    def made() -> Any:
        runtime = FakeRuntime(3, ones, delay=lambda a: [1.0, 10.0, 1.5][a.client])
        return make_server(recipe(aggregation=StalenessWeighted(), clustering=ByParity()), runtime, rounds=60)

    whole, recorder = made()
    whole.run()
    part, first = made()
    part.rounds = 17
    part.run()
    again, second = made()
    again.restore(part.state())
    again.run()
    rows = [(row["client"], row["staleness"], row["weight"]) for row in first.rows + second.rows]
    assert rows == [(row["client"], row["staleness"], row["weight"]) for row in recorder.rows]


def test_tasks_say_how_many_optimizer_steps_are_behind_a_model() -> None:
    runtime = FakeRuntime(
        2, lambda a: Update(update(1.0, 1.0, 1.0).vectors, 100, 5, {}, 1.0), delay=lambda a: 1.0 + a.client
    )
    server, recorder = make_server(recipe(), runtime, rounds=6)
    server.run()
    steps = {row["id"]: row["version"] for row in recorder.rows}
    for task in runtime.sent:
        assert task.committed == 5 * sum(version <= task.version for version in steps.values())


# ----------------------------------------------------------------------------------------------------------------- stop


@pytest.mark.parametrize(
    ("stop", "versions"),
    # three clients a round, of one second each and 32 bytes each way
    [({"updates": 7}, 3), ({"seconds": 2.5}, 3), ({"bytes": 2 * 3 * 2 * 32}, 2)],
    ids=str,
)
def test_a_run_ends_at_the_first_limit(stop: dict[str, float], versions: int) -> None:
    run = piebald.run(
        recipes.fedavg(lr=0.1, batch=20),
        classified_federation(),
        nn.Linear(3, 2),
        stop=stop,
        runtime=piebald.Simulator(engine="sequential", workers=0, fleet=FastSlow(fast=1.0, share_slow=0.0)),
    )
    assert run.rounds[-1]["version"] == versions
    assert {row["version"] for row in run.scores} == set(range(versions + 1))


def test_target_and_patience_go_by_scores(tmp_path: Any) -> None:
    options: dict[str, Any] = {
        "runtime": piebald.Simulator(engine="sequential", workers=0), "checkpoint_every": 7,
        "evaluate_split": "validation",  # so that the curve is of the scores that end the run
    }  # fmt: skip
    clients, model = classified_federation(), nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([1.0, 0.0]))  # it begins with one class for all, and a tiny step changes nothing
    run = piebald.run(
        recipes.fedavg(lr=0.5), clients, model, rounds=60, stop={"target": 0.7}, out=tmp_path / "a", **options
    )
    assert [point["mean"] >= 0.7 for point in run.curve] == [False] * (len(run.curve) - 1) + [True]
    assert run.rounds[-1]["version"] < 60
    again = piebald.resume(tmp_path / "a", clients, model)
    assert again.rounds[-1]["version"] == run.rounds[-1]["version"]
    still = piebald.run(recipes.fedavg(lr=1e-9), clients, model, rounds=9, stop={"patience": 3}, **options)
    assert still.rounds[-1]["version"] == 3  # the first measurement is before the first round


@pytest.mark.parametrize("stop", [{"target": 0.7}, {"patience": 3}])
def test_a_limit_on_scores_needs_evaluations(stop: Any) -> None:
    with pytest.raises(SettingError, match="stop uses scores but evaluate_every is 0"):
        piebald.run(recipes.fedavg(), classified_federation(), nn.Linear(3, 2), rounds=1, stop=stop, evaluate_every=0)


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ({}, "must set at least one limit"),
        ({"second": 3}, "did you mean 'seconds'"),
        ({"updates": 0}, "updates"),
        (7, "stop must be a table or a StoppingCriteria"),
    ],
)
def test_bad_limits_are_refused(stop: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        piebald.run(recipes.fedavg(), classified_federation(), nn.Linear(3, 2), stop=stop)


def test_trainers_know_their_least_number_of_steps() -> None:
    assert Sgd(batch=10, epochs=2).min_steps(35) == 8
    assert Sgd(batch=10, batches="exact").min_steps(31) == 3  # where a lone row joins its batch
    assert Sgd(batch=10, steps=4).min_steps(35) == 4
    assert Sgd(batch=10).min_steps(0) == 0
    assert AdaptiveFrequency(batch=10, epochs=2, cycles=9).min_steps(35) == 8
