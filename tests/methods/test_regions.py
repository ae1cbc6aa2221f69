"""Hierarchical aggregation: FedAvg where regions do one round, HierFAVG's own loop where they do more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.contracts import Task
from piebald.core.errors import SettingError
from piebald.engines.engine_choice import make_engine
from piebald.engines.outgoing import serve
from piebald.engines.stack import ClientStack
from piebald.methods.clustering import Regions
from tests.fakes import classified, seeded, simulate

CLIENTS = classified(9, 3, 5, 8, 4, features=3)
MODEL = seeded(lambda: nn.Linear(3, 2))
HALVES = ((0, 3), (1, 2, 4))


def model(run: piebald.Run, number: int = 0) -> Tensor:
    return run.cluster_models[number]


@pytest.mark.parametrize("aggregation", ["example_weighted", "equal_weighted"])
@pytest.mark.parametrize("cohort", [1.0, 3])
def test_one_round_in_each_region_is_fedavg(aggregation: str, cohort: Any) -> None:
    plain = recipes.fedavg(cohort, lr=0.3, batch=4).with_(aggregation=aggregation)
    regional = plain.with_(clustering=Regions(regions=HALVES, region_rounds=1))
    one, two = (simulate(each, CLIENTS, MODEL, rounds=5) for each in (plain, regional))
    torch.testing.assert_close(model(two), model(one), atol=1e-6, rtol=1e-6)
    assert [row["loss"] for row in one.rounds] == pytest.approx([row["loss"] for row in two.rounds], abs=1e-6)
    assert {row["cluster"] for row in two.results} == {0, 1}


def test_several_rounds_are_the_plain_program() -> None:
    """Algorithm 1 of Liu et al. 2020: FedAvg in each region by itself, then the mean by rows; twice."""
    recipe = recipes.hierfavg(regions=HALVES, region_rounds=2, lr=0.3, batch=4)
    got = simulate(recipe, CLIENTS, MODEL, rounds=4)
    sizes = [CLIENTS.size(client, "train") for client in range(5)]
    whole, work = got.work.initial.clone(), got.work
    trained = {(row["client"], row["sent_version"]): row for row in got.results}
    assert len(trained) == 20
    engine = make_engine("sequential", work, CLIENTS, torch.device("cpu"), False)
    for start in (0, 2):
        ends = []
        for members in HALVES:
            here = whole.clone()
            for version in (start, start + 1):
                total = torch.zeros_like(here)
                for client in members:
                    task = Task(0, client, version, {})
                    stack = ClientStack([client], [version], [task.rng_version], [0], [here], {}, {})
                    total += sizes[client] * serve(engine, stack).update(0).vectors["model"]
                here = here + total / sum(sizes[client] for client in members)
            ends.append(here * sum(sizes[client] for client in members))
        whole = sum(ends) / sum(sizes)
    torch.testing.assert_close(model(got), whole, atol=1e-6, rtol=1e-5)
    assert torch.equal(model(got), model(got, 1))


def test_a_region_counts_by_all_its_updates_since_the_last_step_of_all() -> None:
    """Also one that had none in the last round; and after a step of all, nothing of before counts."""
    regions, state = Regions(regions=2, region_rounds=2), dict[str, Any]()

    def joined(version: int, weights: dict[int, float]) -> Any:
        return regions.join(weights, SimpleNamespace(version=version, state=state))  # type: ignore[arg-type]

    assert joined(0, {0: 3.0, 1: 1.0}) is None
    assert joined(1, {0: 2.0}) == {0: 5.0, 1: 1.0}
    assert joined(2, {1: 4.0}) is None
    assert joined(3, {0: 1.0, 1: 4.0}) == {0: 1.0, 1: 8.0}


def test_between_steps_of_all_each_region_has_its_own_model_and_newcomers_begin_with_it() -> None:
    """Clients who take part late, some of them after a step of all, train their own region's model."""
    recipe = recipes.hierfavg(2, regions=HALVES, region_rounds=3, lr=0.3)
    apart = simulate(recipe, CLIENTS, MODEL, rounds=5, seed=2)
    assert not torch.equal(model(apart, 0), model(apart, 1))
    first = {row["client"]: row["sent_version"] for row in reversed(apart.results)}
    assert max(first.values()) > 0
    assert all(row["cluster"] == (0 if row["client"] in HALVES[0] else 1) for row in apart.results)


def test_a_region_without_updates_takes_over_what_the_others_found() -> None:
    """Clients who are nowhere named form a region of their own; here nobody is left for it."""
    run = simulate(recipes.hierfavg(regions=HALVES, region_rounds=1), CLIENTS, MODEL, rounds=2)
    assert Regions(regions=HALVES).clusters_to_join == 3
    assert torch.equal(model(run, 2), model(run, 0))
    assert Regions(regions=3).cluster(7) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"server_optimizer": "momentum"}, "nothing would average what momentum keeps for each cluster"),
        ({"training": "scaffold"}, "nothing would average what scaffold keeps for each cluster"),
        ({"scheduling": "asynchronous"}, "regions counts rounds but asynchronous has none"),
        ({"transforms": "secure_aggregation"}, "regions needs individual updates"),
    ],
)
def test_what_regions_cannot_stand_beside_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        recipes.hierfavg().with_(**change)


@pytest.mark.parametrize("regions", [0, ((0, 1), (1, 2)), ((0,), ()), ((-1,),), ()])
def test_regions_name_each_client_once(regions: Any) -> None:
    with pytest.raises(SettingError, match="regions"):
        Regions(regions=regions)
