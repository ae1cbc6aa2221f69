"""FedProx: a proximal term towards the global model."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.proximal import Proximal


@recipe("Li et al. 2020, Federated optimization in heterogeneous networks", Proximal)
def fedprox(cohort: CohortSize = 1.0, mu: float = 0.01, **training: Unpack[SgdSettings]) -> Recipe:
    """FedAvg with the proximal term mu/2 |w - w_t|^2 added to the loss of every client."""
    return fedavg(cohort).with_(training=Proximal(mu=mu, **training))
