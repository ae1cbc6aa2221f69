"""SiloBN: the running statistics of batch norms stay with the client, their parameters are shared."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, Sgd, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.sharing.layers import AllExcept


@recipe("Andreux et al. 2020, Siloed federated learning for multi-centric histopathology datasets", Sgd)
def silobn(
    cohort: CohortSize = 1.0,
    private: str | tuple[str, ...] = ("*running_mean", "*running_var"),
    **training: Unpack[SgdSettings],
) -> Recipe:
    """FedAvg of everything but batch norm's running statistics, which describe a client's own inputs.

    Section 3.  FedBN keeps scale and shift private, too; here they are averaged.  With `private = []` it is FedAvg.
    """
    return fedavg(cohort, **training).with_(sharing=AllExcept(private_layers=private))
