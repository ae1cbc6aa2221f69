"""Two rounds of personal methods, computed again from their papers' equations: only CGAU's unit is Piebald's.

Four clients hold unequally many digits, of unlike classes; a batch is all rows of a client.  The programs of others in
benchmarks/crosscheck are run on clients of equal sizes, where weights by examples and equal ones are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

import piebald
from piebald import recipes
from piebald.contracts import Rows
from piebald.data.partition import Lists, PooledClients
from piebald.models.gated import GatedUnit

SIZES, LR, EPOCHS, ROUNDS, WIDTH, CLASSES = (30, 52, 20, 41), 0.2, 2, 2, 6, 10
SHARES = torch.tensor(SIZES) / sum(SIZES)
K = range(len(SIZES))
Loss = Callable[[Tensor, int], Tensor]


def rows() -> tuple[list[Tensor], list[Tensor]]:
    """Digits of each client: the first has small ones, the last large ones."""
    x, y = load_digits(return_X_y=True)
    order = np.argsort(y[:800] + np.random.default_rng(0).normal(0, 2.5, 800))[:: 800 // sum(SIZES)][: sum(SIZES)]
    ends = np.cumsum((0, *SIZES))
    parts = [order[a:b] for a, b in pairwise(ends)]
    return [torch.tensor(x[one] / 16).float() for one in parts], [torch.tensor(y[one]) for one in parts]


X, Y = rows()


class Network(nn.Module):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh())
        self.classifier = nn.Linear(WIDTH, CLASSES)
        drawn = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(torch.randn(one.shape, generator=drawn) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.body(x))
        return logits


START = nn.utils.parameters_to_vector(Network().parameters()).detach().double()
BODY = 64 * WIDTH + WIDTH  # numbers of it; the head's come afterwards
PARTS = [one.shape for one in Network().parameters()]
IN_HEAD = torch.arange(len(START)) >= BODY


def outputs(w: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Logits and features of a client's rows."""
    a, b, c, d = (one.view(s) for one, s in zip(w.split([s.numel() for s in PARTS]), PARTS, strict=True))
    features = torch.tanh(X[k].double() @ a.T + b)
    return features @ c.T + d, features


def plain(w: Tensor, k: int) -> Tensor:
    return cross_entropy(outputs(w, k)[0], Y[k])


def slope(w: Tensor, k: int, loss: Loss = plain) -> Tensor:
    w = w.clone().requires_grad_()
    return torch.autograd.grad(loss(w, k), w)[0]


def trained(w: Tensor, k: int, loss: Loss = plain, where: Tensor | float = 1.0, steps: int = EPOCHS) -> Tensor:
    for _ in range(steps):
        w = w - LR * slope(w, k, loss) * where
    return w


def by_rows(models: list[Tensor]) -> Tensor:
    return torch.einsum("k,kp->p", SHARES.double(), torch.stack(models))


def equally(models: list[Tensor]) -> Tensor:
    return torch.stack(models).mean(0)


Result = tuple[Tensor | None, list[Tensor]]  # the global model, and each client's own


def ditto() -> Result:
    """Li et al. 2021, algorithm 1."""
    w, own = START, [START] * 4
    for _ in range(ROUNDS):
        for k in K:
            own[k] = trained(own[k], k, lambda v, k, w=w: plain(v, k) + 0.35 * (v - w).square().sum())
        w = by_rows([trained(w, k) for k in K])
    return w, own


def apfl() -> Result:
    """Deng et al. 2020, algorithm 1."""
    w, own, a = START, [START] * 4, [0.3] * 4
    for _ in range(ROUNDS):
        sent = []
        for k in K:
            u, v, mix = w, own[k], a[k]
            for step in range(EPOCHS):
                g = slope(mix * v + (1 - mix) * u, k)
                learned = mix if step else min(max(mix - LR * float((v - u) @ g), 0), 1)
                u, v, mix = u - LR * slope(u, k), v - LR * mix * g, learned
            own[k], a[k] = v, mix
            sent.append(u)
        w = equally(sent)
    return w, [a[k] * own[k] + (1 - a[k]) * w for k in K]


def fedrep() -> Result:
    """Collins et al. 2021, algorithm 1."""
    body, heads = START[:BODY], [START[BODY:]] * 4
    for _ in range(ROUNDS):
        ends = [trained(torch.cat([body, heads[k]]), k, where=IN_HEAD, steps=3) for k in K]
        ends = [trained(one, k, where=~IN_HEAD) for k, one in enumerate(ends)]
        body, heads = equally(ends)[:BODY], [one[BODY:] for one in ends]
    return None, [torch.cat([body, head]) for head in heads]


def fedbabu() -> Result:
    """Oh et al. 2022, algorithm 1."""
    w = START
    for _ in range(ROUNDS):
        w = by_rows([trained(w, k, where=~IN_HEAD) for k in K])
    return None, [trained(w, k, steps=3) for k in K]


def fedrod() -> Result:
    """Chen, Chao 2022, eqs. 5 to 7."""
    logs = [Y[k].bincount(minlength=CLASSES).double().log() for k in K]
    w, heads = START, [torch.zeros(len(START) - BODY).double()] * 4
    for _ in range(ROUNDS):
        sent = []
        for k in K:
            u, h = w, heads[k]
            for _ in range(EPOCHS):
                whole = torch.cat([u[:BODY], u[BODY:] + h])
                g = slope(u, k, lambda v, k: cross_entropy(outputs(v, k)[0] + logs[k], Y[k]))
                u, h = u - LR * g, h - LR * slope(whole, k)[BODY:]
            heads[k] = h
            sent.append(u)
        w = by_rows(sent)
    return w, [torch.cat([w[:BODY], w[BODY:] + h]) for h in heads]


def pfedme() -> Result:
    """Dinh et al. 2020, algorithm 1, with beta 0.8."""
    w, own = START, [START] * 4
    for _ in range(ROUNDS):
        sent = []
        for k in K:
            u = t = w
            for _ in range(EPOCHS):
                for _ in range(3):
                    t = t - LR * (slope(t, k) + 1.5 * (t - u))
                u = u - 0.2 * 1.5 * (u - t)
            own[k] = t
            sent.append(u)
        w = 0.2 * w + 0.8 * equally(sent)
    return w, own


def per_fedavg() -> Result:
    """Fallah et al. 2020, algorithm 1, without the Hessian."""
    w = START
    for _ in range(ROUNDS):
        sent = []
        for k in K:
            u = w
            for _ in range(EPOCHS):
                u = u - LR * slope(u - 0.15 * slope(u, k), k)
            sent.append(u)
        w = equally(sent)
    return w, [w - 0.15 * slope(w, k) for k in K]


def fedamp() -> Result:
    """Huang et al. 2021, algorithm 1: A(x) = 1 - exp(-x / 40), alpha 4."""
    u, own = [START] * 4, [START] * 4
    for _ in range(ROUNDS):
        own = [trained(u[k], k, lambda v, k, c=u[k]: plain(v, k) + 0.25 * (v - c).square().sum()) for k in K]
        u = []
        for k in K:
            a = [0.0 if j == k else 4 / 40 * math.exp(-float((own[k] - own[j]).square().sum()) / 40) for j in K]
            u.append((1 - sum(a)) * own[k] + sum((a[j] * own[j] for j in K), torch.zeros(())))
    return None, own


def fedphp() -> Result:
    """Li et al. 2021, after the authors' program: a sum of five kernels around the mean squared distance."""

    def with_discrepancy(inherited: Tensor) -> Loss:
        def loss(w: Tensor, k: int) -> Tensor:
            logits, mine = outputs(w, k)
            both = torch.cat([mine, outputs(inherited, k)[1]])
            apart, n = (both[:, None] - both[None]).square().sum(-1), len(mine)
            middle = apart.detach().sum() / (2 * n * (2 * n - 1))
            kernel = sum(torch.exp(-apart / (middle * factor)) for factor in (0.25, 0.5, 1, 2, 4))
            assert isinstance(kernel, Tensor)
            mmd = kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()
            return 0.6 * cross_entropy(logits, Y[k]) + 0.4 * mmd

        return loss

    w, own = START, [START] * 4
    for number in range(ROUNDS):
        ends = [trained(w, k, with_discrepancy(own[k])) for k in K]
        mu = 0.9 * number / 2
        own = [mu * old + (1 - mu) * new for old, new in zip(own, ends, strict=True)]
        w = by_rows(ends)
    return w, own


def moon() -> Result:
    """Li, He, Song 2021, eq. 3 and 4."""
    w, last = START, [START] * 4
    for _ in range(ROUNDS):

        def loss(v: Tensor, k: int, sent: Tensor = w, before: list[Tensor] = last) -> Tensor:
            logits, z = outputs(v, k)
            near = cosine_similarity(z, outputs(sent, k)[1]) / 0.5
            far = cosine_similarity(z, outputs(before[k], k)[1]) / 0.5
            return cross_entropy(logits, Y[k]) - 1.5 * (near - torch.logaddexp(near, far)).mean()

        last = [trained(w, k, loss) for k in K]
        w = by_rows(last)
    return w, [w] * 4


def fedlc() -> Result:
    """Zhang et al. 2022, section 4, over all classes."""
    margins = [0.8 * Y[k].bincount(minlength=CLASSES).double().clamp(min=1e-8) ** -0.25 for k in K]
    w = START
    for _ in range(ROUNDS):
        w = by_rows([trained(w, k, lambda v, k: cross_entropy(outputs(v, k)[0] - margins[k], Y[k])) for k in K])
    return w, [w] * 4


def scaffold() -> Result:
    """Karimireddy et al. 2020, algorithm 1, option II, with a server's rate of 0.9."""
    w, c, own = START, torch.zeros_like(START), [torch.zeros_like(START)] * 4
    for _ in range(ROUNDS):
        ends, before = [], own
        for k in K:
            u = w
            for _ in range(EPOCHS):
                u = u - LR * (slope(u, k) - own[k] + c)
            ends.append(u)
        own = [own[k] - c + (w - ends[k]) / (EPOCHS * LR) for k in K]
        c = c + equally([new - old for new, old in zip(own, before, strict=True)])
        w = w + 0.9 * (equally(ends) - w)
    return w, [w] * 4


def hdafl() -> Result:
    """Yang et al. 2020, algorithm 1: the mean of the generic layers by rows, each client's own classifier."""
    body, heads = START[:BODY], [START[BODY:]] * 4
    for _ in range(ROUNDS):
        ends = [trained(torch.cat([body, heads[k]]), k) for k in K]
        body, heads = by_rows(ends)[:BODY], [end[BODY:] for end in ends]
    return None, [torch.cat([body, head]) for head in heads]


class Gated(nn.Module):
    """A gated unit with a client's vectors, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.unit, self.classifier = GatedUnit(64, WIDTH), nn.Linear(WIDTH, CLASSES)
        drawn = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for tensor in (self.unit.product.weight, *self.classifier.parameters()):
                tensor.copy_(torch.randn(tensor.shape, generator=drawn) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.unit(x))
        return logits


def cgau() -> Result:
    """Rieger et al. 2020, section 3: h = tanh(W_f x + V_f c) sigmoid(W_g x + V_g c), all but c's V_f, V_g averaged."""
    shapes = [part.shape for part in Gated().parameters()]  # V_f c, V_g c, both W as one, the head

    def loss(w: Tensor, k: int) -> Tensor:
        parts = w.split([shape.numel() for shape in shapes])
        f, g, both, weight, bias = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        x, own = X[k].double(), slice(0, WIDTH)
        h = torch.tanh(x @ both[own].T + f) * torch.sigmoid(x @ both[WIDTH:].T + g)
        return cross_entropy(h @ weight.T + bias, Y[k])

    start = nn.utils.parameters_to_vector(Gated().parameters()).detach().double()
    own, shared = [start[: 2 * WIDTH]] * 4, start[2 * WIDTH :]
    for _ in range(ROUNDS):
        ends = [trained(torch.cat([own[k], shared]), k, loss) for k in K]
        own, shared = [end[: 2 * WIDTH] for end in ends], by_rows(ends)[2 * WIDTH :]
    return None, [torch.cat([own[k], shared]) for k in K]


NETWORKS: dict[str, Callable[[], nn.Module]] = {"cgau": Gated}
METHODS: dict[str, tuple[Callable[[], Result], dict[str, Any]]] = {
    "hdafl": (hdafl, {}), "cgau": (cgau, {}),
    "ditto": (ditto, {"lam": 0.7, "personal_epochs": 2}), "apfl": (apfl, {"alpha": 0.3}),
    "fedrep": (fedrep, {"head_epochs": 3}), "fedbabu": (fedbabu, {"tune_epochs": 3}), "fedrod": (fedrod, {}),
    "pfedme": (pfedme, {"lam": 1.5, "eta": 0.2, "inner_steps": 3, "server_lr": 0.8}),
    "per_fedavg": (per_fedavg, {"alpha": 0.15}), "fedamp": (fedamp, {"alpha": 4.0, "sigma": 40.0, "mu": 0.5}),
    "fedphp": (fedphp, {"lam": 0.4, "mu": 0.9, "horizon": 2}), "moon": (moon, {"mu": 1.5, "temperature": 0.5}),
    "fedlc": (fedlc, {"tau": 0.8}), "scaffold": (scaffold, {"server_lr": 0.9}),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_two_rounds_are_those_of_the_papers_equations(name: str, tmp_path: Path) -> None:
    again, settings = METHODS[name]
    ends = np.cumsum((0, *SIZES))
    x, y = torch.cat(X), torch.cat(Y)
    clients = PooledClients(
        x, y, {"train": Lists(np.arange(len(y)), ends)}, classes=[f"{c}" for c in range(CLASSES)],
        common=Rows(x[:0], y[:0]),
    )  # fmt: skip
    recipe = getattr(recipes, name)(lr=LR, epochs=EPOCHS, batch=max(SIZES), **settings)
    network = NETWORKS.get(name, Network)()
    start = nn.utils.parameters_to_vector(network.parameters()).detach().double()
    run = piebald.run(
        recipe, clients, network, rounds=ROUNDS, evaluate_every=0, out=tmp_path / "run",
        runtime=piebald.Simulator(workers=0, deterministic=True),
    )  # fmt: skip
    model, own = again()
    found = [nn.utils.parameters_to_vector(run.model(k).parameters()).detach().double() for k in K]
    moved = min(float((one - start).abs().max()) for one in own)
    assert moved > 0.01  # far more than what is compared
    for mine, other in zip(found, own, strict=True):
        assert float((mine - other).abs().max()) < 1e-6
    if model is not None:
        common = nn.utils.parameters_to_vector(run.model().parameters()).detach().double()
        assert float((common - model).abs().max()) < 1e-6
