"""What an attacker finds is within the epsilon that is printed, and beyond it where a mechanism is broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from piebald import recipes
from piebald.engines import row_gradients
from piebald.methods.recipe import Recipe
from piebald.methods.transforms import Gaussian
from piebald.privacy.accounting import central, fixed_cohorts, local, rows
from tests.fakes import federation, simulate

from .audits import Scores, from_one_run, from_pairs
from .test_central_noise import NOISE, moves, recipe

pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install '.[privacy]'")

RUNS = 3000
DELTA = 0.05  # as large as an audit of so few runs can use


def test_the_audits_find_what_is_there() -> None:
    """Two shifted Gaussians, whose epsilon is known: the bounds lie below it and not far below."""
    draw = np.random.default_rng(0)
    found = from_pairs(draw.normal(1, 1, 20_000), draw.normal(0, 1, 20_000), DELTA)
    true = central(1.0, 1.0, 1, DELTA).epsilon_pld
    assert 0.8 * true < found <= true
    included = draw.integers(0, 2, 2000).astype(float)
    true = central(1.0, 1.0, 1, 1e-5).epsilon_pld
    assert 0.8 < from_one_run(draw.normal(included, 1.0), included, 400, 1e-5) <= true
    assert from_one_run(draw.normal(0 * included, 1.0), included, 400, 1e-5) < 0.2


# -- an update, from whoever sees what its client sends


class HalfTheNoise(Gaussian):
    kind = "half_the_noise"

    @property
    def multiplier(self) -> float:
        return self.noise / 2


class Unclipped(Gaussian):
    kind = "unclipped"

    def on_client(
        self, vectors: Mapping[str, Tensor], keys: Sequence[int], clients: Sequence[int]
    ) -> Mapping[str, Tensor]:
        free = self.model_copy(update={"clip": 1e6, "noise": self.noise * self.clip / 1e6})
        return Gaussian.on_client(free, vectors, keys, clients)


def uploads(gaussian: Gaussian, sign: float, first_key: int) -> Scores:
    """Uploads of a client whose update is far too long, in one direction or the other."""
    changes = sign * torch.tensor([[7.0, 0.0]]).repeat(RUNS, 1)
    sent = gaussian.on_client({"model": changes}, range(first_key, first_key + RUNS), [0] * RUNS)["model"]
    return sent[:, 0].double().numpy()


@pytest.mark.parametrize(("made", "holds"), [(Gaussian, True), (HalfTheNoise, False), (Unclipped, False)])
def test_noise_at_the_client(made: type[Gaussian], holds: bool) -> None:
    gaussian = made(clip=1.0, noise=2.0, where="client")
    found = from_pairs(uploads(gaussian, 1.0, 0), uploads(gaussian, -1.0, RUNS), DELTA)
    claim = local(2.0, 1, DELTA).epsilon_pld
    assert (found <= claim) == holds
    assert found > claim / 3


# -- a client's part, from whoever sees the global model


def steps(made: Recipe, with_canary: bool) -> Scores:
    """Where steps lead: nine clients move one way, and the canary the other way."""
    changes = [[1.0, 0.0]] * 9 + [[-1.0, 0.0]] * with_canary
    return -np.array([float(step[0]) for step in moves(made, 10, changes, RUNS, seed=with_canary)])


def renormalized(self: Recipe, known: int) -> None:
    """Before: the mean over those who arrived, with noise for their largest weight."""


@pytest.mark.full
@pytest.mark.parametrize(
    "holds", [True, pytest.param(False, marks=pytest.mark.full)], ids=["fixed denominator", "renormalized weights"]
)
def test_noise_at_the_server(holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not holds:
        monkeypatch.setattr(Recipe, "expected_updates", renormalized)
    made = recipe(NOISE)
    found = from_pairs(steps(made, True), steps(made, False), DELTA)
    claim = central(1.0, 1.0, 1, DELTA).epsilon_pld
    assert (found <= claim) == holds
    assert found > claim / 3


@pytest.mark.full
def test_cohorts_of_a_fixed_size_spend_more_than_poisson_samples() -> None:
    """Before, they were accounted as such.  Where the canary is drawn, another client is not, so its part is missed."""
    draw, noise, share, delta, runs = np.random.default_rng(0), 1.0, 0.25, 0.005, 200_000

    def seen(canary: float) -> Scores:
        """What is seen of rounds in which all other clients send 1; only the one that makes room for another counts."""
        inside = draw.random(runs) < share
        return noise * draw.normal(size=runs) - np.where(inside, canary, 1.0)

    found = from_pairs(seen(-1.0), seen(0.0), delta)
    assert found > 1.3 * central(noise, share, 1, delta).epsilon_pld
    assert found <= fixed_cohorts(noise, 5, 20, 1, delta).epsilon_pld


# -- a row, from whoever sees what its client sends

CANARIES = 800


def one_run(batch_share: float, steps: int) -> tuple[Scores, Scores, int]:
    """DP-SGD on canaries with a coordinate each: their scores, which were included, and how many."""
    draw = np.random.default_rng(5)
    included = draw.integers(0, 2, CANARIES).astype(float)
    x = (1e3 * np.eye(CANARIES, dtype=np.float32))[included == 1]
    model = nn.Linear(CANARIES, 2, bias=False)
    nn.init.zeros_(model.weight)
    batch = round(batch_share * len(x))
    trained = recipes.dp_sgd(lr=1e-6, clip=1.0, noise=1.0, batch=batch, steps=steps)
    run = simulate(trained, federation((x, np.zeros(len(x), np.int64)), classes=["a", "b"]), model, rounds=1)
    weight = run.model().weight.detach().double().numpy()
    return weight[0] - weight[1], included, len(x)


def an_eighth_of_the_noise(drawn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda vector, gaussian, deviation: drawn(vector, gaussian, deviation / 8)


def clip_of_nobody(norms: Tensor, clip: float) -> Tensor:
    return torch.ones_like(norms)


@pytest.mark.parametrize(
    ("share", "steps"),
    [(1.0, 1), pytest.param(0.3, 8, marks=pytest.mark.full)],
    ids=["all rows at once", "Poisson samples"],
)
def test_dp_sgd(share: float, steps: int) -> None:
    scores, included, count = one_run(share, steps)
    found = from_one_run(scores, included, 120, 1e-5)
    claim = rows(1.0, round(share * count) / count, steps, 1e-5).epsilon_pld
    assert 0.2 < found <= claim


@pytest.mark.parametrize("broken", ["noise", "clip"])
def test_a_broken_dp_sgd(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "noise":
        monkeypatch.setattr(row_gradients, "hidden", an_eighth_of_the_noise(row_gradients.hidden))
    else:
        for module in (row_gradients,):
            monkeypatch.setattr(module, "shrink", clip_of_nobody)
    scores, included, _ = one_run(1.0, 1)
    found = from_one_run(scores, included, 700, 1e-5)
    assert found > rows(1.0, 1.0, 1, 1e-5).epsilon_pld
