"""CFL: clusters that are split where the updates of their clients diverge."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, Sgd, SgdSettings, recipe
from piebald.methods.clustering.cfl import Cfl
from piebald.methods.recipes.fedavg import fedavg


@recipe("Sattler, Müller, Samek 2020, Clustered federated learning", Sgd)
def cfl(
    cohort: CohortSize = 1.0,
    eps1: float = 0.4,
    eps2: float = 0.5,
    gamma_max: float = 0.0,
    **training: Unpack[SgdSettings],
) -> Recipe:
    """Split a cluster by the cosines between updates when its mean has converged and its clients have not."""
    return fedavg(cohort, **training).with_(clustering=Cfl(eps1=eps1, eps2=eps2, gamma_max=gamma_max))
