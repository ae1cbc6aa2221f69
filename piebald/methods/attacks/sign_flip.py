"""Sign flip: the update with its sign reversed."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from piebald.methods.attacks.base import Attack


class SignFlip(Attack):
    """Send -scale times the honest change (Li et al. 2019, RSA).

    Attributes:
        scale: above 0.
    """

    scale: float = Field(default=1.0, gt=0)

    def corrupt(self, change: Tensor, keys: Sequence[int]) -> Tensor:
        return change * -self.scale
