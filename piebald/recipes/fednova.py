"""FedNova: clients that take unequal numbers of steps are averaged by direction, not by distance."""

from __future__ import annotations

from typing import Unpack

from piebald.aggregation.normalized import Normalized
from piebald.recipe import Recipe
from piebald.recipes.fedavg import fedavg
from piebald.recipes.named import recipe
from piebald.scheduling.cohort import CohortSize
from piebald.training.sgd import Sgd, SgdSettings


@recipe("Wang et al. 2020, Tackling the objective inconsistency problem in heterogeneous federated optimization", Sgd)
def fednova(cohort: CohortSize = 1.0, **training: Unpack[SgdSettings]) -> Recipe:
    """FedAvg whose changes are divided by the numbers of local steps, and multiplied by their mean."""
    return fedavg(cohort, **training).with_(aggregation=Normalized())
