"""Ditto: a personal model with a proximal term towards the global model."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.ditto import Ditto


@recipe("Li et al. 2021, Ditto: fair and robust federated learning through personalization", Ditto)
def ditto(
    cohort: CohortSize = 1.0, lam: float = 0.1, personal_epochs: int = 1, **training: Unpack[SgdSettings]
) -> Recipe:
    """FedAvg, and for each client a personal model with a proximal term towards the global model."""
    return fedavg(cohort).with_(training=Ditto(lam=lam, personal_epochs=personal_epochs, **training))
