"""Comparison of two methods on the rows of the clients at hand, and with answers that need no model.

`paired` asks what *other clients* would gain: where gains differ from client to client, as they do wherever clients are
not alike, few clients say little about that.  Whoever asks for the clients at hand has them all.  What is left is that
each of them has few rows, and that another seed makes another model.

On a row both methods have a score, of accuracies 0 or 1, and the variance of a client's difference is that of these
differences over its n rows: rows on which both are right or both wrong add nothing (McNemar 1947; the mean over clients
is its stratified form).  Metrics of all rows of a client together, such as an area under a curve, have values of rows
from a jackknife (`engines.scoring.pseudo_values`).  Sites keep single rows and tell the covariance of two runs' values
(`methods.queries.row_scores`), from which the same follows.  Where that is not known either, the variance of an
accuracy is taken for that of two shares, at most (p (1 - p) + q (1 - q)) / n, and that of another metric for the sum of
the squares of both standard errors; both find less.  Clients count by their votes (`Scores.votes`), so the variance of
the mean is the sum of those of clients, weighed by the squares of their shares.
One row more, at any client, on which the two disagree is added to accuracies, since no disagreement on few rows is not
known without error (Agresti and Min 2005).  With three seeds and more, what seeds add to the variance is added: that of
their means, less the part of it that comes from rows on which seeds differ, which the variance of rows has already, as
`crossed_effects` does with cells.  One or two seeds say too little about others: what is found holds for these runs,
and two must agree in the sign.  Degrees of freedom are Satterthwaite's.

Sources: McNemar, *Note on the sampling error of the difference between correlated proportions or percentages*,
Psychometrika 1947; Agresti and Min, *Simple improved confidence intervals for comparing matched proportions*,
Statistics in Medicine 2005.

Answers that need no model come from the clients' own training rows, or from the training rows of all clients together,
and are scored on the same rows as models are (`methods.queries.row_scores`).  A method that is not clearly better has
learned nothing that is of use by this metric, however high its accuracy.  Where one class has most of the rows,
balanced accuracy, the mean over classes of the share of rows that are recognised, says more: no constant answer is
better by it than chance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from piebald.core.arguments import Count, checked
from piebald.core.metrics import REPLICATES
from piebald.report.class_rows import Counts
from piebald.report.crossed_effects import ERROR_RATE, SEEDS_FOR_INTERVAL
from piebald.report.page.wording import MetricFormat, names
from piebald.report.paired import FULL_VOTE, Difference, Scores, within_shares
from piebald.report.tables import History

Floats = NDArray[np.float64]
COUNTED = "accuracy"  # the metric whose standard error follows from the number of rows
_PRIOR = 5  # rows that the mean of all clients counts as, when it is told what a client's rows vary around
_MOST_FREEDOM = 1e9  # where Student's t is the normal distribution


@checked
def row_difference(a: Scores, b: Scores, *, comparisons: Count = 1) -> Difference | None:
    """Compare two methods on the rows of the clients at hand: the mean of `a` minus that of `b`, under common seeds.

    Args:
        a, b: scores; clients are matched by name, seeds by number.
        comparisons: the number of comparisons that the interval and p are to hold for together (Bonferroni).

    Returns:
        None where no client has both, or where the noise of rows is not known of all that have.

    Examples:
        >>> sizes = {"sizes": [100, 100], "counted": True}
        >>> together = Scores([[0.75, 0.75]], ["north", "south"], **sizes)
        >>> gap = row_difference(together, Scores([[0.5, 0.5]], ["north", "south"], **sizes))
        >>> gap.mean, round(gap.error, 3), gap.noise
        (0.25, 0.047, 'rows')
    """
    from scipy.special import stdtr, stdtrit

    # under common seeds both have the same rows and starts, whose noise the difference is free of
    seeds = [seed for seed in a.seeds if seed in b.seeds]
    names = [name for name in a.clients if name in b.clients and min(_size(a, name), _size(b, name)) > 0]
    if not seeds or not names:
        return None
    ours, theirs = _cells(a, seeds, names), _cells(b, seeds, names)
    gaps = ours - theirs
    # a client that only one method has says nothing about their difference
    scored = np.flatnonzero(np.isfinite(gaps).any(0)).tolist()
    gaps, names = gaps[:, scored], [names[index] for index in scored]
    held = [[seed for seed, gap in zip(seeds, column, strict=True) if np.isfinite(gap)] for column in gaps.T]
    votes = dict(zip(a.clients, a.votes, strict=True))
    shares = np.array([votes[name] for name in names])
    # after clients without a difference were left out, so that the weights of the others add up to 1
    shares = shares / shares.sum()
    mean = float((shares * np.nanmean(gaps, axis=0)).sum()) if names else 0.0
    parts = [_of_client(a, b, own_seeds, name, mean) for name, own_seeds in zip(names, held, strict=True)]
    if not parts or None in parts:
        return None
    variances, freedoms, sizes, disagreements, by_seeds = np.array(parts, np.float64).T
    # clients' rows are independent, so variances add up by squared shares
    of_rows = shares**2 * variances
    # where the disagreement is, or anywhere if there is none
    weights = sizes * disagreements if disagreements.any() else np.ones(len(sizes))
    # Agresti and Min 2005: as if a row more disagreed, so that methods that agree on few rows are not surely alike
    one_more = float(np.average((shares / sizes) ** 2, weights=weights)) if a.counted and b.counted else 0.0
    variance = float(of_rows.sum()) + (one_more if np.isfinite(freedoms).all() else 0.0)
    # Satterthwaite 1946: each client's variance is estimated with its own degrees of freedom
    uncertain = float((of_rows**2 / freedoms).sum())
    per_seed = [
        float(np.nansum(shares * row) / shares[~np.isnan(row)].sum()) for row in gaps if not np.isnan(row).all()
    ]
    # two seeds give no variance to speak of; from three on that of seeds comes on top of that of rows
    if len(per_seed) >= SEEDS_FOR_INTERVAL:
        of_means = float(np.var(per_seed, ddof=1))
        # seeds' means differ by rows on which seeds differ as well, and the variance of rows has those
        beyond_rows = of_means - float((shares**2 * by_seeds).sum())
        if beyond_rows > 0:
            variance += beyond_rows / len(per_seed)
            uncertain += (of_means / len(per_seed)) ** 2 / (len(per_seed) - 1)
    freedom = min(variance**2 / uncertain, _MOST_FREEDOM) if uncertain else _MOST_FREEDOM
    # no variance is known better than by all rows together: two rows that agree prove nothing
    freedom = min(freedom, max(1.0, float(sizes.sum()) - 1))
    error = float(np.sqrt(variance))
    half = float(stdtrit(freedom, 1 - ERROR_RATE / 2 / comparisons)) * error
    low, high = within_shares(mean - half, mean + half, a, b)
    # seeds that contradict each other, and are too few for a variance, leave no claim
    agree = len({float(np.sign(gap)) for gap in per_seed} - {0.0}) < 2 or len(per_seed) >= SEEDS_FOR_INTERVAL
    p = min(1.0, comparisons * float(2 * stdtr(freedom, -abs(mean) / error))) if agree and mean and error else 1.0
    return Difference(mean, low, high, len(per_seed), len(names), "interval", error, p, "rows")


def row_differences(a: Scores, b: Scores, comparisons: Count = 1) -> dict[str, Difference]:
    """Compare two methods at each client by itself, where the noise of its rows is known."""
    shared = [name for name in a.clients if name in b.clients]
    gaps = {name: row_difference(a.of_client(name), b.of_client(name), comparisons=comparisons) for name in shared}
    return {name: gap for name, gap in gaps.items() if gap is not None}


class _Noise(NamedTuple):
    """The noise of a client's difference.

    Attributes:
        variance: by its rows, of the mean over seeds; without single rows the largest that shares allow.
        freedom: its degrees of freedom, infinite for that largest variance.
        rows: the client's.
        disagreement: the mean square of rows' differences.
        by_seeds: the variance of a seed's difference by rows on which seeds differ, 0 where it is not known.
    """

    variance: float
    freedom: float
    rows: float
    disagreement: float
    by_seeds: float = 0.0


def _of_client(a: Scores, b: Scores, seeds: list[int], name: str, mean: float) -> _Noise | None:
    """The noise of a client's difference, None where it is not known."""
    pairs = [(a.rows.get((seed, name)), b.rows.get((seed, name))) for seed in seeds]
    # rows pair only where both methods were scored on as many
    gaps = [x - y for x, y in pairs if x is not None and y is not None and len(x) == len(y)]
    if len(gaps) == len(pairs):
        # of the same rows the mean over seeds is what varies; of others no less than their mean variance
        same = len({len(gap) for gap in gaps}) == 1 and not a.redrawn
        tables = [np.mean(gaps, axis=0)] if same else gaps
        rows, disagreement = min(map(len, tables)), float(np.mean([(gap**2).mean() for gap in tables]))
        covariance = np.cov(gaps) / rows if len(tables) < len(gaps) and rows > 1 else np.zeros((1, 1))
        variance = float(np.mean([_variance(gap, mean) for gap in tables]))
        return _Noise(variance, max(1, rows - 1), rows, disagreement, _between(covariance))
    if (part := _of_moments(a, b, seeds, name, mean)) is not None:
        return part
    # rows are the same under every seed, so averaging over seeds does not reduce their noise
    p, q = (float(_cells(scores, seeds, [name]).mean()) for scores in (a, b))
    rows = min(_size(a, name), _size(b, name))
    if a.counted and b.counted:
        return _Noise(row_error(p, q, rows) ** 2, np.inf, rows, 0.0)
    squares = [[_standard_error(scores, seed, name) ** 2 for seed in seeds] for scores in (a, b)]
    values = min(rows, REPLICATES)
    if values < 2 or not np.isfinite(squares).all():
        return None
    return _Noise(float(np.mean(squares, axis=1).sum()) + _off_centre(p - q, values, mean), values - 1, rows, 0.0)


def _between(covariance: Floats) -> float:
    """What seeds' values vary by around their mean, from their covariance [seeds, seeds] for other rows."""
    count = len(covariance)
    return 0.0 if count < 2 else float(max(0.0, np.trace(covariance) - covariance.sum() / count) / (count - 1))


def _of_moments(a: Scores, b: Scores, seeds: list[int], name: str, mean: float) -> _Noise | None:
    """The result of `_of_client`, from covariances in place of single rows; None where they are not known."""
    cells = [scores.moments.get((seed, name)) for scores in (a, b) for seed in seeds]
    moments, count = [cell for cell in cells if cell is not None], len(seeds)
    if len(moments) < len(cells):
        return None
    table = np.array([[x.covariance(y) for y in moments] for x in moments], dtype=np.float64)
    gaps = _cells(a, seeds, [name])[:, 0] - _cells(b, seeds, [name])[:, 0]
    # of the same rows under all seeds, all covariances are known, and the mean over seeds has one variance
    if len({moment.count for moment in moments}) == 1 and np.isfinite(table).all():
        signs = np.kron([1.0, -1.0], np.eye(count))  # of each seed's difference
        of_seeds = signs @ table @ signs.T
        gaps, variances, by_seeds = gaps.mean(keepdims=True), of_seeds.mean(keepdims=True)[0], _between(of_seeds)
    else:  # only the two methods' values under the same seed
        ours, theirs = np.arange(count), np.arange(count, 2 * count)
        variances, by_seeds = table[ours, ours] + table[theirs, theirs] - 2 * table[ours, theirs], 0.0
        if not np.isfinite(variances).all():
            return None
    values = min(moment.count for moment in moments)
    variances = np.maximum(variances, 0.0)  # rounded
    disagreement = float(np.mean(variances * (values - 1) + gaps**2))
    noise = [v + _off_centre(gap, values, mean) for v, gap in zip(variances.tolist(), gaps.tolist(), strict=True)]
    return _Noise(float(np.mean(noise)), max(1, values - 1), values, disagreement, by_seeds)


def row_error(a: float, b: float, rows: float) -> float:
    """Return the largest standard error of the difference of two accuracies on `rows` rows.

    A perfect score on few rows is not known without error: the error is at least one row.
    """
    return float(max(np.sqrt((a * (1 - a) + b * (1 - b)) / rows), 1 / rows))


def _standard_error(scores: Scores, seed: int, name: str) -> float:
    """The standard error of a client's value for other rows: as it was told, or from single rows; NaN if unknown."""
    rows = scores.rows.get((seed, name))
    from_rows = float(np.std(rows, ddof=1) / len(rows) ** 0.5) if rows is not None and len(rows) > 1 else np.nan
    return scores.errors.get((seed, name), from_rows)


def _variance(gaps: Floats, mean: float) -> float:
    """The variance of the mean of some rows' differences [n]; that of few rows is taken around all clients' mean."""
    spread = float(((gaps - gaps.mean()) ** 2).sum() / max(1, len(gaps) - 1) / len(gaps))
    return spread + _off_centre(float(gaps.mean()), len(gaps), mean)


def _off_centre(gap: float, rows: int, mean: float) -> float:
    """The variance that a client's mean difference gets from lying off the mean of all clients, if its rows are few.

    Two rows that are right by luck would otherwise be as sure as two hundred.
    """
    centre = (rows * gap + _PRIOR * mean) / (rows + _PRIOR)
    return float((gap - centre) ** 2) / max(1, rows - 1)


def _size(scores: Scores, name: str) -> int:
    return int(scores.sizes[list(scores.clients).index(name)]) if len(scores.sizes) else 0


def _cells(scores: Scores, seeds: list[int], names: list[str]) -> Floats:
    places = [list(scores.seeds).index(seed) for seed in seeds], [list(scores.clients).index(name) for name in names]
    return np.asarray(scores.cells()[np.ix_(*places)])


PLAIN = "alone/"  # begins the name of a plain model's scores beside those of a run, see `runs.plain_models`
CHOOSING = "choosing"  # names scores on rows that nothing is judged by, of Local (model "rows") and of plain models
DOMINANT = 0.7  # share of the judged rows from which one class dominates
_TYPICAL = dict.fromkeys(("regression", "l1", "huber"), "the typical value")
_NAMES = {
    **_TYPICAL, "multilabel": "the most frequent labels", "counts": "the constant rate",
    "survival": "the Kaplan-Meier curve",
}  # fmt: skip


def answers(runs: list[History], scores_of: Callable[[list[History], str], Scores]) -> dict[str, Scores]:
    """Scores of the answers that need no model, by name; empty where the run folders have none.

    Args:
        runs: of all labels, of which one of each seed is read.
        scores_of: makes the scores of runs by one of these answers.
    """
    # reversed, so that of several labels the first one's run of a seed stays: the answer is the same for all
    once = {run.repetition: run for run in reversed(runs) if run.naive("naive")}
    kept = list(once.values())
    return {
        name: scores_of(kept, model)
        for name, model in (answer_names(runs[0]).items() if kept else ())
        if any(run.naive(model) for run in kept)
    }


def answer_names(run: History) -> dict[str, str]:
    """The answers that need no model by their names in words: how the run folder calls them."""
    objective = str(run.meta.get("objective"))
    name = _NAMES.get(objective, "the most frequent class")
    of_all = {f"all clients' {name.removeprefix('the ')}": "naive_of_all"} if objective != "survival" else {}
    return {name: "naive", **of_all}


def balanced(matrix: Counts) -> float | None:
    """The balanced accuracy of counts [true, predicted], None without rows.

    Examples:
        >>> balanced(np.array([[8, 2], [1, 1]]))
        0.65
    """
    rows = matrix.sum(1)
    # a class without rows has no share that could be recognised, and would make the mean NaN
    held = rows > 0
    return float((matrix.diagonal()[held] / rows[held]).mean()) if held.any() else None


def imbalance(runs: list[History]) -> str:
    """A sentence about balanced accuracy where one class dominates at some client; empty where none does."""
    dominated, scored = dict[str, None](), dict[str, list[tuple[float, float, float]]]()
    for run in runs:
        for client, matrix in run.class_counts.items():
            rows = matrix.sum(1)
            if (value := balanced(matrix)) is not None:
                vote = min(rows.sum() / FULL_VOTE, 1.0)  # as in other means; of few rows one class has most by chance
                scored.setdefault(run.label, []).append((value, 1 / int((rows > 0).sum()), vote))
                dominated |= {run.names[client]: None} if vote == 1 and rows.max() > DOMINANT * rows.sum() else {}
    if not dominated:
        return ""
    columns = {label: np.array(rows_of_label).T for label, rows_of_label in scored.items()}
    means = {label: float(np.average(shares, weights=votes)) for label, (shares, _, votes) in columns.items()}
    _, chances, votes = np.concatenate([*columns.values()], axis=1)
    chance = float(np.average(chances, weights=votes))
    shown = MetricFormat("balanced_accuracy")
    order = sorted(means, key=lambda label: -means[label])
    listed = names([f"{label} {shown.value(means[label])}" for label in order], 6)
    return (
        f"One class has over {DOMINANT:.0%} of the judged rows at {names(list(dominated))}, so look at balanced "
        f"accuracy: {listed}; one class for every row at most {shown.value(chance)}."
    )
