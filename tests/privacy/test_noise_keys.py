"""Noise of simulations: runs that differ in what they compute share none, and all others are the same to the bit.

Two runs that shared noise would give away the difference of what it hides.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import piebald
from piebald import recipes
from piebald.core.randomness import torch_seed
from piebald.methods.recipe import Recipe
from piebald.methods.transforms import Gaussian
from piebald.runs import prepare as prepared
from tests.fakes import classified, simulate

ROWS = recipes.dp_sgd(lr=0.5, batch=4, noise=1.0)
UPDATES = recipes.fedavg(lr=0.5, batch=4).with_(transforms=[Gaussian(clip=1.0, noise=1.0, where="client")])


class Halved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


Doubled.__name__ = Doubled.__qualname__ = "Halved"  # two classes of one name


def halved(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * cross_entropy(outputs, targets)


def doubled(outputs: Tensor, targets: Tensor) -> Tensor:
    return 2.0 * cross_entropy(outputs, targets)


def model(between: type[nn.Module] = nn.Tanh, last: type[nn.Linear] = nn.Linear) -> nn.Module:
    with torch_seed(0):
        return nn.Sequential(nn.Linear(4, 3), between(), last(3, 2))


def noisy(
    network: nn.Module | None = None, simulator: Any = None, rounds: int = 2, recipe: Recipe = ROWS, **options: Any
) -> piebald.Run:
    settings = {"engine": "sequential", **(simulator or {})}
    return simulate(recipe, classified(8, 6, 9), network or model(), rounds=rounds, simulator=settings, **options)


@pytest.mark.full
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"network": model(nn.Sigmoid)}),
        ({"network": model(last=Halved)}, {"network": model(last=Doubled)}),
        ({"loss": halved}, {"loss": doubled}),
        ({"recipe": UPDATES}, {"recipe": UPDATES, "simulator": {"bfloat16": True}}),
    ],
    ids=["activation", "forward", "loss", "bfloat16"],
)
def test_models_losses_and_precisions_that_compute_something_else_share_no_noise(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    """Before, two networks of the same parameters had the same noise, and so runs in half precision."""
    assert noisy(**one).meta["noise_key"] != noisy(**other).meta["noise_key"]
    assert noisy(**one).meta["noise_key"] == noisy(**one).meta["noise_key"]


# with which each of these settings is another one
VARIED: dict[str, dict[str, Any]] = {
    "checkpoint_every": {"checkpoint_every": 2},
    "evaluate": {"evaluate_every": 0},
    "label": {"label": "another"},
    "measure": {"measure": "none"},
    "metrics": {"metrics": ["accuracy", "auc"]},
    "metric": {"metrics": {"error": lambda outputs, targets: (outputs.argmax(1) != targets).float()}},
    "per_class": {"per_class": True},
    "runtime": {"simulator": {"stack": 3, "engine": "sequential"}},
    "stop": {"stop": {"seconds": 1e6, "updates": 1000}},
}
# what a run is made with or from, and what is told of it
DESCRIBES = {"piebald", "torch", "python", "machine", "plugins", "settings", "paper", "gathered_bytes", "privacy"}
DESCRIBES |= {"trackers", "threshold", "keep", "higher_is_better"}


def test_what_the_noise_does_not_follow_from_is_listed_here() -> None:
    assert {*VARIED, "rounds"} | DESCRIBES == prepared._NO_INFLUENCE


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(VARIED))
def test_a_setting_without_another_noise_changes_no_number(name: str) -> None:
    plain, varied = noisy(), noisy(**VARIED[name])
    assert plain.meta[name] != varied.meta[name]
    assert plain.meta["noise_key"] == varied.meta["noise_key"]
    for tensor, theirs in zip(plain.model().parameters(), varied.model().parameters(), strict=True):
        assert torch.equal(tensor, theirs)


@pytest.mark.full
def test_a_run_of_more_rounds_begins_with_the_same_ones() -> None:
    fewer, more = noisy(rounds=2), noisy(rounds=3)
    assert fewer.meta["noise_key"] == more.meta["noise_key"]
    assert [row["norm"] for row in fewer.results] == [row["norm"] for row in more.results if row["version"] <= 2]
