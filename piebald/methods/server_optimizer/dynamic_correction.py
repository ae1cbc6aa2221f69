"""FedDyn, at the server: the mean of the clients' models, corrected by the sum of all that clients ever moved."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import StepContext
from piebald.contracts.component import RecipeComponents
from piebald.methods.aggregation.linear import is_plain_mean
from piebald.methods.server_optimizer.base import ServerOptimizer
from piebald.methods.training.dynamic_regularization import DynamicRegularization


class DynamicCorrection(ServerOptimizer):
    """h <- h - alpha (|S| / N) d;  w <- w + d - h / alpha (Acar et al. 2021, algorithm 1, the server's part).

    d is the plain mean of the changes of the |S| clients that arrived, out of N in the federation.

    Attributes:
        alpha: strength of the regularizer, above 0; that of the clients' `training.DynamicRegularization`.
    """

    alpha: float = Field(default=0.01, gt=0)

    def incompatible_with(self, recipe: RecipeComponents) -> str | None:
        trainer, aggregator = recipe.training, recipe.aggregation
        # h is the mean of the clients' g_k only if both sides step it by the same alpha
        if not isinstance(trainer, DynamicRegularization) or trainer.alpha != self.alpha:
            return (
                "dynamic_correction needs clients that train with the same alpha: use training = "
                f"{{ kind = 'dynamic_regularization', alpha = {self.alpha:g} }}"
            )
        # h sums changes of all clients alike, so another mean would not be the one that h corrects
        if not is_plain_mean(aggregator):
            return (
                f"dynamic_correction needs the plain mean: use aggregation = 'equal_weighted', not {aggregator.kind!r}"
            )
        return None

    def initial_state(self, model: Tensor) -> dict[str, Tensor]:
        return {"h": torch.zeros_like(model)}

    def step(self, model: Tensor, average: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        # with noise at the server the average is a sum over the number that was expected
        count = context.arrived if context.expected is None else context.expected
        h = context.state["h"] - self.alpha * (count / context.known) * average
        return model + average - h / self.alpha, {"h": h}
