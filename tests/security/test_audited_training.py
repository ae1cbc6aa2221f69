"""Training tasks under DP-SGD as a site carries them out, audited from many with a canary and many without.

What an attacker sees is an update or a failure; canaries are of every kind that once told itself otherwise than by the
noisy vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from piebald.engines import row_gradients
from piebald.engines.engine_choice import make_engine
from piebald.engines.outgoing import serve
from piebald.engines.stack import ClientStack
from piebald.methods.client_work import ClientWork
from piebald.methods.training import DpSgd
from piebald.privacy.accounting import rows
from tests.fakes import client_work, federation, seeded

from .audits import FAILED, Scores, from_outcomes

pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install '.[privacy]'")

RUNS, STACK, ROWS, FEATURES, DELTA, NOISE = 2000, 100, 6, 4, 0.01, 1.0


class Counting(nn.Linear):
    """A linear model with a buffer that counts rows of a kind, and goes by it."""

    counted: Tensor

    def __init__(self) -> None:
        super().__init__(FEATURES, 2)
        self.register_buffer("counted", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x) * (1 + self.counted)
        if self.training:
            self.counted += (x.detach()[:, 0] > 5).sum()
        return logits


class Refusing(nn.Linear):
    """A linear model that fails at rows of a kind."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        if not torch._C._functorch.is_batchedtensor(x) and bool((x > 50).any()):
            raise ValueError("a value above 50")
        return super().forward(x)


CANARIES: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "far away": (lambda: nn.Linear(FEATURES, 2), 1e3),
    "not a number": (lambda: nn.Linear(FEATURES, 2), np.nan),
    "infinite": (lambda: nn.Linear(FEATURES, 2), np.inf),
    "too long": (lambda: nn.Linear(FEATURES, 2), 1e25),
    "an error": (Refusing, 60.0),
    "a moved buffer": (Counting, 30.0),
}


def clients(canary: float | None) -> Any:
    """Clients that are alike, each with a few small rows, and perhaps a canary."""
    draw = np.random.default_rng(1)
    x, y = draw.normal(0, 0.1, (ROWS, FEATURES)), draw.integers(0, 2, ROWS)
    if canary is not None:
        x, y = np.vstack([x, np.full((1, FEATURES), canary)]), np.append(y, 0)
    return federation(*[(x.astype(np.float32), y)] * STACK, classes=["a", "b"])


def outcomes(build: Callable[[], nn.Module], canary: float | None) -> Scores:
    """Scores of what a site sends in so many tasks, each with noise of its own; those that failed are `FAILED`.

    The score is what a canary adds to the weights of its class, and what a buffer has; the number of rows is known.
    """
    work = client_work(seeded(build), DpSgd(lr=1.0, steps=1, batch=50, clip=1.0, noise=NOISE))
    direction = torch.zeros(work.layout.size)
    views = work.layout.views(direction)
    views["weight"][0], views["weight"][1] = 1.0, -1.0
    if "counted" in views:
        views["counted"][0] = 1e3
    direction *= ROWS + (canary is not None)
    try:
        engine = make_engine("vmapped", work, clients(canary), torch.device("cpu"), False)
    except Exception:  # a site that refuses tells as much as one that fails
        return np.full(RUNS, FAILED)
    return np.concatenate([_sent(engine, work, f"{canary} {run}", direction) for run in range(RUNS // STACK)])


def _sent(engine: Any, work: ClientWork, secret: str, direction: Tensor) -> Scores:
    each, everybody = [0] * STACK, list(range(STACK))
    stack = ClientStack(everybody, each, each, each, [work.initial] * STACK, {}, {}, None, secret)
    try:
        result = serve(engine, stack)
    except Exception:  # what a site tells as a failure
        return np.full(STACK, FAILED)
    scores = (result.vectors["model"].double() @ direction.double()).numpy()
    sound = np.isfinite(scores) & (np.array([failure is None for failure in result.failures])) & (not result.metrics)
    return np.where(sound, scores, FAILED)


def stated(steps: int = 1) -> float:
    return rows(NOISE, 1.0, steps, DELTA).epsilon_pld


@pytest.mark.long
@pytest.mark.parametrize(("build", "canary"), CANARIES.values(), ids=CANARIES)
def test_no_row_is_told_by_more_than_is_stated(build: Callable[[], nn.Module], canary: float) -> None:
    inside, outside = outcomes(build, canary), outcomes(build, None)
    assert not (outside == FAILED).any()
    bounds = [from_outcomes(inside, outside, DELTA, doubt) for doubt in (0.05, 0.01)]
    assert max(bounds) <= stated()
    # an attack that finds nothing would find nothing that is broken either
    assert canary != 1e3 or min(bounds) > stated() / 3


def less_noise(drawn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda vector, gaussian, deviation: drawn(vector, gaussian, deviation / 10)


def no_clip(_: object) -> Callable[..., Tensor]:
    return lambda lengths, clip: torch.ones_like(lengths)


def no_care(_: object) -> Callable[..., Tensor]:
    return lambda vectors, lengths: vectors


BREAKS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "less noise": ("hidden", less_noise, "far away"),
    "no clip": ("shrink", no_clip, "far away"),
    "numbers that are not finite": ("finite", no_care, "not a number"),
}


@pytest.mark.full
@pytest.mark.parametrize(("name", "broken", "canary"), BREAKS.values(), ids=BREAKS)
def test_the_audit_finds_what_is_broken(
    name: str, broken: Callable[..., Any], canary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_gradients, name, broken(getattr(row_gradients, name)))
    build, value = CANARIES[canary]
    assert from_outcomes(outcomes(build, value), outcomes(build, None), DELTA) > stated()
