"""FedRoD: a shared head for all classes alike, and each client's own beside it."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.two_heads import TwoHeads


@recipe("Chen, Chao 2022, On bridging generic and personalized federated learning for image classification", TwoHeads)
def fedrod(
    cohort: CohortSize = 1.0, head: str = "classifier", balanced: bool = True, **training: Unpack[SgdSettings]
) -> Recipe:
    """FedAvg on the balanced softmax, and for each client a head of its own beside the shared one."""
    return fedavg(cohort).with_(training=TwoHeads(head=head, balanced=balanced, **training))
