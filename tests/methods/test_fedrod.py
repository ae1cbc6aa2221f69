"""FedRoD, with two heads, against its paper's algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piebald
from piebald import recipes
from piebald.core.errors import PiebaldError, SettingError
from piebald.data.partition import clients_from
from tests.regressions import (
    LR,
    ROUNDS,
    Train,
    classifier,
    federation,
    labelled,
    mean,
    runner,
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Train:
    return runner(tmp_path)


def fedrod(epochs: int) -> tuple[nn.Module, list[nn.Linear]]:
    """Chen, Chao 2022, algorithm 1, with modules: the global model, and the clients' own heads."""
    shared, own = classifier(), [nn.Linear(4, 3) for _ in range(3)]
    for head in own:
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    for _ in range(ROUNDS):
        ends = []
        for head, (x, y) in zip(own, labelled(), strict=True):
            local, prior = classifier(), torch.bincount(y, minlength=3).log()
            local.load_state_dict(shared.state_dict())
            for _ in range(epochs):
                features = local[:2](x)
                generic = local[2](features)
                balanced = nn.functional.cross_entropy(generic + prior, y)
                usual = nn.functional.cross_entropy(generic.detach() + head(features.detach()), y)
                for module, loss in ((local, balanced), (head, usual)):
                    names = list(module.parameters())
                    for parameter, gradient in zip(names, torch.autograd.grad(loss, names), strict=True):
                        parameter.data -= LR * gradient
            ends.append(local.state_dict())
        shared.load_state_dict({name: mean([one[name] for one in ends]) for name in ends[0]})
    return shared, own


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_both_heads_of_fedrod_are_those_of_the_papers_algorithm(run: Train, engine: str) -> None:
    shared, own = fedrod(3)
    ended = run("fedrod", engine, clients=labelled(), model=classifier, batch=100, epochs=3)
    for mine, theirs in zip(ended.model().parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-6)
    for client, head in enumerate(own):
        module = ended.model(client)
        torch.testing.assert_close(module[2].weight, shared[2].weight + head.weight, rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(module[2].bias, shared[2].bias + head.bias, rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(module[0].weight, shared[0].weight, rtol=1e-4, atol=2e-6)


def test_without_balance_the_shared_model_of_fedrod_is_that_of_fedavg(run: Train) -> None:
    more = {"clients": labelled(), "model": classifier, "batch": 5, "epochs": 2}
    one, two = run("fedrod", balanced=False, **more), run("fedavg", **more)
    for mine, theirs in zip(one.model().parameters(), two.model().parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_with_balance_a_client_unlearns_less_and_its_own_head_knows_the_rest(run: Train) -> None:
    """One client, with six times as many rows of one class as of each other one, tested on even classes."""
    held, draw = labelled()[:1], torch.Generator().manual_seed(9)
    even = torch.arange(3).repeat(300)
    inputs = 2 * torch.eye(3)[even] + torch.randn(len(even), 3, generator=draw)
    more = {"clients": held, "model": classifier, "batch": 100, "epochs": 30, "rounds": 1, "lr": 0.3}
    rod, avg = run("fedrod", **more), run("fedavg", **more)
    right = [float((one.model()(inputs).argmax(1) == even).float().mean()) for one in (rod, avg)]
    assert right[0] > right[1] + 0.05
    (x, y), loss = held[0], nn.functional.cross_entropy
    assert loss(rod.model(0)(x), y).detach() < 0.5 * loss(rod.model()(x), y).detach()


def test_settings_and_tasks_that_cannot_work() -> None:
    with pytest.raises(SettingError, match="parameter_groups cannot be used with two_heads"):
        recipes.fedrod(parameter_groups=[{"layers": "*", "lr": 0.1}])
    with pytest.raises(PiebaldError, match="needs classification with one label"):
        piebald.run(recipes.fedrod(), clients_from(federation(), test=0.0), nn.Linear(2, 1), rounds=1)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (nn.Linear(3, 3, bias=False), {}, "must be one linear layer with a bias"),
        (classifier(), {"head": "*"}, "must be one linear layer with a bias"),
        (classifier(), {"head": "0"}, "an output for each of the 3 classes"),
        (classifier(), {"head": "last"}, "there is no layer or role of this model called 'last'"),
        (classifier(), {"sharing": {"kind": "all_except", "private_layers": "classifier"}}, "must be shared"),
    ],
)
def test_heads_that_fedrod_cannot_double(model: nn.Module, settings: dict[str, Any], message: str) -> None:
    sharing = {"sharing": settings.pop("sharing")} if "sharing" in settings else {}
    with pytest.raises(PiebaldError, match=message):
        piebald.run(recipes.fedrod(**settings).with_(**sharing), clients_from(labelled(), test=0.0), model, rounds=1)
