"""Norm clipping: a bound on the norm of each update."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from piebald.contracts import Cohort
from piebald.core.cohort_matrix import mean, norms
from piebald.methods.aggregation.robust import Robust, Weighting, shares_of


class NormClipping(Robust):
    """Updates longer than a bound are scaled down to it, then averaged (Sun et al. 2019, "Can you really backdoor
    federated learning?").

    No share of attackers is detected; each moves the mean by its share of the bound at most.  So it protects
    against scaled-up models, not against many attackers.

    Attributes:
        bound: longest update, None for the median length of the updates of this step (safe below half attackers).
        weighting: before clipping, all "equal" or by "examples".
    """

    on_device: ClassVar[bool] = True

    bound: float | None = Field(default=None, gt=0)
    weighting: Weighting = "equal"

    def tolerates(self, count: int) -> int:
        return count if self.bound is not None else (count - 1) // 2

    def merge(self, matrix: Tensor, cohort: Cohort) -> tuple[Tensor, Tensor]:
        lengths = norms(matrix)
        bound = self.bound if self.bound is not None else float(lengths.median())  # of an even number the lower one
        shares = shares_of(cohort, self.weighting)
        # at most 1: a short update is never lengthened to the bound
        factors = (bound / lengths.clamp(min=1e-30)).clamp(max=1.0)
        return mean(matrix, shares.to(matrix.device) * factors), shares
