"""FTL's alignment (Liu, Chen, Yang 2018, eq. 4), the baseline: co-occurring rows of both parties are pulled together.

    L = -kappa * mean over i of u_i^source . u_i^target

Its gradient by one party's row is the other party's row.  Whatever the encryption, each party learns the hidden rows of
the other's co-occurring samples.
"""

from __future__ import annotations

import numpy as np

from piebald.vertical.kernels import Floats, MatrixShare, Size
from piebald.vertical.loss_terms import PartyView, Pull, Term
from piebald.vertical.protocol import Role


class Alignment(Term):
    """The term above, by the same exchange as all others: a masked product of zeros, the row as the owner's constant.

    Args:
        role: of this party.
        kappa: its weight.
        rows: of a co-occurring batch.
        width: of the last aligned layer.
    """

    name = "alignment"

    def __init__(self, role: Role, kappa: float, rows: int, width: int) -> None:
        self.role, self.kappa = role, kappa
        self.owned = self.asked = [Size(rows, 1, width, 1.0)]
        self.probes = []

    def shares(self, view: PartyView) -> list[MatrixShare]:
        rows = view.common.detach().numpy()
        return [MatrixShare(np.zeros((1, rows.shape[1])), -rows)]

    def questions(self, view: PartyView) -> list[Floats]:
        return [np.ones((len(view.common), 1))]

    def pulls(self, view: PartyView, answers: list[Floats]) -> list[Pull]:
        return [(view.common, self.kappa * answers[0] / len(view.common))]

    def value(self, view: PartyView, answers: list[Floats], probed: list[Floats], aside: float) -> float:
        return float((answers[0] * view.common.detach().numpy()).sum() / len(view.common))
