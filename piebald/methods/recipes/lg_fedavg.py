"""LG-FedAvg: local representations, a shared head."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, Sgd, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.sharing.layers import Only


@recipe("Liang et al. 2020, Think locally, act globally: federated learning with local and global representations", Sgd)
def lg_fedavg(
    cohort: CohortSize = 1.0, shared: str | tuple[str, ...] = "classifier", **training: Unpack[SgdSettings]
) -> Recipe:
    """FedAvg of the head only; the layers that make representations are private.

    Algorithm 1.  FL-bench shares the first layers in its place, and keeps the last ones private.
    """
    return fedavg(cohort, **training).with_(sharing=Only(shared_layers=shared))
