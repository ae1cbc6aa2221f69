"""The split model: the inputs of both parties add up to one score, in training and at prediction.

A vertically split logistic regression (Hardy et al. 2017), with the losses of `loss_terms.ResidualTerm`:

    z = z_source + z_target,    z_party = w_party . x_party

Each party keeps its weights.  The target's score of a row needs the source's share z_source of the same row.

Inputs and shares are clipped to -8 to 8 (`MOST_SCORE`), in training and at prediction: a score within is as good as
certain, and products under encryption need bounds.  A row whose own share is clipped has no part in the gradient of
the party's weights: its coefficients are 0, whatever the other party's share of it is, as the slope of a clipped share
is.  What the other party sends as its shares of held-out or new rows is refused beyond the same bound.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from piebald.core.errors import RuntimeFault
from piebald.vertical.loss_terms import MOST_SCORE, PartyView
from piebald.vertical.party import Party
from piebald.vertical.party_messages import MessageKind
from piebald.vertical.party_secret import PartySecret
from piebald.vertical.protocol import PartySession, receive_numbers
from piebald.vertical.transfer_methods import Method


class LinearScore(nn.Module):
    """A party's share of the score; float64, all weights 0 at first.

    Args:
        features: number of input features.
        bias: whether one weight belongs to no feature, as the source's does.
    """

    def __init__(self, features: int, bias: bool) -> None:
        super().__init__()
        self.bias = bias
        self.weight = nn.Parameter(torch.zeros(features + bias, dtype=torch.float64))

    def inputs(self, x: Tensor) -> Tensor:
        """Rows x [n, f] as they are weighed: within the bound that products are computed for."""
        x = x.clamp(-MOST_SCORE, MOST_SCORE)
        return torch.cat([x, torch.ones_like(x[:, :1])], 1) if self.bias else x

    def forward(self, x: Tensor) -> Tensor:
        """The share z [n] of rows x [n, f]."""
        return self.share(self.inputs(x))

    def share(self, inputs: Tensor) -> Tensor:
        """The share z [n] of rows of `inputs`, clipped."""
        return (inputs @ self.weight).clamp(-MOST_SCORE, MOST_SCORE)

    def unclipped(self, inputs: Tensor) -> Tensor:
        """Rows of `inputs` [n, f], with 0 in those whose share is clipped and does not change with the weights."""
        return inputs * ((inputs @ self.weight).detach().abs() <= MOST_SCORE)[:, None]


def party_class(method: Method) -> type[Party]:
    """Return the class of the parties of a method."""
    return SplitParty if method.joint else Party


class SplitParty(Party):
    """A party of the split model, which trains on co-occurring rows alone."""

    network: LinearScore
    summary_kind = "shares"

    def _network(self, secret: PartySecret) -> LinearScore:
        # the loss is convex, so nothing needs to be drawn
        return LinearScore(self.data.x.shape[1], bias=self.role == "source")

    def view(self) -> PartyView:
        chunk = self.common[self.done % len(self.common)]
        inputs = self.network.inputs(self.data.x[chunk])
        labels = None if self.data.y is None else self.data.y[chunk]
        coefficients = self.network.unclipped(inputs)
        return PartyView([], self.network.share(inputs), labels, inputs=coefficients, weight=self.network.weight)

    def predict(self, x: Tensor) -> Tensor:
        raise RuntimeFault("a split model scores rows with both parties' shares: use piebald.vertical.predict")

    def test_scores(self) -> Tensor:
        if self.phi is None:
            raise RuntimeFault("the target can predict only after training, with the source's shares")
        with torch.no_grad():
            return torch.sigmoid(self.network(self.data.test) + self.phi)

    def _receive_summary(self, session: PartySession) -> tuple[Tensor, float]:
        numbers = receive_numbers(session, MessageKind.HANDOVER, len(self.data.test) + 1, most=MOST_SCORE)
        return torch.from_numpy(numbers[:-1]), float(np.clip(numbers[-1], 0.0, 1.0))

    def summary(self) -> tuple[Tensor, float]:
        """Return the source's shares of the held-out rows, and its share of positives among co-occurring rows."""
        assert self.data.y is not None, "only the source has labels"
        with torch.no_grad():
            share: Tensor = self.network(self.data.test)
        return share, float((self.data.y[np.concatenate(self.common)] > 0).double().mean())
