"""A little is enough: a shift within the spread of honest updates."""

from __future__ import annotations

from statistics import NormalDist

from pydantic import Field
from torch import Tensor

from piebald.methods.attacks.base import Collusion, deviation


class LittleIsEnough(Collusion):
    """All attackers send  mean - z * standard deviation, number by number (Baruch et al. 2019, algorithm 3).

    Mean and deviation are those of the attackers' own honest updates.  With n updates of which a are theirs,
    s = floor(n / 2 + 1) - a honest ones must lie further out for theirs to pass as the middle, so z is the point below
    which a standard normal lies with probability (n - a - s) / (n - a).  Fewer than two attackers in a step have no
    deviation to hide in and send their mean.

    Attributes:
        z: instead of the paper's choice.
    """

    z: float | None = Field(default=None)

    def colluded_update(self, own: Tensor, count: int) -> Tensor:
        return own.mean(0) - self.reach(count, len(own)) * deviation(own)

    def reach(self, count: int, attackers: int) -> float:
        """z_max for this many updates and attackers; at a majority, where any will do, that of the largest minority."""
        if self.z is not None:
            return self.z
        honest = count - attackers
        supporters = count // 2 + 1 - attackers
        # the attackers are the majority, so no honest client has to stand further out
        if honest < 1 or supporters < 1:
            return NormalDist().inv_cdf(0.99)
        share = (honest - supporters) / honest
        # the inverse is infinite at 0 and 1
        return NormalDist().inv_cdf(min(max(share, 0.01), 0.99))
