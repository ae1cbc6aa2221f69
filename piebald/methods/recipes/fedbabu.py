"""FedBABU: the body is trained together under a fixed head, then each client fine-tunes."""

from __future__ import annotations

from typing import Literal, Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.sharing.layers import AllExcept
from piebald.methods.training.shared_only import SharedOnly


@recipe("Oh et al. 2022, FedBABU: toward enhanced representation for federated image classification", SharedOnly)
def fedbabu(
    cohort: CohortSize = 1.0,
    private: str | tuple[str, ...] = "classifier",
    tune_epochs: int = 1,
    tune: Literal["all", "shared", "private"] = "all",
    **training: Unpack[SgdSettings],
) -> Recipe:
    """FedAvg of the body under a fixed head; each client fine-tunes the model for its own use.

    The paper fine-tunes once, when training has ended; here every evaluation does.  One epoch by default is ours.
    """
    return fedavg(cohort).with_(
        training=SharedOnly(tune_epochs=tune_epochs, tune=tune, **training), sharing=AllExcept(private_layers=private)
    )
