"""FedLC: logits calibrated by the classes of a client's rows."""

from __future__ import annotations

from typing import Unpack

from piebald.methods.catalog.registry import CohortSize, Recipe, SgdSettings, recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.methods.training.logit_calibration import LogitCalibration


@recipe("Zhang et al. 2022, Federated learning with label distribution skew via logits calibration", LogitCalibration)
def fedlc(cohort: CohortSize = 1.0, tau: float = 1.0, **training: Unpack[SgdSettings]) -> Recipe:
    """FedAvg with logits calibrated by how many rows of each class a client has."""
    return fedavg(cohort).with_(training=LogitCalibration(tau=tau, **training))
