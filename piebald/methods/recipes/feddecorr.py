"""FedDecorr: features that do not collapse into a few dimensions."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import recipe
from piebald.methods.recipe import Recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.scheduling.base import CohortSize
from piebald.methods.training.decorrelation import Decorrelation
from piebald.methods.training.sgd import SgdSettings


@recipe(
    "Shi et al. 2023, Towards understanding and mitigating dimensional collapse in heterogeneous federated learning",
    Decorrelation,
)
def feddecorr(cohort: CohortSize = 1.0, beta: float = 0.1, **training: Unpack[SgdSettings]) -> Recipe:
    """FedAvg with a penalty on the correlation of a batch's features."""
    return fedavg(cohort).with_(training=Decorrelation(beta=beta, **training))
