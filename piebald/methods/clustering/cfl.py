"""Clustered federated learning: split a cluster whose members' updates disagree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field

from piebald.contracts import Cohort, ServerContext
from piebald.core.cohort_matrix import gram, too_many_pairs
from piebald.methods.clustering.base import Clustering


class Cfl(Clustering):
    """Clusters are repeatedly cut in two by the cosines of updates (Sattler, Müller, Samek 2020, algorithm 2).

    A cluster is cut when its mean has converged and its members have not: the mean update is shorter than `eps1`
    and the longest one longer than `eps2`.  The cut is the one with the least largest cosine between both sides
    (algorithm 1: single linkage), and is made if gamma_max < sqrt((1 - that cosine) / 2) (theorem 1).  Both halves
    begin with the cluster's model.  Clusters are never joined again.  Updates are compared by their trained
    parameters: running statistics of batch norms, which are no gradients, would fill most of their length.

    The authors' program, and FL-bench after it, join the two groups of which the least cosine is largest (complete
    linkage), which is not the cut of algorithm 1.  Where there are two clear groups, both cuts are the same.

    The paper's thresholds are lengths and go with the learning rate and the network, so by default they are taken
    relative to the longest update of the cluster's first step, which is what `relative` says.

    Attributes:
        eps1: the mean update is shorter.
        eps2: the longest update is longer.
        gamma_max: the largest error, relative to the cluster's gradient, with which one client's update stands for its
            cluster's, in [0, 1].  The larger it is, the further apart the halves must be: at 0.7 their largest cosine
            must be below 0.02, at 1 no halves are far enough.  The paper gives no value and the authors' program has
            none, which is 0.
        relative: both are shares of the longest update at the cluster's first step, else plain lengths.
        least: fewest clients of a half.
        after: server steps before the first cut.
    """

    on_device: ClassVar[bool] = True

    eps1: float = Field(default=0.4, gt=0)
    eps2: float = Field(default=0.5, ge=0)
    gamma_max: float = Field(default=0.0, ge=0, le=1)
    relative: bool = True
    least: int = Field(default=2, ge=1)
    after: int = Field(default=1, ge=0)

    def unsupported_cohort(self, count: int) -> str | None:
        return too_many_pairs(self.kind, count, 4)

    def assign(self, cohort: Cohort, known: Mapping[int, int], context: ServerContext) -> list[int]:
        labels = [known.get(client, 0) for client in cohort.clients]
        scale: dict[str, float] = context.state.setdefault("scale", {})
        # above all numbers that are known, also of clients that were not asked
        fresh, cuts = max([0, *known.values(), *labels]) + 1, list[dict[str, float]]()
        for label in sorted(set(labels)):
            rows = [row for row, number in enumerate(labels) if number == label]
            inner = gram(cohort.parameters[rows]).cpu()
            # rounding can leave a squared length a little below 0
            lengths = inner.diagonal().clamp(min=0).sqrt()
            # the mean of all inner products is the squared length of the mean, so no pass over the updates is needed
            longest, mean = float(lengths.max()), float(inner.mean().clamp(min=0).sqrt())
            unit = scale.setdefault(str(label), longest) if self.relative else 1.0
            if cohort.version < self.after or not (mean < self.eps1 * unit and longest > self.eps2 * unit):
                continue
            far, cosine = self.halved(inner, lengths)
            wide = self.gamma_max < math.sqrt(max(0.0, 1 - cosine) / 2)
            if wide and min(len(far), len(rows) - len(far)) >= self.least:
                for index in far:
                    labels[rows[index]] = fresh
                cuts.append({"group": label, "into": fresh, "mean": mean, "longest": longest, "cosine": cosine})
                fresh += 1
        if cuts:  # together: of two notes with one name, a step keeps the last
            context.note("cuts", cuts)
        return labels

    def halved(self, inner: torch.Tensor, lengths: torch.Tensor) -> tuple[Sequence[int], float]:
        """The smaller side of the best cut, as places among the members, and the largest cosine between both sides.

        Args:
            inner: inner products [n, n] of the members' updates.
            lengths: of the updates [n].
        """
        from scipy.cluster.hierarchy import fcluster, linkage
        from scipy.spatial.distance import squareform

        if len(lengths) < 2:
            return [], 1.0
        cosines = (inner / lengths.clamp(min=1e-30)[:, None] / lengths.clamp(min=1e-30)[None, :]).numpy()
        away = np.clip(1 - (cosines + cosines.T) / 2, 0, 2)
        # no distance from itself, whatever rounding leaves of the cosine
        np.fill_diagonal(away, 0)
        sides = fcluster(linkage(squareform(away, checks=False), method="single"), 2, criterion="maxclust")
        first, second = np.flatnonzero(sides == 1), np.flatnonzero(sides == 2)
        # the larger half keeps its number, and so the scale of its first step
        smaller = second if len(second) <= len(first) else first
        cosine = 1 - float(away[np.ix_(first, second)].min()) if len(first) and len(second) else 1.0
        return [int(place) for place in smaller], cosine
