"""The verdict on a remade figure: what its interval says about the paper's size, by one rule for all papers."""

from __future__ import annotations

import math

from scipy.stats import t

NONE = 1.0  # a printed difference below this is no difference
WORDS = ("agrees", "same sign", "undecided", "refuted", "opposite")
PARTS = ("", "", "half", "a third", "a quarter", "a fifth", "a sixth", "a seventh", "an eighth", "a ninth", "a tenth")
MOST_SEEDS = 1000


def verdict(printed: float, mean: float, half: float, none: float = NONE, sized: bool = True) -> str:
    """Compare a difference with the paper's.

    Args:
        printed: the paper's difference.
        mean: ours, in the same unit.
        half: half of its 95 % interval; NaN from a single seed.
        none: how far from the printed size is as good as equal; printed differences below this are none, and have no
            sign.
        sized: False where only the sign of `printed` is printed.

    Returns:
        "agrees" where the interval lies within `none` of the printed size, or excludes 0 and ours is between half and
        twice it; "same sign" and "opposite" where the interval excludes 0 besides, the former with the share or the
        multiple; "refuted" where the interval holds 0 and excludes the printed size, "undecided" where it holds both.

    Examples:
        >>> verdict(57.1, 59.8, 4.5), verdict(78.8, 3.5, 1.5), verdict(7.8, 7.5, 8.3), verdict(6.8, -0.9, 0.7)
        ('agrees', 'same sign, 1/23', 'undecided', 'opposite')
        >>> verdict(0.1, 0.5, 0.4), verdict(0.1, 0.5, 20.0), verdict(0.1, 4.0, 1.4), verdict(25.3, 1.0, 9.9)
        ('agrees', 'undecided', 'refuted', 'refuted')
    """
    if math.isnan(half):
        return "no verdict from one seed"
    if sized and abs(mean - printed) + half <= none:
        return "agrees"
    if abs(mean) > half and (abs(printed) >= none or not sized):
        ratio = mean / printed
        if ratio < 0:
            return "opposite"
        return "same sign" if not sized else "agrees" if 0.5 <= ratio <= 2 else f"same sign, {size(ratio)}"
    return "refuted" if sized and abs(mean - printed) > half else "undecided"


def size(ratio: float) -> str:
    """Return a share or a multiple in words."""
    if ratio >= 1:
        return f"{ratio:.0f} times"
    part = round(1 / ratio)
    return PARTS[part] if part < len(PARTS) else "a twentieth" if part == 20 else f"1/{part}"


def seeds_needed(printed: float, half: float, seeds: int, none: float = NONE) -> int | None:
    """Return how many seeds tell the printed size from 0: half of the interval is half of it, or `none` if it is none.

    None where the present seeds do not differ, or where a thousand are too few.

    Examples:
        >>> seeds_needed(0.4, 1.3, 3, 0.1), seeds_needed(0.012, 0.0235, 3, 0.001)
        (29, 13)
    """
    if not half or math.isnan(half):
        return None
    spread = half * math.sqrt(seeds) / t.ppf(0.975, seeds - 1)
    wanted = abs(printed) / 2 if abs(printed) >= none else none
    counts = range(2, MOST_SEEDS + 1)
    return next((n for n in counts if t.ppf(0.975, n - 1) * spread / math.sqrt(n) <= wanted), None)
