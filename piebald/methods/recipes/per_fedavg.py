"""Per-FedAvg: a global model from which one step of each client leads to a good one."""

from __future__ import annotations

from typing import Literal, Unpack

from piebald.methods.aggregation.linear import EqualWeighted
from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.meta_learning import MetaLearning


@recipe(
    "Fallah, Mokhtari, Ozdaglar 2020, Personalized federated learning: a model-agnostic meta-learning approach",
    MetaLearning,
)
def per_fedavg(
    cohort: CohortSize = 1.0,
    alpha: float = 0.01,
    hessian: Literal["ignored", "differences"] = "ignored",
    **training: Unpack[SgdSettings],
) -> Recipe:
    """Train the global model so that it is good after one step of each client on its own rows.

    Algorithm 1.  All clients count the same, as in the paper.
    """
    return fedavg(cohort).with_(
        training=MetaLearning(alpha=alpha, hessian=hessian, **training), aggregation=EqualWeighted()
    )
