"""Lower bounds on epsilon by experiment: an attacker guesses who is in, and how well it does bounds what is hidden."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import stats

Scores = np.ndarray[Any, np.dtype[np.float64]]

DOUBT = 0.01  # the probability that a bound is wrong
FAILED = -1e9  # the score of a run that ended without a result, which is an outcome like any other


def from_pairs(inside: Scores, outside: Scores, delta: float, doubt: float = DOUBT) -> float:
    """From many runs with a canary and many without, and a score of each that is larger with it.

    (epsilon, delta) means that P(score above t | inside) <= e^epsilon P(score above t | outside) + delta for every t.
    Half of the runs choose t, the others bound both probabilities (Clopper and Pearson 1934).
    """
    even, odd = slice(0, None, 2), slice(1, None, 2)
    places = np.quantile(np.concatenate([inside[even], outside[even]]), np.linspace(0.02, 0.98, 97))
    best = max(places, key=lambda place: _bound(inside[even], outside[even], place, delta, doubt))
    return _bound(inside[odd], outside[odd], best, delta, doubt)


def from_outcomes(inside: Scores, outside: Scores, delta: float, doubt: float = DOUBT) -> float:
    """The same of an attacker who also sees whether a run failed, and tells either by that or by the score.

    A failed run has the score `FAILED`.  Each of the four tests may be wrong with a quarter of the doubt: more failures
    with the canary or without, and higher scores with it or without.
    """
    failures = ((inside == FAILED).astype(float), (outside == FAILED).astype(float))
    pairs = [failures, failures[::-1], (inside, outside), (-outside, -inside)]
    # a threshold between 0 and 1 for whether it failed; quantiles of two values would be one of them
    by_failure = [_bound(one, other, 0.5, delta, doubt / 4) for one, other in pairs[:2]]
    return max(*by_failure, *(from_pairs(one, other, delta, doubt / 4) for one, other in pairs[2:]))


def _bound(inside: Scores, outside: Scores, place: float, delta: float, doubt: float) -> float:
    hits, alarms = int((inside > place).sum()), int((outside > place).sum())
    least = stats.beta.ppf(doubt / 2, hits, len(inside) - hits + 1) if hits else 0.0
    most = stats.beta.ppf(1 - doubt / 2, alarms + 1, len(outside) - alarms) if alarms < len(outside) else 1.0
    return math.log((least - delta) / most) if least > delta else 0.0


def from_one_run(scores: Scores, included: Scores, guesses: int, delta: float, doubt: float = DOUBT) -> float:
    """From one run with many canaries, each of which was included with probability 1/2 (Steinke, Nasr and Jagielski
    2023, theorem 5.2): the highest scores are guessed to be in, the lowest to be out, and the others are left open.
    """
    order = np.argsort(scores)
    half = guesses // 2
    right = int((included[order[:half]] == 0).sum() + (included[order[-half:]] == 1).sum())
    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _chance(len(scores), 2 * half, right, middle, delta) < doubt else (low, middle)
    return low


def _chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The largest probability of so many right guesses against a mechanism with this epsilon and delta."""
    each = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
    fewer = np.cumsum(each.pmf(np.arange(right - 1, -1, -1)))  # of right - 1, right - 1 or right - 2, ...
    steepest = float((fewer / np.arange(1, right + 1)).max(initial=0.0))
    return float(each.sf(right - 1)) + 2 * canaries * delta * steepest
