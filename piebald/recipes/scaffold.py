"""SCAFFOLD: control variates against client drift."""

from __future__ import annotations

from typing import Unpack

from piebald.client import Scaffold, Training
from piebald.controller.pace import CohortSize
from piebald.controller.step import Momentum
from piebald.controller.weigh import Equal
from piebald.recipe import Recipe
from piebald.recipes.fedavg import fedavg
from piebald.recipes.registry import recipe


@recipe("Karimireddy et al. 2020, SCAFFOLD: stochastic controlled averaging for federated learning", Scaffold)
def scaffold(cohort: CohortSize = 1.0, server_lr: float = 1.0, **training: Unpack[Training]) -> Recipe:
    """Local steps corrected by the difference between the centre's and the client's control variate.

    Algorithm 1, option II.  Clients count equally, as in the paper.
    """
    return fedavg(cohort).with_(learn=Scaffold(**training), weigh=Equal(), step=Momentum(lr=server_lr, beta=0.0))
