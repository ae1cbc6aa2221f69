"""MOON: model-contrastive federated learning."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.model_contrastive import ModelContrastive


@recipe("Li, He, Song 2021, Model-contrastive federated learning", ModelContrastive)
def moon(
    cohort: CohortSize = 1.0, mu: float = 1.0, temperature: float = 0.5, **training: Unpack[SgdSettings]
) -> Recipe:
    """FedAvg whose clients draw features towards those of the global model and away from those of their last one."""
    return fedavg(cohort).with_(training=ModelContrastive(mu=mu, temperature=temperature, **training))
