"""Weight divergence against closed forms, and the measures of heterogeneity that a run keeps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import piebald
from piebald import data
from piebald.core.errors import SettingError
from piebald.data.measures.heterogeneity import diverge, weight_divergence
from piebald.data.measures.pictures import flat
from piebald.data.partition import Dirichlet, Disjoint, FastSlow, Iid, LazyClients, clients_from, collect, measure
from piebald.report.tables import History
from piebald.runtimes import Simulator


def network(outputs: int = 10) -> nn.Module:
    return piebald.models.build_model("logistic", (1, 8, 8), outputs)


def test_two_points_at_right_angles() -> None:
    apart, pooled = weight_divergence(np.array([[2.0, 0.0], [0.0, 2.0]]), np.array([5, 5]), np.array([1.0, 0.0]))
    assert apart == pytest.approx([1, 1])  # sqrt 2 from (1, 1), whose length is sqrt 2
    assert pooled == pytest.approx(1)
    apart, pooled = weight_divergence(np.array([[4.0, 0.0], [0.0, 4.0]]), np.array([3, 1]))
    assert apart == pytest.approx([math.sqrt(2) / math.sqrt(10), 3 * math.sqrt(2) / math.sqrt(10)])
    assert pooled is None


def test_one_step_on_all_rows_averages_to_the_step_on_the_pool() -> None:
    """Gradients add up: with one full batch each, the average IS the pooled model (McMahan's FedSGD)."""
    clients = Disjoint(clients=5, classes_each=2, test=0.0, limit=500).split(data.digits())
    seen = diverge(clients, network(), batch=10_000)
    assert seen.pooled == pytest.approx(0, abs=1e-6)
    assert seen.clients.min() > 0.01
    assert diverge(clients, network(), batch=20).pooled > 1e-3


def test_one_step_by_hand() -> None:
    x = np.array([[1.0, 0.0], [0.0, 2.0]], np.float32)
    clients = clients_from([(x[:1], np.array([0.0])), (x[1:], np.array([0.0]))], test=0.0)
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight[:] = torch.tensor([[3.0, 5.0]])
    seen = diverge(clients, model, lr=0.1)
    # w - 0.1 * 2 (w x) x: (3 - 0.6, 5) and (3, 5 - 4); their mean is (2.7, 3); pooled: half of each step.
    length = math.hypot(2.7, 3.0)
    assert seen.clients == pytest.approx([math.hypot(0.3, 2.0) / length] * 2, rel=1e-5)
    assert seen.pooled == pytest.approx(0, abs=1e-6)
    assert model.weight.tolist() == [[3.0, 5.0]]


def test_uneven_labels_diverge_more() -> None:
    """Zhao et al. 2018, figure 2: the more labels differ, the more weights diverge."""
    kinds = [Iid(clients=5), Dirichlet(clients=5, alpha=0.5), Disjoint(clients=5, classes_each=2)]
    seen = [diverge(kind.split(data.digits()), network()) for kind in kinds]
    assert [one.clients.mean() for one in seen] == sorted(one.clients.mean() for one in seen)
    assert [one.pooled for one in seen] == sorted(one.pooled for one in seen)


def test_it_is_repeatable_and_leaves_the_global_random_state_alone() -> None:
    clients = Iid(clients=3, limit=90).split(data.digits())
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Dropout(0.5))
    before = torch.get_rng_state()
    first, second = (diverge(clients, model).clients for _ in range(2))
    assert (first == second).all()
    assert torch.equal(before, torch.get_rng_state())
    assert (diverge(clients, model, seed=1).clients != first).any()


def test_too_many_models_are_refused() -> None:
    lazy = LazyClients(1_000_000, lambda _: pytest.fail("loaded"))
    with pytest.raises(
        SettingError, match="1000000 models of 650 parameters are too large to compare: use fewer clients"
    ):
        diverge(lazy, network())


def test_a_run_keeps_the_measures_of_heterogeneity(tmp_path) -> None:
    clients = Dirichlet(clients=4, alpha=0.3, limit=400).split(data.digits())
    fleet = FastSlow(fast=0.5, slow_factor=3, first="fast")
    piebald.run(
        "fedavg", clients, network(), rounds=1, out=tmp_path / "run", runtime=Simulator(fleet=fleet), measure="weights"
    )
    with History(tmp_path / "run") as history:
        kept = {(row["client"], row["name"]): row["value"] for row in history.measures}
        units = history.meta["units"]
    expected = measure(collect(clients, embed=flat), [fleet.device(client).seconds_per_step for client in range(4)])
    for name, value in expected.federation.items():
        assert kept.pop((None, name)) == pytest.approx(value)
    for client, row in enumerate(expected.table()):
        for name, value in row.items():
            assert kept.pop((client, name)) == pytest.approx(value)
    apart = diverge(clients, network())
    assert kept.pop((None, "pooled_divergence")) == pytest.approx(apart.pooled)
    assert kept.pop((None, "divergence")) == pytest.approx(apart.clients.mean())
    assert [kept.pop((client, "divergence")) for client in range(4)] == pytest.approx(apart.clients)
    assert not kept
    assert units["frechet"].startswith("squared units")
    assert {"frechet", "total_variation", "speed_ratio", "size_gini", "divergence", "seconds"} <= units.keys()


@pytest.mark.full
def test_nothing_is_loaded_to_measure_a_million_clients() -> None:
    asked: set[int] = set()

    def load(client: int):
        asked.add(client)
        return np.ones((4, 3), np.float32), np.array([0, 1, 0, 1])

    recipe = piebald.recipes.fedavg(cohort=2)
    seen = []
    for how in ("none", "data"):
        asked.clear()
        lazy = LazyClients(1_000_000, load, classes=["a", "b"])
        named = Simulator(engine="sequential")  # else clients' rows are loaded where engines are measured
        run = piebald.run(recipe, lazy, nn.Linear(3, 2), rounds=1, evaluate_every=0, measure=how, runtime=named)
        seen.append(set(asked))
    assert seen[0] == seen[1]
    assert len(asked) < 100
    assert run.measures == []
    few = LazyClients(5, load, classes=["a", "b"])
    asked.clear()
    assert piebald.data.partition.survey(few) is None
    assert not asked


def test_unknown_measures_are_refused(tmp_path) -> None:
    clients = Iid(clients=2, limit=40).split(data.digits())
    with pytest.raises(SettingError, match="got 'weight': did you mean 'weights'"):
        piebald.run("fedavg", clients, network(), measure="weight", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert piebald.run("fedavg", clients, network(), rounds=1, measure="none").measures == []
