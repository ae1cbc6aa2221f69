"""FedNova: averages that are normalized by the number of each client's steps."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.aggregation.normalized import Normalized
from piebald.methods.catalog.registry import CohortSize, Recipe, Sgd, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg


@recipe("Wang et al. 2020, Tackling the objective inconsistency problem in heterogeneous federated optimization", Sgd)
def fednova(cohort: CohortSize = 1.0, **training: Unpack[SgdSettings]) -> Recipe:
    """FedAvg with changes divided by the number of local steps, and multiplied by the mean number of steps."""
    return fedavg(cohort, **training).with_(aggregation=Normalized())
