"""FedAsync: every update is mixed into the community model, a stale one less."""

from __future__ import annotations

from typing import Literal, Unpack

from piebald.client import Proximal, Training
from piebald.controller.pace import Asynchronous, CohortSize
from piebald.controller.step import Mixing
from piebald.controller.weigh import ByStaleness
from piebald.recipe import Recipe
from piebald.recipes.fedavg import fedavg
from piebald.recipes.registry import recipe


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
