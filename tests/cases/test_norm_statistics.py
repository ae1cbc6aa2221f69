"""Case 02: server optimizers on networks that keep statistics.  `tests/contract/test_statistics.py` has all recipes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import data, partition, recipes
from piebald.core.errors import SettingError
from piebald.core.randomness import torch_seed
from piebald.methods.recipe import Recipe
from tests.contract.conftest import HERE


@functools.cache
def digits() -> Any:
    return partition.Dirichlet(clients=6, alpha=10.0, sizes={"kind": "skewed", "ratio": 4.0}, limit=900).split(
        data.digits()
    )


class Renorm(nn.Module):
    """Batch renormalization (Ioffe 2017) as a user writes it, with buffers that no class of torch has."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("deviation", torch.ones(width))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = self.mean, self.deviation
        if self.training:
            mean, deviation = x.mean(0), x.std(0, unbiased=False) + 1e-3
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * mean)
                self.deviation.mul_(0.9).add_(0.1 * deviation)
        return (x - mean) / deviation * self.weight + self.bias


def flat(norm: Callable[[], nn.Module]) -> nn.Module:
    with torch_seed(1):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), norm(), nn.ReLU(), nn.Linear(24, 10))


def spatial(norm: Callable[[], nn.Module]) -> nn.Module:
    with torch_seed(1):
        layers = nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), norm(), nn.ReLU(), nn.Flatten()
        return nn.Sequential(*layers, nn.Linear(36, 10))


NETWORKS: dict[str, nn.Module] = {
    "batch": flat(lambda: nn.BatchNorm1d(24)),
    "cumulative": flat(lambda: nn.BatchNorm1d(24, momentum=None)),
    "renorm": flat(lambda: Renorm(24)),
    "instance": spatial(lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
}


def trained(recipe: Recipe, network: str, rounds: int) -> piebald.Run:
    runtime = piebald.Simulator(**HERE)
    return piebald.run(
        recipe, digits(), NETWORKS[network], rounds=rounds, seed=1, evaluate_every=0, per_class=False, runtime=runtime
    )


@pytest.mark.parametrize(
    ("recipe", "network"),
    [
        ("fedadam", "batch"), ("fedyogi", "batch"), ("fedadam", "cumulative"), ("fedadam", "renorm"),
        ("feddyn", "renorm"), ("fedadam", "instance"),
    ],
)  # fmt: skip
def test_models_are_as_good_as_with_the_statistics_of_the_inputs(recipe: str, network: str) -> None:
    """Some clients a round, of unequal sizes."""
    made = recipes.make(recipe, lr=0.1, batch=16, batches="exact", cohort=3)
    run, rows = trained(made, network, 12), digits().common
    accuracies = []
    for own in (False, True):
        with torch.no_grad():
            outputs = run.model().train(own)(rows.x)
        accuracies.append(float((outputs.argmax(1) == rows.y).float().mean()))
    assert accuracies[1] > 0.7
    assert abs(accuracies[0] - accuracies[1]) < 0.02


@pytest.mark.parametrize("transform", ["top_k", "sign", "secure_aggregation"])
def test_compression_and_masks_leave_the_mean_of_statistics(transform: str) -> None:
    recipe = recipes.fedavg(lr=0.1, batch=16)
    held, mean = (
        dict(trained(made, "batch", 1).model().named_buffers())
        for made in (recipe.with_(transforms=[transform]), recipe)
    )
    for name in ("2.running_mean", "2.running_var"):
        torch.testing.assert_close(held[name], mean[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "model",
    [
        flat(lambda: nn.BatchNorm1d(24, track_running_stats=False)),
        spatial(lambda: nn.BatchNorm2d(4, track_running_stats=False)),
    ],
)
def test_a_batch_norm_without_running_statistics_is_told_before_training(model: nn.Module) -> None:
    with pytest.raises(
        SettingError, match=r"BatchNorm.d '2' of the model keeps no running .* track_running_stats=False"
    ):
        piebald.run("fedavg", digits(), model, rounds=1)
