"""DistFL: clusters by distribution knowledge."""

from __future__ import annotations

from typing import Literal, Unpack

from piebald.clustering.distfl import Distfl
from piebald.recipe import Recipe
from piebald.recipes.fedavg import fedavg
from piebald.recipes.named import recipe
from piebald.scheduling.cohort import CohortSize
from piebald.training.sgd import Sgd, SgdSettings


@recipe("Liu et al. 2021, DistFL: Distribution-aware federated learning for mobile scenarios", Sgd)
def distfl(
    cohort: CohortSize = 1.0,
    probes: int = 200,
    channels: float = 0.5,
    find: Literal["silhouette", "gap"] = "silhouette",
    normal: Literal["largest", "vote", "server_rows"] = "largest",
    every: int = 1,
    **training: Unpack[SgdSettings],
) -> Recipe:
    """Find out from the uploaded models alone whose data are alike, and average each group by itself.

    The model needs batch norms that are shared.  More settings are those of the group part `distfl`.
    """
    group = Distfl(probes=probes, channels=channels, find=find, normal=normal, every=every)
    return fedavg(cohort, **training).with_(clustering=group)
