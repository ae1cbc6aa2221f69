"""q-FedAvg: more equal losses."""

from __future__ import annotations

from typing import Literal, Unpack

from piebald.methods.aggregation.q_fair import QFair
from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.initial_loss import InitialLoss


@recipe("Li et al. 2020, Fair resource allocation in federated learning", InitialLoss)
def qfedavg(
    cohort: CohortSize = 1.0,
    q: float = 1.0,
    weights: Literal["equal", "examples"] = "equal",
    **training: Unpack[SgdSettings],
) -> Recipe:
    """Clients with larger losses count more, so that losses become more equal.

    With q = 0 and weights = "examples" this is FedAvg.
    """
    return fedavg(cohort).with_(training=InitialLoss(**training), aggregation=QFair(q=q, weights=weights))
