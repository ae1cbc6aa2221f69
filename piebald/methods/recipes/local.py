"""Local: no federation, the baseline for every federation."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, Sgd, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.sharing.layers import Nothing


@recipe("Baseline: every client alone", Sgd)
def local(cohort: CohortSize = 1.0, **training: Unpack[SgdSettings]) -> Recipe:
    """Every client trains a model of its own and sends nothing; it gets as many tasks as in the other recipes."""
    return fedavg(cohort, **training).with_(sharing=Nothing())
