"""The alignment loss of FTL (Liu, Chen, Yang 2018, eq. 4), a baseline that makes co-occurring rows similar.

    L = -kappa * mean over i of u_i^source . u_i^target

Its gradient with respect to one party's row is the other party's row.  Whatever the encryption, each party learns the
hidden rows of the other's co-occurring samples.
"""

from __future__ import annotations

import numpy as np

from piebald.vertical.kernels import Floats, ProductSize, ProductStatistics
from piebald.vertical.loss_terms import LossTerm, PartyView, TensorGradient
from piebald.vertical.protocol import Role


class Alignment(LossTerm):
    """The alignment term.  It uses the same exchange as all others: a product of zeros, with the row as the constant.

    Args:
        role: role of this party.
        kappa: weight of the term.
        rows: number of rows in a co-occurring batch.
        width: number of units of the last aligned layer.
    """

    name = "alignment"

    def __init__(self, role: Role, kappa: float, rows: int, width: int) -> None:
        self.role, self.kappa = role, kappa
        self.owned = self.asked = [ProductSize(rows, 1, width, 1.0)]
        self.probes = []
        self.told_common = rows * width

    def statistics(self, view: PartyView) -> list[ProductStatistics]:
        rows = view.common.detach().numpy()
        return [ProductStatistics(np.zeros((1, rows.shape[1])), -rows)]

    def coefficients(self, view: PartyView) -> list[Floats]:
        return [np.ones((len(view.common), 1))]

    def gradients(self, view: PartyView, results: list[Floats]) -> list[TensorGradient]:
        return [(view.common, self.kappa * results[0] / len(view.common))]

    def value(self, view: PartyView, results: list[Floats], probed: list[Floats], target_value: float) -> float:
        return float((results[0] * view.common.detach().numpy()).sum() / len(view.common))
