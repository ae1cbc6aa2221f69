"""FedDyn: each client's loss is regularized so that its minimum agrees with the federation's."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.aggregation.linear import EqualWeighted
from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.server_optimizer.dynamic_correction import DynamicCorrection
from piebald.methods.training.dynamic_regularization import DynamicRegularization


@recipe("Acar et al. 2021, Federated learning based on dynamic regularization", DynamicRegularization)
def feddyn(cohort: CohortSize = 1.0, alpha: float = 0.01, **training: Unpack[SgdSettings]) -> Recipe:
    """FedAvg with dynamic regularization at the clients and its correction at the server."""
    return fedavg(cohort).with_(
        training=DynamicRegularization(alpha=alpha, **training),
        aggregation=EqualWeighted(),
        server_optimizer=DynamicCorrection(alpha=alpha),
    )
