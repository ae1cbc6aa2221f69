"""Means over seeds with their 95 % intervals, and differences of runs with the same seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from scipy.stats import t


def interval(values: Sequence[float], least: int = 2) -> tuple[float, float]:
    """Return the mean and half of its 95 % interval (Student's t).

    Args:
        values: one for each seed, at least one.
        least: number of values from which there is an interval; with fewer, half of it is NaN.
    """
    middle, count = statistics.fmean(values), len(values)
    if count < max(2, least):
        return middle, math.nan
    return middle, float(t.ppf(0.975, count - 1) * statistics.stdev(values) / math.sqrt(count))


def differences(first: Mapping[int, float], second: Mapping[int, float]) -> list[float]:
    """Return the first values less the second ones, for the seeds that both have, in their order."""
    return [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]


def plus_minus(middle: float, half: float, form: str) -> str:
    """Format a mean with half of its interval, or the mean alone where that is NaN."""
    return f"{middle:{form}}" + ("" if math.isnan(half) else f" ± {half:{form.lstrip('+')}}")


def sign(middle: float, half: float) -> int:
    """Return 1 or -1 where an interval excludes 0, otherwise 0, also where there is none."""
    return 0 if math.isnan(half) or abs(middle) <= half else 1 if middle > 0 else -1
