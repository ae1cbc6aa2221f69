"""FedAdam: Adam at the centre."""

from __future__ import annotations

from typing import Unpack

from piebald.client import Sgd, Training
from piebald.controller.pace import CohortSize
from piebald.controller.step import Adam
from piebald.recipe import Recipe
from piebald.recipes.fedavg import fedavg
from piebald.recipes.registry import recipe


@recipe("Reddi et al. 2021, Adaptive federated optimization", Sgd)
def fedadam(
    cohort: CohortSize = 1.0, server_lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3,
    **training: Unpack[Training],
) -> Recipe:  # fmt: skip
    """FedAvg whose centre takes the averaged change as Adam's gradient."""
    return fedavg(cohort, **training).with_(step=Adam(lr=server_lr, beta1=beta1, beta2=beta2, tau=tau))
