"""Exact statistics: clients answer with counts and moments, which are merged to those of the pooled rows.

Quantiles need no bounds and no sorted rows: the server bisects the order of all float64 numbers, and each client counts
how many of its numbers are at most the threshold of the question.  After 64 questions at most, an order statistic is
known to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from piebald.core.moments import Floats, Moments, counts_at_most
from piebald.data.partition.split import Ints
from piebald.statistics.columns import ClientColumns


class Answers(Protocol):
    """Answers of clients about d columns of numbers, on this machine or at sites."""

    def moments(self) -> list[Moments]:
        """Return each client's moments of the columns."""

    def at_most(self, thresholds: Floats) -> Ints:
        """Count the finite numbers of each client that are at most these thresholds [d, t]: [clients, d, t]."""


class LocalAnswers:
    """Answers of clients on this machine.

    Args:
        clients: their rows.
        names: the columns of numbers, in order.
    """

    def __init__(self, clients: Sequence[ClientColumns], names: Sequence[str]) -> None:
        self._names = names
        self._values = [client.matrix(names) for client in clients]
        self._sorted: list[list[Floats]] | None = None

    def moments(self) -> list[Moments]:
        """See `Answers`."""
        return [Moments.of(values, self._names) for values in self._values]

    def at_most(self, thresholds: Floats) -> Ints:
        """See `Answers`."""
        if self._sorted is None:
            self._sorted = [[np.sort(column[np.isfinite(column)]) for column in values.T] for values in self._values]
        return np.array([counts_at_most(columns, thresholds) for columns in self._sorted], dtype=np.int64)


def edges_of(low: Floats, high: Floats, bins: int) -> Floats:
    """Return edges [d, bins + 1] of bins of one width; as numpy.histogram's, a constant column has ends 1 apart."""
    same = low == high
    low, high = np.where(same, low - 0.5, low), np.where(same, high + 0.5, high)
    return np.stack([np.linspace(a, b, bins + 1) if np.isfinite(a) else np.full(bins + 1, np.nan)
                     for a, b in zip(low, high, strict=True)]) if len(low) else np.zeros((0, bins + 1))  # fmt: skip
