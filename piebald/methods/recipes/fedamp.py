"""FedAMP: attentive message passing between clients' models."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.clustering.attentive import Attentive
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.last_trained import LastTrained


@recipe("Huang et al. 2021, Personalized cross-silo federated learning on non-IID data", LastTrained)
def fedamp(
    cohort: CohortSize = 1.0, alpha: float = 0.1, sigma: float = 1.0, mu: float = 0.1, **training: Unpack[SgdSettings]
) -> Recipe:
    """A model for each client, moved towards the models of clients with similar models."""
    return fedavg(cohort).with_(training=LastTrained(mu=mu, **training), clustering=Attentive(alpha=alpha, sigma=sigma))
