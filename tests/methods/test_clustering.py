"""Clusterings: which clients are aggregated together, in whole runs."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score
from torch import Tensor, nn

from piebald import data, recipes
from piebald.contracts import Update
from piebald.core.errors import SettingError
from piebald.data.partition import FlipPairs, Iid, Lists, PooledClients
from piebald.engines.row_statistics import input_moments
from piebald.methods.aggregation.linear import EqualWeighted
from piebald.methods.clustering import Cfl, Distfl, Ifca
from piebald.methods.clustering.normal_cluster import ballot
from piebald.models import build_model
from piebald.testing.components import uneven_clients
from tests.fakes import classified, seeded, simulate

TRUTH = np.repeat([0, 1, 2], [4, 4, 4])
CLASSES = ((0, 1, 2), (3, 4, 5), (6, 7, 8))


def planted(each: int = 30, server_rows: int = 0) -> PooledClients:
    """Twelve clients with digits, in three clusters that have no class in common."""
    source, draw = data.digits(), np.random.default_rng(0)
    y = source.y.numpy()
    stock = {c: list(draw.permutation(np.flatnonzero(y == c))) for c in range(10)}
    train = [[stock[CLASSES[g][i % 3]].pop() for i in range(each)] for g in TRUTH]
    test = [[stock[CLASSES[g][i % 3]].pop() for i in range(9)] for g in TRUTH]
    lists = {
        name: Lists(np.concatenate(p), np.cumsum([0, *map(len, p)])) for name, p in (("train", train), ("test", test))
    }
    kept = np.array([stock[i % 10].pop() for i in range(server_rows)], dtype=np.int64)
    return PooledClients(source.x, source.y, lists, classes=source.classes, server_rows=kept if server_rows else None)


def network(seed: int = 0) -> nn.Module:
    return build_model("cnn_bn", (1, 8, 8), 10, seed=seed, channels=(8, 8))


def clusters_at(run: Any, version: int) -> list[int]:
    """The cluster of each client at a version, by the run's results."""
    rows = [row for row in run.results if row["version"] == version and row["cluster"] is not None]
    return [row["cluster"] for row in sorted(rows, key=lambda row: row["client"])]


def trained(recipe: Any, clients: Any, model: Any = network, rounds: int = 4, **options: Any) -> Any:
    return simulate(recipe, clients, model, rounds=rounds, **options)


TRAINING: dict[str, Any] = {"lr": 0.1, "epochs": 3, "batch": 10}


@pytest.mark.full
def test_distfl_finds_planted_clusters_and_keeps_their_numbers() -> None:
    run = trained(recipes.distfl(probes=60, **TRAINING), planted())
    for version in (2, 3, 4):
        assert adjusted_rand_score(TRUTH, clusters_at(run, version)) == 1.0
    assert clusters_at(run, 2) == clusters_at(run, 3) == clusters_at(run, 4)
    last = {row["client"]: row["value"] for row in run.scores if row["version"] == 4 and row["metric"] == "accuracy"}
    shared = {
        row["client"]: row["value"]
        for row in trained(recipes.fedavg(**TRAINING), planted()).scores
        if row["version"] == 4 and row["metric"] == "accuracy"
    }
    own = [last[client] for client in range(12)]
    assert np.mean(own) > np.mean([shared[client] for client in range(12)]) + 0.1
    names = {row["name"] for row in run.notes}
    assert {"divergence", "clusters", "clustering"} <= names


@pytest.mark.full
def test_a_cluster_model_is_the_mean_of_its_members_models() -> None:
    """Eq. 7, also in the round in which a client changes its cluster: models are averaged, not changes."""
    recipe = recipes.distfl(probes=40, **TRAINING).with_(clustering=Distfl(clusters=3, probes=40))
    one, two = (trained(recipe, planted(), rounds=rounds) for rounds in (1, 2))
    layout = one.work.layout
    first = {client: layout.flatten(one.model(client)) for client in range(12)}
    for cluster in set(clusters_at(one, 1)):
        members = [client for client, own in enumerate(clusters_at(one, 1)) if own == cluster]
        assert all(torch.equal(first[members[0]], first[member]) for member in members)
    assert len({tuple(vector[:5].tolist()) for vector in first.values()}) == 3
    assert clusters_at(two, 2) != [0] * 12


def test_members_of_a_cluster_count_the_same_whatever_their_rows() -> None:
    """Eq. 7 divides by the number of models; McMahan's weights by rows are a setting."""
    clients = uneven_clients()
    last: dict[str, Tensor] = {}
    for label, recipe in (
        ("one cluster", recipes.distfl(**TRAINING).with_(clustering=Distfl(clusters=1, probes=4, steps=1))),
        ("equal", recipes.fedavg(**TRAINING).with_(aggregation="equal_weighted")),
        ("by rows", recipes.fedavg(**TRAINING)),
    ):
        run = trained(recipe, clients, lambda seed: build_model("mlp_bn", (6,), 4, seed=seed), rounds=1)
        last[label] = run.work.layout.flatten(run.model(0))
    torch.testing.assert_close(last["one cluster"], last["equal"], rtol=0, atol=1e-6)
    assert (last["one cluster"] - last["by rows"]).abs().max() > 1e-3


@pytest.mark.full
def test_iid_clients_stay_together() -> None:
    run = trained(recipes.distfl(probes=60, **TRAINING), Iid(clients=12).split(data.digits()))
    assert set(clusters_at(run, 4)) == {0}


@pytest.mark.full
@pytest.mark.parametrize("attackers", [3, 9])
def test_attackers_are_separated_and_server_rows_tell_which_cluster_is_normal(attackers: int) -> None:
    """Also where they are three in four; cluster 0, whose model stands for the run, is the honest one."""
    pairs = ((0, 4), (1, 5), (2, 6), (3, 7))
    changes = (FlipPairs(pairs=pairs, clients=tuple(range(attackers))),)
    clients = Iid(clients=12, server_rows=60, changes=changes).split(data.digits())
    recipe = recipes.distfl(probes=60, normal="server_rows", **TRAINING)
    run = trained(recipe, clients, rounds=6)
    truth = [0 if client >= attackers else 1 for client in range(12)]
    assert adjusted_rand_score(truth, clusters_at(run, 6)) == 1.0
    common = [row["value"] for row in run.scores if row["split"] == "common" and row["metric"] == "accuracy"]
    assert common[-1] > 0.85


PAIRS = ((0, 4), (1, 5), (2, 6), (3, 7))


def vote_among(attackers: int) -> tuple[Any, list[int]]:
    """Ten clients vote; so many of them swap labels, in their training rows and in their validation rows."""
    changes = (FlipPairs(pairs=PAIRS, clients=tuple(range(attackers))),)
    clients = Iid(clients=10, validation=0.2, changes=changes).split(data.digits())
    recipe = recipes.distfl(probes=60, normal="vote", **TRAINING)
    run = trained(recipe, clients, rounds=4, measure="none")
    return run, clusters_at(run, 4)


@pytest.mark.full
@pytest.mark.parametrize("attackers", [2, 4])
def test_clients_vote_for_the_honest_cluster_while_most_are_honest(attackers: int) -> None:
    run, labels = vote_among(attackers)
    assert adjusted_rand_score([client < attackers for client in range(10)], labels) == 1.0
    assert run.main == labels[-1]
    (last,) = [row["value"] for row in run.notes if row["name"] == "vote_loss"][-1:]
    assert min(last, key=last.__getitem__) == str(labels[-1])
    asked = [row for row in run.results if row["kind"] == "validate" and row["version"] == 4]
    assert len(asked) == 10 * len(last)
    one = run.work.layout.shared * 4
    assert all(row["bytes_down"] == one for row in asked)


@pytest.mark.full
def test_a_vote_is_lost_where_most_clients_attack() -> None:
    """As it must: answers of clients cannot tell which cluster is honest then, see `ballot`."""
    run, labels = vote_among(8)
    assert adjusted_rand_score([client < 8 for client in range(10)], labels) == 1.0
    assert run.main == labels[0]


def test_a_vote_needs_validation_rows() -> None:
    with pytest.raises(SettingError, match="distfl needs validation rows but clients have none"):
        trained(recipes.distfl(normal="vote", **TRAINING), planted())


class TableOfLosses:
    """A server context whose clients answer from a table: losses by client and model."""

    version = 3

    def __init__(self, losses: list[list[float | None]], rows: int = 5) -> None:
        self.losses, self.rows, self.asked = losses, rows, list[tuple[int, int]]()
        self.spec = type("ModelSpec", (), {"seed": 1})

    def query(self, requests: Any) -> list[Any]:
        found: list[Any] = []
        for request in requests:
            model = int(request.vectors["model"])
            self.asked.append((request.client, model))
            loss = self.losses[request.client][model]
            found.append(None if loss is None else update(examples=self.rows, loss=loss))
        return found


def update(examples: int, loss: float) -> Update:
    return Update({}, examples, 0, {"loss": loss})


def test_honest_clients_in_many_clusters_outvote_one_large_cluster_of_attackers() -> None:
    """Three clusters of two honest clients, one of five attackers who lie: the largest is not the normal one."""
    honest = [[0.3, 0.9, 0.8, 4.0], [0.9, 0.3, 0.8, 5.0], [0.8, 0.9, 0.3, 3.0]]
    context = TableOfLosses([*honest, *honest, *[[1e9, 1e9, 1e9, 0.0]] * 5])
    models = {number: torch.tensor(float(number)) for number in range(4)}
    found = ballot(models, range(11), None, context)
    assert max(found, key=found.__getitem__) == 3
    half = TableOfLosses([*honest, *[[1e9, 1e9, 1e9, 0.0]] * 3])
    tied = ballot(models, range(6), None, half)
    assert min(tied, key=tied.__getitem__) == 3


def test_an_incomplete_vote_is_left_out() -> None:
    """A client without an answer for every model, without rows or with a loss that is no number has no vote."""
    models = {number: torch.tensor(float(number)) for number in (0, 1)}
    context = TableOfLosses([[0.1, 0.5], [None, 0.0], [math.nan, 0.0], [math.inf, 0.0]])
    assert ballot(models, range(4), None, context) == {0: 0.1, 1: 0.5}
    assert ballot(models, range(4), None, TableOfLosses([[0.1, 0.5]] * 4, rows=0)) == {0: math.inf, 1: math.inf}
    few = TableOfLosses([[0.1, 0.5]] * 4)
    ballot(models, range(4), 2, few)
    assert len({client for client, _ in few.asked}) == 2
    assert len(few.asked) == 4


@pytest.mark.full
def test_a_replaced_model_is_left_out_of_the_mean_and_trains_alone() -> None:
    clients = planted()
    attack = {"kind": "model_replacement", "clients": [5], "scale": 300.0}
    run = trained(recipes.distfl(probes=60, **TRAINING).with_(transforms=[attack]), clients)
    first = clusters_at(run, 1)
    others = [client for client in range(12) if client != 5]
    assert first.count(first[5]) == 1
    last = {row["client"]: row["cluster"] for row in run.results if row["version"] == 4 and row["client"] != 5}
    assert adjusted_rand_score(TRUTH[others], [last[client] for client in others]) == 1.0
    rows = [row for row in run.results if row["client"] == 5 and row["version"] == 1]
    assert rows[0]["status"] == "excluded"
    assert "variance below 0" in rows[0]["reason"]


@pytest.mark.full
def test_clients_that_were_not_asked_keep_cluster_and_model() -> None:
    run = trained(recipes.distfl(cohort=8, probes=60, **TRAINING), planted(), rounds=6)
    seen: dict[int, int] = {}
    for version in range(1, 7):
        for row in run.results:
            if row["version"] == version:
                seen[row["client"]] = row["cluster"]
    assert adjusted_rand_score([TRUTH[client] for client in seen], list(seen.values())) == 1.0
    for client, cluster in seen.items():
        for other, same in seen.items():
            if cluster == same:
                mine, theirs = (run.work.layout.flatten(run.model(one)) for one in (client, other))
                assert torch.equal(mine, theirs)


@pytest.mark.full
def test_clustering_every_other_round() -> None:
    run = trained(recipes.distfl(probes=40, every=2, **TRAINING), planted())
    made = [row["version"] for row in run.notes if row["name"] == "clusters"]
    assert made == [1, 3]
    assert clusters_at(run, 2) == clusters_at(run, 1)


@pytest.mark.full
def test_without_batch_norm_clients_send_moments_of_their_layers() -> None:
    model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10)))
    clients = planted()
    training = {"kind": "with_moments", "layers": ["1", "3"], **TRAINING}
    recipe = recipes.distfl(probes=60).with_(training=training)
    run = trained(recipe, clients, model)
    assert adjusted_rand_score(TRUTH, clusters_at(run, 4)) == 1.0
    bare = trained(recipes.fedavg(**TRAINING), clients, model, rounds=1)
    more = run.results[0]["bytes_up"] - bare.results[0]["bytes_up"]
    assert more == 4 * 2 * (64 + 24)
    with pytest.raises(SettingError, match="has no batch norm"):
        trained(recipes.distfl(**TRAINING), clients, model)
    with pytest.raises(SettingError, match="must be a convolution or linear layer"):
        trained(recipes.distfl().with_(training={**training, "layers": ["2"]}), clients, model)


def test_moments_are_those_of_the_rows() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    clients = classified(9, 5)
    run = simulate(recipes.fedavg(), clients, model, rounds=1)
    from piebald.engines.engine_choice import make_engine

    engine = make_engine("sequential", run.work, clients, torch.device("cpu"), bfloat16=False)
    found = input_moments(engine, [0, 1], run.work.initial.expand(2, -1), ["0", "2"])
    for row, client in zip(found, (0, 1), strict=True):
        x = clients.rows(client, "train").x
        with torch.no_grad():
            inside = torch.relu(model[0](x))
        wanted = torch.cat([x.mean(0), x.var(0, unbiased=False), inside.mean(0), inside.var(0, unbiased=False)])
        torch.testing.assert_close(row, wanted, atol=1e-5, rtol=1e-4)


def test_private_batch_norms_are_refused() -> None:
    with pytest.raises(SettingError, match="keeps its batch norms private"):
        trained(
            recipes.distfl(**TRAINING).with_(sharing={"kind": "all_except", "private_layers": "batch_norm"}), planted()
        )


def test_the_normal_cluster_by_server_rows_needs_such_rows() -> None:
    with pytest.raises(SettingError, match="needs rows that the server may see"):
        trained(recipes.distfl(normal="server_rows", **TRAINING), planted())
    with pytest.raises(SettingError, match="fltrust"):
        trained(recipes.fedavg(**TRAINING).with_(aggregation="fltrust"), planted())


# ------------------------------------------------------------------------------------------------------- IFCA, CFL, ...


@pytest.mark.parametrize("warm", [1, *(pytest.param(warm, marks=pytest.mark.full) for warm in (0, 2))])
def test_ifca_finds_planted_clusters_given_their_number(warm: int) -> None:
    run = trained(recipes.ifca(k=3, warm=warm, **TRAINING), planted(), rounds=5)
    if warm:  # cold starts may leave two clusters with one model, as the paper says
        assert adjusted_rand_score(TRUTH, clusters_at(run, 5)) == 1.0
    shared = run.work.layout.shared
    down = {row["bytes_down"] for row in run.results if row["version"] == 5}
    assert down == {4 * shared * (1 + 3)}


@pytest.mark.parametrize("engine", ["sequential", "reference"])
@pytest.mark.parametrize(
    "recipe",
    [
        recipes.ifca(k=2, warm=0, batch=2),
        recipes.afl(batch=2),
        recipes.fedavg().with_(training={"kind": "adaptive_frequency", "cycles": 2, "batch": 2}),
    ],
    ids=["ifca", "afl", "validation cycles"],
)
def test_clients_that_need_losses_alone_compute_no_metric(recipe: Any, engine: str) -> None:
    asked: list[int] = []

    def costly(outputs: Tensor, targets: Tensor) -> Tensor:
        asked.append(len(targets))
        return outputs.argmax(1) == targets

    model, metrics, where = seeded(lambda: nn.Linear(6, 4)), {"costly": costly}, {"engine": engine}
    run = simulate(recipe, uneven_clients(), model, metrics=metrics, evaluate_every=0, simulator=where)
    assert all(math.isfinite(row["loss"]) for row in run.results)
    assert not asked


def test_ifca_sends_no_more_models_than_there_are_clusters() -> None:
    """With nine models for three clients, six copies travelled down in each round, and none could be chosen."""
    rows = Iid(clients=3, limit=120).split(data.digits())
    few, many = (
        simulate(recipes.ifca(k=k), rows, build_model("logistic", (1, 8, 8), 10), rounds=3, evaluate_every=0)
        for k in (3, 9)
    )
    assert few.final["bytes_down"] == many.final["bytes_down"]
    assert all(torch.equal(one, many.cluster_models[number]) for number, one in few.cluster_models.items())


@pytest.mark.full
def test_ifca_clients_choose_by_their_own_loss() -> None:
    """Of several candidates, no client takes one that was trained on other classes."""
    run = trained(recipes.ifca(k=3, **TRAINING), planted(), rounds=3)
    found = clusters_at(run, 3)
    models = {one: run.work.layout.flatten(run.model(found.index(one))) for one in set(found)}
    assert len(models) == 3
    assert recipes.ifca(k=3).aggregation == EqualWeighted()  # before, by examples, unlike the paper and FedLab
    with pytest.raises(SettingError, match="lowest_loss"):
        trained(recipes.fedavg(**TRAINING).with_(clustering=Ifca(k=2)), planted())


@pytest.mark.full
def test_cfl_cuts_where_updates_pull_apart() -> None:
    recipe = recipes.cfl(**{**TRAINING, "lr": 0.05}, eps1=0.6, eps2=0.2, gamma_max=0.7)
    run = trained(recipe, planted(), rounds=8)
    found = clusters_at(run, 8)
    assert adjusted_rand_score(TRUTH, found) == 1.0
    iid = trained(recipe, Iid(clients=6).split(data.digits()), rounds=6)
    assert set(clusters_at(iid, 6)) == {0}


@pytest.mark.full
def test_gamma_max_asks_how_far_apart_the_halves_are() -> None:
    """Theorem 1: cut where gamma_max < sqrt((1 - cosine) / 2), so at 0.7 only below a cosine of 0.02."""
    cut = {}
    for gamma_max in (0.0, 0.7, 1.0):
        recipe = recipes.cfl(lr=0.05, epochs=3, batch=10, eps1=0.6, eps2=0.2, gamma_max=gamma_max)
        run = trained(recipe, planted(), rounds=5)
        cut[gamma_max] = [one["cosine"] for row in run.notes if row["name"] == "cuts" for one in row["value"]]
    assert max(cut[0.0]) > 0.02 >= max(cut[0.7])
    assert not cut[1.0]


def test_cfl_cuts_at_the_least_largest_cosine() -> None:
    """Against all cuts of seven clients."""
    import itertools

    draw = np.random.default_rng(0)
    changes = torch.from_numpy(draw.normal(size=(7, 5)))
    lengths = changes.norm(dim=1)
    inner = changes @ changes.T
    cosine = (inner / lengths[:, None] / lengths[None]).numpy()

    def worst(side: tuple[int, ...]) -> float:
        rest = [i for i in range(7) if i not in side]
        return max(cosine[i, j] for i in side for j in rest)

    every = [side for size in (1, 2, 3) for side in itertools.combinations(range(7), size)]
    best = min(every, key=worst)
    assert worst(tuple(Cfl().halved(inner, lengths)[0])) == pytest.approx(worst(best))


def test_all_cuts_of_a_step_are_recorded() -> None:
    """Two clusters of which both halves pull apart."""
    axes = torch.eye(2).repeat_interleave(4, 0) * torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(2)[:, None]
    notes: dict[str, Any] = {}
    context: Any = SimpleNamespace(state={}, note=notes.__setitem__)
    cohort: Any = SimpleNamespace(clients=list(range(8)), parameters=axes, version=1)
    known = {client: client // 4 for client in range(8)}
    labels = Cfl(eps1=0.5, eps2=0.5, relative=False).assign(cohort, known, context)
    assert [labels[:2], labels[2:4], labels[4:6], labels[6:]] == [[labels[k]] * 2 for k in (0, 2, 4, 6)]
    assert len(set(labels)) == 4
    assert [(one["group"], one["into"]) for one in notes["cuts"]] == [(0, 2), (1, 3)]
    assert [one["cosine"] for one in notes["cuts"]] == pytest.approx([-1, -1])


@pytest.mark.full
def test_fltrust_trains_on_server_rows_under_a_majority_of_attackers() -> None:
    clients = Iid(clients=10, server_rows=60).split(data.digits())
    assert len(clients.server_rows) == 60
    held = {int(row) for client in range(10) for row in clients.indices(client, "train")}
    assert len(held) == sum(clients.size(client, "train") for client in range(10))
    attack = {"kind": "sign_flip", "clients": list(range(7)), "scale": 3.0}
    accuracy = {}
    for kind in ("example_weighted", "fltrust"):
        recipe = recipes.fedavg(lr=0.1, epochs=2).with_(aggregation=kind, transforms=[attack])
        run = trained(recipe, clients, build_model("mlp", (1, 8, 8), 10), rounds=12)
        accuracy[kind] = [r["value"] for r in run.scores if r["split"] == "common" and r["metric"] == "accuracy"][-1]
    assert accuracy["fltrust"] > 0.8 > 0.3 > accuracy["example_weighted"]


@pytest.mark.full
def test_foolsgold_keeps_state_for_each_client() -> None:
    """Sybils with one data set between them get next to no weight; that takes state over rounds."""
    clients = planted()
    attack = {"kind": "inner_product", "clients": [0, 1, 2, 3], "scale": 1.0}
    recipe = recipes.fedavg(**TRAINING).with_(aggregation="foolsgold", transforms=[attack])
    run = trained(recipe, clients, rounds=3)
    last = {row["client"]: row["weight"] for row in run.results if row["version"] == 3}
    shares = [row for row in run.results if row["version"] == 3]
    assert max(last[client] or 0.0 for client in range(4)) == 0.0
    assert len(shares) == 12


def every_number(run: Any) -> Tensor:
    layout = run.work.layout
    return torch.stack([layout.flatten(run.model(client)) for client in range(12)])


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vmapped"])
def test_clusters_are_the_same_on_every_engine(engine: str) -> None:
    recipe = recipes.distfl(probes=40, **TRAINING)
    one, two = (trained(recipe, planted(), rounds=3, simulator={"engine": name}) for name in ("sequential", engine))
    assert clusters_at(one, 3) == clusters_at(two, 3)
    torch.testing.assert_close(every_number(one), every_number(two), atol=1e-3, rtol=1e-2)


@pytest.mark.full
def test_cluster_models_of_a_finished_run(tmp_path: Any) -> None:
    clients = planted()
    run = trained(recipes.distfl(probes=40, **TRAINING), clients, rounds=3, out=tmp_path / "run")
    for client in range(12):
        rows = clients.rows(client, "test")
        with torch.no_grad():
            right = (run.model(client)(rows.x).argmax(1) == rows.y).float().mean()
        recorded = [
            row["value"]
            for row in run.scores
            if (row["client"], row["version"], row["metric"]) == (client, 3, "accuracy")
        ]
        assert recorded == [pytest.approx(float(right))]
