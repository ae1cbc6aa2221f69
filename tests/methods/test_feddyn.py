"""FedDyn against its equations, written out plainly (Acar et al. 2021, algorithm 1)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import piebald
from piebald import recipes
from piebald.core.errors import SettingError
from piebald.data.partition import clients_from

LR, ALPHA, STEPS, ROUNDS = 0.05, 0.3, 3, 4


def federation() -> list[tuple[Tensor, Tensor]]:
    """Three clients whose regressions have different solutions."""
    draw = torch.Generator().manual_seed(3)
    made = []
    for client in range(3):
        x = torch.randn(8, 2, generator=draw)
        made.append((x, (x * torch.tensor([1.0 + client, -client])).sum(1, keepdim=True)))
    return made


def linear(seed: int) -> nn.Module:
    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, 0.5)
    return module


def by_hand(clients: list[tuple[Tensor, Tensor]], rounds: int) -> Tensor:
    """The global model after some rounds in which all clients take part."""
    w, h = torch.full((2,), 0.5), torch.zeros(2)
    own = [torch.zeros(2) for _ in clients]
    for _ in range(rounds):
        moved = []
        for k, (x, y) in enumerate(clients):
            v = w.clone()
            for _ in range(STEPS):
                gradient = 2 * x.T @ (x @ v - y.squeeze(1)) / len(x)
                v = v - LR * (gradient - own[k] + ALPHA * (v - w))
            own[k] = own[k] - ALPHA * (v - w)
            moved.append(v - w)
        h = h - ALPHA * torch.stack(moved).sum(0) / len(clients)
        w = w + torch.stack(moved).mean(0) - h / ALPHA
    return w


@pytest.mark.parametrize("engine", ["reference", "sequential"])
def test_all_clients_follow_the_papers_equations(engine: str) -> None:
    run = piebald.run(
        recipes.feddyn(alpha=ALPHA, lr=LR, batch=8, steps=STEPS), clients_from(federation(), test=0.0), linear,
        rounds=ROUNDS, evaluate_every=0, runtime=piebald.Simulator(engine=engine, workers=0),
    )  # fmt: skip
    torch.testing.assert_close(run.model().weight.detach()[0], by_hand(federation(), ROUNDS), rtol=1e-4, atol=1e-5)


def test_the_correction_counts_all_clients_though_few_arrive() -> None:
    """One round with one client of three: the server state moves by alpha / 3 of its change."""
    recipe = recipes.feddyn(cohort=1, alpha=ALPHA, lr=LR, batch=8, steps=STEPS)
    clients = federation()
    run = piebald.run(recipe, clients_from(clients, test=0.0), linear, rounds=1, evaluate_every=0, seed=1)
    (chosen,) = (row["client"] for row in run.results)
    w, v = torch.full((2,), 0.5), torch.full((2,), 0.5)
    x, y = clients[chosen]
    for _ in range(STEPS):
        v = v - LR * (2 * x.T @ (x @ v - y.squeeze(1)) / len(x) + ALPHA * (v - w))
    expected = w + (v - w) + (v - w) / 3
    torch.testing.assert_close(run.model().weight.detach()[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_it_reaches_the_minimum_of_all_where_fedavg_does_not() -> None:
    """Many local steps carry FedAvg to a point between the clients' own solutions; FedDyn removes that bias."""
    clients = federation()
    x, y = torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients])
    best = torch.linalg.lstsq(x, y).solution.squeeze(1)
    apart = {}
    for recipe in (recipes.fedavg(lr=LR, batch=8, steps=20), recipes.feddyn(alpha=ALPHA, lr=LR, batch=8, steps=20)):
        run = piebald.run(recipe, clients_from(clients, test=0.0), linear, rounds=60, evaluate_every=0)
        apart[recipe.name] = float((run.model().weight.detach()[0] - best).norm())
    assert apart["feddyn"] < 0.1 * apart["fedavg"], apart


@pytest.mark.parametrize(
    ("components", "wrong"),
    [
        ({"training": {"kind": "sgd"}}, "alpha = .* would have no effect"),
        ({"training": {"kind": "dynamic_regularization", "alpha": 0.5}}, "same alpha"),
        ({"aggregation": "example_weighted"}, "plain mean"),
    ],
)
def test_halves_that_do_not_belong_together_are_refused(components: dict[str, object], wrong: str) -> None:
    with pytest.raises(SettingError, match=wrong):
        recipes.feddyn(alpha=0.1).with_(**components)
