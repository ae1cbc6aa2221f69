"""IFCA, K-Cluster: as many clusters as one says."""

from __future__ import annotations

from typing import Unpack

from piebald.clustering.ifca import Ifca
from piebald.recipe import Recipe
from piebald.recipes.fedavg import fedavg
from piebald.recipes.named import recipe
from piebald.scheduling.cohort import CohortSize
from piebald.training.lowest_loss import LowestLoss
from piebald.training.sgd import SgdSettings


@recipe("Ghosh et al. 2020, An efficient framework for clustered federated learning", LowestLoss)
def ifca(cohort: CohortSize = 1.0, k: int = 5, warm: int = 1, **training: Unpack[SgdSettings]) -> Recipe:
    """Offer K models to every client, who trains the one of least loss; each model is the average of its choosers.

    K-Cluster among the baselines of DistFL.  After `warm` rounds of FedAvg the K models begin as the k-means
    clusters of the clients' models; 0 begins with K random ones.
    """
    return fedavg(cohort).with_(training=LowestLoss(**training), clustering=Ifca(k=k, warm=warm))
