"""What the paper prints: conditions, the figures of Table I, and its tables and figures in order.

Stripelis, Ambite 2020, Accelerating federated learning in heterogeneous data and computational environments.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.stored import printed

PRINTED = printed("metis")
HETEROGENEOUS = ("SyncFedAvg", "SyncDVW", "AsyncFedAvg", "FedAsync", "AsyncDVW", "AsyncDVW, adaptive")
ROUNDS_200, SECONDS_14K = (
    {tuple(cell.split(", ")): tuple(figures) for cell, figures in PRINTED[name].items()}
    for name in ("rounds_200", "seconds_14k")
)  # Table I by sizes and classes, per cent
CONDITIONS = PRINTED["conditions"]


def gains(table: dict[tuple[str, str], tuple[float, ...]], labels: tuple[str, ...]) -> str:
    """Return each policy's least and largest difference to the first one over the cells of Table I, in points."""
    spans = []
    for place, label in enumerate(labels[1:], 1):
        apart = [row[place] - row[0] for row in table.values()]
        spans.append(f"{label} {min(apart):+.1f} to {max(apart):+.1f}")
    return f"minus {labels[0]}: {'; '.join(spans)}"


@dataclass(frozen=True)
class Row:
    """A table or figure of the paper.

    Attributes:
        name: as the paper numbers it.
        shows: what it shows.
        printed: the paper's figures, as far as the text gives them.
        part: the part of our results that makes it, or None.
        without: why it is not made here, and what it would need.
    """

    name: str
    shows: str
    printed: str
    part: str | None = None
    without: str = ""


DIFFERENCES = {
    "rounds_200": gains(ROUNDS_200, ("FedAvg", "DVW")),
    "seconds_14k": gains(SECONDS_14K, HETEROGENEOUS),
}


def _row(differences: str = "", **row: str) -> Row:
    return Row(**({"printed": DIFFERENCES[differences]} if differences else {}) | row)


ROWS = [_row(**one) for one in PRINTED["rows"]]
