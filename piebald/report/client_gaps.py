"""Differences between methods at single clients: the headline of the dots that stand beside clients' names.

Each client is asked by itself, under the noise of its own test rows and of the seeds (`report.row_noise`).  The largest
of many differences is large by luck alone, so p values are multiplied by the number of differences that were looked at
(Bonferroni).  Such small p values of so few rows need care: each method counts one right and one wrong row more than it
has (Agresti and Caffo, *Simple and effective confidence intervals for proportions*, The American Statistician 2000).
Only of accuracies does the noise follow from the number of rows; of other metrics the largest difference is named, and
nothing is claimed about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from piebald.report.comparison import Comparison
from piebald.report.crossed_effects import ERROR_RATE
from piebald.report.page.wording import MetricFormat
from piebald.report.paired import Scores
from piebald.report.row_noise import COUNTED, row_difference


@dataclass(frozen=True, slots=True)
class Gap:
    """The difference between two methods at one client: the mean over their common seeds.

    Attributes:
        client: its name.
        label, base: the two methods.
        size: the first one's metric minus the other's.
        p: two-sided, not adjusted for other gaps; None where chance is not known.
    """

    client: str
    label: str
    base: str
    size: float
    p: float | None


def client_gaps(comparison: Comparison) -> list[Gap]:
    """The differences at each client: of every method to training alone, or of every two where none trains alone.

    Clients that never trained with a method have no score of it here.
    """
    ranked, rows = comparison.ranking(), _rows(comparison)
    scores = _aligned({label: comparison.scores[label] for label in ranked})
    base = _alone(comparison)
    pairs: Iterable[tuple[str, str]] = combinations(ranked, 2)
    if base is not None:
        pairs = [(label, base) for label in ranked if label != base]
    gaps = []
    for label, rival in pairs:
        differences = scores[label].values - scores[rival].values
        for column, client in enumerate(scores[label].clients):
            measured = differences[np.isfinite(differences[:, column]), column]
            if not measured.size:
                continue
            p = _p(scores[label], scores[rival], client, rows[client]) if client in rows else None
            gaps.append(Gap(client, label, rival, float(measured.mean()), p))
    return gaps


def headline(comparison: Comparison, gaps: Sequence[Gap]) -> str:
    """Return the headline: the number of clients at which methods differ beyond chance, and the largest difference."""
    shown = MetricFormat(comparison.metric)
    if not gaps:
        return f"Final {shown.name} of each client"
    if not any(gap.size for gap in gaps):
        return "All methods score the same at every client"
    tested = [gap for gap in gaps if gap.p is not None]
    # Bonferroni over all differences that could have become the headline
    clear = [gap for gap in tested if gap.p is not None and gap.p * len(tested) < ERROR_RATE]
    most = max(clear or gaps, key=lambda gap: abs(gap.size))
    side = "above" if most.size > 0 else "below"
    place = f"{most.client}, where {most.label} is {shown.size(abs(most.size))}{shown.points} {side} {most.base}"
    if not tested:
        return f"Methods differ most at {place}"
    clients, of = len({gap.client for gap in clear}), len({gap.client for gap in tested})
    if _alone(comparison) is None:
        subject = f"At {clients} of {of} clients methods can" if clients else "At no client can methods"
        return f"{subject} be told apart; they differ most at {place}"
    who = f"{clients} of {of} clients {'gains or loses' if clients == 1 else 'gain or lose'}"
    return f"{who if clients else 'No client gains or loses'} beyond chance; methods differ most at {place}"


def noise(gaps: Sequence[Gap]) -> str:
    """Return a sentence for the caption: the noise that the headline takes for chance."""
    tested = sum(gap.p is not None for gap in gaps)
    if tested:
        return (
            " Chance is that of each client's own rows and, from three seeds on, of seeds: p < "
            f"{ERROR_RATE} after multiplying by {tested:,} differences."
        )
    return " How far chance moves the score of a single client is not known." if gaps else ""


def _p(one: Scores, other: Scores, client: str, rows: int) -> float | None:
    """Return the p value of the difference at one client, with two more rows, one of them right."""
    # Agresti and Caffo: a score of 100 % on few rows is not known without error
    ours, theirs = (replace(scores, values=(rows * scores.values + 1) / (rows + 2)) for scores in (one, other))
    tested = row_difference(ours, theirs, {client: rows + 2})
    return None if tested is None else tested.p


def _alone(comparison: Comparison) -> str | None:
    """The label whose clients train alone, None if there is none with scores."""
    base = comparison.made_by("local")
    return base if base in comparison.ranking() else None


def _rows(comparison: Comparison) -> Mapping[str, int]:
    """The rows that each client is judged by, by name; empty unless the metric is the accuracy on known rows."""
    rows_of: dict[str, int] = {}
    if comparison.metric != COUNTED:
        return rows_of
    for run in comparison.runs:
        for client in run.clients:
            if rows := client[run.split]:
                name = run.names[client["client"]]
                # the smallest number over runs: the noise is never understated
                rows_of[name] = min(rows, rows_of.get(name, rows))
    return rows_of


def _aligned(scores: Mapping[str, Scores]) -> dict[str, Scores]:
    """All scores with the same seeds and clients, NaN where a method has none or the client never trained with it."""
    seeds = sorted({seed for table in scores.values() for seed in table.seeds})
    clients = list(dict.fromkeys(client for table in scores.values() for client in table.clients))
    aligned = {}
    for label, table in scores.items():
        values = np.full((len(seeds), len(clients)), np.nan)
        places = np.ix_([seeds.index(seed) for seed in table.seeds], [clients.index(name) for name in table.clients])
        values[places] = table.cells()
        aligned[label] = Scores(values, clients, seeds)
    return aligned
