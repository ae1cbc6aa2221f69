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
from piebald.report.paired import FULL_VOTE, Scores
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


def balanced(matrix: Counts) -> float | None:
    """The balanced accuracy of counts [true, predicted], None without rows.

    Examples:
        >>> balanced(np.array([[8, 2], [1, 1]]))
        0.65
    """
    rows = matrix.sum(1)
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
