"""What members of a sum count: the sizes that they announce, and how much the largest of them may count.

A size is a whole number of quarters of a doubling: a member of size s counts at least 2^(s / 4), and less than
2^((s + 1) / 4).  All bounds are for the worst case: the largest member at the upper end of its size, all others at the
lower end, and only the smallest of them there when the sum is opened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

_STEPS = 4  # sizes in a doubling
_LARGEST = 32_767  # that is announced in two bytes


def size_of(weight: float) -> int:
    """The size of a weight above 0.

    Examples:
        >>> [size_of(weight) for weight in (1, 1.1, 1.2, 100, 200)]
        [0, 0, 1, 26, 30]
    """
    size = math.floor(_STEPS * math.log2(weight))
    # the logarithm is rounded, and nobody may count less than it has announced
    size += (weight >= least_weight(size + 1)) - (weight < least_weight(size))
    return max(-_LARGEST, min(size, _LARGEST))


def least_weight(size: int) -> float:
    """The smallest weight of a size."""
    return float(2.0 ** (size / _STEPS))


def largest_weight(sizes: Collection[int], fewest: int, share: float) -> float:
    """Return how much one member may count, so that it is no more than a share of any sum that may be opened.

    Heavier members count as that.

    Args:
        sizes: those of all members.
        fewest: members in a sum that may be opened.
        share: of the sum's weights, 1 / `fewest` or more, below 1.

    Examples:
        With five members of whom four may be left, the largest counts as much as the three smallest together:

        >>> largest_weight([size_of(rows) for rows in (64, 128, 128, 256, 4096)], 4, 0.5)
        320.0
    """
    ascending = sorted(sizes)
    bound, others = least_weight(ascending[-1] + 1), [least_weight(size) for size in ascending[: fewest - 1]]
    # those of the others that are heavier than the bound are cut to it as well, so that it is defined by itself:
    # bound * (1 - share) = share * sum(min(other, bound))
    for lighter in range(len(others), 0, -1):
        cut = (1 - share) / share - (len(others) - lighter)
        if cut > 0 and (solution := math.fsum(others[:lighter]) / cut) >= others[lighter - 1]:
            return min(bound, solution)
    return min(bound, others[0])


def balanced(sizes: Mapping[int, int], fewest: Callable[[int], int], share: float) -> list[int]:
    """The largest group of members of whom none is more than a share of any sum that may be opened, as they are.

    Of several groups that are as large, it is the one with the larger sizes.

    Args:
        sizes: by member.
        fewest: returns how many of so many members may be left when a sum is opened.
        share: of the sum's weights.

    Examples:
        >>> balanced({0: size_of(3), 1: size_of(3), 2: size_of(9000), 3: size_of(3)}, lambda members: 3, 0.5)
        [0, 1, 3]
    """
    ascending = sorted(sizes, key=lambda member: (sizes[member], member))
    for count in range(len(ascending), 1, -1):
        for start in range(len(ascending) - count, -1, -1):
            group = ascending[start : start + count]
            if is_balanced([sizes[member] for member in group], fewest(count), share):
                return sorted(group)
    return []


def is_balanced(sizes: Collection[int], fewest: int, share: float) -> bool:
    """Return whether no member is more than a share of any sum that may be opened; arguments as of `largest_weight`."""
    ascending = sorted(sizes)
    others = math.fsum(map(least_weight, ascending[: fewest - 1]))
    return fewest <= len(ascending) and least_weight(ascending[-1] + 1) * (1 - share) <= share * others
