"""DP-SGD at every client: single rows are protected from all others, including the server."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.dp_sgd import DpSgd


@recipe("Abadi et al. 2016, Deep learning with differential privacy", DpSgd)
def dp_sgd(cohort: CohortSize = 1.0, noise: float = 1.0, mu: float = 0.0, **training: Unpack[SgdSettings]) -> Recipe:
    """FedAvg whose clients clip the gradient of each row and add noise to every step."""
    return fedavg(cohort).with_(training=DpSgd(noise=noise, mu=mu, **training))
