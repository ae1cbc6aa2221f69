"""FedNova: changes are divided by the number of steps that made them, before they are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from piebald.contracts import Cohort, ModelSpec, ServerContext
from piebald.contracts.component import RecipeComponents
from piebald.core.machine import moved
from piebald.methods.aggregation.base import Aggregator
from piebald.methods.training.sgd import Sgd


class Normalized(Aggregator):
    """Normalized averaging (Wang et al. 2020, "Tackling the objective inconsistency problem in heterogeneous federated
    optimization", FedNova, eq. 7).

    The average change is tau_eff * sum of p_i d_i with d_i = change_i / a_i, p_i the client's share of the rows of
    those that arrived, and tau_eff = sum of p_i a_i.  After t steps of SGD with momentum rho,
    a_i = (t - rho (1 - rho^t) / (1 - rho)) / (1 - rho), which is t without momentum.  A client that took no step counts
    nothing.  Where all clients take equally many steps, this is FedAvg.  Running statistics of batch norms, which the
    paper does not mention, are averaged by p_i.

    The theory is that of changes that are sums of gradients with known shares.  Those of adaptive optimizers are not,
    so they are refused; other forms of momentum, groups and schedules within a task are refused as their a_i is
    another.

    Attributes:
        momentum: rho; set by the recipe.
    """

    on_device: ClassVar[bool] = True
    averages_rows: ClassVar[bool] = True

    momentum: float = 0.0

    def incompatible_with(self, recipe: RecipeComponents) -> str | None:
        trainer = recipe.training
        if not isinstance(trainer, Sgd) or not trainer.steps_plainly():
            return f"normalized knows the steps of training = 'sgd' only, not of {trainer.kind!r}: choose that"
        if trainer.keep_momentum:
            return "normalized needs velocities that start at 0: leave keep_momentum out"
        beyond = trainer.beyond_plain_sgd()
        return f"normalized knows the steps of plain SGD only: leave {beyond} out" if beyond else None

    def adapted_to(self, recipe: RecipeComponents, spec: ModelSpec) -> Self:
        return self.model_copy(update={"momentum": recipe.training.table()["momentum"]})

    def accumulated(self, steps: int) -> float:
        """a_i, the sum of how much each of so many gradients counts in the change."""
        rho = self.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)

    def statistics_shares(self, cohort: Cohort, shares: Sequence[float]) -> Sequence[float]:
        """Return p_i [n], the weights of eq. 6 and 7: only changes that are sums of gradients are divided by a_i."""
        return self._rows(cohort)

    def aggregate(self, cohort: Cohort, context: ServerContext) -> tuple[Tensor, list[float]]:
        assert cohort.matrix is not None
        counted = self._rows(cohort)
        whole = sum(counted)
        if not whole:
            return torch.zeros_like(cohort.matrix[0]), [0.0] * len(counted)
        accumulated = [self.accumulated(update.steps) for update in cohort.updates]
        # tau_eff of eq. 7: the mean over clients of how much their steps count
        effective = sum(rows / whole * a for rows, a in zip(counted, accumulated, strict=True))
        shares = [effective * rows / whole / a if rows else 0.0 for rows, a in zip(counted, accumulated, strict=True)]
        return moved(torch.tensor(shares), cohort.matrix.device) @ cohort.matrix, shares

    def _rows(self, cohort: Cohort) -> list[float]:
        """Return the rows that count of each client [n]: without a step a_i is 0, by which no change can be divided."""
        return [update.counts if update.steps else 0 for update in cohort.updates]
