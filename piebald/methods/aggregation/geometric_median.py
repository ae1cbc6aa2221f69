"""The geometric median: the point with the least sum of distances to all updates."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from piebald.contracts import Cohort
from piebald.core.cohort_matrix import mean, norms
from piebald.methods.aggregation.robust import Robust, Weighting, shares_of


class GeometricMedian(Robust):
    """RFA: the smoothed Weiszfeld algorithm, a few weighted means (Pillutla, Kakade, Harchaoui 2022, algorithm 2).

    v starts at 0 (no change); each iteration averages with weights proportional to share / max(smoothing, distance
    from v).  It runs until no share moves by more than 1e-6, or `iterations`.  Tolerates fewer than half of the weight.
    The sums over clients are plain ones, which is why the paper can run it over a secure aggregation; here single
    updates are seen.

    Attributes:
        iterations: at most.
        smoothing: nu of the paper, relative to the median length of the updates; keeps the division safe.
        weighting: shares to start from, all "equal" or by "examples" (the paper's; attackers can claim many).
    """

    on_device: ClassVar[bool] = True

    iterations: int = Field(default=100, ge=1)
    smoothing: float = Field(default=1e-6, gt=0)
    weighting: Weighting = "equal"

    def tolerates(self, count: int) -> int:
        return (count - 1) // 2

    def merge(self, matrix: Tensor, cohort: Cohort) -> tuple[Tensor, Tensor]:
        start = shares_of(cohort, self.weighting).to(matrix.device)
        lengths = norms(matrix)
        # relative to the updates, so that one default does for all learning rates
        least = max(self.smoothing * float(lengths.median()), 1e-30)
        # v = 0, so the first distances are the lengths themselves
        shares, distances = start, lengths
        for _ in range(self.iterations):
            before, shares = shares, start / distances.clamp(min=least)
            shares = shares / shares.sum()
            average = mean(matrix, shares)
            # waits for a GPU once an iteration, which costs little beside two passes over the matrix
            if float((shares - before).abs().max()) < 1e-6:
                break
            distances = norms(matrix, average)
        return average, shares.cpu()
