"""IFCA and K-Cluster: a fixed number of clusters."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.aggregation.linear import EqualWeighted
from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.clustering.ifca import Ifca
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.lowest_loss import LowestLoss


@recipe("Ghosh et al. 2020, An efficient framework for clustered federated learning", LowestLoss)
def ifca(cohort: CohortSize = 1.0, k: int = 5, warm: int = 1, **training: Unpack[SgdSettings]) -> Recipe:
    """Send K models to every client; each model is averaged over the clients for which its loss is the smallest.

    The baseline K-Cluster of DistFL.  After `warm` rounds of FedAvg, the K models start as the k-means clusters of
    the clients' models; with 0, they start as K random ones.  All clients count the same, as in the paper.

    Examples:
        >>> from piebald import recipes
        >>> recipes.ifca(k=3).clustering.k
        3
    """
    return fedavg(cohort).with_(
        training=LowestLoss(**training), clustering=Ifca(k=k, warm=warm), aggregation=EqualWeighted()
    )
