"""Differences of a metric: the smallest that rows can show, what counts as little, and their size in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from piebald.core.arguments import Whole, checked
from piebald.core.errors import SettingError
from piebald.report.page.wording import three_digits

# Share of rows on which one of two methods is right and the other wrong.  Between methods on seven federations it was
# 0.02 to 0.48, the median 0.13 (python benchmarks/advise/disagreement.py); methods that are nearly equal disagree less.
DISAGREEMENT = 0.1
POWER = 0.8
LEVEL = 0.05
FOUND = NormalDist().inv_cdf(1 - LEVEL / 2) + NormalDist().inv_cdf(POWER)  # standard errors that are found 4 times in 5
# Metrics from 0 to 1, whose differences are called points.
SHARES = (
    "accuracy", "auc", "average_precision", "balanced_accuracy", "concordance", "f1", "sensitivity", "specificity",
    "token_accuracy",
)  # fmt: skip
POINT = 0.01


@checked
def detectable_difference(
    rows: Sequence[Whole], disagreement: float = DISAGREEMENT, power: float = POWER, level: float = LEVEL
) -> float | None:
    """The smallest true difference in mean accuracy of two methods that is found with a given probability.

    Both methods are scored on the same rows, and every client counts the same, as in tables of this package.  The
    difference on one row is -1, 0 or 1, and not 0 on a share q of the rows, so its variance is at most q, and that of
    the mean over C clients of n_c rows at most q / C^2 sum(1 / n_c).  A two-sided test at `level` finds a difference of
    (z(1 - level / 2) + z(power)) standard errors with probability `power` (Connor 1987, for McNemar's test; the mean
    over clients is its stratified form).  A difference cannot be above q: where it would have to be, q is raised to it.

    This is the noise of the rows alone.  What other seeds and other clients would change comes on top and is not known
    before training, so smaller differences certainly cannot be told apart, and larger ones only perhaps.

    Args:
        rows: number of rows of each client [c]; clients without rows are left out.
        disagreement: q, in (0, 1].
        power: probability that the difference is found, in [0.5, 1).
        level: probability that a difference of 0 is taken for one, in (0, 0.5].

    Returns:
        The difference, in (0, 1]; None if no client has a row.

    Raises:
        SettingError: a number is out of its range.

    Examples:
        Ten clients of 100 test rows show differences of about three points of accuracy and more.

        >>> round(detectable_difference([100] * 10), 4)
        0.028
        >>> round(detectable_difference([100] * 10, disagreement=0.4), 4)
        0.056
    """
    if not 0 < disagreement <= 1:
        raise SettingError(f"disagreement must be above 0 and at most 1, got {disagreement:g}")
    if not 0.5 <= power < 1 or not 0 < level <= 0.5:
        raise SettingError(f"power must be in [0.5, 1) and level in (0, 0.5], got {power:g} and {level:g}")
    held = [count for count in rows if count > 0]
    if not held:
        return None
    z = NormalDist().inv_cdf(1 - level / 2) + NormalDist().inv_cdf(power)
    # every client counts the same, so the variance of the mean is that of the clients over C squared
    squared = z * z * sum(1 / count for count in held) / len(held) ** 2
    smallest = math.sqrt(squared * disagreement)
    # methods cannot differ by more than the share of rows on which they disagree
    return min(1.0, smallest if smallest <= disagreement else squared)


def nearness(metric: str, value: float) -> float:
    """Return the difference from a value of the metric that counts as little.

    Examples:
        >>> nearness("accuracy", 0.5), nearness("loss", 2.0)
        (0.01, 0.02)
    """
    return POINT if metric in SHARES else POINT * abs(value)


def in_points(metric: str, value: float, signed: bool = True, unit: str = " points") -> str:
    """Return a difference of the metric in words: in points, with this word behind it, where the metric is a share.

    Examples:
        >>> in_points("accuracy", 0.0125), in_points("loss", 0.0125, signed=False)
        ('+1.2 points', '0.0125')
    """
    sign = "+" if signed else ""
    # no more digits than rows can show, and no "+1.99e-06 points"
    tenths = round(10 * 100 * value) / 10 + 0.0  # nor "-0.0"
    return f"{tenths:{sign}.1f}{unit}" if metric in SHARES else three_digits(value, sign)
