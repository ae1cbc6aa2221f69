"""Weighings that are known from an update's numbers alone, so that sums can be made where the clients are."""

from __future__ import annotations

import torch
from torch import Tensor

from piebald.aggregation.base import Weigh
from piebald.contracts import Centre, Cohort, Update


class Linear(Weigh):
    """A weighted mean; subclasses say the weight of one update."""

    axis = "weigh"

    def undamped(self, update: Update) -> float:
        """The weight that shares are measured against: the update's own, unless it is held back on purpose."""
        return self.weight(update)

    def combine(self, cohort: Cohort, centre: Centre) -> tuple[Tensor, list[float]]:
        pool = cohort.updates[0].pool
        weights = [self.weight(u, stale) for u, stale in zip(cohort.updates, cohort.staleness, strict=True)]
        whole = sum(self.undamped(update) for update in cohort.updates)
        if whole <= 0:  # nobody counts (all clients without rows): stay where we are
            shape = (pool.parts["model"] if pool is not None else cohort.updates[0].parts["model"]).shape
            return torch.zeros(shape), [0.0] * len(weights)
        shares = [weight / whole for weight in weights]
        if pool is not None:
            return pool.parts["model"] / pool.weight, shares
        assert cohort.matrix is not None
        return torch.tensor(shares) @ cohort.matrix, shares


class ByExamples(Linear):
    """By training rows (McMahan et al. 2017; HDAFL, algorithm 1)."""

    def weight(self, update: Update, staleness: int = 0) -> float:
        return float(update.examples)


class Equal(Linear):
    """Every update counts the same."""

    def weight(self, update: Update, staleness: int = 0) -> float:
        return 1.0


class ByGradientNorm(Linear):
    """By the norm of the gradient, which HDAFL names as another choice without a formula.

    Our reading: the gradient summed over the local steps, |w_t - w_k| / lr; the learning rate cancels in the shares.
    """

    def weight(self, update: Update, staleness: int = 0) -> float:
        return update.norm
