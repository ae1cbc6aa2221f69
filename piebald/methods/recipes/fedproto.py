"""FedProto: clients exchange prototypes of classes instead of models."""

from __future__ import annotations

from typing import Literal, Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.sharing.layers import Nothing
from piebald.methods.training.nearest_prototype import NearestPrototype
from piebald.methods.training.prototypes import Prototypes


@recipe("Tan et al. 2022, FedProto: federated prototype learning across heterogeneous clients", Prototypes)
def fedproto(
    cohort: CohortSize = 1.0,
    lam: float = 1.0,
    inference: Literal["classifier", "prototypes"] = "prototypes",
    **training: Unpack[SgdSettings],
) -> Recipe:
    """Every client trains a model of its own, of any architecture, towards common mean features of each class.

    Clients predict the class of the nearest prototype, as in the paper, or by the "classifier" of their model.
    """
    trainer = {"classifier": Prototypes, "prototypes": NearestPrototype}
    return fedavg(cohort).with_(training=trainer[inference](lam=lam, **training), sharing=Nothing())
