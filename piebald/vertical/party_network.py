"""The two parties' networks, the translator between them, and the loss on co-occurring rows.

Choices where the paper leaves something open:

- The paper has "convolutional layers" and tables as data.  Here layers are dense with sigmoids, so hidden units lie in
  (0, 1).
- "Weakly shared" aligned layers: no weights are shared; MMD makes the outputs of both parties similar.
- The translator is not defined fully.  Here it is FTL's (Liu, Chen, Yang 2018, eq. 1; after Shu et al. 2015): a target
  row u is scored by phi(u) = Phi.u, where Phi is the mean of label times hidden row over the source's rows of the
  step.  With `balanced`, both classes have the same weight in that mean.
- The "sigmoid classifier" on the aligned layer is sigmoid(Phi.u).  The target receives Phi once, at the end.
- Losses are means over rows, not sums, so that the learning rate does not depend on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from piebald.vertical.party_secret import PartySecret

Trace = list[tuple[Tensor, Tensor]]


class PartyNetwork(nn.Module):
    """One party's network: its own layers, then the aligned ones; sigmoids after each; float64.

    Args:
        features: number of input features.
        hidden: units of the layers before the aligned ones.
        aligned: units of the aligned layers, the last of which gives the scores.
        secret: what the initial weights are drawn from (Glorot and Bengio 2010, uniform; with gain 4 after a sigmoid);
            None draws none, for a network whose weights are loaded.
    """

    def __init__(
        self, features: int, hidden: Sequence[int], aligned: Sequence[int], secret: PartySecret | None
    ) -> None:
        super().__init__()
        widths = [features, *hidden, *aligned]
        linear = [nn.Linear(before, after, dtype=torch.float64) for before, after in pairwise(widths)]
        self.layers = nn.ModuleList(linear)
        self.aligned = len(aligned)
        if secret is None:
            return
        for index, layer in enumerate(linear):
            most = (4.0 if index else 1.0) * math.sqrt(6 / (layer.in_features + layer.out_features))
            drawn = secret.uniform(layer.weight.numel(), "weights", index).reshape(layer.weight.shape)
            with torch.no_grad():
                layer.weight.copy_(torch.from_numpy(most * (2 * drawn - 1)))
                layer.bias.zero_()

    def forward(self, x: Tensor, trace: Trace | None = None) -> list[Tensor]:
        """The outputs of the aligned layers [n, units], for rows x [n, features].

        Args:
            x: the rows.
            trace: a list to which each layer's inputs and its sums before the sigmoid are added.
        """
        outputs = []
        for layer in self.layers:
            sums = layer(x)
            if trace is not None:
                trace.append((x, sums))
            x = torch.sigmoid(sums)
            outputs.append(x)
        return outputs[-self.aligned :]


def row_gradients(trace: Trace, slopes: Sequence[Tensor | None], longest: float | None = None) -> list[Tensor] | None:
    """Gradients of a network's parameters, in their order, from the slopes of the loss by each layer's sums.

    Args:
        trace: inputs and sums of each layer, as `PartyNetwork` notes them.
        slopes: for each layer [n, units], or None if the loss does not depend on these rows.
        longest: what each row's gradient of all parameters together is clipped to; None for no clipping.  The slopes
            of a row must depend on no other row then.
    """
    layers = [(x.detach(), slope) for (x, _), slope in zip(trace, slopes, strict=True) if slope is not None]
    if not layers:
        return None
    # A layer's gradient for one row is the outer product of slope and inputs, with a 1 for the bias.
    if longest is not None:  # a row whose gradient is no number adds none, where it could end the run
        layers = [(x, slope.nan_to_num(0.0, 0.0, 0.0)) for x, slope in layers]
    squares = torch.stack([(slope**2).sum(1) * ((x**2).sum(1) + 1) for x, slope in layers]).sum(0)
    # a row with a gradient of 0 has an infinite share, which the clamp makes 1; one that overflows has none
    sizes = squares.nan_to_num(math.inf, math.inf).sqrt()
    share = torch.ones_like(squares) if longest is None else (longest / sizes).clamp(max=1.0)
    return [part for x, slope in layers for part in ((share[:, None] * slope).T @ x, share @ slope)]


def unit_rows(rows: Tensor) -> Tensor:
    """Rows scaled to length 1; those of hidden units that are nearly all 0 stay shorter."""
    unit: Tensor = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return unit


def translator(rows: Tensor, labels: Tensor, balanced: bool) -> Tensor:
    """Phi [d]: the mean of label times hidden row; labels are -1 or 1.

    Args:
        rows: the source's hidden rows [n, d].
        labels: labels of these rows [n].
        balanced: give both classes the same weight, if both occur.
    """
    weights = torch.full_like(labels, 1 / len(labels))
    if balanced and (labels > 0).any() and (labels < 0).any():
        for sign in (-1, 1):
            weights[labels == sign] = 0.5 / int((labels == sign).sum())  # not a tensor: that would round to float32
    return (weights * labels) @ rows


def taylor_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """log(1 + exp(-y phi)) to second order around 0, the mean over rows: log 2 - y phi / 2 + phi^2 / 8."""
    return (math.log(2) - labels * scores / 2 + scores**2 / 8).mean()
