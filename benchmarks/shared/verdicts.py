"""The verdict on a remade figure: how large the difference is beside the paper's, by one rule for all papers."""

from __future__ import annotations

import math

NONE, NARROW = 1.0, 3.0  # a printed difference below NONE is no difference; a wider interval than NARROW may hide one
PARTS = ("", "", "half", "a third", "a quarter", "a fifth", "a sixth", "a seventh", "an eighth", "a ninth", "a tenth")


def verdict(printed: float, mean: float, half: float, none: float = NONE, narrow: float = NARROW) -> str:
    """Compare a difference with the paper's.

    Args:
        printed: the paper's difference.
        mean: ours, in the same unit.
        half: half of its 95 % interval; NaN from a single seed.
        none: printed differences below this are none, in the paper's own reading.
        narrow: half of an interval from which on a difference could be hidden where the paper has none.

    Returns:
        "agrees" between half and twice the printed difference; "same sign, a tenth" or "same sign, 3 times" for other
        sizes; "not found" where the interval holds 0; "opposite"; and "a difference where the paper has none".

    Examples:
        >>> verdict(57.1, 59.8, 4.5), verdict(78.8, 3.5, 1.5), verdict(7.8, 7.5, 8.3), verdict(6.8, -0.9, 0.7)
        ('agrees', 'same sign, 1/23', 'not found', 'opposite')
        >>> verdict(0.1, 0.5, 1.4), verdict(0.1, 0.5, 20.0), verdict(0.1, 4.0, 1.4)
        ('agrees', 'not found', 'a difference where the paper has none')
    """
    if math.isnan(half):
        return "no verdict from one seed"
    if abs(printed) < none:
        hidden = abs(mean) <= max(half, none)
        return "a difference where the paper has none" if not hidden else "agrees" if half <= narrow else "not found"
    if abs(mean) <= half:
        return "not found"
    ratio = mean / printed
    if ratio < 0:
        return "opposite"
    return "agrees" if 0.5 <= ratio <= 2 else f"same sign, {size(ratio)}"


def size(ratio: float) -> str:
    """Return a share or a multiple in words."""
    if ratio >= 1:
        return f"{ratio:.0f} times"
    part = round(1 / ratio)
    return PARTS[part] if part < len(PARTS) else "a twentieth" if part == 20 else f"1/{part}"
