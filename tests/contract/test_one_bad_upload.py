"""One client's numbers, however absurd, leave everybody else a model: what compares all with all is not poisoned."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from piebald import data, recipes
from piebald.data.partition import Iid
from piebald.methods.attacks.base import Attack
from piebald.methods.attacks.model_replacement import ModelReplacement
from piebald.methods.clustering import Distfl
from piebald.models import build_model
from piebald.runs.finished_run import Run
from tests.contract.conftest import SIZES, carry_out, in_turn, method
from tests.fakes import simulate

DISTFL = list(itertools.product(("silhouette", "gap", "linked"), ("probes", "running"), ("synthesis", "noise")))


class Flooded(Attack):
    """Sends one large number in place of each, which is finite, so that the server takes it in."""

    axis = "transforms"
    size: float = 1e9

    def corrupt(self, change: Tensor, keys: Sequence[int]) -> Tensor:
        return torch.full_like(change, self.size)


ATTACKS: dict[str, Callable[[tuple[int, ...]], Attack]] = {
    "replaced": lambda clients: ModelReplacement(scale=30.0, clients=clients),
    "turned": lambda clients: ModelReplacement(scale=-1000.0, clients=clients),
    "high": lambda clients: Flooded(clients=clients),
    "low": lambda clients: Flooded(size=-1e9, clients=clients),
}


def network(seed: int = 0) -> nn.Module:
    return build_model("mlp_bn", (1, 8, 8), 10, seed=seed)


def assert_finite(run: Run, clients: Sequence[int]) -> None:
    for client in clients:
        tensors = run.model(client).state_dict()
        assert all(bool(tensor.isfinite().all()) for tensor in tensors.values()), f"client {client} has no model"


@pytest.mark.parametrize("attackers", [1, 3, 5])
@pytest.mark.parametrize("attack", sorted(ATTACKS))
@pytest.mark.parametrize(("find", "statistics", "knowledge"), DISTFL)
@pytest.mark.full
def test_no_attacker_ends_or_blinds_distfl(
    find: Any, statistics: Any, knowledge: Any, attack: str, attackers: int
) -> None:
    clients = Iid(clients=8, limit=400, server_rows=40).split(data.digits())
    clustering = Distfl(probes=20, steps=5, find=find, statistics=statistics, knowledge=knowledge)
    recipe = recipes.distfl(lr=0.1, batch=20).with_(
        clustering=clustering, transforms=(ATTACKS[attack](tuple(range(attackers))),)
    )
    run = simulate(recipe, clients, network, rounds=3, longest_step=1e30)
    assert_finite(run, range(attackers, 8))
    for row in run.notes:
        if row["name"] == "divergence":
            assert np.isfinite(np.array(row["value"]["matrix"])).all()


@in_turn(3)
def test_whatever_one_client_sends_the_others_have_a_model(name: str, tmp_path: Any) -> None:
    recipe = method(name)
    for label, attack in ATTACKS.items():
        run = carry_out(recipe.with_(transforms=(attack((1,)), *recipe.transforms)), out=tmp_path / label)
        assert_finite(run, [client for client in range(len(SIZES)) if client != 1])
