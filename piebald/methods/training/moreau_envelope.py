"""pFedMe: personal models near the shared one, which moves towards them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from piebald.contracts import ClientContext, Slopes, TrainInput, TrainOutput
from piebald.methods.training.custom_steps import CustomSteps


class MoreauEnvelope(CustomSteps):
    """At every step, look for the personal model t that is best on f(t) + lam/2 |t - w|^2 over the step's batch, by
    gradient descent, then w <- w - eta lam (w - t) (Dinh et al. 2020, "Personalized federated learning with Moreau
    envelopes", eq. 7 and algorithm 1).

    `lr` is the rate of the search for t, on the loss, as in other trainers; `eta` is the paper's rate of w.  The paper
    does not say where a search starts.  Here, as in the authors' program, it goes on from the last t, and the first
    one of a task starts from the model that was sent.  (PFLlib adds a decay of 0.001 to the search, which is not in the
    paper.)  The client uses its last t.  Statistics of batch norm are those of t.

    Attributes:
        lam: lambda of the paper, above 0; where lr * lam is 2 or more, the search does not converge.
        eta: learning rate of w, above 0; w moves by the share eta * lam of its distance to t.
        inner_steps: K, gradient steps of each search.
    """

    lam: float = Field(default=15.0, gt=0)
    eta: float = Field(default=0.05, gt=0)
    inner_steps: int = Field(default=5, ge=1)

    @model_validator(mode="after")
    def _check_eta(self) -> Self:
        if self.eta * self.lam > 1:
            raise ValueError(
                f"eta * lam must be at most 1, or w would move beyond t, got {self.eta * self.lam:g}: lower eta"
            )
        return self

    def initial_state(self, model: Tensor, shared: int) -> dict[str, Tensor]:
        return {"personal": model}

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        return self.take_steps(inputs, context, {"personal": inputs.model}, keep=("personal",))

    def step(self, at: Mapping[str, Tensor], slopes: Slopes) -> dict[str, Tensor]:
        """One search for t, and one step of w."""
        w, t, lr = at["model"], at["personal"], at["lr"]
        for _ in range(self.inner_steps):
            slope = slopes(t)
            t = slope.model - lr * (slope.gradient + self.lam * slopes.trained * (t - w))
        # buffers of w are those of t: they were computed by passes at t
        return {"model": torch.where(slopes.trained, w - self.eta * self.lam * (w - t), t), "personal": t}

    def personalize(self, inputs: TrainInput, context: ClientContext) -> Tensor:
        return inputs.state["personal"]
