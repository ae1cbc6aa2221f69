"""Recipes that no other test has at sites: in a run rebuilt from its terms, over the bytes of the wire format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import piebald
from piebald import recipes
from tests.contract.conftest import TABLE

from .conftest import settings
from .in_process import in_process
from .test_runs import RECIPES

pytestmark = pytest.mark.full

ELSEWHERE = {*RECIPES, "flexlora", "heterofl", "fedmd"}  # or in test_unlike_models and test_published_rows
# What comes in another order where nothing costs time: one task at a time.
ONE_BY_ONE = {"fedbuff", "async_fedavg", "async_dvw", "adaptive_dvw"}
NORMED = {"model": {"name": "mlp_bn"}}
FITTING: dict[str, dict[str, Any]] = {
    "cgau": {"model": {"name": "gated_classifier"}},
    "fedbn": NORMED,
    "silobn": NORMED,
}


@pytest.mark.parametrize("name", sorted({*recipes.names()} - ELSEWHERE))
def test_sites_come_to_the_model_of_the_simulator(name: str) -> None:
    own = {"cohort": 1} if name in ONE_BY_ONE else {}
    made = settings({"name": name, **TABLE[name], **own}, rounds=2, **FITTING.get(name, {}))
    plan = made.plan()
    recipe = next(iter(plan.recipes.values()))
    runtimes = [in_process(made), piebald.Simulator(engine="sequential", workers=0)]
    real, simulated = (
        piebald.run(recipe, plan.clients, plan.model, runtime=runtime, rounds=2, seed=made.seed, evaluate_every=0)
        for runtime in runtimes
    )
    assert {row["status"] for row in real.results} == {"ok"}
    if not recipe.training.protects:
        torch.testing.assert_close(real.start(), simulated.start(), atol=1e-5, rtol=1e-5)
