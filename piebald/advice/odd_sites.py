"""Sites whose rows are at odds with those of the others, by name, and which differences of a metric count.

Somebody should look at such sites before any training.  Two kinds can be told by scores.  Where one model for all is
far worse than a site's own, its labels or inputs mean something else there.  Few rows make no model of their own, but
they are enough to tell where a model of all fails: on labels that are turned around it is wrong where it is right
elsewhere (`misfits`).  Where neither is better than one answer for every row, labels follow from nothing.

Of differences: the smallest that rows can show, what counts as little, and their size in words.

Source: Anscombe, *The transformation of Poisson, binomial and negative-binomial data*, Biometrika 1948.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Annotated, Any, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from piebald.contracts import Clients, Split
from piebald.core.arguments import Fraction, Whole, checked
from piebald.report.crossed_effects import ERROR_RATE
from piebald.report.page.wording import names, plural, three_digits
from piebald.report.paired import Difference, Scores
from piebald.report.row_noise import row_differences

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
    rows: Sequence[Whole], disagreement: Fraction = DISAGREEMENT, power: Annotated[float, Field(ge=0.5, lt=1)] = POWER,
    level: Annotated[float, Field(gt=0, le=0.5)] = LEVEL,
) -> float | None:  # fmt: skip
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


FAR = 20  # times as far from the median as 95 % of the rows
_MOST_READ = 1 << 20  # rows whose targets are looked at
SPLITS: tuple[Split, ...] = get_args(Split)
_SUSPECTED = 1.645  # standard errors beyond which a site may be odd, one by one
_MOST = 0.34  # share of the clients that may be odd: where more are, they are many kinds and nobody is


def far_amounts(amounts: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which amounts [n] are so far from all others that a model would learn little else.

    Examples:
        >>> far_amounts(np.array([*range(50), 99_999.0])).nonzero()[0].tolist()
        [50]
    """
    if not np.isfinite(amounts).any():
        return np.zeros(len(amounts), bool)
    # the median and a quantile, which a few far amounts do not move, in place of mean and deviation
    away = np.abs(amounts - np.nanmedian(amounts))
    usual = float(np.nanquantile(away, 0.95))  # of 95 % of the rows, whatever the others are
    # where 95 % of the amounts are the same nothing is far: most targets are 0 in counts of rare events
    return np.asarray((np.nan_to_num(away) > FAR * usual) & (usual > 0))


def far_targets(clients: Clients, names_of_clients: Sequence[str]) -> list[str]:
    """Return a sentence about amounts to predict that are far from all others, by site; none where there are none."""
    sizes = [[clients.size(client, split) for split in SPLITS] for client in range(len(clients))]
    if any(None in row for row in sizes) or sum(map(sum, sizes)) > _MOST_READ:  # type: ignore[arg-type]
        return []
    targets, sites = [], []
    for client in range(len(clients)):
        for split in SPLITS:
            y = clients.rows(client, split).y
            if not isinstance(y, Tensor) or not y.is_floating_point() or y.numel() != len(y):
                return []  # classes, labels, and times
            targets.append(y.double().flatten().numpy())
            sites += [client] * len(y)
    far = far_amounts(np.concatenate(targets))
    counts = np.bincount(np.array(sites)[far], minlength=len(clients))
    if not far.any():
        return []
    places = [
        f"{plural(int(counts[client]), 'row')} at {names_of_clients[client]}"
        for client in np.flatnonzero(counts).tolist()
    ]
    return [
        f"Targets over {FAR} times as far from the median as 95 % of all: {names(places, 12)}: if they are errors, "
        "correct them."
    ]


def odd_sites(
    alone: Scores | None,
    together: Scores | None,
    naive: Mapping[str, Scores],
    metric: str,
    higher_is_better: bool = True,
) -> list[str]:
    """Return a sentence for each kind of odd sites that there is.

    A site is named only beyond the chance of its rows, with all sites looked at together (Bonferroni), and where most
    others are not like it.

    Args:
        alone, together: the scores of Local and of one model for all on the same rows.
        naive: those of answers that need no model, by name.
        metric, higher_is_better: of the scores.
    """
    if alone is None:
        return []
    sentences = []
    sign = 1 if higher_is_better else -1
    worse = {} if together is None else _gaps(together, alone, sign)
    contradicting = [name for name, gap in worse.items() if gap.high < 0]
    # few rows hide that others are like them, as in a federation of two kinds of sites
    suspected = [name for name, gap in worse.items() if gap.mean < -_SUSPECTED * (gap.error or 0.0)]
    # the looser bound is for the question whether others are like them, where missing some would accuse the rest
    if contradicting and len(suspected) <= _MOST * len(worse):
        largest = min(worse[name].mean for name in contradicting)
        sentences.append(
            f"At odds with the others: {names(contradicting, 12)}, where one model for all is up to "
            f"{in_points(metric, -largest, False)} worse than a model of its own: do labels or inputs mean the same?"
        )
    for constant in naive.values():
        over = [_gaps(scores, constant, sign) for scores in (alone, together) if scores is not None]
        clear = [name for name in over[0] if any(name in gaps and gaps[name].low > 0 for gaps in over)]
        usual = sorted(max(gaps[name].mean for gaps in over if name in gaps) for name in clear)
        half = usual[len(usual) // 2] / 2 if usual else 0.0
        # the site must be shown to be unlike the others: little beyond the constant answer, by any method
        blank = [
            name for name in over[0]
            if name not in clear
            and _room(float(constant.of_client(name).mean), metric, sign) > 2 * half
            and all(name in gaps and gaps[name].high < half for gaps in over)
        ]  # fmt: skip
        if blank and len(blank) <= _MOST * len(over[0]):
            sentences.append(
                f"Not better than one answer for every row by any method: {names(blank, 12)}: are the labels right?"
            )
            break
    return sentences


def misfits(judged: Scores, seen: Scores, constants: Sequence[Scores]) -> list[str]:
    """Return a sentence on sites where one model for all is wrong as at no other site; none where there is no such one.

    A site is compared with what is to be expected of a site like the others, whose shares of right rows vary by chance
    and by themselves: by Student's t of arcsines, with Satterthwaite's degrees of freedom, and Bonferroni's correction
    for all sites.  It must also be no better there than each constant answer, so that harder rows are no reason.

    Args:
        judged: the accuracies of one model for all on validation rows.
        seen: those on the same rows and training rows: where few rows contradict all others, training on them changes
            little.
        constants: of answers that need no model, on these rows.
    """
    from scipy.special import stdtr

    sizes, shares = np.array(judged.sizes, float), judged.client_means()
    rows, right = np.array(seen.sizes, float), seen.client_means()
    if not judged.counted or not len(sizes) or len(rows) != len(sizes):
        return []
    compared = np.isfinite(shares) & np.isfinite(right)
    angles, votes = _arcsine(shares, sizes), judged.votes * compared
    # the lowest constant answer of each site: being no better than each of them is being no better than this
    constant = np.nanmin([table.client_means() for table in constants], axis=0) if constants else np.ones(len(rows))
    places = []
    for index in np.flatnonzero(compared & (right <= constant)).tolist():
        others = votes.copy()
        others[index] = 0.0
        effective = others.sum() ** 2 / max(float((others**2).sum()), 1e-12)  # Kish's number of others
        if effective <= 2:
            continue
        mean = float(np.average(np.nan_to_num(angles), weights=others))
        spread = float(np.average(np.nan_to_num(angles - mean) ** 2, weights=others)) * effective / (effective - 1)
        # variance of a new site around an estimated mean, as in a prediction interval
        of_others = spread * (1 + 1 / effective)
        variance = of_others + 1 / (4 * rows[index] + 2)
        # only the spread between sites is estimated; the variance of an arcsine by its rows is known
        freedom = min(variance**2 / max(of_others**2 / (effective - 1), 1e-12), 1e6)
        distance = float(_arcsine(right[index], rows[index]) - mean) / variance**0.5
        # one-sided: sites that do better than expected are no misfits
        if stdtr(freedom, distance) < ERROR_RATE / compared.sum():
            places.append(index)
    named = [f"{judged.clients[x]} ({right[x] * rows[x]:.0f} of {rows[x]:.0f} rows right)" for x in places]
    if not named or len(places) > _MOST * compared.sum():
        return []
    return [f"One model for all fails at {names(named, 12)}, as at no other site: do labels or inputs mean the same?"]


def over_rows(a: Scores, b: Scores) -> Scores:
    """The accuracies of a method on the rows of two tables of the same clients together."""
    parts = np.array([[table.client_means(), table.sizes] for table in (a, b)], np.float64)
    shares, sizes = np.nan_to_num(parts[:, 0]), parts[:, 1] * np.isfinite(parts[:, 0])
    rows = sizes.sum(0)
    with np.errstate(invalid="ignore"):
        values = (shares * sizes).sum(0, keepdims=True) / rows
    return Scores(values, a.clients, sizes=rows.astype(int).tolist(), counted=a.counted and b.counted)


def _arcsine(shares: Any, rows: Any) -> Any:
    """The angles of shares of rows, whose variance is 1 / (4 rows + 2) whatever the share."""
    # Anscombe's correction keeps the variance constant down to a few rows, and defined at shares of 0 and 1
    return np.arcsin(np.sqrt((shares * rows + 0.375) / (rows + 0.75)))


def _room(constant: float, metric: str, sign: int) -> float:
    """Return what is left to gain beyond a constant answer: little where one class has nearly all rows."""
    if sign < 0:
        return constant
    return 1 - constant if metric in SHARES else math.inf


def _gaps(a: Scores, b: Scores, sign: int) -> dict[str, Difference]:
    """The gain of each client by `a` over `b`, where the noise of its rows is known.

    Each end of the intervals holds for all sites together (Bonferroni), by Student's t for what few rows say of noise.
    """
    # half of the clients: each end is one-sided, and an interval of 95 % has two of them
    gaps = row_differences(a, b, comparisons=math.ceil(len(a.clients) / 2))
    ends = {name: sorted((sign * gap.low, sign * gap.high)) for name, gap in gaps.items() if gap.error}
    return {
        name: replace(gaps[name], mean=sign * gaps[name].mean, low=low, high=high) for name, (low, high) in ends.items()
    }
