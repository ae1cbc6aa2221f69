"""Credit: weights from the error with which an auto-encoder of updates reconstructs each of them."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import Cohort
from piebald.core.cohort_matrix import mean
from piebald.core.randomness import torch_generator
from piebald.methods.aggregation.robust import Robust, Weighting, shares_of


class Credit(Robust):
    """Updates that an auto-encoder reconstructs badly get small weights (Li, Cheng, Liu, Wang, Chen 2019).

    "Abnormal client behavior detection in federated learning": each update is cut down to `numbers` of its numbers
    (the paper's surrogate vector; here evenly spread over all layers), an auto-encoder reconstructs it, the anomaly
    score A is the error, and update k counts n_k A_k^-power.

    The paper trains the auto-encoder beforehand, on the updates of a public data set.  A context without one has only
    the updates of this step, so it is trained on those, each cut to the median length so that a scaled update cannot
    draw the auto-encoder to itself.  So it tolerates attackers that are few and differ from one another and from the
    rest; many similar attackers are learned as well as honest clients.  No share is guaranteed.

    Attributes:
        power: L of the paper, at least 0; 0 is a plain mean.
        numbers: of one surrogate vector, at most.
        hidden: width of the auto-encoder's middle; a wide one reconstructs unusual updates, too.
        steps: of training it, with Adam.
        weighting: n_k: all "equal" or by "examples".
    """

    on_device: ClassVar[bool] = True

    power: float = Field(default=2.0, ge=0)
    numbers: int = Field(default=2000, ge=2)
    hidden: int = Field(default=2, ge=1)
    steps: int = Field(default=100, ge=1)
    weighting: Weighting = "equal"

    def tolerates(self, count: int) -> int:
        return 0

    def merge(self, matrix: Tensor, cohort: Cohort) -> tuple[Tensor, Tensor]:
        score = self.anomaly(self.surrogates(matrix), cohort.version)
        # without the floor, one update that is reconstructed perfectly would take all the weight
        credit = (score / score.median().clamp(min=1e-30)).clamp(min=1e-3) ** -self.power
        shares = shares_of(cohort, self.weighting) * credit.cpu()
        shares = shares / shares.sum()
        return mean(matrix, shares.to(matrix.device)), shares

    def surrogates(self, matrix: Tensor) -> Tensor:
        """A few of each update's numbers [n, m], evenly spread, divided by their root mean square over honest sizes."""
        count = min(self.numbers, matrix.shape[1])
        # float32 has no whole numbers above 2^24, and the last place would be one too far
        spread = torch.linspace(0, matrix.shape[1] - 1, count, dtype=torch.float64).long()
        few = matrix[:, spread]
        return few / few.square().mean(1).sqrt().median().clamp(min=1e-30)

    def anomaly(self, surrogates: Tensor, version: int) -> Tensor:
        """Mean squared errors [n] in float64 of an auto-encoder trained on the surrogates [n, m]."""
        lengths = surrogates.square().mean(1, keepdim=True).sqrt()
        # at most 1: a short update stays short
        tamed = surrogates * (lengths.median() / lengths.clamp(min=1e-30)).clamp(max=1.0)
        # by version: the auto-encoder is trained anew at each step, and a run must repeat
        rng = torch_generator("credit", version)
        width, hidden = surrogates.shape[1], self.hidden
        sizes = [(width, 4 * hidden), (4 * hidden, hidden), (hidden, 4 * hidden), (4 * hidden, width)]
        weights = [(torch.randn(a, b, generator=rng) / a**0.5).to(surrogates.device) for a, b in sizes]
        with torch.enable_grad():
            weights = [weight.requires_grad_() for weight in weights]
            adam = torch.optim.Adam(weights, lr=1e-2)
            for _ in range(self.steps):
                adam.zero_grad()
                # absolute errors, not squares: a few odd ones pull less
                (_rebuilt(tamed, weights) - tamed).abs().mean().backward()  # type: ignore[no-untyped-call]
                adam.step()
        with torch.no_grad():
            # errors of the updates as they came: only training saw them cut to the median length
            return (_rebuilt(surrogates, weights) - surrogates).square().mean(1).double()


def _rebuilt(x: Tensor, weights: list[Tensor]) -> Tensor:
    first, second, third, last = weights
    return torch.tanh(torch.tanh(x @ first) @ second @ third) @ last
