"""FedSAM: sharpness-aware minimization at the clients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field

from piebald.contracts import PLAIN_STEP, LocalStep, StepPoint
from piebald.contracts.training import Gradients
from piebald.core.arguments import checked_class
from piebald.methods.training.sgd import Sgd


@checked_class
@dataclass(frozen=True)
class Uphill(LocalStep):
    """Go along the gradient at w + rho * g / |g|, with |g| the length of the whole gradient g at w."""

    rho: float

    def gradients(self, point: StepPoint) -> Gradients:
        losses, gradients = point.gradients()
        # for each client of the stack by itself, and over all of its tensors
        square = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0)
        share = self.rho / (square.sqrt() + 1e-12)  # where there is no gradient, there is nowhere to climb
        away = (gradient * share.view(-1, *[1] * (gradient.dim() - 1)) for gradient in gradients)
        return losses, point.gradients(away)[1]


class SharpnessAware(Sgd):
    """Steps along the gradient at w + rho * g / |g|, where g is the gradient of the same batch at w (Foret et al. 2021,
    eq. 2 and 3; at the clients of a federation Qu et al. 2022, "Generalized federated learning via sharpness aware
    minimization", algorithm 1, and Caldarola, Caputo, Ciccone 2022).

    Both gradients have the same dropout masks.  Where the papers are silent: |g| is the length of the whole gradient,
    shared and private; clipping, momentum and weight decay act on the second gradient; running statistics of batch norm
    are those of the pass at w, so that they do not move twice.

    Attributes:
        rho: radius of the ball, at least 0; 0 is plain SGD.

    Examples:
        >>> SharpnessAware(rho=0.1).local_step
        Uphill(rho=0.1)
    """

    rho: float = Field(default=0.05, ge=0)

    @property
    def local_step(self) -> LocalStep:
        return Uphill(self.rho) if self.rho else PLAIN_STEP
