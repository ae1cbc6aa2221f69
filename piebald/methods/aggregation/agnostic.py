"""Agnostic federated learning: weights move towards the mixture of clients on which the model is worst."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import Cohort, ServerContext
from piebald.contracts.component import RecipeComponents
from piebald.core.cohort_matrix import weighted_sum
from piebald.methods.aggregation.base import Aggregator
from piebald.methods.aggregation.q_fair import initial_loss, needs_initial_loss


class Agnostic(Aggregator):
    """Weights lambda on the simplex, which rise with losses (Mohri, Sivek, Suresh 2019, "Agnostic federated learning",
    algorithm 1, Stochastic-AFL).

    Clients count lambda_k, which sum to one over the clients of the step.  Then lambda moves by `lambda_lr` times the
    losses F_k of the model that was sent (those of a part of the clients stand for all: they are multiplied by known /
    arrived), and is projected onto the simplex.  The model takes the clients' local steps instead of one gradient step.

    Attributes:
        lambda_lr: learning rate of lambda, at least 0; 0 keeps it equal.
        weights: a client's loss and update count lambda_k, "equal", as in the paper, or lambda_k times its training
            "examples" over the mean of the step's clients.  With lambda_lr = 0 the first is the plain mean of clients,
            and the second FedAvg.
    """

    on_device: ClassVar[bool] = True
    averages_rows: ClassVar[bool] = True

    lambda_lr: float = Field(default=0.1, ge=0)
    weights: Literal["equal", "examples"] = "equal"

    def incompatible_with(self, recipe: RecipeComponents) -> str | None:
        return needs_initial_loss("agnostic", recipe)

    def aggregate(self, cohort: Cohort, context: ServerContext) -> tuple[Tensor, list[float]]:
        assert cohort.matrix is not None
        weights = context.state.get("lambda")
        if weights is None:
            # nobody is preferred before a loss is known
            weights = torch.full((context.known,), 1 / context.known, dtype=torch.float64)
        clients = torch.tensor(list(cohort.clients))
        rows = torch.tensor([float(update.counts) for update in cohort.updates], dtype=torch.float64)
        sizes = torch.ones_like(rows) if self.weights == "equal" else rows / rows.mean().clamp(min=1e-30)
        counted = weights[clients] * sizes
        whole = float(counted.sum())
        losses = torch.tensor([initial_loss(update) for update in cohort.updates], dtype=torch.float64)
        # unbiased for the gradient over all clients: those of the step are a sample of them
        rise = self.lambda_lr * losses * sizes * context.known / len(losses)
        context.state["lambda"] = on_simplex(weights.index_add(0, clients, rise))
        if whole <= 0:  # lambda is 0 for all that arrived: the average is no change
            return torch.zeros_like(cohort.matrix[0]), [0.0] * len(losses)
        shares = (counted / whole).tolist()
        return weighted_sum(cohort.matrix, shares).float(), shares


def on_simplex(point: Tensor) -> Tensor:
    """The nearest vector [n] with numbers of at least 0 that sum to one (Duchi et al. 2008, figure 1).

    Examples:
        >>> on_simplex(torch.tensor([0.5, 0.9, 0.0]))
        tensor([0.3000, 0.7000, 0.0000])
    """
    # the projection is that of the point less any number from all of it; of huge ones nothing else would be left
    point = point - point.max()
    ordered = point.sort(descending=True).values
    counts = torch.arange(1, len(point) + 1, dtype=point.dtype)
    thresholds = (ordered.cumsum(0) - 1) / counts
    # the largest count at which the smallest number that is kept stays above its threshold
    nearest = (point - thresholds[int((ordered > thresholds).sum()) - 1]).clamp(min=0)
    return nearest / nearest.sum()
