"""Three regressions with unlike solutions, for methods that give each client a model of its own.

The model is a body and a head without biases, and batches are whole unless a test says otherwise: then the order of
rows changes nothing, and every number can be followed by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.data.partition import clients_from
from piebald.runs.finished_run import Run

LR, ROUNDS, ROWS = 0.05, 3, 8
Pair = tuple[Tensor, Tensor]


def federation() -> list[Pair]:
    draw = torch.Generator().manual_seed(3)
    made = []
    for client in range(3):
        x = torch.randn(ROWS, 2, generator=draw)
        made.append((x, (x * torch.tensor([1.0 + client, -client])).sum(1, keepdim=True)))
    return made


def two_layers(seed: int = 0) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([[0.5, -0.2], [0.3, 0.4]]))
        module[1].weight.copy_(torch.tensor([[0.6, -0.5]]))
    return module


START: Pair = tuple(parameter.detach().clone() for parameter in two_layers().parameters())  # type: ignore[assignment]


def slope(body: Tensor, head: Tensor, rows: Pair) -> Pair:
    """The gradient of the mean squared error of x -> head @ body @ x."""
    x, y = rows
    error = 2 * (x @ body.T @ head.T - y) / len(x)
    return head.T @ error.T @ x, error.T @ x @ body.T


Train = Callable[..., Run]


def runner(folder: Path) -> Train:
    """What runs a recipe by name; what clients keep is in a folder."""
    count = itertools.count()

    def train(name: str, engine: str = "sequential", rounds: int = ROUNDS, **settings: Any) -> Run:
        held, model = settings.pop("clients", federation()), settings.pop("model", two_layers)
        recipe = recipes.make(name, **{"lr": LR, "batch": ROWS} | settings)
        clients, where = clients_from(held, test=0.0), piebald.Simulator(engine=engine, workers=0)
        options: dict[str, Any] = {"rounds": rounds, "evaluate_every": 0, "out": folder / str(next(count))}
        return piebald.run(recipe, clients, model, runtime=where, **options)

    return train


def parts(model: nn.Module) -> Pair:
    body, head = (parameter.detach() for parameter in model.parameters())
    return body, head


def mean(vectors: list[Tensor]) -> Tensor:
    return torch.stack(vectors).mean(0)


def along(start: Pair, direction: Pair, length: float) -> Pair:
    return start[0] + length * direction[0], start[1] + length * direction[1]


def moved(start: Pair, other: Pair, share: float) -> Pair:
    """The point between two that is this share of the way away from the first."""
    return along(start, along(other, start, -1), share)


def mean_of(ends: list[Pair]) -> Pair:
    return mean([body for body, _ in ends]), mean([head for _, head in ends])


def same(one: Run, other: Run) -> bool:
    """Whether the models that each client uses have the same bits."""
    pairs = [(parts(one.model(client)), parts(other.model(client))) for client in (None, 0, 1, 2)]
    return all(torch.equal(a, b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


def labelled() -> list[Pair]:
    """Three clients, each with 12 rows of one class and 2 of each other one."""
    draw, made = torch.Generator().manual_seed(2), []
    for client in range(3):
        y = torch.tensor([label for label in range(3) for _ in range(12 if label == client else 2)])
        made.append((2 * torch.eye(3)[y] + torch.randn(len(y), 3, generator=draw), y))
    return made


def classifier(seed: int = 0) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=draw))
    return module
