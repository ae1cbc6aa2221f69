"""Coordinate by coordinate: median and trimmed mean."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from piebald.contracts import Cohort
from piebald.core.cohort_matrix import blocks
from piebald.methods.aggregation.robust import ExpectsAttackers, Robust


class Median(Robust):
    """The median of each coordinate; of an even number the mean of the middle two (Yin et al. 2018, definition 1).

    Tolerates fewer than half of the updates.  A client's share is the share of coordinates that are its own.
    """

    on_device: ClassVar[bool] = True

    def tolerates(self, count: int) -> int:
        return (count - 1) // 2

    def merge(self, matrix: Tensor, cohort: Cohort) -> tuple[Tensor, Tensor]:
        return middle(matrix, (len(matrix) - 1) // 2)


class TrimmedMean(ExpectsAttackers):
    """The mean of each coordinate without its lowest and highest values (Yin et al. 2018, definition 2).

    As many are cut off at each end as there are attackers expected; so fewer than half are tolerated.  A client's share
    is the mean of its weights over the coordinates.
    """

    on_device: ClassVar[bool] = True

    def merge(self, matrix: Tensor, cohort: Cohort) -> tuple[Tensor, Tensor]:
        return middle(matrix, self.expected(len(matrix)))


def middle(matrix: Tensor, cut: int) -> tuple[Tensor, Tensor]:
    """The mean of each column without its `cut` lowest and highest values, and each row's mean share in it.

    Examples:
        >>> average, shares = middle(torch.tensor([[0.0], [1.0], [2.0], [100.0]]), 1)
        >>> average, shares
        (tensor([1.5000]), tensor([0.0000, 0.5000, 0.5000, 0.0000], dtype=torch.float64))
    """
    rows, columns = matrix.shape
    remaining = rows - 2 * cut
    average, used = matrix.new_empty(columns), torch.zeros(rows, dtype=torch.float64)
    for span, block in blocks(matrix, copies=4):  # values, places and the sort's own room
        values, places = block.sort(dim=0, stable=True)
        average[span] = values[cut : rows - cut].mean(0)
        used += torch.bincount(places[cut : rows - cut].flatten(), minlength=rows).double().cpu()
    # a model without shared parameters has no columns
    return average, used / (remaining * max(columns, 1))
