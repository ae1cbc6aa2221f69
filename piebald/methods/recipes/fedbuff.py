"""FedBuff: asynchronous clients, and a server step for each full buffer of updates."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.aggregation.staleness import StalenessWeighted
from piebald.methods.catalog.registry import CohortSize, Recipe, Sgd, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.scheduling.asynchronous import Buffered
from piebald.methods.server_optimizer.momentum import Momentum


@recipe("Nguyen et al. 2022, Federated learning with buffered asynchronous aggregation", Sgd)
def fedbuff(
    cohort: CohortSize = 1.0,
    buffer_size: int = 10,
    a: float = 0.5,
    server_lr: float = 1.0,
    max_staleness: int | None = None,
    **training: Unpack[SgdSettings],
) -> Recipe:
    """Clients train continuously; after every `buffer_size` results the server steps, with less weight for stale ones.

    Algorithm 1.  Changes are measured from the model that was sent, and a client may train twice on one version.
    """
    return fedavg(cohort, **training).with_(
        scheduling=Buffered(cohort=cohort, buffer_size=buffer_size, max_staleness=max_staleness),
        aggregation=StalenessWeighted(a=a),
        server_optimizer=Momentum(lr=server_lr, beta=0.0),
    )
