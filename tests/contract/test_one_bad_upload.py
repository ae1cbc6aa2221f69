"""One client's numbers, however absurd, leave everybody else a model: what compares all with all is not poisoned.

All aggregations and clusterings that are registered are walked, so that a new one is, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from piebald import data, recipes
from piebald.contracts.component import Component
from piebald.core.errors import RuntimeFault
from piebald.core.parameters import Layout
from piebald.data.partition import Iid, PooledClients
from piebald.methods.attacks.base import Attack
from piebald.methods.attacks.model_replacement import ModelReplacement
from piebald.methods.clustering import Distfl
from piebald.methods.recipe import Recipe
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


class OneNumber(Attack):
    """Sends the honest update with another number in place of its first."""

    axis = "transforms"
    number: str

    def corrupt(self, change: Tensor, keys: Sequence[int]) -> Tensor:
        return torch.cat([torch.full_like(change[:, :1], float(self.number)), change[:, 1:]], 1)


class BelowZero(Attack):
    """Sends the honest update with changes that take all running variances below 0."""

    axis = "transforms"

    def corrupt(self, change: Tensor, keys: Sequence[int]) -> Tensor:
        change = change.clone()
        for variance in Layout.of(network()).variances:
            change[:, variance] = -50.0
        return change


ATTACKS: dict[str, Callable[[tuple[int, ...]], Attack]] = {
    "replaced": lambda clients: ModelReplacement(scale=30.0, clients=clients),
    "turned": lambda clients: ModelReplacement(scale=-1000.0, clients=clients),
    "high": lambda clients: Flooded(clients=clients),
    "low": lambda clients: Flooded(size=-1e9, clients=clients),
    "below zero": lambda clients: BelowZero(clients=clients),
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
    if attack == "below zero":
        assert_excluded(run, range(attackers), "variance below 0")


# A plain mean of products of two factors, each a thousand times too long, is a million times too long: training from it
# ends, with a sentence.  `longest_step` below a million, or an aggregation that defends, is what helps.
BENT = {("flexlora", "turned")}


@pytest.mark.full
@in_turn(3)
def test_whatever_one_client_sends_the_others_have_a_model(name: str, tmp_path: Any) -> None:
    recipe = method(name)
    for label, attack in ATTACKS.items():
        if (name, label) in BENT:
            with pytest.raises(RuntimeFault, match="not finite"):
                carry_out(recipe.with_(transforms=(attack((1,)), *recipe.transforms)), out=tmp_path / label)
            continue
        run = carry_out(recipe.with_(transforms=(attack((1,)), *recipe.transforms)), out=tmp_path / label)
        assert_finite(run, [client for client in range(len(SIZES)) if client != 1])


# Others need a training of their own; product_average, whose models have adapters, is among the recipes above.
NEEDS: dict[str, dict[str, Any]] = {
    "fixed_shares": {"aggregation": {"kind": "fixed_shares", "shares": {"*": 1.0}}},
    "ifca": {"training": "lowest_loss", "clustering": {"kind": "ifca", "k": 2}},
    **{kind: {"training": "initial_loss", "aggregation": kind} for kind in ("qfair", "tilted", "agnostic")},
}
KINDS = sorted(
    (axis, kind)
    for axis in ("aggregation", "clustering")
    for kind, component in Component.registry[axis].items()
    if component.__module__.startswith("piebald.") and kind not in ("product_average", "function")
)
BAD = 2  # the client that sends them


def struck(recipe: Recipe, attack: Attack) -> Run:
    clients = Iid(clients=5, limit=150, server_rows=20, validation=0.2).split(data.digits())
    return simulate(recipe.with_(transforms=(attack,)), clients, network, rounds=2)


def assert_excluded(run: Run, clients: Sequence[int], reason: str) -> None:
    for client in clients:
        rows = [row for row in run.results if row["client"] == client and row["kind"] == "train"]
        assert rows
        assert all(row["status"] != "ok" and reason in row["reason"] for row in rows), rows


def assert_same_models(first: Run, second: Run, clients: PooledClients | Sequence[int], atol: float = 0.0) -> None:
    for client in clients:
        ours, theirs = first.model(client).state_dict(), second.model(client).state_dict()
        same = (torch.allclose(tensor, theirs[name], rtol=0.0, atol=atol) for name, tensor in ours.items())
        assert all(same), f"client {client} differs"


@pytest.mark.parametrize(("axis", "kind"), KINDS)
def test_an_upload_that_is_no_numbers_is_excluded_by_name_and_changes_nobody_elses_result(axis: str, kind: str) -> None:
    """Whichever number it is: what one client sends that nobody can use, nobody else's model depends on."""
    recipe = recipes.fedavg(lr=0.1, batch=10).with_(**NEEDS.get(kind, {axis: kind}))
    infinite = struck(recipe, OneNumber(clients=(BAD,), number="inf"))
    missing = struck(recipe, OneNumber(clients=(BAD,), number="nan"))
    too_long = struck(recipe, OneNumber(clients=(BAD,), number="1e30"))
    others = [client for client in range(5) if client != BAD]
    assert_finite(infinite, others)
    assert_excluded(infinite, [BAD], "not finite")
    assert_excluded(missing, [BAD], "not finite")
    assert_same_models(infinite, missing, others)
    assert_same_models(infinite, too_long, others)


@pytest.mark.full
@pytest.mark.parametrize(("axis", "kind"), KINDS)
def test_variances_below_0_end_no_run(axis: str, kind: str) -> None:
    recipe = recipes.fedavg(lr=0.1, batch=10).with_(**NEEDS.get(kind, {axis: kind}))
    run = struck(recipe, BelowZero(clients=(BAD,)))
    assert_finite(run, range(5))
    layout = run.work.layout
    for model in run.cluster_models.values():
        assert float(layout.least_variance(model)) >= 0


@pytest.mark.parametrize("statistics", ["probes", "running"])
@pytest.mark.parametrize("find", ["silhouette", "gap", "linked"])
def test_variances_below_0_exclude_a_client_from_distfl_by_name(find: Any, statistics: Any) -> None:
    """The others have what they have where the client sends nothing that counts."""
    clustering = Distfl(probes=20, steps=5, find=find, statistics=statistics)
    recipe = recipes.distfl(lr=0.1, batch=10).with_(clustering=clustering)
    run = struck(recipe, BelowZero(clients=(BAD,)))
    assert_excluded(run, [BAD], "variance below 0")
    absent = struck(recipe, OneNumber(clients=(BAD,), number="nan"))
    # sums of other numbers of clients are rounded otherwise
    assert_same_models(run, absent, [client for client in range(5) if client != BAD], atol=1e-6)
