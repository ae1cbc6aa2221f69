"""Thresholds of each column that all clients share: quantiles of the pooled numbers, from counts alone.

Who asks divides the order of all float32 numbers by 16 again and again, and learns how many numbers of all clients are
at most as large as each limit.  After 9 questions the order statistics are known to the bit; no bounds of a column are
needed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from piebald.core.moments import Ints
from piebald.statistics.boosting.forest import Floats32

NOWHERE = np.finfo(np.float32).max  # fills the list of a column with fewer thresholds than others
_SIGN = 1 << 31
_PARTS = 16  # more would be fewer questions of more numbers


def counts_at_most(x: Floats32, thresholds: Floats32) -> Ints:
    """How many numbers of each column [n, d] are at most its thresholds [d, t]; gaps are never."""
    found = np.zeros(thresholds.shape, dtype=np.int64)
    for column, limits in enumerate(thresholds):
        known = np.sort(x[:, column][~np.isnan(x[:, column])])
        found[column] = np.searchsorted(known, limits, side="right")
    return found


def thresholds_of(count: Callable[[Floats32], Ints], columns: int, most: int) -> Floats32:
    """Quantiles of each column, its least and its largest number among them.

    Args:
        count: tells how many of all clients' numbers of each column are at most some thresholds [d, t].
        columns: d.
        most: thresholds of a column, at most.  Where no more rows than that have a number, each number is one; else a
            number that few rows have may be none, also where there are fewer different ones.

    Returns:
        Different thresholds [d, t] in increasing order, and then `NOWHERE`.
    """
    present = count(np.full((columns, 1), NOWHERE, dtype=np.float32))[:, 0]
    ranks = (np.arange(most) * np.maximum(present - 1, 0)[:, None]) // max(most - 1, 1)
    low = np.full(ranks.shape, _key(-NOWHERE) - 1, dtype=np.int64)  # its number has a rank below the one that is wanted
    high = np.full(ranks.shape, _key(NOWHERE), dtype=np.int64)
    while bool((low + 1 < high).any()):
        step = -((low - high) // _PARTS)  # upwards, so that the last part is no longer than others
        limits = np.minimum(low[:, :, None] + step[:, :, None] * np.arange(1, _PARTS), high[:, :, None])
        below = count(_number(limits.reshape(columns, -1))).reshape(limits.shape) <= ranks[:, :, None]
        passed = below.sum(2)  # limits whose rank is below
        reached = np.concatenate([low[:, :, None], limits, high[:, :, None]], axis=2)
        low = np.take_along_axis(reached, passed[:, :, None], 2)[:, :, 0]
        high = np.take_along_axis(reached, passed[:, :, None] + 1, 2)[:, :, 0]
    found = [np.unique(_number(one) + np.float32(0)) if n else one[:0] for one, n in zip(high, present, strict=True)]
    made = np.full((columns, max(1, *map(len, found))), NOWHERE, dtype=np.float32)
    for column, numbers in enumerate(found):
        made[column, : len(numbers)] = numbers
    return made


def _key(number: np.floating) -> int:
    """The place of a float32 number in their order."""
    bits = int(np.float32(number).view(np.int32))
    return bits if bits >= 0 else -(bits + _SIGN) - 1


def _number(keys: NDArray[np.int64]) -> Floats32:
    """The float32 numbers at some places of their order."""
    bits = np.where(keys >= 0, keys, -keys - 1 - _SIGN).astype(np.int32)
    return np.ascontiguousarray(bits).view(np.float32)
