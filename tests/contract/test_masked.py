"""Every recipe under secure aggregation: members of a sum are shown the same, or the recipe is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piebald.core.errors import SettingError
from piebald.methods.recipe import Recipe
from piebald.privacy import SecureAggregation
from tests.fakes import seeded

from .conftest import SIZES, TABLE, carry_out, method, tier


def masked(name: str, **more: Any) -> Recipe:
    recipe = method(name, **more)
    return recipe.with_(transforms=[*recipe.transforms, SecureAggregation(least=2)])


def sentence(name: str) -> str | None:
    """Why a recipe is refused under secure aggregation, or None."""
    try:
        masked(name)
    except SettingError as error:
        return str(error)
    return None


REFUSED = {name: why for name in TABLE if (why := sentence(name)) is not None}
NOTHING = {"local"}  # is shared, so there is nothing to sum
SUMMED = [name if place % 6 == 0 else pytest.param(name, marks=tier(name))
          for place, name in enumerate(name for name in TABLE if name not in {*REFUSED, *NOTHING})]  # fmt: skip


@pytest.mark.parametrize("name", SUMMED)
def test_members_of_a_sum_are_shown_the_same(name: str) -> None:
    """Four of five clients in each round, who join at different ones: each sum is opened, and nobody is left out."""
    run = carry_out(masked(name), rounds=4, evaluate_every=0)
    updates = [row for row in run.results if row["kind"] == "train"]
    assert {row["status"] for row in updates} == {"ok"}, {row["reason"] for row in updates}
    assert len(updates) == 16
    asked = {row["kind"] for row in run.results}
    assert {"confirm_survivors", "unmasking"} <= asked
    assert {row["status"] for row in run.results} == {"ok"}


def test_what_clients_may_be_shown_otherwise_is_refused() -> None:
    """Clusters of clients, parts of the model, and models of their own: each with its reason."""
    otherwise = {"ifca", "cfl", "distfl", "hierfavg", "fedamp", "heterofl", "flexlora", "async_dvw", "async_fedavg"}
    assert otherwise <= REFUSED.keys()
    for name in otherwise:
        assert "secure_aggregation" in REFUSED[name]
        assert any(word in REFUSED[name] for word in ("needs individual updates", "every client's own model"))
    for name in NOTHING:
        with pytest.raises(SettingError, match="has nothing to sum"):
            carry_out(masked(name))


@pytest.mark.parametrize("bits", [32, 64])
def test_a_masked_step_is_the_plain_one_within_the_grid(bits: int) -> None:
    """The bound is that of `SecureAggregation`, with the error of a float32 mean."""
    # without dropout, which members of a sum draw alike and others do not
    network = seeded(lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)))
    plain = carry_out(method("fedavg", cohort=5), model=network, rounds=1, evaluate_every=0)
    masking = SecureAggregation(bits=bits)  # type: ignore[arg-type]
    summed = carry_out(
        method("fedavg", cohort=5).with_(transforms=[masking]), model=network, rounds=1, evaluate_every=0
    )
    weights = sum(row["examples"] for row in plain.results if row["kind"] == "train")
    heaviest, clients = 10_000.0, len(SIZES)
    bound = 2 * clients * masking.reach * heaviest / (masking.unit(clients) * weights)
    off = (summed.cluster_models[0] - plain.cluster_models[0]).abs().max().item()
    assert off <= bound + 4 * torch.finfo(torch.float32).eps * plain.cluster_models[0].abs().max().item()
    again = carry_out(method("fedavg", cohort=5).with_(transforms=[masking]), model=network, rounds=1, evaluate_every=0)
    assert torch.equal(again.cluster_models[0], summed.cluster_models[0])
