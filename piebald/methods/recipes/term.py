"""TERM: tilted losses of clients (eq. 2 of the paper)."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.aggregation.tilted import Tilted
from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.initial_loss import InitialLoss


@recipe("Li et al. 2021, Tilted empirical risk minimization", InitialLoss)
def term(cohort: CohortSize = 1.0, t: float = 1.0, **training: Unpack[SgdSettings]) -> Recipe:
    """FedAvg with weights that grow exponentially with the loss, or shrink where the tilt is negative."""
    return fedavg(cohort).with_(training=InitialLoss(**training), aggregation=Tilted(t=t))
