"""CGAU: shared gated units, conditioned on the client by private vectors."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, Sgd, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.sharing.layers import AllExcept, OneHot


@recipe("Rieger, Høegh, Hansen 2020, Client adaptation improves federated learning with simulated non-IID clients", Sgd)
def cgau(
    cohort: CohortSize = 1.0,
    private: str | tuple[str, ...] = "conditioning",
    shared_matrix: bool = False,
    **training: Unpack[SgdSettings],
) -> Recipe:
    """FedAvg of a model with gated units, which private vectors condition on the client.

    Section 3, with models such as `gated_classifier`.  With `shared_matrix`, the vectors of all clients are
    columns of one matrix that is averaged like the rest, as in the paper's simulation; the model then needs `clients`.
    """
    return fedavg(cohort, **training).with_(sharing=OneHot() if shared_matrix else AllExcept(private_layers=private))
