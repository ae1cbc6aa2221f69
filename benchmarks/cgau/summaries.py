"""Measured results by method and seed, and their 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jobs
from scipy.stats import t


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half of its 95 % interval (Student's t); NaN for fewer than three values."""
    middle, count = sum(values) / len(values), len(values)
    if count < 3:
        return middle, math.nan
    spread = math.sqrt(sum((value - middle) ** 2 for value in values) / (count - 1))
    return middle, float(t.ppf(0.975, count - 1)) * spread / math.sqrt(count)


def by_method(out: Path, part: str, setting: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the results of one setting by method, then by seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for one in jobs.load(out, part):
        if one["job"]["setting"] == setting and one["job"]["rate"] is None:
            found.setdefault(one["job"]["method"], {})[one["job"]["seed"]] = one
    return found
