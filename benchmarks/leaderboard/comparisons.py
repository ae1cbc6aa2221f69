"""What may be said of differences: several methods against one on a federation, and one method over federations.

On a federation, methods are compared by the verdict of the answer (`piebald.report.verdict`): row by row, for other
rows of the clients at hand and other seeds.  All comparisons with one method hold together.  Bonferroni would count
methods that are nearly the same model as independent; here the number of comparisons is the effective one, from which
Bonferroni's bound is what the largest of correlated differences exceeds in 5 of 100 cases.  Against Local this is
Dunnett's test for paired rows; against the leader, one-sided, it is Hsu's comparison with the best: a method that is
truly the best is called behind in at most 5 of 100 cases.

Over federations a federation is one value, however many clients it has, and those of the same rows are drawn together.

Sources: Dunnett, *A multiple comparison procedure for comparing several treatments with a control*, JASA 1955; Hsu,
*Constrained simultaneous confidence intervals for multiple comparisons with the best*, Annals of Statistics 1984;
Hesterberg, *What teachers should know about the bootstrap*, American Statistician 2015 (expanded percentiles).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, t

from piebald.report.crossed_effects import ERROR_RATE
from piebald.report.paired import Difference, Scores, ranking
from piebald.report.verdict import compared

FEWEST = 5  # data sets, below which nothing is said of others
DRAWS = 20_000
SHARED = 0.5  # the correlation of two differences to the same method where single rows are not known
Floats = NDArray[np.float64]


def against(scores: Mapping[str, Scores], reference: str, one_sided: bool = False) -> dict[str, Difference]:
    """The mean of each method minus that of the reference, with simultaneous intervals and p values.

    Args:
        scores: by method.
        reference: the method that all others are compared with.
        one_sided: whether only one direction is asked for; p below the error rate then means that direction.
    """
    others = [name for name in scores if name != reference]
    count = effective_comparisons(scores, reference, one_sided)
    found = {name: compared(scores[name], scores[reference], count) for name in others}
    return {name: difference for name, difference in found.items() if difference is not None}


def not_behind(scores: Mapping[str, Scores]) -> list[str]:
    """The leader, and all methods that are not clearly behind it, the best mean first."""
    order = ranking(scores)
    behind = against(scores, order[0], one_sided=True)
    return [name for name in order if name == order[0] or behind[name].p >= ERROR_RATE]


def effective_comparisons(scores: Mapping[str, Scores], reference: str, one_sided: bool = False) -> int:
    """The number of independent comparisons that exceed the bound as often as these correlated ones, rounded up."""
    # the same scores always give the same number
    correlation = _correlations(scores, reference)
    values, vectors = np.linalg.eigh(correlation)
    root = vectors * np.sqrt(np.clip(values, 0, None))
    drawn = np.random.default_rng(len(correlation)).standard_normal((DRAWS, len(correlation))) @ root.T
    largest = (drawn if one_sided else abs(drawn)).max(axis=1)
    bound = float(np.quantile(largest, 1 - ERROR_RATE))
    # p values are two-sided: of a one-sided question they may be twice as large
    return max(1, math.ceil(ERROR_RATE / (2 * norm.sf(bound)) - 1e-9))


def _correlations(scores: Mapping[str, Scores], reference: str) -> Floats:
    """The correlations of the differences to the reference, from the mean differences of single rows over seeds."""
    gaps = [_row_gaps(table, scores[reference]) for name, table in scores.items() if name != reference]
    found = np.full((len(gaps), len(gaps)), SHARED)
    known = [place for place, gap in enumerate(gaps) if gap is not None and gap.any()]
    if known:
        table = np.stack([gaps[place] for place in known])  # type: ignore[arg-type]
        found[np.ix_(known, known)] = table @ table.T / np.outer(*[np.sqrt((table**2).sum(1))] * 2)
    np.fill_diagonal(found, 1.0)
    return found


def _row_gaps(a: Scores, b: Scores) -> Floats | None:
    """The difference of each row, less its client's mean, by the weight of a row in the mean over clients."""
    parts = []
    for client, vote in zip(a.clients, a.votes, strict=True):
        pairs = [(a.rows.get((seed, client)), b.rows.get((seed, client))) for seed in a.seeds if seed in b.seeds]
        if any(x is None or y is None for x, y in pairs):
            return None
        gap = np.mean([x - y for x, y in pairs if x is not None and y is not None], axis=0)
        parts.append(vote / len(gap) * (gap - gap.mean()) if len(gap) else gap)
    return np.concatenate(parts)


def over_federations(gains: Sequence[float], rows: Sequence[str]) -> tuple[float, float, float]:
    """The mean of gains on several federations, and its 95 % interval for other federations, NaN of too few.

    Args:
        gains: one of each federation.
        rows: the data set of each; those of the same one are drawn together.
    """
    groups = [[gain for gain, own in zip(gains, rows, strict=True) if own == name] for name in dict.fromkeys(rows)]
    mean, count = float(np.mean(gains)), len(groups)
    if count < FEWEST:
        return mean, math.nan, math.nan
    sums, sizes = np.array([sum(group) for group in groups]), np.array([len(group) for group in groups])
    drawn = np.random.default_rng(count).integers(count, size=(DRAWS, count))
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)
    # a bootstrap of few values is too narrow: its percentiles are those that Student's t would need
    level = norm.cdf(-math.sqrt(count / (count - 1)) * t.ppf(1 - ERROR_RATE / 2, count - 1))
    low, high = np.quantile(means, [level, 1 - level])
    return mean, float(low), float(high)
