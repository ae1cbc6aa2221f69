"""All clients share one global model."""

from __future__ import annotations

from collections.abc import Mapping

from piebald.contracts import Cohort, ServerContext
from piebald.methods.clustering.base import Clustering


class SingleCluster(Clustering):
    """A single cluster of all clients (FedAvg)."""

    requires_individual_updates = False

    def is_single(self) -> bool:
        return not self.overrides(SingleCluster.assign)

    def assign(self, cohort: Cohort, known: Mapping[int, int], context: ServerContext) -> list[int]:
        return [0] * len(cohort.clients)
