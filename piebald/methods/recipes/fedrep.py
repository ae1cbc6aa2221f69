"""FedRep: a shared representation, and a private head that is trained first."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.aggregation.linear import EqualWeighted
from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.sharing.layers import AllExcept
from piebald.methods.training.private_first import PrivateFirst


@recipe("Collins et al. 2021, Exploiting shared representations for personalized federated learning", PrivateFirst)
def fedrep(
    cohort: CohortSize = 1.0,
    private: str | tuple[str, ...] = "classifier",
    head_epochs: int = 1,
    **training: Unpack[SgdSettings],
) -> Recipe:
    """FedAvg of the shared layers, which each client trains under its own private ones, after those.

    All clients count the same, as in the paper, whose experiments train the head for 10 epochs in each task: 1 here by
    default, so that a task takes twice the steps of FedAvg.
    """
    return fedavg(cohort).with_(
        training=PrivateFirst(head_epochs=head_epochs, **training),
        sharing=AllExcept(private_layers=private),
        aggregation=EqualWeighted(),
    )
