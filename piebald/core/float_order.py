"""The order of all float64 numbers as whole numbers, so that it can be bisected, and counts of numbers below others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from piebald.core.moments import Floats, Ints

_SIGN = np.int64(-(2**63))


def counts_at_most(columns: Sequence[Floats], thresholds: Floats) -> Ints:
    """How many numbers of each sorted column are at most these thresholds [d, t]."""
    if not len(columns):
        return np.zeros(thresholds.shape, dtype=np.int64)
    found = [np.searchsorted(column, limits, side="right") for column, limits in zip(columns, thresholds, strict=True)]
    return np.stack(found).astype(np.int64)


def keys_of(numbers: Floats) -> Ints:
    """The places of float64 numbers in their order; those of -0.0 and 0.0 are next to each other."""
    bits = np.ascontiguousarray(numbers, dtype=np.float64).view(np.int64)
    return np.where(bits < 0, _SIGN - bits - 1, bits)


def number_of(keys: NDArray[np.int64]) -> Floats:
    """The float64 numbers at some places of their order."""
    return np.ascontiguousarray(np.where(keys < 0, _SIGN - keys - 1, keys)).view(np.float64)


LOWEST, HIGHEST = keys_of(np.array([-np.inf, np.inf])).tolist()
