"""Differences between methods at single clients: the headline of the dots that stand beside clients' names.

Each client is asked by itself, under the noise of its own test rows and of the seeds (`report.row_noise`).  The largest
of many differences is large by luck alone, so p values are multiplied by the number of differences that were looked at
(Bonferroni).  Where that noise is not known the largest difference is named, and nothing is claimed about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from piebald.report.comparison import Comparison
from piebald.report.crossed_effects import ERROR_RATE
from piebald.report.page.wording import MetricFormat
from piebald.report.paired import difference
from piebald.report.row_noise import row_difference


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
    ranked, base = comparison.ranking(), _alone(comparison)
    pairs: Iterable[tuple[str, str]] = combinations(ranked, 2)
    if base is not None:
        pairs = [(label, base) for label in ranked if label != base]
    gaps = []
    for label, rival in pairs:
        ours, theirs = comparison.scores[label], comparison.scores[rival]
        for client in [name for name in ours.clients if name in theirs.clients]:
            pair = ours.of_client(client), theirs.of_client(client)
            # only the noise of rows is known of one client
            measured, tested = difference(*pair), row_difference(*pair)
            if measured is not None:
                gaps.append(Gap(client, label, rival, measured.mean, None if tested is None else tested.p))
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
        subject = f"At {clients} of {of} clients methods" if clients else "At no client do methods"
        return f"{subject} differ clearly; they differ most at {place}"
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


def _alone(comparison: Comparison) -> str | None:
    """The label whose clients train alone, None if there is none with scores."""
    base = comparison.made_by("local")
    return base if base in comparison.ranking() else None
