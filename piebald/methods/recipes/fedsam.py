"""FedSAM: flat minima at every client."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.sharpness_aware import SharpnessAware


@recipe("Qu et al. 2022, Generalized federated learning via sharpness aware minimization", SharpnessAware)
def fedsam(cohort: CohortSize = 1.0, rho: float = 0.05, **training: Unpack[SgdSettings]) -> Recipe:
    """FedAvg with sharpness-aware steps: along the gradient at the worst point near the model, two passes a step."""
    return fedavg(cohort).with_(training=SharpnessAware(rho=rho, **training))
