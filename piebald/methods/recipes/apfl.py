"""APFL: each client mixes the shared model with one of its own."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.aggregation.linear import EqualWeighted
from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.mixed_models import MixedModels


@recipe("Deng, Kamani, Mahdavi 2020, Adaptive personalized federated learning", MixedModels)
def apfl(
    cohort: CohortSize = 1.0, alpha: float = 0.5, adaptive: bool = True, **training: Unpack[SgdSettings]
) -> Recipe:
    """FedAvg, and for each client a mixture, with a learned weight, of the global model and a model of its own.

    All clients count the same, as in the paper.
    """
    return fedavg(cohort).with_(
        training=MixedModels(alpha=alpha, adaptive=adaptive, **training), aggregation=EqualWeighted()
    )
