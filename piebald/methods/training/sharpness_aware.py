"""FedSAM: sharpness-aware minimization at the clients."""

from __future__ import annotations

import dataclasses

from pydantic import Field

from piebald.contracts import SgdConfig, TrainInput
from piebald.methods.training.sgd import Sgd


class SharpnessAware(Sgd):
    """Steps along the gradient at w + rho * g / |g|, where g is the gradient of the same batch at w (Foret et al. 2021,
    eq. 2 and 3; at the clients of a federation Qu et al. 2022, "Generalized federated learning via sharpness aware
    minimization", algorithm 1, and Caldarola, Caputo, Ciccone 2022).

    Both gradients have the same dropout masks.  Where the papers are silent: |g| is the length of the whole gradient,
    shared and private; clipping, momentum and weight decay act on the second gradient; running statistics of batch norm
    are those of the pass at w, so that they do not move twice.

    Attributes:
        rho: radius of the ball, at least 0; 0 is plain SGD.
    """

    rho: float = Field(default=0.05, ge=0)

    def sgd_config(self, inputs: TrainInput, epochs: int | None = None) -> SgdConfig:
        return dataclasses.replace(super().sgd_config(inputs, epochs), sam_radius=self.rho)
