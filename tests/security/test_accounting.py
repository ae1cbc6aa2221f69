"""Stated budgets beside the exact ones, bracketed by a computation of this file: never too small, and hardly larger.

The privacy loss of one release is put on a grid, rounded down for a lower and up for an upper bound, and composed by
convolution (Koskela et al. 2020).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.special import ndtr

from piebald.privacy.accounting import PrivacyBudget, central, fixed_cohorts, local, rows

pytest.importorskip("dp_accounting", reason="needs the extra: pip install '.[privacy]'")

STEP, REACH = 2e-4, 30.0  # of the grid of losses
DELTA = 1e-5


def one_release(noise: float, share: float, removed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Edges of the grid, and the probability that the loss of one sampled Gaussian is below each."""
    edges = np.arange(-REACH, REACH + STEP / 2, STEP)
    losses = edges if removed else -edges
    with np.errstate(divide="ignore", invalid="ignore"):
        x = noise**2 * np.log(np.expm1(losses) / share + 1) + 0.5  # where the loss is this; it rises with x
    x = np.where(losses <= np.log1p(-share) if share < 1 else False, -np.inf, x)
    if removed:
        return edges, (1 - share) * ndtr(x / noise) + share * ndtr((x - 1) / noise)
    return edges, ndtr(-x / noise)


def epsilon(noise: float, share: float, releases: int, removed: bool, up: bool) -> float:
    """A bound of the exact epsilon of so many releases, from above or from below."""
    edges, below = one_release(noise, share, removed)
    masses = np.diff(below)
    low, high = below[0], 1 - below[-1]  # beyond the grid
    assert low < 1e-12
    assert high < 1e-12
    size = 1 << (releases * len(masses)).bit_length()
    size = min(size, 1 << 20)  # what falls out comes round at the other end, where there is next to nothing
    composed = np.fft.irfft(np.fft.rfft(masses, size) ** releases, size)
    start = releases * (edges[0] + (STEP if up else 0.0))
    period = size * STEP
    losses = start + STEP * np.arange(size)
    losses = (losses + period / 2) % period - period / 2 if size < releases * len(masses) else losses
    missing = releases * (low + high) if up else 0.0
    beyond = np.clip(composed, 0.0, None)

    def delta(bound: float) -> float:
        over = losses > bound
        return missing + float((beyond[over] * -np.expm1(bound - losses[over])).sum())

    least, most = 0.0, 40.0
    for _ in range(50):
        middle = (least + most) / 2
        least, most = (middle, most) if delta(middle) > DELTA else (least, middle)
    return most


def bracket(noise: float, share: float, releases: int) -> tuple[float, float]:
    """Bounds of the exact epsilon for adding or removing one, from below and from above."""

    def bound(up: bool) -> float:
        return max(epsilon(noise, share, releases, removed, up) for removed in (True, False))

    return bound(False), bound(True)


CASES: list[tuple[str, Callable[[], PrivacyBudget], tuple[float, float, int]]] = [
    ("central, all", lambda: central(4.0, 1.0, 20, DELTA), (4.0, 1.0, 20)),
    ("central, drawn", lambda: central(1.1, 0.1, 30, DELTA), (1.1, 0.1, 30)),
    ("local", lambda: local(8.0, 10, DELTA), (4.0, 1.0, 10)),  # twice the clip apart
    ("rows", lambda: rows(1.0, 0.02, 100, DELTA), (1.0, 0.02, 100)),
    ("rows, large batches", lambda: rows(3.0, 0.5, 25, DELTA), (3.0, 0.5, 25)),
    ("rows, all", lambda: rows(5.0, 1.0, 4, DELTA), (5.0, 1.0, 4)),
]


@pytest.mark.long
@pytest.mark.parametrize(("stated", "exact"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_is_stated_is_the_exact_budget(
    stated: Callable[[], PrivacyBudget], exact: tuple[float, float, int]
) -> None:
    least, most = bracket(*exact)
    budget = stated()
    assert most - least < 0.05 * most, "the bracket says nothing"
    assert least <= budget.epsilon_pld <= 1.01 * most + 1e-3
    assert budget.epsilon_rdp >= least
    assert budget.epsilon_prv is None or 0.98 * least <= budget.epsilon_prv <= 1.02 * most


@pytest.mark.full
def test_half_the_noise_would_be_found() -> None:
    """The bracket is narrow enough to tell a budget for updates at the distance of one clip from the true one."""
    least, _ = bracket(2.0, 1.0, 10)
    assert local(8.0, 10, DELTA).epsilon_pld < least


@pytest.mark.full
def test_a_fixed_cohort_never_claims_less_than_a_poisson_sample() -> None:
    """Where all others send zeros, one client's updates are in each round with the same probability in both."""
    for noise, cohort, known in ((2.0, 5, 100), (1.0, 50, 100), (6.0, 10, 10)):
        least, _ = bracket(noise, cohort / known, 10)
        assert fixed_cohorts(noise, cohort, known, 10, DELTA).epsilon_pld >= least
