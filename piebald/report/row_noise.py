"""Noise of the difference of two accuracies that comes from the number of rows, for the clients at hand.

`paired` asks what *other clients* would gain: where gains differ from client to client, as they do wherever clients are
not alike, few clients say little about that.  Whoever asks for the clients at hand has them all.  What is left is that
each of them has few rows, and that another seed makes another model.

On one row a method is right or wrong, so the variance of a client's difference is that of two shares of its n rows, at
most (p (1 - p) + q (1 - q)) / n: methods that are right on the same rows have less.  Every client counts the same, so
the variance of the mean over C clients is the sum over C^2.  With three seeds and more, that of the seeds' means is
added, with Satterthwaite's degrees of freedom; with two, they must agree in the sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from piebald.core.arguments import checked
from piebald.report.crossed_effects import SEEDS_FOR_INTERVAL
from piebald.report.paired import Scores

Floats = NDArray[np.float64]
COUNTED = "accuracy"  # the metric whose standard error follows from the number of rows


@dataclass(frozen=True, slots=True)
class RowDifference:
    """The mean of one method's accuracies minus another's, for these clients.

    Attributes:
        mean: over seeds and clients.
        error: the standard error, for other rows of these clients, and for other seeds where there are three.
        p: the two-sided p value of "no difference".
        seeds, clients, rows: the number of each.
    """

    mean: float
    error: float
    p: float
    seeds: int
    clients: int
    rows: int


@checked
def row_difference(a: Scores, b: Scores, rows: Mapping[str, int]) -> RowDifference | None:
    """Compare two methods by the accuracies of the clients at hand; None where no client has both, and rows.

    Args:
        a, b: accuracies from 0 to 1; clients are matched by name, seeds by number.
        rows: the number of rows behind the accuracies of each client, by its name.

    Examples:
        >>> together, alone = Scores([[0.75, 0.75]], ["north", "south"]), Scores([[0.5, 0.5]], ["north", "south"])
        >>> gap = row_difference(together, alone, {"north": 100, "south": 100})
        >>> gap.mean, round(gap.error, 3), gap.rows
        (0.25, 0.047, 200)
    """
    from scipy.special import stdtr

    seeds = [seed for seed in a.seeds if seed in b.seeds]
    names = [name for name in a.clients if name in b.clients and rows.get(name, 0) > 0]
    if not seeds or not names:
        return None
    ours, theirs = _cells(a, seeds, names), _cells(b, seeds, names)
    present = np.isfinite(ours) & np.isfinite(theirs)
    scored = present.any(0)
    if not scored.any():
        return None
    # a client that only one method has says nothing about their difference
    cells = np.where(present, ours - theirs, np.nan)[:, scored]
    of_client = np.nanmean(cells, axis=0)
    counts = np.array([rows[name] for name in names], np.float64)[scored]
    # rows are the same under every seed, so averaging over seeds does not reduce their noise
    errors = row_errors(_mean(ours, present)[scored], _mean(theirs, present)[scored], counts)
    mean, variance, freedom = float(of_client.mean()), float((errors**2).sum()) / len(counts) ** 2, np.inf
    per_seed = np.nanmean(cells[np.isfinite(cells).any(1)], axis=1)
    if len(per_seed) >= SEEDS_FOR_INTERVAL:
        of_seeds = float(per_seed.var(ddof=1)) / len(per_seed)
        variance += of_seeds
        # the variance of rows is taken for known; only that of seeds is estimated, from few of them
        freedom = (len(per_seed) - 1) * (variance / of_seeds) ** 2 if of_seeds > 0 else np.inf
    error = float(np.sqrt(variance))
    # seeds that contradict each other, and are too few for a variance, leave no claim
    agree = len({float(np.sign(gap)) for gap in per_seed} - {0.0}) < 2 or len(per_seed) >= SEEDS_FOR_INTERVAL
    # with infinitely many degrees of freedom Student's t is the normal distribution, which stdtr has at 1e9
    p = float(2 * stdtr(min(freedom, 1e9), -abs(mean) / error)) if agree else 1.0
    return RowDifference(mean, error, p, len(per_seed), len(counts), int(counts.sum()))


def row_errors(a: Floats, b: Floats, rows: Floats) -> Floats:
    """Return the largest standard error [c] of each client's difference of two accuracies [c] on `rows` [c] rows.

    A perfect score on few rows is not known without error: the error is at least one row.
    """
    return np.asarray(np.maximum(np.sqrt((a * (1 - a) + b * (1 - b)) / rows), 1 / rows))


def _cells(scores: Scores, seeds: list[int], names: list[str]) -> Floats:
    places = [list(scores.seeds).index(seed) for seed in seeds], [list(scores.clients).index(name) for name in names]
    return np.asarray(scores.values[np.ix_(*places)])


def _mean(values: Floats, present: NDArray[np.bool_]) -> Floats:
    """Return the mean over the seeds that have a value, 0 where none has."""
    return np.asarray(np.where(present, np.nan_to_num(values), 0).sum(0) / np.maximum(present.sum(0), 1))
