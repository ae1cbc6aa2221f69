"""HierFAVG: rounds within regions, then a step of all regions."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, Sgd, SgdSettings, recipe
from piebald.methods.clustering.regions import Regions
from piebald.methods.recipes.fedavg import fedavg


@recipe("Liu et al. 2020, Client-edge-cloud hierarchical federated learning", Sgd)
def hierfavg(
    cohort: CohortSize = 1.0,
    regions: int | tuple[tuple[int, ...], ...] = 2,
    region_rounds: int = 2,
    **training: Unpack[SgdSettings],
) -> Recipe:
    """FedAvg within each region, and after some rounds the mean of the regions' models."""
    return fedavg(cohort, **training).with_(clustering=Regions(regions=regions, region_rounds=region_rounds))
