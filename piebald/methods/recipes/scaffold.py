"""SCAFFOLD: control variates against client drift."""

from __future__ import annotations

from typing import Literal, Unpack

from piebald.methods.aggregation.linear import EqualWeighted
from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.server_optimizer.momentum import Momentum
from piebald.methods.training.scaffold import Scaffold


@recipe("Karimireddy et al. 2020, SCAFFOLD: stochastic controlled averaging for federated learning", Scaffold)
def scaffold(
    cohort: CohortSize = 1.0, server_lr: float = 1.0, option: Literal["I", "II"] = "II", **training: Unpack[SgdSettings]
) -> Recipe:
    """FedAvg with local steps corrected by the control variates of the client and of the server.

    Algorithm 1, with either option.  Clients have equal weights, as in the paper.

    Examples:
        >>> from piebald import recipes
        >>> recipes.scaffold(lr=0.1).training.uploads()
        ('control',)
    """
    trainer, optimizer = Scaffold(option=option, **training), Momentum(lr=server_lr, beta=0.0)
    return fedavg(cohort).with_(training=trainer, aggregation=EqualWeighted(), server_optimizer=optimizer)
