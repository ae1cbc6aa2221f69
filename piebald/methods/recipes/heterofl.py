"""HeteroFL: clients train networks of several widths, each a part of the next."""

from __future__ import annotations

from typing import Literal, Unpack

from piebald.methods.aggregation.held_average import HeldAverage
from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.nested_widths import NestedWidths


@recipe(
    "Diao, Ding, Tarokh 2021, HeteroFL: computation and communication efficient federated learning for heterogeneous "
    "clients",
    NestedWidths,
)
def heterofl(
    cohort: CohortSize = 1.0,
    widths: tuple[float, ...] = (1.0, 0.5),
    dynamic: bool = False,
    scaler: bool = True,
    static_batch_norm: bool = False,
    masked_loss: bool = False,
    weights: Literal["examples", "equal"] = "examples",
    **training: Unpack[SgdSettings],
) -> Recipe:
    """FedAvg of networks of several widths, in which each number is averaged over the clients that have it."""
    trainer = NestedWidths(
        widths=widths,
        dynamic=dynamic,
        scaler=scaler,
        static_batch_norm=static_batch_norm,
        masked_loss=masked_loss,
        **training,
    )
    return fedavg(cohort).with_(training=trainer, aggregation=HeldAverage(weights=weights))
