"""FedAsync: every update is mixed into the community model, a stale one less."""

from __future__ import annotations

from typing import Literal, Unpack

from piebald.aggregation import ByStaleness
from piebald.recipe import Recipe
from piebald.recipes.fedavg import fedavg
from piebald.recipes.named import recipe
from piebald.scheduling.asynchronous import Asynchronous
from piebald.scheduling.cohort import CohortSize
from piebald.server_optimizer.mixing import Mixing
from piebald.training import Proximal, Training


@recipe("Xie et al. 2019, Asynchronous federated optimization", Proximal)
def fedasync(
    cohort: CohortSize = 1.0,
    alpha: float = 0.6,
    function: Literal["constant", "polynomial", "hinge"] = "polynomial",
    a: float = 0.5,
    b: float = 4,
    mu: float = 0.005,
    oldest: int | None = None,
    **training: Unpack[Training],
) -> Recipe:
    """Mix each arriving model into the community's with weight alpha * s(staleness); clients are pulled by mu (rho)."""
    return fedavg(cohort).with_(
        learn=Proximal(mu=mu, **training),
        pace=Asynchronous(cohort=cohort, oldest=oldest),
        weigh=ByStaleness(function=function, a=a, b=b),
        step=Mixing(alpha=alpha),
    )
