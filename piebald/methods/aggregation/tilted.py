"""TERM: weights that grow exponentially with the loss."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field

from piebald.contracts import Update
from piebald.contracts.component import RecipeComponents
from piebald.methods.aggregation.linear import Linear
from piebald.methods.aggregation.q_fair import LARGEST_EXPONENT, initial_loss, needs_initial_loss


class Tilted(Linear):
    """Weights n_k exp(t F_k) (Li, Beirami, Sanjabi, Smith 2021, "Tilted empirical risk minimization", lemma 1, with
    clients as groups).

    n_k is the number of training rows, F_k the loss of the model that was sent.  The minimum of the clients' tilted
    loss 1/t log(sum of n_k exp(t F_k)) is a fixed point.

    Attributes:
        t: the tilt; positive values help the clients with large losses, negative ones ignore them as outliers, 0 is
            FedAvg.
    """

    on_device: ClassVar[bool] = True

    t: float = Field(default=1.0)

    def incompatible_with(self, recipe: RecipeComponents) -> str | None:
        return needs_initial_loss("tilted", recipe)

    def weight(self, update: Update, staleness: int = 0) -> float:
        tilt = self.t * initial_loss(update)
        # `math.exp` raises above 709, and a client may claim any loss
        return update.counts * math.exp(max(-LARGEST_EXPONENT, min(LARGEST_EXPONENT, tilt)))
