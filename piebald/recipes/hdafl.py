"""HDAFL: share what is generic, keep the classifier at home."""

from __future__ import annotations

from typing import Literal, Unpack

from piebald.aggregation import ByExamples, ByGradientNorm
from piebald.errors import unknown
from piebald.recipe import Recipe
from piebald.recipes.fedavg import fedavg
from piebald.recipes.named import recipe
from piebald.scheduling.cohort import CohortSize
from piebald.sharing import AllBut
from piebald.training import Sgd, Training


@recipe("Yang, Beliard, Rossi 2020, Heterogeneous data-aware federated learning", Sgd)
def hdafl(
    cohort: CohortSize = 1.0,
    private: str | tuple[str, ...] = "classifier",
    weigh: Literal["examples", "gradient_norm"] = "examples",
    **training: Unpack[Training],
) -> Recipe:
    """Average the generic layers; the private ones go out once, at the start, and never come back.

    Algorithm 1.  `private` names the layers that stay: the last linear layer by default, see `parameters.matching`.
    """
    weighings = {"examples": ByExamples(), "gradient_norm": ByGradientNorm()}
    if weigh not in weighings:
        raise unknown("weighing of hdafl called", weigh, weighings)
    return fedavg(cohort, **training).with_(share=AllBut(private_layers=private), weigh=weighings[weigh])
