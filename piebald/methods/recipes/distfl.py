"""DistFL: clusters by distribution knowledge."""

from __future__ import annotations

from typing import Literal, Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, Sgd, SgdSettings, recipe
from piebald.methods.clustering.distfl import Distfl
from piebald.methods.recipes.fedavg import fedavg


@recipe("Liu et al. 2021, DistFL: Distribution-aware federated learning for mobile scenarios", Sgd)
def distfl(
    cohort: CohortSize = 1.0,
    probes: int = 200,
    channels: float = 0.5,
    find: Literal["silhouette", "gap", "linked"] = "silhouette",
    normal: Literal["largest", "vote", "server_rows"] = "largest",
    every: int = 1,
    **training: Unpack[SgdSettings],
) -> Recipe:
    """Cluster clients by what their models reveal about their data, and train one model for each cluster.

    The model needs shared batch norm.  Clients of a cluster count the same, whatever their rows (eq. 7); with
    `aggregation="example_weighted"` they count by rows, as in FedAvg.  Further settings are those of the clustering
    `distfl`.
    """
    group = Distfl(probes=probes, channels=channels, find=find, normal=normal, every=every)
    return fedavg(cohort, **training).with_(clustering=group, aggregation="equal_weighted")
