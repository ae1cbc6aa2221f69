"""What leaves a client under CGAU, and how averaging changes a column that only one client updates."""

from __future__ import annotations

import pytest
import torch

import piebald
from piebald import data, models, partition, recipes
from piebald.core.errors import SettingError
from piebald.core.parameters import Layout

HERE = piebald.Simulator(engine="sequential", workers=0)
CLIENTS = 4


@pytest.fixture(scope="module")
def clients() -> partition.PooledClients:
    return partition.Dirichlet(clients=CLIENTS, alpha=0.5, limit=240, validation=0.2).split(data.digits())


def gated(seed: int = 0, **settings: object) -> torch.nn.Module:
    return models.build_model("gated_classifier", (1, 8, 8), 10, seed, **{"units": (6, 5), "dropout": 0.0} | settings)


def test_only_the_conditioning_stays(clients, tmp_path) -> None:
    run = piebald.run(recipes.cgau(lr=0.3), clients, gated, rounds=3, runtime=HERE, out=tmp_path / "run")
    layout = run.work.layout
    assert layout.private == {
        f"features.{layer}.0.conditioning.{name}" for layer in (1, 2) for name in ("filter", "gate")
    }
    own = layout.size - layout.shared
    assert own == 2 * (6 + 5)
    assert {row["bytes_up"] for row in run.results} == {4 * layout.shared}
    assert [row["bytes_down"] for row in run.results] == CLIENTS * [4 * layout.size] + 2 * CLIENTS * [4 * layout.shared]
    vectors = torch.stack([layout.flatten(run.model(client))[layout.shared :] for client in range(CLIENTS)])
    assert (torch.pdist(vectors) > 0).all()  # each has learnt something of its own
    assert not layout.flatten(run.model())[layout.shared :].any()  # the global model is that of an unknown client


def test_the_frozen_extractor_never_travels(clients) -> None:
    """Bytes of a round are those of the classifier over embeddings, however large the extractor is."""
    extractor = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4000), torch.nn.Linear(4000, 7)).eval()
    behind = models.embedded(clients, extractor)
    model = models.build_model("gated_classifier", (7,), 10, units=(6, 5))
    run = piebald.run(recipes.cgau(), behind, model, rounds=1, runtime=HERE)
    shared = Layout.of(model, recipes.cgau().sharing.private(model)).shared
    assert run.final["bytes_up"] == CLIENTS * 4 * shared < 4 * 7 * 4000


def test_averaging_shrinks_a_column_to_its_clients_share(clients) -> None:
    """After one round, column k of the averaged matrix is what client k alone learnt, times its share of the rows."""
    model = gated(clients=CLIENTS)
    run = piebald.run(recipes.cgau(lr=0.3, shared_matrix=True), clients, model, rounds=1, runtime=HERE)
    rows = [clients.size(client, "train") for client in range(CLIENTS)]
    name = "features.1.0.conditioning.filter"
    averaged = dict(run.model().named_parameters())[name]
    for client in range(CLIENTS):
        alone = partition.Lists(clients.indices(client, "train"), torch.tensor([0, rows[client]]).numpy())
        one = partition.PooledClients(
            clients.x, clients.y, {"train": alone}, names=[clients.names[client]], classes=list("0123456789")
        )
        own = gated(bias=True)
        learnt = piebald.run(recipes.fedavg(lr=0.3), one, own, rounds=1, runtime=HERE, evaluate_every=0)
        change = dict(learnt.model().named_parameters())[name]
        torch.testing.assert_close(averaged[:, client], change * rows[client] / sum(rows), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_shared_bias_would_reveal_the_private_vector(clients, momentum: float, tmp_path) -> None:
    """Both have the same gradient, so the bias that a client sends is its private vector; so there is no bias."""
    first = gated(bias=True)
    run = piebald.run(
        recipes.cgau(lr=0.3, momentum=momentum).with_(aggregation={"kind": "equal_weighted"}),
        clients, first, rounds=1, runtime=HERE, out=tmp_path / "run",
    )  # fmt: skip
    before, after = (dict(model.named_parameters())["features.1.0.bias.gate"] for model in (first, run.model()))
    own = [dict(run.model(client).named_parameters())["features.1.0.conditioning.gate"] for client in range(CLIENTS)]
    torch.testing.assert_close(after - before, torch.stack(own).mean(0), atol=1e-6, rtol=1e-4)
    assert gated().features[1][0].bias is None


def test_the_client_indicator_is_sent_once_and_stays(clients, tmp_path) -> None:
    run = piebald.run(
        recipes.cgau(shared_matrix=True), clients, gated(clients=CLIENTS), rounds=2, runtime=HERE, out=tmp_path / "run"
    )
    assert run.work.layout.size - run.work.layout.shared == 2 * CLIENTS
    for client in range(CLIENTS):
        who = dict(run.model(client).named_buffers())["features.1.0.conditioning.client"]
        assert who.tolist() == [float(other == client) for other in range(CLIENTS)]
    assert not dict(run.model().named_buffers())["features.1.0.conditioning.client"].any()


def test_private_rows_are_the_matrix_if_nothing_is_averaged(clients, tmp_path) -> None:
    """After one round, a private vector and the client's own column of the matrix have learnt the same."""
    both = [
        piebald.run(recipe, clients, model, rounds=1, runtime=HERE, out=tmp_path / str(number))
        for number, (recipe, model) in enumerate(
            [
                (recipes.cgau(lr=0.3), gated(bias=True)),
                (recipes.cgau(lr=0.3, shared_matrix=True), gated(clients=CLIENTS)),
            ]
        )
    ]
    mine, theirs = (row.results for row in both)
    assert [row["loss"] for row in mine] == pytest.approx([row["loss"] for row in theirs], rel=1e-5)


@pytest.mark.parametrize(
    ("recipe", "model", "message"),
    [
        (
            recipes.cgau(),
            gated(filter=False, gate=False),
            "'conditioning' means the model's conditioning layers but it",
        ),
        (recipes.cgau(shared_matrix=True), gated(clients=3), "has clients = 3, too few for 4 clients"),
        (recipes.cgau(shared_matrix=True), gated(), "needs a model with a conditioning matrix"),
    ],
)
def test_an_unsuitable_model_is_refused(clients, recipe, model, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        piebald.run(recipe, clients, model, rounds=1)


def test_other_components_combine_with_it(clients) -> None:
    """Asynchronous scheduling, noise on the shared parameters, another server optimizer."""
    recipe = recipes.cgau(lr=0.1).with_(
        scheduling={"kind": "asynchronous", "cohort": 3},
        transforms=[{"kind": "gaussian", "clip": 0.5, "noise": 0.1, "where": "client"}],
        server_optimizer={"kind": "momentum", "beta": 0.5},
    )
    run = piebald.run(recipe, clients, gated, rounds=8, runtime=HERE)
    assert run.final["rounds"] == 8
    assert run.accuracy is not None
