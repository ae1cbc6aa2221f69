"""FedProx: a pull towards the community model."""

from __future__ import annotations

from typing import Unpack

from piebald.recipe import Recipe
from piebald.recipes.fedavg import fedavg
from piebald.recipes.named import recipe
from piebald.scheduling.cohort import CohortSize
from piebald.training import Proximal, Training


@recipe("Li et al. 2020, Federated optimization in heterogeneous networks", Proximal)
def fedprox(cohort: CohortSize = 1.0, mu: float = 0.01, **training: Unpack[Training]) -> Recipe:
    """FedAvg with mu/2 |w - w_t|^2 added to every client's loss."""
    return fedavg(cohort).with_(learn=Proximal(mu=mu, **training))
