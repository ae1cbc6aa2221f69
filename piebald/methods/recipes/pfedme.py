"""pFedMe: personal models near the global one, which moves towards them."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.aggregation.linear import EqualWeighted
from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.server_optimizer.momentum import Momentum
from piebald.methods.training.moreau_envelope import MoreauEnvelope


@recipe("Dinh, Tran, Nguyen 2020, Personalized federated learning with Moreau envelopes", MoreauEnvelope)
def pfedme(
    cohort: CohortSize = 1.0,
    lam: float = 15.0,
    eta: float = 0.05,
    inner_steps: int = 5,
    server_lr: float = 1.0,
    **training: Unpack[SgdSettings],
) -> Recipe:
    """Each client finds a personal model near the global one, which moves towards the personal ones.

    Algorithm 1; `server_lr` is its beta.  All clients count the same, as in the paper.  Of the defaults, `lam`,
    `inner_steps` and `server_lr` are those of the authors' program; `eta`, and an epoch instead of R steps, are ours.
    """
    return fedavg(cohort).with_(
        training=MoreauEnvelope(lam=lam, eta=eta, inner_steps=inner_steps, **training),
        aggregation=EqualWeighted(),
        server_optimizer=Momentum(lr=server_lr, beta=0.0),
    )
