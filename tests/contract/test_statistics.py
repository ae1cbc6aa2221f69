"""Running statistics are averaged, whatever a recipe does with parameters: models are as good with them as with those
of the inputs at hand.

Clients are of unequal sizes and not alike, only some of them are asked at a time, and there is momentum.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import data, models, partition, recipes
from piebald.contracts import Personalizes, StepContext
from piebald.contracts.component import Component
from piebald.core.parameters import Layout
from piebald.core.randomness import torch_seed
from piebald.methods.recipe import Recipe
from piebald.methods.server_optimizer.base import ServerOptimizer
from tests.contract.conftest import HERE, TABLE, method

NEAR = 0.02  # accuracy
PERSONAL = 0.03  # of personal models, whose last steps are on few rows
QUICK = ("fedadam", "fedavgm", "feddyn", "fednova", "fedasync")
ROUNDS = {
    "fedasync": 48,
    "async_fedavg": 48,
    "async_dvw": 48,
    "adaptive_dvw": 48,
    "fedbuff": 24,
}  # steps of few updates
# mild settings, where those of the table are for engines: a mean over many tasks has statistics of none of them
MORE: dict[str, dict[str, Any]] = {"fedphp": {"horizon": 100}, "qfedavg": {"q": 0.5}}
WITHOUT = {"flexlora", "dp_sgd"}  # no batch norm in adapters; refused, see below


@functools.cache
def clients() -> Any:
    sizes = {"kind": "skewed", "ratio": 4.0}
    split = partition.Dirichlet(clients=5, alpha=10.0, sizes=sizes, validation=0.1, public_rows=100, seed=2)
    return split.split(data.digits())


def network(name: str = "") -> nn.Module:
    gate: list[nn.Module] = [models.GatedUnit(32, 32)] if name == "cgau" else []
    with torch_seed(1):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), *gate, nn.Linear(32, 10))


def accuracies(modules: Iterable[nn.Module], rows: Iterable[piebald.Rows]) -> tuple[float, float]:
    """The accuracy of models on rows of theirs, with the statistics they hold, and with those of the rows."""
    pairs = list(zip(modules, rows, strict=True))
    right = [0.0, 0.0]
    for module, part in pairs:
        for place in (0, 1):
            module.train(place == 1)
            with torch.no_grad():
                right[place] += float((module(part.x).argmax(1) == part.y).sum())
    count = sum(len(part.y) for _, part in pairs)
    return right[0] / count, right[1] / count


def checked(recipe: Recipe, rounds: int, folder: Path | None = None, name: str = "") -> None:
    """Run a recipe, and compare both accuracies; of personal models, if there are any, on clients' test rows."""
    run = piebald.run(
        recipe, clients(), network(name), rounds=rounds, seed=1, out=folder, evaluate_every=0,
        runtime=piebald.Simulator(**HERE),
    )  # fmt: skip
    if folder is not None:
        everybody = range(len(clients()))
        modules = [run.model(client) for client in everybody]
        as_it_is, afresh = accuracies(modules, [clients().rows(client, "test") for client in everybody])
    else:
        as_it_is, afresh = accuracies([run.model()], [clients().common])
    assert afresh > 0.7, "the model has learned something"
    assert abs(as_it_is - afresh) <= (NEAR if folder is None else PERSONAL)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in sorted(set(TABLE) - WITHOUT)],
)
def test_every_recipe_averages_statistics(name: str, tmp_path: Path) -> None:
    recipe = method(name, cohort=4, batch=16, **MORE.get(name, {}))
    personal = isinstance(recipe.training, Personalizes) or bool(recipe.sharing.private(network(name)))
    checked(recipe, ROUNDS.get(name, 14), tmp_path / "run" if personal else None, name)


@pytest.mark.full
@pytest.mark.parametrize("name", ["fedavg", "fedadam", "fedavgm", "fednova", "feddyn", "fedprox", "fedbuff"])
def test_with_momentum_at_clients(name: str) -> None:
    checked(method(name, cohort=3, batch=16, lr=0.05, momentum=0.8, **MORE.get(name, {})), 24)


class PlainNesterov(ServerOptimizer):
    """The example of CONTRIBUTING.md, which knows nothing of statistics."""

    def initial_state(self, model: Tensor) -> dict[str, Tensor]:
        return {"velocity": torch.zeros_like(model)}

    def step(self, model: Tensor, average: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        velocity = 0.9 * context.state["velocity"] + average
        return model + average + 0.9 * velocity, {"velocity": velocity}


OPTIMIZERS = sorted(set(Component.registry["server_optimizer"]) - {"dynamic_correction"})  # in feddyn, above


@pytest.mark.parametrize(
    "kind", [kind if kind == "plain_nesterov" else pytest.param(kind, marks=pytest.mark.full) for kind in OPTIMIZERS]
)
def test_every_server_optimizer_leaves_statistics_alone(kind: str) -> None:
    checked(recipes.fedavg(cohort=3, lr=0.1, batch=16).with_(server_optimizer=kind), 14)


def statistics(vector: Tensor) -> Tensor:
    return vector[Layout.of(network()).statistics]


@pytest.mark.parametrize("optimizer", [{"kind": "momentum", "lr": 3.0}, {"kind": "adam", "lr": 1.0}, "plain_nesterov"])
def test_a_round_brings_the_clients_mean_to_the_bit(optimizer: Any) -> None:
    """After one round from one model, statistics are those of FedAvg whatever the server optimizer does."""
    plain = recipes.fedavg(lr=0.1, batch=16)
    ends = [
        piebald.run(recipe, clients(), network(), rounds=1, seed=1, runtime=piebald.Simulator(**HERE))
        for recipe in (plain, plain.with_(server_optimizer=optimizer))
    ]
    first, second = (end.cluster_models[0] for end in ends)
    assert torch.equal(statistics(first), statistics(second))
    assert not torch.equal(first, second)
