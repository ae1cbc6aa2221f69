"""Per-FedAvg: a model that is good after one step of each client."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from pydantic import Field
from torch import Tensor

from piebald.contracts import ClientContext, Slopes, TrainInput, TrainOutput
from piebald.methods.training.custom_steps import CustomSteps


class MetaLearning(CustomSteps):
    """SGD on f(w - alpha grad f(w)), the loss after one step of the client (Fallah et al. 2020, "Personalized federated
    learning: a model-agnostic meta-learning approach", eq. 3 and algorithm 1).

    Its gradient is (I - alpha H) g with g = grad f(w - alpha grad f(w)) and the Hessian H at w.  The paper has two ways
    without a Hessian: to leave it out, and to take (grad f(w + delta g) - grad f(w - delta g)) / (2 delta) for H g
    (section 5, FO and HF).  The three gradients of a step are of batches that are drawn independently, each an order
    of the rows of its own.  `lr` is the paper's beta.

    The client uses the model after one step of rate alpha on its training rows, as the paper evaluates it; that is
    computed whenever it is needed.  All its rows are in that step, as in eq. 3, unless `adapt_batch` says otherwise.

    Attributes:
        alpha: rate of the client's own step, at least 0; 0 is FedAvg.
        hessian: H g is "ignored" (FO), or found by "differences" of gradients (HF).
        delta: length of the differences, in multiples of g, above 0; too short ones are lost in rounding.
        adapt_batch: rows of the step by which a client adapts the model, by default all that it has.
    """

    alpha: float = Field(default=0.01, ge=0)
    hessian: Literal["ignored", "differences"] = "ignored"
    delta: float = Field(default=0.01, gt=0)
    adapt_batch: int | None = Field(default=None, ge=1)

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        return self.take_steps(inputs, context, batches=3 if self.hessian == "differences" else 2)

    def step(self, at: Mapping[str, Tensor], slopes: Slopes) -> dict[str, Tensor]:
        """One step of w."""
        w = at["model"]
        # another batch than the outer gradient's, as in the paper: on one batch both would share its noise
        adapted = w - self.alpha * slopes(w, 1).gradient
        outer = slopes(adapted, 0)
        g = gradient = outer.gradient
        if self.hessian == "differences":
            # both on one batch, so that its noise cancels in the difference
            ahead, behind = (slopes(w + sign * self.delta * g, 2).gradient for sign in (1, -1))
            gradient = g - self.alpha * (ahead - behind) / (2 * self.delta)
        # outer.model differs from `adapted` in buffers only
        return {"model": w + (outer.model - adapted) - at["lr"] * gradient}

    def personalize(self, inputs: TrainInput, context: ClientContext) -> Tensor:
        single_step = replace(self.sgd_config(inputs), lr=self.alpha, steps=1, batch=self.adapt_batch or sys.maxsize)
        return context.run_sgd(inputs.model, single_step).model
