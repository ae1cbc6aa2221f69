"""FedDecorr: features that do not collapse into a few dimensions."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.decorrelation import Decorrelation


@recipe(
    "Shi et al. 2023, Towards understanding and mitigating dimensional collapse in heterogeneous federated learning",
    Decorrelation,
)
def feddecorr(cohort: CohortSize = 1.0, beta: float = 0.1, **training: Unpack[SgdSettings]) -> Recipe:
    """FedAvg with a penalty on the correlation of a batch's features."""
    return fedavg(cohort).with_(training=Decorrelation(beta=beta, **training))
