"""Agnostic federated learning: the smallest loss on the worst mixture of clients."""

from __future__ import annotations

from typing import Unpack

from piebald.aggregation.agnostic import Agnostic
from piebald.recipe import Recipe
from piebald.recipes.fedavg import fedavg
from piebald.recipes.named import recipe
from piebald.scheduling.cohort import CohortSize
from piebald.training.initial_loss import InitialLoss
from piebald.training.sgd import SgdSettings


@recipe("Mohri et al. 2019, Agnostic federated learning", InitialLoss)
def afl(cohort: CohortSize = 1.0, lambda_lr: float = 0.1, **training: Unpack[SgdSettings]) -> Recipe:
    """FedAvg whose weights move towards the clients with the largest losses: the worst client becomes better."""
    return fedavg(cohort).with_(training=InitialLoss(**training), aggregation=Agnostic(lambda_lr=lambda_lr))
