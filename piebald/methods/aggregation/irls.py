"""Residual-based reweighting: confidence by distance from a robust regression line."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import Cohort
from piebald.core.cohort_matrix import BUDGET, blocks
from piebald.methods.aggregation.robust import Robust


class Irls(Robust):
    """Each parameter's values are sorted and fitted by a line; values far from it count less (Fu et al. 2019).

    For one parameter over n clients: x is a value's rank, y the value.  The line is the repeated-median one (Siegel
    1982).  Residuals are divided by 1.4826 (1 + 5 / (n - 1)) times their median, which gives e; with the leverage h
    and the bound Z = width * sqrt(2 / n) the confidence is  sqrt(1 - h) / e * Psi(e / sqrt(1 - h)),  Psi cutting off at
    -Z and Z.  Values of a confidence below `threshold` are put on the line.  A client's weight is the sum over
    parameters of its confidence times the standard deviation that the parameter's confidences have over clients.
    The authors' published program squares these weights, so that is the default.

    The line's intercept is median(y) - slope * median(x), as in the authors' program; the paper does not say.  With
    `intercept = "residuals"` it is the median of y - slope * x, as Siegel has it, which leaves attackers more weight:
    0.25 where the other leaves 0.17.  Clients with equal values have equal ranks, the mean of theirs.  It works on
    changes; the line moves along with the model they
    start from, so that is the same as on models.  Tolerates fewer than half of the updates; below 4 updates there is
    no residual to judge by and the result is their mean.  All pairs of clients are formed for every parameter: n^2 s
    steps, in bounded memory.

    Attributes:
        width: lambda of the paper.
        threshold: delta of the paper, in [0, 1].
        power: of the summed confidences.
        intercept: of the line, from "medians" of x and y or from the median of "residuals".
    """

    on_device: ClassVar[bool] = True

    width: float = Field(default=2.0, gt=0)
    threshold: float = Field(default=0.1, ge=0, le=1)
    power: float = Field(default=2.0, gt=0)
    intercept: Literal["medians", "residuals"] = "medians"

    def tolerates(self, count: int) -> int:
        return max(0, count - (count - 1) // 2 - 2) if count >= 4 else 0  # the spread leaves out the smallest

    def merge(self, matrix: Tensor, cohort: Cohort) -> tuple[Tensor, Tensor]:
        count = len(matrix)
        if count < 4:  # a line through three points has no residual worth a name
            even = torch.full((count,), 1 / count, dtype=torch.float64)
            return matrix.mean(0), even
        total = torch.zeros(count, dtype=torch.float64, device=matrix.device)
        small = matrix.numel() <= BUDGET
        mended = torch.empty_like(matrix) if small else None  # else worked out twice: a second cohort may not fit
        for span, block in blocks(matrix, copies=24):
            confidence, line = self.confidence(block.T)
            total += (confidence * confidence.std(dim=1, keepdim=True)).double().sum(0)
            if mended is not None:
                mended[:, span] = torch.where(confidence >= self.threshold, block.T, line).T
        if float(total.max()) <= 0:  # all confidences alike in every parameter
            total = torch.ones_like(total)
        shares = (total / total.max()) ** self.power
        shares = shares / shares.sum()
        if mended is not None:
            return shares.to(matrix.dtype) @ mended, shares.cpu()
        average = matrix.new_empty(matrix.shape[1])
        for span, block in blocks(matrix, copies=24):
            confidence, line = self.confidence(block.T)
            average[span] = torch.where(confidence >= self.threshold, block.T, line) @ shares.to(matrix.dtype)
        return average, shares.cpu()

    def confidence(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Confidences [width, n] of values [width, n] and where the line would put them.

        In float64: where many values are equal the residuals' spread is 0, and rounding would be taken for residuals.
        """
        count, dtype, y = y.shape[1], y.dtype, y.double()
        values, order = y.sort(dim=1, stable=True)
        rank = torch.arange(count, dtype=y.dtype, device=y.device)
        slope = repeated_median(values, rank)
        if self.intercept == "medians":
            intercept = middle_two(values) - slope * (count - 1) / 2
        else:
            intercept = middle_two((values - slope * rank).sort(dim=1).values)
        ranks = torch.empty_like(values).scatter_(1, order, shared_ranks(values))
        line = intercept + slope * ranks
        residual = y - line
        spread = middle_two(residual.abs().sort(dim=1).values[:, 1:])  # as published, without the smallest
        scale = 1.4826 * (1 + 5 / (count - 1)) * spread + 1e-7
        context = (count - 1) / 2
        leverage = 1 / count + (ranks - context).square() / (rank - context).square().sum()
        room = (1 - leverage).clamp(min=0).sqrt() * self.width * (2 / count) ** 0.5
        off = (residual / scale).abs()
        confidence = torch.where(off <= room, torch.ones_like(off), room / off.clamp(min=1e-30))
        return confidence.to(dtype), line.to(dtype)


def repeated_median(y: Tensor, x: Tensor) -> Tensor:
    """Slopes [width, 1] of the repeated-median lines through (x [n], y [width, n]): medians of medians."""
    count = len(x)
    everyone = torch.arange(count, device=x.device)
    slopes = []
    for row in range(count):
        rest = everyone[everyone != row]
        slopes.append(middle_two(((y[:, rest] - y[:, row, None]) / (x[rest] - x[row])).sort(dim=1).values))
    return middle_two(torch.cat(slopes, dim=1).sort(dim=1).values)


def shared_ranks(ordered: Tensor) -> Tensor:
    """Ranks [width, n] from 0 up of sorted rows [width, n]; equal values have the mean of their ranks."""
    count = ordered.shape[1]
    place = torch.arange(count, device=ordered.device).expand_as(ordered)
    differs = ordered[:, 1:] != ordered[:, :-1]
    edge = torch.ones_like(ordered[:, :1], dtype=torch.bool)
    first = torch.where(torch.cat([edge, differs], dim=1), place, 0).cummax(dim=1).values
    last = torch.where(torch.cat([differs, edge], dim=1), place, count - 1).flip(1).cummin(dim=1).values.flip(1)
    return (first + last).to(ordered.dtype) / 2


def middle_two(ordered: Tensor) -> Tensor:
    """The median [width, 1] of sorted rows [width, n]: of an even number the mean of the middle two."""
    count = ordered.shape[1]
    return (ordered[:, (count - 1) // 2, None] + ordered[:, count // 2, None]) / 2
