"""FedAvg (algorithm 1 of the paper): the recipe from which the others differ in one or a few components."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.aggregation.linear import ExampleWeighted
from piebald.methods.catalog.registry import CohortSize, Recipe, Sgd, SgdSettings, recipe
from piebald.methods.clustering.single_cluster import SingleCluster
from piebald.methods.scheduling.synchronous import Synchronous
from piebald.methods.server_optimizer.average import ServerSgd
from piebald.methods.sharing.layers import Full


@recipe("McMahan et al. 2017, Communication-efficient learning of deep networks from decentralized data", Sgd)
def fedavg(cohort: CohortSize = 1.0, **training: Unpack[SgdSettings]) -> Recipe:
    """Train the global model at the clients, and average the results weighted by examples.

    Examples:
        >>> from piebald import recipes
        >>> recipe = recipes.fedavg(lr=0.1, epochs=2, cohort=10)
        >>> recipe.training.epochs, recipe.scheduling.cohort
        (2, 10)
    """
    return Recipe(
        training=Sgd(**training),
        sharing=Full(),
        scheduling=Synchronous(cohort=cohort),
        clustering=SingleCluster(),
        aggregation=ExampleWeighted(),
        server_optimizer=ServerSgd(),
    )
