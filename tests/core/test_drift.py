"""Methods against drift, beside plain loops over the papers' equations, and what each of them claims."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import piebald
from piebald import recipes
from piebald.errors import SettingError
from piebald.finished_run import Run
from piebald.partition import clients_from
from piebald.recipe import Recipe

LR, STEPS, ROUNDS = 0.2, 3, 3
PLAIN: dict[str, Any] = {"lr": LR, "steps": STEPS, "batch": 100}  # every batch is all of a client's rows


def sites() -> list[tuple[Tensor, Tensor]]:
    """Three clients of unequal size; each lacks one of four classes, and has one that it has few rows of."""
    draw, made = torch.Generator().manual_seed(3), []
    for client, size in enumerate((9, 14, 20)):
        y = torch.arange(size) % 2 + 2 * (torch.arange(size) % 7 == 0)
        y = (y + client) % 4
        y[y == (client + 3) % 4] = client
        made.append((torch.randn(size, 5, generator=draw) + y[:, None] + 0.5 * client, y))
    return made


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))


def normed(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


def run(recipe: Recipe, model: Callable[[int], nn.Module] = network, **options: Any) -> Run:
    clients = clients_from(sites(), test=0.0, classes=list("abcd"))
    where = piebald.Simulator(engine="sequential", workers=0)
    return piebald.run(
        recipe, clients, model, **{"rounds": ROUNDS, "evaluate_every": 0, "seed": 0, "runtime": where} | options
    )


def features(model: nn.Sequential, x: Tensor) -> Tensor:
    return model[:-1](x)


def descend(model: nn.Module, loss: Callable[[nn.Module], Tensor], steps: int = STEPS) -> None:
    """Gradient descent, by torch's own optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


def averaged(models: list[nn.Module], weights: list[float]) -> nn.Module:
    """The weighted mean of models, with the mean of their float buffers."""
    mean = copy.deepcopy(models[0])
    for name, tensor in mean.state_dict().items():
        parts = [weight * model.state_dict()[name] for weight, model in zip(weights, models, strict=True)]
        tensor.copy_(sum(parts) / sum(weights))  # type: ignore[arg-type]
    return mean


def by_hand(train: Callable[[int, nn.Module, Tensor, Tensor], None], start: nn.Module | None = None) -> nn.Module:
    """Rounds of FedAvg whose clients train a copy of the global model in place."""
    world = start or network()
    for _ in range(ROUNDS):
        locals_ = [copy.deepcopy(world) for _ in sites()]
        for client, ((x, y), model) in enumerate(zip(sites(), locals_, strict=True)):
            train(client, model, x, y)
        world = averaged(locals_, [float(len(y)) for _, y in sites()])
    return world


def apart(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of parameters and buffers."""
    theirs = other.state_dict()
    return max(float((tensor - theirs[name]).abs().max()) for name, tensor in one.state_dict().items())


# ------------------------------------------------------------------------------------------ beside the papers' equations


def plain_moon() -> nn.Module:
    mu, temperature, previous = 2.0, 0.3, [network() for _ in sites()]

    def train(client: int, model: nn.Module, x: Tensor, y: Tensor) -> None:
        world, before = copy.deepcopy(model), previous[client]

        def loss(model: Any) -> Tensor:
            z = features(model, x)
            near = functional.cosine_similarity(z, features(world, x).detach()) / temperature  # type: ignore[arg-type]
            far = functional.cosine_similarity(z, features(before, x).detach()) / temperature
            contrast = -torch.log(near.exp() / (near.exp() + far.exp()))
            return functional.cross_entropy(model(x), y) + mu * contrast.mean()

        descend(model, loss)
        previous[client] = copy.deepcopy(model)  # type: ignore[assignment]

    return by_hand(train)


def plain_fedlc() -> nn.Module:
    def train(client: int, model: nn.Module, x: Tensor, y: Tensor) -> None:
        counts = torch.tensor([max(1e-8, float((y == label).sum())) for label in range(4)])

        def loss(model: nn.Module) -> Tensor:
            calibrated = (model(x) - 0.7 * counts ** (-1 / 4)).exp()
            return -(calibrated[torch.arange(len(y)), y] / calibrated.sum(1)).log().mean()

        descend(model, loss)

    return by_hand(train)


def plain_feddecorr() -> nn.Module:
    def train(client: int, model: nn.Module, x: Tensor, y: Tensor) -> None:
        def loss(model: Any) -> Tensor:
            correlation = torch.corrcoef(features(model, x).T)
            return functional.cross_entropy(model(x), y) + 0.8 * correlation.norm() ** 2 / len(correlation) ** 2

        descend(model, loss)

    return by_hand(train)


def plain_fedsam() -> nn.Module:
    def train(client: int, model: nn.Module, x: Tensor, y: Tensor) -> None:
        for _ in range(STEPS):
            here = copy.deepcopy(model)
            gradients = torch.autograd.grad(functional.cross_entropy(here(x), y), list(here.parameters()))
            length = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            with torch.no_grad():
                for parameter, gradient in zip(here.parameters(), gradients, strict=True):
                    parameter += 0.3 * gradient / length
            above = torch.autograd.grad(functional.cross_entropy(here(x), y), list(here.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), above, strict=True):
                    parameter -= LR * gradient

    return by_hand(train)


def plain_silobn() -> nn.Module:
    """The global model has the affine parameters' means, and the statistics that it began with."""
    kept = [copy.deepcopy(normed()[1]) for _ in sites()]
    world: Any = normed()
    for _ in range(ROUNDS):
        locals_ = [copy.deepcopy(world) for _ in sites()]
        for client, ((x, y), model) in enumerate(zip(sites(), locals_, strict=True)):
            for name in ("running_mean", "running_var"):
                getattr(model[1], name).copy_(getattr(kept[client], name))
            descend(model, lambda model, x=x, y=y: functional.cross_entropy(model(x), y))  # type: ignore[misc]
            kept[client] = copy.deepcopy(model[1])
        world = averaged(locals_, [float(len(y)) for _, y in sites()])
        world[1].reset_running_stats()
    return world  # type: ignore[no-any-return]


def plain_scaffold() -> nn.Module:
    """Algorithm 1, option I, of which every client takes part in each round."""
    world, clients = network(), range(len(sites()))
    common = [torch.zeros_like(parameter) for parameter in world.parameters()]
    own = [[torch.zeros_like(parameter) for parameter in world.parameters()] for _ in clients]
    for _ in range(ROUNDS):
        locals_, fresh = [copy.deepcopy(world) for _ in clients], []
        for client, ((x, y), model) in enumerate(zip(sites(), locals_, strict=True)):
            at = torch.autograd.grad(functional.cross_entropy(world(x), y), list(world.parameters()))
            fresh.append(list(at))
            for _ in range(STEPS):
                g = torch.autograd.grad(functional.cross_entropy(model(x), y), list(model.parameters()))
                with torch.no_grad():
                    for p, one, mine, all_ in zip(model.parameters(), g, own[client], common, strict=True):
                        p -= LR * (one - mine + all_)
        world = averaged(locals_, [1.0] * len(locals_))  # type: ignore[assignment]
        for place, before in enumerate(common):
            common[place] = before + sum(fresh[k][place] - own[k][place] for k in clients) / len(locals_)
        own = fresh
    return world


def plain_fedala() -> nn.Module:
    """Algorithm 1 with all rows and all layers; the first task changes nothing, as W = 1 and both models are equal."""
    last = [network() for _ in sites()]
    weights = [[torch.ones_like(parameter) for parameter in network().parameters()] for _ in sites()]

    def train(client: int, model: nn.Module, x: Tensor, y: Tensor) -> None:
        old, sent, w = list(last[client].parameters()), list(copy.deepcopy(model).parameters()), weights[client]
        start = copy.deepcopy(model)

        def place() -> None:
            with torch.no_grad():
                for p, a, b, share in zip(start.parameters(), old, sent, w, strict=True):
                    p.copy_(a + (b - a) * share)

        place()
        g = torch.autograd.grad(functional.cross_entropy(start(x), y), list(start.parameters()))
        for share, one, a, b in zip(w, g, old, sent, strict=True):
            share.copy_((share - 3.0 * one * (b - a).detach()).clamp(0, 1))
        place()
        model.load_state_dict(start.state_dict())
        descend(model, lambda model: functional.cross_entropy(model(x), y))
        last[client] = copy.deepcopy(model)  # type: ignore[assignment]

    return by_hand(train)


BESIDE: dict[str, tuple[Recipe, Callable[[], nn.Module], Any]] = {
    "MOON": (recipes.moon(mu=2.0, temperature=0.3, **PLAIN), plain_moon, network),
    "FedLC": (recipes.fedlc(tau=0.7, **PLAIN), plain_fedlc, network),
    "FedDecorr": (recipes.feddecorr(beta=0.8, **PLAIN), plain_feddecorr, network),
    "FedSAM": (recipes.fedsam(rho=0.3, **PLAIN), plain_fedsam, network),
    "SiloBN": (recipes.silobn(**PLAIN), plain_silobn, normed),
    "SCAFFOLD, option I": (recipes.scaffold(option="I", **PLAIN), plain_scaffold, network),
    "FedALA": (
        recipes.fedala(weight_lr=3.0, weight_share=1.0, adaptive_layers="*", **PLAIN), plain_fedala, network,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE)
def test_equals_a_plain_loop_over_the_papers_equations(case: str) -> None:
    recipe, plain, model = BESIDE[case]
    found, fedavg = run(recipe, model).model(), run(recipes.fedavg(**PLAIN), model).model()
    names = [name for name, _ in found.named_parameters()]
    expected = {name: tensor for name, tensor in plain().state_dict().items() if name in names}
    away = max(float((found.state_dict()[name] - tensor).abs().max()) for name, tensor in expected.items())
    other = max(float((fedavg.state_dict()[name] - tensor).abs().max()) for name, tensor in expected.items())
    assert away < 1e-5 < 1e-3 < other, f"{away} from the equations, which are {other} from FedAvg"
