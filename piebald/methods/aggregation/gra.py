"""Group-wise robust aggregation: robust inside groups of similar updates, then over the groups."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import Cohort
from piebald.core.cohort_matrix import coordinates, mean
from piebald.core.randomness import key
from piebald.methods.aggregation.coordinate_wise import middle
from piebald.methods.aggregation.geometric_median import GeometricMedian
from piebald.methods.aggregation.robust import Robust


class Gra(Robust):
    """Updates are put into groups by k-means; each group is averaged robustly, and groups by size (Yu and Wu 2020).

    "Towards Byzantine-resilient federated learning via group-wise robust aggregation": honest clients whose data
    differ must not be taken for outliers of one another.  The paper lets the robust average be any; so do we.

    A group of attackers alone enters with its share of the clients.  So attackers are tolerated while they are fewer
    than half in each group, and elsewhere they have the weight that they have in a mean.

    Attributes:
        groups: how many, at most the number of updates.
        inside: the robust average of a group: "median", "geometric_median" or "trimmed_mean".
        trim: share cut off at each end, for "trimmed_mean".
    """

    on_device: ClassVar[bool] = True

    groups: int = Field(default=3, ge=1)
    inside: Literal["median", "geometric_median", "trimmed_mean"] = "median"
    trim: float = Field(default=0.2, ge=0, lt=0.5)

    def tolerates(self, count: int) -> int:
        return (count - 1) // 2 if self.groups == 1 else 0

    def merge(self, matrix: Tensor, cohort: Cohort) -> tuple[Tensor, Tensor]:
        count = len(matrix)
        labels = self._labels(matrix, cohort.version)
        averages, vectors, shares = [], [], torch.zeros(count, dtype=torch.float64)
        # sorted, so that the order of the sum does not depend on that of a set
        for label in sorted(set(labels.tolist())):
            rows = torch.nonzero(labels == label).flatten()
            average, inner_shares = self._robust(matrix[rows], cohort)
            averages.append(average)
            vectors.append(len(rows) / count)
            shares[rows] = inner_shares * vectors[-1]
        together = torch.tensor(vectors, dtype=torch.float64, device=matrix.device)
        return mean(torch.stack(averages), together), shares

    def _labels(self, matrix: Tensor, version: int) -> Tensor:
        from sklearn.cluster import KMeans

        groups = min(self.groups, len(matrix))
        if groups == 1:
            return torch.zeros(len(matrix), dtype=torch.int64)
        # a cohort's rows span at most n dimensions: k-means sees the same distances in n numbers as in s
        points = coordinates(matrix).cpu().numpy()
        # KMeans warns and leaves groups empty where there are fewer distinct points than groups
        groups = min(groups, len({tuple(point) for point in points.round(12).tolist()}))
        labels = KMeans(groups, n_init=10, random_state=key("gra", version) % 2**32).fit_predict(points)
        return torch.from_numpy(labels).long()

    def _robust(self, members: Tensor, cohort: Cohort) -> tuple[Tensor, Tensor]:
        count = len(members)
        if self.inside == "geometric_median":
            updates = cohort.updates[:count]  # equal weights: only their number is looked at
            inner = Cohort(cohort.clients[:count], cohort.versions[:count], updates, members, cohort.version)
            return GeometricMedian().merge(members, inner)
        # at least one value must be left, so never more than for the median
        cut = (count - 1) // 2 if self.inside == "median" else min(int(self.trim * count + 0.5), (count - 1) // 2)
        return middle(members, cut)
