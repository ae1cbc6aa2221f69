"""FedLC: logits calibrated by the labels that a client has."""

from __future__ import annotations

from typing import Unpack

from piebald.recipe import Recipe
from piebald.recipes.fedavg import fedavg
from piebald.recipes.named import recipe
from piebald.scheduling.cohort import CohortSize
from piebald.training.logit_calibration import LogitCalibration
from piebald.training.sgd import SgdSettings


@recipe("Zhang et al. 2022, Federated learning with label distribution skew via logits calibration", LogitCalibration)
def fedlc(cohort: CohortSize = 1.0, tau: float = 1.0, **training: Unpack[SgdSettings]) -> Recipe:
    """FedAvg whose clients unlearn less of the classes of which they have few rows."""
    return fedavg(cohort).with_(training=LogitCalibration(tau=tau, **training))
