"""FedAvg, the recipe that all others change one answer of."""

from __future__ import annotations

from typing import Unpack

from piebald.aggregation import ByExamples
from piebald.clustering import Together
from piebald.recipe import Recipe
from piebald.recipes.named import recipe
from piebald.scheduling.cohort import CohortSize
from piebald.scheduling.synchronous import Synchronous
from piebald.server_optimizer.average import ToAverage
from piebald.sharing import Everything
from piebald.training import Sgd, Training


@recipe("McMahan et al. 2017, Communication-efficient learning of deep networks from decentralized data", Sgd)
def fedavg(cohort: CohortSize = 1.0, **training: Unpack[Training]) -> Recipe:
    """Train locally from the community model, average by examples."""
    return Recipe(
        learn=Sgd(**training),
        share=Everything(),
        pace=Synchronous(cohort=cohort),
        group=Together(),
        weigh=ByExamples(),
        step=ToAverage(),
    )
