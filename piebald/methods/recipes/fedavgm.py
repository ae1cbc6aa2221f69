"""FedAvgM: momentum at the server."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, Sgd, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.server_optimizer.momentum import Momentum


@recipe(
    "Hsu, Qi, Brown 2019, Measuring the effects of non-identical data distribution for federated visual classification",
    Sgd,
)
def fedavgm(
    cohort: CohortSize = 1.0, server_lr: float = 1.0, beta: float = 0.9, **training: Unpack[SgdSettings]
) -> Recipe:
    """FedAvg with momentum at the server."""
    return fedavg(cohort, **training).with_(server_optimizer=Momentum(lr=server_lr, beta=beta))
