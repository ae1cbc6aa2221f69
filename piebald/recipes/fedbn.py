"""FedBN: batch norm stays at home."""

from __future__ import annotations

from typing import Unpack

from piebald.client import AllBut, Sgd, Training
from piebald.controller.pace import CohortSize
from piebald.recipe import Recipe
from piebald.recipes.fedavg import fedavg
from piebald.recipes.registry import recipe


@recipe("Li et al. 2021, FedBN: federated learning on non-IID features via local batch normalization", Sgd)
def fedbn(cohort: CohortSize = 1.0, **training: Unpack[Training]) -> Recipe:
    """Average everything but batch norm's parameters and statistics.  Refuses a model without batch norm."""
    return fedavg(cohort, **training).with_(share=AllBut(private_layers="batch_norm"))
