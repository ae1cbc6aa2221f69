"""AsyncFedAvg: FedAvg's weighted mean over the last models of all clients, updated at every result."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, Sgd, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.scheduling.asynchronous import Asynchronous
from piebald.methods.server_optimizer.cached_average import CachedAverage

METIS = "Stripelis, Ambite 2020, Accelerating federated learning in heterogeneous data and computational environments"


@recipe(
    "Stripelis, Ambite 2020, Accelerating federated learning in heterogeneous data and computational environments", Sgd
)
def async_fedavg(cohort: CohortSize = 1.0, max_staleness: int | None = None, **training: Unpack[SgdSettings]) -> Recipe:
    """Keep the mean of all clients' last models, weighted by examples, and update it at every result."""
    return fedavg(cohort, **training).with_(
        scheduling=Asynchronous(cohort=cohort, max_staleness=max_staleness), server_optimizer=CachedAverage()
    )
