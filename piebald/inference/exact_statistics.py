"""Exact statistics of columns of numbers, from clients that tell their moments and count numbers up to thresholds.

Exact quantiles need no bounds and no sorted rows: the server bisects the order of all float64 numbers, and each client
counts how many of its numbers are at most the thresholds of the question.  After 16 questions at most, an order
statistic is known to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from piebald.contracts import Split
from piebald.core.errors import RuntimeFault
from piebald.core.moments import (
    HIGHEST,
    LOWEST,
    Floats,
    Ints,
    Moments,
    keys_of,
    merged,
    number_of,
    order_statistics,
)
from piebald.inference.pooled_statistics import NumberColumn
from piebald.inference.queries.columns import MOST_KEYS, PARTS, StatisticsQuery
from piebald.inference.request import StatisticsRequest
from piebald.inference.sites import AskedSites

_SECTIONS = 16  # of the numbers that are left: 2 would take 64 questions in place of 16


class ExactAnswers:
    """The answers of clients about d columns of numbers.

    The first question says who takes part: clients that refuse it, or do not answer, are left out, and those who
    answered must answer all further ones.

    Args:
        sites: reaches the clients.
        split: the split that the questions are about.
        targets: how many numbers a target has.

    Attributes:
        clients: the numbers of those who take part.
        moments: of the columns of each of them.

    Raises:
        SettingError: nobody answers.
    """

    def __init__(self, sites: AskedSites, split: Split, targets: int) -> None:
        self._sites, self._split, self._targets = sites, split, targets
        answers = sites.ask(StatisticsQuery(split=split, targets=targets), sites.runtime.clients())
        if not answers:
            raise sites.refusal("no site answers questions about statistics")
        sites.leave_out(answers)
        self.clients = list(answers)
        self.moments = [_moments(answer.vectors["moments"].numpy()) for answer in answers.values()]

    def at_most(self, thresholds: Floats) -> Ints:
        """Count the finite numbers of each client that are at most these thresholds [d, t]: [clients, d, t]."""
        queries = counts_queries(thresholds, self._split, self._targets)
        answers = [self._sites.ask(query, self.clients) for query in queries]
        # quantiles are a bisection over all rows: counts of fewer clients would lead it astray
        if lost := [client for client in self.clients if not all(client in answer for answer in answers)]:
            raise RuntimeFault(
                f"client {lost[0] + 1} answered the first question and not the next one "
                f"({self._sites.refused[lost[0]]}): ask again, or for no more than it answers"
            )
        counts = [[answer[client].vectors["counts"] for answer in answers] for client in self.clients]
        return torch.stack([torch.cat(parts, 1) for parts in counts]).numpy().astype(np.int64)

    def quantiles(self, present: Ints, shares: Sequence[float]) -> Floats:
        """Return exact quantiles [d, shares] of the pooled numbers, linear between neighbours like numpy.quantile.

        Args:
            present: how many numbers each column has [d].
            shares: of the numbers below.
        """
        if not shares:
            return np.zeros((len(present), 0))
        positions = np.maximum(present - 1, 0)[:, None] * np.asarray(shares, dtype=np.float64)
        # as numpy's method "linear": a share p lies at the position p (n - 1), between two order statistics
        below = np.floor(positions).astype(np.int64)
        # the neighbour of the last rank is itself; without numbers both are 0, and the result becomes NaN below
        ranks = np.minimum(np.concatenate([below, below + 1], axis=1), np.maximum(present - 1, 0)[:, None])
        keys = order_statistics(
            lambda thresholds: self.at_most(number_of(thresholds)).sum(0), ranks, LOWEST, HIGHEST, _SECTIONS
        )
        ends = np.where(present[:, None] > 0, number_of(keys) + 0.0, np.nan)  # -0.0 becomes 0.0
        lower, upper = ends[:, : len(shares)], ends[:, len(shares) :]
        part = positions - below
        with np.errstate(over="ignore", invalid="ignore"):
            # from the nearer end, as numpy interpolates: the other form would differ in the last bit
            between = np.where(part < 0.5, lower + (upper - lower) * part, upper - (upper - lower) * (1 - part))
        # at a rank itself nothing is interpolated: with an infinite neighbour 0 times infinity would be NaN
        return np.where(part == 0, lower, between)

    def columns(
        self, names: Sequence[str], clients: Sequence[str], request: StatisticsRequest, few_questions: bool = False
    ) -> tuple[dict[str, NumberColumn], dict[str, dict[str, NumberColumn]]]:
        """Return the columns of numbers over all clients, and each client's own where the request asks for them.

        Args:
            names: of the columns.
            clients: names of those who take part.
            request: what is asked for.
            few_questions: whether quantiles come from the histogram, whose counts are the only ones that are asked for.
        """
        if not names:
            return {}, {}
        pooled, shares = merged(self.moments), request.quantiles
        quantiles = np.full((len(names), len(shares)), np.nan)
        if not few_questions:
            quantiles = self.quantiles(pooled.present, shares)
        edges: Floats | None = None
        counts = np.zeros((len(self.moments), len(names), 0), dtype=np.int64)
        if request.bins is not None:
            edges = edges_of(*self._ends(names, pooled.present, request), request.bins)
            counts = np.diff(self.at_most(bin_limits(edges)), axis=2)
        numbers = _columns(names, pooled, shares, quantiles, edges, counts.sum(0))
        if few_questions and edges is not None:
            numbers = {
                name: column.with_histogram(np.array(column.edges), np.array(column.counts), shares)
                for name, column in numbers.items()
            }
        no_quantiles = np.zeros((len(names), 0))
        by_client = {
            client: _columns(names, moments, (), no_quantiles, edges, own_counts)
            for client, moments, own_counts in zip(clients, self.moments, counts, strict=True)
        }
        return numbers, by_client if request.by_client else {}

    def _ends(self, names: Sequence[str], present: Ints, request: StatisticsRequest) -> tuple[Floats, Floats]:
        """Return the ends [d] of histograms: stated bounds, or the extremes, which are asked for."""
        ends = np.full((len(names), 2), np.nan)
        if any(name not in request.bounds for name in names):
            ends = self.quantiles(present, (0.0, 1.0))
        low, high = np.array([request.bounds.get(name, own) for name, own in zip(names, ends, strict=True)]).T
        return low, high


def counts_queries(thresholds: Floats, split: Split, targets: int) -> list[StatisticsQuery]:
    """Return questions about thresholds [d, t], each about no more than a question may have."""
    keys = keys_of(thresholds)
    parts = [keys[:, first : first + MOST_KEYS] for first in range(0, keys.shape[1], MOST_KEYS)]
    return [StatisticsQuery(split=split, targets=targets, keys=tuple(map(tuple, part.tolist()))) for part in parts]


def edges_of(low: Floats, high: Floats, bins: int) -> Floats:
    """Return edges [d, bins + 1] of bins of one width; as numpy.histogram's, a constant column has ends 1 apart."""
    # not numpy.histogram_bin_edges, which refuses a column whose numbers lie too near for so many bins
    low, high = np.where(low == high, low - 0.5, low), np.where(low == high, high + 0.5, high)
    ends = zip(low, high, strict=True)
    edges = [np.linspace(*pair, bins + 1) if np.isfinite(pair).all() else [np.nan] * (bins + 1) for pair in ends]
    return np.array(edges, dtype=np.float64).reshape(len(low), bins + 1)


def bin_limits(edges: Floats) -> Floats:
    """Return thresholds [d, bins + 1] whose counts tell those of bins: each has its lower edge, the last one both."""
    # questions count numbers at most a limit, and a bin has its lower edge: the next smaller float is the limit
    limits = np.nextafter(edges, -np.inf)
    limits[:, -1] = edges[:, -1]
    # columns without numbers have edges NaN, which are no thresholds; their counts are 0 anywhere
    return np.nan_to_num(limits)


def _columns(
    names: Sequence[str], moments: Moments, shares: Sequence[float], quantiles: Floats, edges: Floats | None,
    counts: Ints,
) -> dict[str, NumberColumn]:  # fmt: skip
    columns, variance = {}, moments.variance
    for index, name in enumerate(names):
        present = int(moments.present[index])
        columns[name] = NumberColumn(
            present=present,
            missing=int(moments.missing[index]),
            infinite=int(moments.infinite[index]),
            mean=float(moments.mean[index]) if present else float("nan"),
            variance=float(variance[index]),
            quantiles=dict(zip(shares, quantiles[index].tolist(), strict=True)),
            edges=() if edges is None else tuple(edges[index].tolist()),
            counts=tuple(counts[index].tolist()),
        )
    return columns


def _moments(vectors: Floats) -> Moments:
    """Return the moments of one client from its answer [parts, d]."""
    parts = dict(zip(PARTS, np.asarray(vectors), strict=True))
    counts = {name: parts[name].astype(np.int64) for name in PARTS[:3]}
    # each row is present, missing or infinite in the first column
    rows = int(vectors[:3, 0].sum()) if vectors.shape[1] else 0
    return Moments(rows, **counts, mean=parts["mean"], scatter=parts["scatter"])
