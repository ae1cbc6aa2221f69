"""SCAFFOLD: control variates against client drift."""

from __future__ import annotations

from typing import Unpack

from piebald.aggregation.linear import EqualWeighted
from piebald.recipe import Recipe
from piebald.recipes.fedavg import fedavg
from piebald.recipes.named import recipe
from piebald.scheduling.cohort import CohortSize
from piebald.server_optimizer.momentum import Momentum
from piebald.training.scaffold import Scaffold
from piebald.training.sgd import SgdSettings


@recipe("Karimireddy et al. 2020, SCAFFOLD: stochastic controlled averaging for federated learning", Scaffold)
def scaffold(cohort: CohortSize = 1.0, server_lr: float = 1.0, **training: Unpack[SgdSettings]) -> Recipe:
    """FedAvg with local steps corrected by the control variates of the client and of the server.

    Algorithm 1, option II.  Clients have equal weights, as in the paper.
    """
    return fedavg(cohort).with_(
        training=Scaffold(**training), aggregation=EqualWeighted(), server_optimizer=Momentum(lr=server_lr, beta=0.0)
    )
