"""HDAFL: share what is generic, keep the classifier at home."""

from __future__ import annotations

from typing import Literal, Unpack

from piebald.aggregation.linear import ExampleWeighted, GradientNormWeighted
from piebald.errors import unknown
from piebald.recipe import Recipe
from piebald.recipes.fedavg import fedavg
from piebald.recipes.named import recipe
from piebald.scheduling.cohort import CohortSize
from piebald.sharing.layers import AllExcept
from piebald.training.sgd import Sgd, SgdSettings


@recipe("Yang, Beliard, Rossi 2020, Heterogeneous data-aware federated learning", Sgd)
def hdafl(
    cohort: CohortSize = 1.0,
    private: str | tuple[str, ...] = "classifier",
    aggregation: Literal["examples", "gradient_norm"] = "examples",
    **training: Unpack[SgdSettings],
) -> Recipe:
    """Average the shared layers; private ones are sent once, at the start, and never come back.

    Algorithm 1.  `private` names the layers that stay: the last linear layer by default, see `parameters.matching`.
    """
    aggregators = {"examples": ExampleWeighted(), "gradient_norm": GradientNormWeighted()}
    if aggregation not in aggregators:
        raise unknown("aggregation of hdafl called", aggregation, aggregators)
    return fedavg(cohort, **training).with_(
        sharing=AllExcept(private_layers=private), aggregation=aggregators[aggregation]
    )
