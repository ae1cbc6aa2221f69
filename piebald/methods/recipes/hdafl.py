"""HDAFL (algorithm 1 of the paper): generic layers are shared, the classifier is private."""

from __future__ import annotations

from typing import Literal, Unpack

from piebald.core.errors import unknown
from piebald.methods.aggregation.linear import ExampleWeighted, GradientNormWeighted
from piebald.methods.catalog.registry import CohortSize, Recipe, Sgd, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.sharing.layers import AllExcept


@recipe("Yang, Beliard, Rossi 2020, Heterogeneous data-aware federated learning", Sgd)
def hdafl(
    cohort: CohortSize = 1.0,
    private: str | tuple[str, ...] = "classifier",
    aggregation: Literal["examples", "gradient_norm"] = "examples",
    **training: Unpack[SgdSettings],
) -> Recipe:
    """FedAvg of the shared layers; private layers are sent to a client once and never sent back.

    Algorithm 1.  `private` names the private layers: the last linear layer by default, see `parameters.matching`.
    """
    aggregators = {"examples": ExampleWeighted(), "gradient_norm": GradientNormWeighted()}
    if aggregation not in aggregators:
        raise unknown("aggregation of hdafl called", aggregation, aggregators)
    return fedavg(cohort, **training).with_(
        sharing=AllExcept(private_layers=private), aggregation=aggregators[aggregation]
    )
