"""q-FedAvg: clients with larger losses count more."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from piebald.contracts import Update
from piebald.contracts.component import RecipeComponents
from piebald.methods.aggregation.linear import Linear
from piebald.methods.training.base import Trainer
from piebald.methods.training.sgd import Sgd

LARGEST_EXPONENT = 300.0  # e to this, times rows and changes, is a number of 64 bits; a client may claim any loss
_LARGEST_LOSS = 3.5e38  # what a number of 32 bits can be


class QFair(Linear):
    """Weights F_k^q (Li, Sanjabi, Beirami, Smith 2020, "Fair resource allocation in federated learning", algorithm 2).

    The change is sum of F_k^q d_k / sum of (F_k^q + q F_k^(q-1) |d_k|^2 / lr), with F_k the loss of the model that was
    sent and d_k the client's change: the paper's steps Delta_k / h_k with its estimate L = 1 / lr of the Lipschitz
    constant, at the learning rate lr that the client's task had.  That is the constant of plain SGD, so momentum and
    other optimizers are refused.  As in the authors' program, 1e-10 is added to F_k.  A client that claims a large loss
    is believed: limit its share with `max_weight`.

    Attributes:
        q: how much larger losses count, at least 0.
        weights: clients count alike, "equal", as in algorithm 2, or by training "examples", p_k = n_k / n of eq. 2.
            With q = 0 the first is the plain mean of clients, and the second FedAvg.
    """

    on_device: ClassVar[bool] = True

    q: float = Field(default=1.0, ge=0)
    weights: Literal["equal", "examples"] = "equal"

    def incompatible_with(self, recipe: RecipeComponents) -> str | None:
        trainer = recipe.training
        if reason := needs_initial_loss("qfair", recipe):
            return reason
        assert isinstance(trainer, Sgd)
        beyond = "momentum" if trainer.momentum else trainer.beyond_plain_sgd()
        return f"qfair takes 1 / lr for a constant of plain SGD's steps: leave {beyond} out" if beyond else None

    def weight(self, update: Update, staleness: int = 0) -> float:
        return self._share(update) * self._power(update, self.q) if _rate(update) > 0 else 0.0

    def undamped_weight(self, update: Update) -> float:
        rate = _rate(update)
        # the second term of h_k: q F^(q-1) |L d|^2 + L F^q, divided by L = 1 / lr
        step = self.q * self._power(update, self.q - 1) * update.norm**2 / rate if rate > 0 else 0.0
        return self._share(update) * (self._power(update, self.q) + step) if rate > 0 else 0.0

    def _share(self, update: Update) -> float:
        return float(update.counts) if self.weights == "examples" else 1.0

    def _power(self, update: Update, exponent: float) -> float:
        """A power of a client's loss, at most e^300 for F^q: a claim beyond is as large as that, not infinite."""
        # a loss below 0 has no power with a fractional q
        log_loss = math.log(max(0.0, initial_loss(update)) + 1e-10)
        if self.q:
            log_loss = max(-LARGEST_EXPONENT / self.q, min(log_loss, LARGEST_EXPONENT / self.q))
        return math.exp(exponent * log_loss)


def _rate(update: Update) -> float:
    return float(update.metrics.get("lr", 0.0))


def initial_loss(update: Update) -> float:
    """The loss that an update carries, finite; 0 for a client that reports none, so that it gains nothing by that."""
    loss = float(update.metrics.get("initial_loss", 0.0))
    return 0.0 if math.isnan(loss) else max(-_LARGEST_LOSS, min(loss, _LARGEST_LOSS))


def needs_initial_loss(kind: str, recipe: RecipeComponents) -> str | None:
    """Return why an aggregator that weights by losses cannot work beside a trainer that does not send them, or None."""
    trainer = recipe.training
    if isinstance(trainer, Trainer) and trainer.sends_initial_loss:
        return None
    return f"{kind} weighs by the loss that training = 'initial_loss' sends, got {trainer.kind!r}: choose that"
