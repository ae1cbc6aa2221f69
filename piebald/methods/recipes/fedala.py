"""FedALA: adaptive local aggregation."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.adaptive_local_aggregation import AdaptiveLocalAggregation


@recipe(
    "Zhang et al. 2023, FedALA: Adaptive local aggregation for personalized federated learning",
    AdaptiveLocalAggregation,
)
def fedala(
    cohort: CohortSize = 1.0,
    weight_lr: float = 1.0,
    weight_share: float = 0.8,
    adaptive_layers: str | tuple[str, ...] = "classifier",
    **training: Unpack[SgdSettings],
) -> Recipe:
    """FedAvg whose clients learn for each parameter of the higher layers how much of the global one to take over."""
    trainer = AdaptiveLocalAggregation(
        weight_lr=weight_lr, weight_share=weight_share, adaptive_layers=adaptive_layers, **training
    )
    return fedavg(cohort).with_(training=trainer)
