"""FedBN: batch norm stays at the client."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, Sgd, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.sharing.layers import AllExcept


@recipe("Li et al. 2021, FedBN: federated learning on non-IID features via local batch normalization", Sgd)
def fedbn(cohort: CohortSize = 1.0, **training: Unpack[SgdSettings]) -> Recipe:
    """FedAvg of all layers except batch norm, which is private.  A model without batch norm is refused."""
    return fedavg(cohort, **training).with_(sharing=AllExcept(private_layers="batch_norm"))
