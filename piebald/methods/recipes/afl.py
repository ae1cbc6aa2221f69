"""Agnostic federated learning: the smallest loss on the worst mixture of clients."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.aggregation.agnostic import Agnostic
from piebald.methods.recipe import Recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.recipes.named import recipe
from piebald.methods.scheduling.cohort import CohortSize
from piebald.methods.training.initial_loss import InitialLoss
from piebald.methods.training.sgd import SgdSettings


@recipe("Mohri et al. 2019, Agnostic federated learning", InitialLoss)
def afl(cohort: CohortSize = 1.0, lambda_lr: float = 0.1, **training: Unpack[SgdSettings]) -> Recipe:
    """FedAvg whose weights move towards the clients with the largest losses: the worst client becomes better."""
    return fedavg(cohort).with_(training=InitialLoss(**training), aggregation=Agnostic(lambda_lr=lambda_lr))
