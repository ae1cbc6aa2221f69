"""Inner-product manipulation: against the mean, with an inconspicuous norm."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from piebald.methods.attacks.base import Collusion


class InnerProduct(Collusion):
    """All attackers send -scale times the mean of their honest updates (Xie, Koyejo, Gupta 2019, "Fall of empires").

    The paper's attackers know the honest clients' updates; these know only the ones they would have sent themselves,
    whose mean stands for the others'.

    Attributes:
        scale: epsilon of the paper, above 0; a small one gets past defences that look at distances.
    """

    scale: float = Field(default=0.5, gt=0)

    def colluded_update(self, own: Tensor, count: int) -> Tensor:
        return -self.scale * own.mean(0)
