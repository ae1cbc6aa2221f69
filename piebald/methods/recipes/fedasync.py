"""FedAsync: each update is mixed into the global model, with a smaller weight if it is stale."""

from __future__ import annotations

from typing import Literal, Unpack

from piebald.methods.aggregation.staleness import StalenessWeighted
from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.scheduling.asynchronous import Asynchronous
from piebald.methods.server_optimizer.mixing import Mixing
from piebald.methods.training.proximal import Proximal


@recipe("Xie et al. 2019, Asynchronous federated optimization", Proximal)
def fedasync(
    cohort: CohortSize = 1.0,
    alpha: float = 0.5,
    function: Literal["constant", "polynomial", "hinge"] = "polynomial",
    a: float = 0.5,
    b: float = 4,
    mu: float = 0.005,
    max_staleness: int | None = None,
    **training: Unpack[SgdSettings],
) -> Recipe:
    """Mix each model into the global one with weight alpha * s(staleness); clients have a proximal term mu (rho).

    The defaults are those with which Metis compares (Stripelis, Ambite 2020, section VI): polynomial damping, mixing
    0.5, rho 0.005.  Xie et al. mix with 0.6.
    """
    return fedavg(cohort).with_(
        training=Proximal(mu=mu, **training),
        scheduling=Asynchronous(cohort=cohort, max_staleness=max_staleness),
        aggregation=StalenessWeighted(function=function, a=a, b=b),
        server_optimizer=Mixing(alpha=alpha),
    )
