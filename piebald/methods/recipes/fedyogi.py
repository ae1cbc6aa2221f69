"""FedYogi: Yogi at the server (algorithm 2 of the paper)."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, Sgd, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.server_optimizer.adaptive import Yogi


@recipe("Reddi et al. 2021, Adaptive federated optimization", Sgd)
def fedyogi(
    cohort: CohortSize = 1.0, server_lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3,
    **training: Unpack[SgdSettings],
) -> Recipe:  # fmt: skip
    """FedAvg whose server uses the averaged change as the gradient of Yogi."""
    return fedavg(cohort, **training).with_(server_optimizer=Yogi(lr=server_lr, beta1=beta1, beta2=beta2, tau=tau))
