"""Answers that need no model, beside every method: the most frequent class, the median, equal hazards.

They come from the clients' own training rows, or from the training rows of all clients together, and are scored on the
same rows as models are (`methods.queries.row_scores`).  A method that is not clearly better has learned nothing that is
of use by this metric, however high its accuracy.  Where one class has most of the rows, balanced accuracy, the mean
over classes of the share of rows that are recognised, says more: no constant answer is better by it than chance.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from piebald.report.class_rows import Counts
from piebald.report.page.wording import MetricFormat, names
from piebald.report.paired import Scores
from piebald.report.tables import History

DOMINANT = 0.7  # share of the judged rows from which one class dominates
_ANSWERS = {"regression": "mean", "l1": "median", "huber": "mean", "multilabel": "labels", "survival": "equal"}
_NAMES = {
    "mean": "the typical value", "median": "the typical value", "labels": "the most frequent labels",
    "equal": "equal hazards",
}  # fmt: skip


def answers(runs: list[History], scores_of: Callable[[list[History], str], Scores]) -> dict[str, Scores]:
    """Scores of the answers that need no model, by name; empty where the run folders have none.

    Args:
        runs: of all labels, of which one of each seed is read.
        scores_of: makes the scores of runs by one of these answers.
    """
    once = {run.repetition: run for run in reversed(runs) if run.naive("naive")}
    kept = list(once.values())
    return {
        name: scores_of(kept, model)
        for name, model in (answer_names(runs[0]).items() if kept else ())
        if any(run.naive(model) for run in kept)
    }


def answer_names(run: History) -> dict[str, str]:
    """The answers that need no model by their names in words: how the run folder calls them."""
    name = _NAMES.get(_ANSWERS.get(str(run.meta.get("objective")), ""), "the most frequent class")
    return {name: "naive", f"all clients' {name.removeprefix('the ')}": "naive_of_all"}


def balanced(matrix: Counts, predicted: int | None = None) -> float | None:
    """The balanced accuracy of counts [true, predicted], or of one class as the answer to every row.

    Examples:
        >>> balanced(np.array([[8, 2], [1, 1]])), balanced(np.array([[8, 2], [1, 1]]), 0)
        (0.65, 0.5)
    """
    rows = matrix.sum(1)
    held = rows > 0
    if not held.any():
        return None
    if predicted is not None:
        return float(held[predicted]) / int(held.sum())
    return float((matrix.diagonal()[held] / rows[held]).mean())


def dominated(runs: list[History]) -> list[str]:
    """The clients of which one class has more than 70 % of the judged rows, and with more classes than one to judge."""
    clients: dict[str, None] = {}
    for run in runs:
        for client, matrix in run.class_counts.items():
            rows = matrix.sum(1)
            if rows.sum() and rows.max() > DOMINANT * rows.sum():
                clients[run.names[client]] = None
    return list(clients)


def balanced_means(runs: list[History]) -> dict[str, float]:
    """The mean balanced accuracy over clients and seeds of each label whose answers were counted by class."""
    values: dict[str, list[float]] = {}
    for run in runs:
        for matrix in run.class_counts.values():
            if (value := balanced(matrix)) is not None:
                values.setdefault(run.label, []).append(value)
    return {label: float(np.mean(shares)) for label, shares in values.items()}


def imbalance(runs: list[History]) -> str:
    """A sentence about balanced accuracy where one class dominates at some client; empty where none does."""
    where = dominated(runs)
    means = balanced_means(runs)
    if not where or not means:
        return ""
    matrices = [matrix for run in runs for matrix in run.class_counts.values()]
    chance = float(np.mean([1 / held for matrix in matrices if (held := int((matrix.sum(1) > 0).sum()))]))
    shown = MetricFormat("balanced_accuracy")
    order = sorted(means, key=lambda label: -means[label])
    listed = names([f"{label} {shown.value(means[label])}" for label in order], 6)
    return (
        f"One class has over {DOMINANT:.0%} of the judged rows at {names(where)}, so look at balanced accuracy: "
        f"{listed}; one class for every row at most {shown.value(chance)}."
    )
