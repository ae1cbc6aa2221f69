"""HeteroFL, at the server: each number is averaged over the clients that have it."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from piebald.contracts import Cohort, ServerContext
from piebald.core.cohort_matrix import held_mask, held_mean, weighted_sum
from piebald.core.parameters import head
from piebald.methods.aggregation.base import Aggregator


class HeldAverage(Aggregator):
    """The mean of each number over those clients of the step whose models have it (Diao, Ding, Tarokh 2021, "HeteroFL",
    eqs. 1 to 3); a number that none of them has stays as it is.

    With "classes" in the updates (`training.NestedWidths`, masked_loss), a client has the classifier's rows of those
    classes only.  Where all clients have all numbers, this is the weighted mean of FedAvg, to the bit.  A client's
    share is its mean share over the numbers that anybody has.

    Attributes:
        weights: clients count by training "examples", as in FedAvg, or "equal", as in the paper, whose clients hold
            about equally many.
    """

    takes_parts: ClassVar[bool] = True
    takes_statistics: ClassVar[bool] = True

    weights: Literal["examples", "equal"] = "examples"

    def aggregate(self, cohort: Cohort, context: ServerContext) -> tuple[Tensor, list[float]]:
        assert cohort.matrix is not None
        weights = [float(update.counts) if self.weights == "examples" else 1.0 for update in cohort.updates]
        apart = any("classes" in update.vectors for update in cohort.updates)
        # where all clients have all numbers no mask, as large as the matrix, is needed
        if not apart and all(positions is None for positions in cohort.held):
            return self._plain(cohort.matrix, weights)
        held = held_mask(cohort.matrix, cohort.held)
        if apart:
            self._leave_out_classes(held, cohort, context)
        return held_mean(cohort.matrix, held, weights)

    @staticmethod
    def _plain(matrix: Tensor, weights: list[float]) -> tuple[Tensor, list[float]]:
        whole = sum(weights)
        if whole <= 0:
            return torch.zeros(matrix.shape[1]), [0.0] * len(weights)
        return (weighted_sum(matrix, weights) / whole).float(), [weight / whole for weight in weights]

    @staticmethod
    def _leave_out_classes(held: Tensor, cohort: Cohort, context: ServerContext) -> None:
        """Take from each client the classifier's rows of classes that it has not."""
        last = head(context.spec.model)
        slots = [slot for slot in context.spec.layout.slots if slot.name in (f"{last}.weight", f"{last}.bias")]
        for row, update in enumerate(cohort.updates):
            # 0 or below: a client may send any number here
            absent = update.vectors["classes"] <= 0
            for slot in slots:
                # a private classifier is no part of the updates
                if slot.stop <= held.shape[1]:
                    # a view, so that the assignment changes the mask; a bias has one column
                    rows = held[row, slot.start : slot.stop].view(len(absent), -1)
                    rows[absent] = False
