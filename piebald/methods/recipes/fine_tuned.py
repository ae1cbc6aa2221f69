"""FedAvg, then fine-tuning at the client."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.fine_tune import FineTune


@recipe("Liu et al. 2021, DistFL (baseline LG-Net); McMahan et al. 2017", FineTune)
def fine_tuned(cohort: CohortSize = 1.0, tune_epochs: int = 1, **training: Unpack[SgdSettings]) -> Recipe:
    """FedAvg, and for each client a personal model: the global model after `tune_epochs` local epochs."""
    return fedavg(cohort).with_(training=FineTune(tune_epochs=tune_epochs, **training))
