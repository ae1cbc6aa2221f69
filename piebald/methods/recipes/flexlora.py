"""FlexLoRA: adapters of unlike ranks are averaged as the layers that they are."""

from __future__ import annotations

from typing import Literal, Unpack

from piebald.methods.aggregation.product_average import ProductAverage
from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.adapter_ranks import AdapterRanks


@recipe(
    "Bai et al. 2024, Federated fine-tuning of large language models under heterogeneous tasks and client resources",
    AdapterRanks,
)
def flexlora(
    cohort: CohortSize = 1.0,
    ranks: tuple[int, ...] = (4, 2),
    average: Literal["models", "changes"] = "models",
    **training: Unpack[SgdSettings],
) -> Recipe:
    """FedAvg of low-rank adapters whose rank differs between clients, averaged by their products."""
    return fedavg(cohort).with_(
        training=AdapterRanks(ranks=ranks, **training), aggregation=ProductAverage(average=average)
    )
