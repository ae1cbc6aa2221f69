"""FedAvg, the recipe that all others change one answer of."""

from __future__ import annotations

from typing import Unpack

from piebald.client import Everything, Sgd, Training
from piebald.controller.group import Together
from piebald.controller.pace import CohortSize, Synchronous
from piebald.controller.step import ToAverage
from piebald.controller.weigh import ByExamples
from piebald.recipe import Recipe
from piebald.recipes.registry import recipe


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
