"""TERM: tilted losses of clients (eq. 2 of the paper)."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.aggregation.tilted import Tilted
from piebald.methods.catalog.registry import recipe
from piebald.methods.recipe import Recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.scheduling.base import CohortSize
from piebald.methods.training.initial_loss import InitialLoss
from piebald.methods.training.sgd import SgdSettings


@recipe("Li et al. 2021, Tilted empirical risk minimization", InitialLoss)
def term(cohort: CohortSize = 1.0, t: float = 1.0, **training: Unpack[SgdSettings]) -> Recipe:
    """FedAvg with weights that grow exponentially with the loss, or shrink where the tilt is negative."""
    return fedavg(cohort).with_(training=InitialLoss(**training), aggregation=Tilted(t=t))
