"""Agnostic federated learning: the smallest loss on the worst mixture of clients."""

from __future__ import annotations

from typing import Literal, Unpack

from piebald.methods.aggregation.agnostic import Agnostic
from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.initial_loss import InitialLoss


@recipe("Mohri et al. 2019, Agnostic federated learning", InitialLoss)
def afl(
    cohort: CohortSize = 1.0,
    lambda_lr: float = 0.1,
    weights: Literal["equal", "examples"] = "equal",
    **training: Unpack[SgdSettings],
) -> Recipe:
    """Weights move towards the clients with the largest losses: the worst client becomes better.

    With lambda_lr = 0 and weights = "examples" this is FedAvg.
    """
    return fedavg(cohort).with_(
        training=InitialLoss(**training), aggregation=Agnostic(lambda_lr=lambda_lr, weights=weights)
    )
