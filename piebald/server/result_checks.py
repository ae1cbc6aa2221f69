"""Checks of results: shape, type, finite numbers, length of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import MOST_ROWS, Result, Update, count_reason, described
from piebald.contracts.component import Component
from piebald.core.parameters import Layout
from piebald.methods.recipe import Recipe
from piebald.methods.server_optimizer.cached_average import CachedAverage

LONGEST_STEP = 1000.0


class ResultChecks(Component):
    """What an update must satisfy to count.

    Attributes:
        longest_step: refuse a change whose norm is above this many times that of the model (at least of a unit vector),
            and so other vectors that the server adds to those it sends.
        max_examples: a client's rows count as at most so many, None for no limit.
        max_weight: the largest share of one update in a step, in (0, 1].
    """

    axis = "check"

    longest_step: float = Field(default=LONGEST_STEP, gt=0)
    max_examples: int | None = Field(default=None, ge=1)
    max_weight: float = Field(default=1.0, gt=0, le=1)

    @property
    def limits_weights(self) -> bool:
        """Whether what one update counts is limited, so that updates cannot be summed before the server has them."""
        return self.max_examples is not None or self.max_weight < 1

    def unlimited_reason(self, recipe: Recipe) -> str | None:
        """Why the weights of a recipe's updates cannot be limited as wanted, or None."""
        if self.limits_weights and recipe.masking is not None:
            return (
                f"{recipe.masking.kind} hides what single updates count, so max_examples and max_weight cannot be "
                "held: leave them out, and set the transform's heaviest"
            )
        if self.max_weight < 1 and isinstance(recipe.server_optimizer, CachedAverage):
            return (
                f"{recipe.server_optimizer.kind} averages the last models of all clients, so max_weight, a share of "
                "one step, cannot be held: leave it out, or set max_examples"
            )
        return None

    def limit(self, norm: float) -> float:
        """The longest step allowed from a model of this length."""
        return self.longest_step * max(norm, 1.0)

    def reject_reason(self, result: Result, layout: Layout, limit: float, uploads: Sequence[str] = ()) -> str | None:
        """Why a result may not count, or None.  An update that was summed early was checked where it was summed.

        Args:
            result: what came.
            layout: that of the model.
            limit: the longest step allowed.
            uploads: names of the vectors that the trainer declares besides the model.
        """
        if result.failure is not None or result.update is None:
            return result.failure or "no answer"
        update = result.update
        if update.partial_sum is not None:
            return None
        change = update.vectors.get("model")
        if change is None or change.dtype != torch.float32 or change.shape != (layout.shared,):
            return f"must send {layout.shared} float32 numbers, sent {described(change)}"
        if undeclared := sorted(update.vectors.keys() - {"model", *uploads}):
            return f"sent {undeclared[0]!r}, which its trainer does not declare"
        for name in uploads:
            vector, sent = update.vectors.get(name), result.task.vectors.get(name)
            if vector is None:
                return f"must send {name}, sent nothing"
            if sent is not None and (vector.dtype != sent.dtype or vector.shape != sent.shape):
                return f"must send {name} like the {described(sent)} it got, sent {described(vector)}"
        norm = self.norm(change)
        if not math.isfinite(norm):
            return "not finite"
        for name in uploads:
            if not bool(torch.isfinite(update.vectors[name]).all()):
                return f"{name} is not finite"
        if norm > limit:
            return f"step of length {norm:.3g} is above the limit of {limit:.3g}"
        for name in uploads:  # what the server adds to a vector that all clients get next time is as short as a step
            if name in result.task.vectors and self.norm(update.vectors[name]) > limit:
                return f"{name} of length {self.norm(update.vectors[name]):.3g} is above the limit of {limit:.3g}"
        return self._number_reason(update)

    @staticmethod
    def norm(change: Tensor) -> float:
        """The Euclidean length of a change [s]."""
        return float(torch.linalg.vector_norm(change).item())

    @staticmethod
    def _number_reason(update: Update) -> str | None:
        """Why the numbers beside the vectors cannot be, or None.  A loss may be infinite where training fails."""
        reason = count_reason("examples", update.examples, MOST_ROWS) or count_reason("steps", update.steps, MOST_ROWS)
        for name, value in update.metrics.items():
            if reason is None and name != "loss" and not math.isfinite(value):
                reason = f"{name} is not finite"
        return reason
