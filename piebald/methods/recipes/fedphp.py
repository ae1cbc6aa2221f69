"""FedPHP: clients keep a mean of the models that they have trained, and train towards its features."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.inherited_private import InheritedPrivate


@recipe("Li et al. 2021, FedPHP: Federated personalization with inherited private models", InheritedPrivate)
def fedphp(
    cohort: CohortSize = 1.0, lam: float = 0.05, mu: float = 0.9, horizon: int = 100, **training: Unpack[SgdSettings]
) -> Recipe:
    """FedAvg whose clients keep and use a mean of the models that they have trained, and train towards its features."""
    return fedavg(cohort).with_(training=InheritedPrivate(lam=lam, mu=mu, horizon=horizon, **training))
