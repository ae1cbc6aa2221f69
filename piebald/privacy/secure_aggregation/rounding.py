"""Unbiased rounding: a number goes up with the probability of its fraction, so that sums of many stay right.

Rounding to the nearest whole number makes a bias of many small numbers: 0.3 of a thousand clients would add up to 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from piebald.privacy.secure_aggregation.masks import key_stream

_PIECE = 1 << 16  # numbers rounded at a time, so that what a piece needs stays in the processor's cache


def round_stochastically(numbers: np.ndarray[Any, Any], seed: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Whole numbers whose expectations are these numbers, each next below or above its number.

    Args:
        numbers: float64 [n], below 2^62 in absolute value.
        seed: 32 bytes; its key stream says which way each number goes, so the same seed rounds the same way again.
    """
    stream, rounded = key_stream(seed), np.empty(len(numbers), np.int64)
    for start in range(0, len(numbers), _PIECE):
        piece = numbers[start : start + _PIECE]
        bits = np.frombuffer(stream.update(bytes(8 * len(piece))), dtype="<u8") >> np.uint64(11)
        below = np.floor(piece)
        rounded[start : start + _PIECE] = below.astype(np.int64) + (bits.astype(np.float64) * 2.0**-53 < piece - below)
    return rounded
