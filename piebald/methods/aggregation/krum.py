"""Krum, multi-Krum and Bulyan: the updates with the nearest neighbours."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import Cohort
from piebald.core.cohort_matrix import blocks, mean, squared_distances
from piebald.methods.aggregation.robust import ExpectsAttackers, even


class Krum(ExpectsAttackers):
    """The one update that is nearest to its n - f - 2 nearest others (Blanchard et al. 2017).

    Tolerates f of n >= 2 f + 3 updates.  It needs no mean, so it learns from one client a round.
    """

    on_device: ClassVar[bool] = True

    def tolerates(self, count: int) -> int:
        return max(0, (count - 3) // 2)

    def merge(self, matrix: Tensor, cohort: Cohort) -> tuple[Tensor, Tensor]:
        best = ranked(squared_distances(matrix).cpu(), self.expected(len(matrix)))[:1]
        # a clone, since an average may be written to, and the row is the client's update
        return matrix[best[0]].clone(), even(best, len(matrix))


class MultiKrum(Krum):
    """The mean of the updates with the lowest scores of Krum (Blanchard et al. 2017, section 4).

    Tolerates f of n >= 2 f + 3 updates.

    Attributes:
        keep: how many updates are averaged, None for n - f.
    """

    on_device: ClassVar[bool] = True

    keep: int | None = Field(default=None, ge=1)

    def merge(self, matrix: Tensor, cohort: Cohort) -> tuple[Tensor, Tensor]:
        count = len(matrix)
        expected = self.expected(count)
        order = ranked(squared_distances(matrix).cpu(), expected)
        shares = even(order[: min(self.keep or count - expected, count)], count)
        return mean(matrix, shares.to(matrix.device)), shares


class Bulyan(ExpectsAttackers):
    """Krum chooses n - 2 f updates one by one, then of each coordinate the values next to the median are averaged.

    El Mhamdi et al. 2018, "The hidden vulnerability of distributed learning in Byzantium": theta = n - 2 f chosen,
    beta = theta - 2 f values a coordinate.  Tolerates f of n >= 4 f + 3 updates, fewer than a quarter.  Distances are
    worked out once, and only the scores again after each choice.  The median of an even number is the mean of the
    middle two; where two values are equally far from it and one of them is to count, each counts half.
    """

    on_device: ClassVar[bool] = True

    def most(self) -> float:
        return 0.25

    def tolerates(self, count: int) -> int:
        return max(0, (count - 3) // 4)

    def merge(self, matrix: Tensor, cohort: Cohort) -> tuple[Tensor, Tensor]:
        count = len(matrix)
        expected = self.expected(count)
        chosen = _one_by_one(squared_distances(matrix).cpu(), expected, max(1, count - 2 * expected))
        average, used = near_the_median(matrix[chosen], max(1, len(chosen) - 2 * expected))
        shares = torch.zeros(count, dtype=torch.float64)
        shares[chosen] = used
        return average, shares


def scores(distances: Tensor, expected: int) -> Tensor:
    """Krum's scores [n]: sums of the squared distances [n, n] to the n - f - 2 nearest others, at least one."""
    count = len(distances)
    # n - f - 2 of the paper may be 0 or less where few updates arrived
    near = min(max(1, count - expected - 2), count - 1)
    if near < 1:
        return distances.new_zeros(count)
    away = distances.clone().fill_diagonal_(math.inf)
    return away.topk(near, dim=1, largest=False).values.sum(1)


def ranked(distances: Tensor, expected: int) -> Tensor:
    """Rows [n] from the lowest score of Krum up; of two that are each other's nearest, the one nearer to all first."""
    # two that are each other's nearest have equal scores with few updates: sorting first by the sum breaks the tie
    order = distances.sum(1).argsort(stable=True)
    return order[scores(distances, expected)[order].argsort(stable=True)]


def _one_by_one(distances: Tensor, expected: int, size: int) -> Tensor:
    """Rows that Krum chooses when it is asked again and again without those it chose before; in the order of rows."""
    remaining = torch.arange(len(distances))
    for _ in range(size):
        best = ranked(distances[remaining][:, remaining], expected)[0]
        # `best` is a place among those that remain, not a row of the whole matrix
        remaining = torch.cat([remaining[:best], remaining[best + 1 :]])
    is_chosen = torch.ones(len(distances), dtype=torch.bool)
    is_chosen[remaining] = False
    return is_chosen.nonzero().flatten()


def near_the_median(matrix: Tensor, near: int) -> tuple[Tensor, Tensor]:
    """The mean of the `near` values of each column next to its median, and each row's mean share in it.

    In sorted order these are a window.  Windows that lie equally near count alike, so that neither the order of rows
    nor the sign of the numbers decides between them.
    """
    rows, columns = matrix.shape
    average, used = matrix.new_empty(columns), torch.zeros(rows, dtype=torch.float64)
    for span, block in blocks(matrix, copies=12):
        values, places = block.double().sort(dim=0, stable=True)
        middle = (values[(rows - 1) // 2] + values[rows // 2]) / 2
        # in sorted order the nearest values are one window, so there are few candidates
        starts = rows - near + 1
        reach = torch.maximum(middle - values[:starts], values[near - 1 :] - middle)
        least = reach.min(dim=0).values
        # what rounding can do, by the scale of the values next to the median: far ones must not blur it
        best = (reach <= least * (1 + 1e-6) + 4 * torch.finfo(matrix.dtype).eps * middle.abs()).double()
        counts = torch.zeros_like(values)
        for start in range(starts):
            counts[start : start + near] += best[start]
        counts /= near * best.sum(0)
        average[span] = (counts * values).sum(0).to(matrix.dtype)
        used.index_add_(0, places.flatten().cpu(), counts.flatten().cpu())
    return average, used / max(columns, 1)
