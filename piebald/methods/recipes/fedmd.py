"""FedMD: clients exchange outputs for public rows instead of models."""

from __future__ import annotations

from typing import Literal, Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.sharing.layers import Nothing
from piebald.methods.training.public_distillation import PublicDistillation


@recipe("Li and Wang 2019, FedMD: heterogenous federated learning via model distillation", PublicDistillation)
def fedmd(
    cohort: CohortSize = 1.0,
    digest_steps: int = 20,
    digest_batch: int | None = None,
    digest_lr: float | None = None,
    distance: Literal["l1", "l2"] = "l1",
    public_steps: int = 0,
    **training: Unpack[SgdSettings],
) -> Recipe:
    """Every client trains a model of its own, of any architecture, towards all clients' mean outputs on public rows."""
    trainer = PublicDistillation(
        digest_steps=digest_steps,
        digest_batch=digest_batch,
        digest_lr=digest_lr,
        distance=distance,
        public_steps=public_steps,
        **training,
    )
    return fedavg(cohort).with_(training=trainer, sharing=Nothing())
