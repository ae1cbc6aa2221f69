"""The base classes of robust aggregators."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import Cohort, ServerContext
from piebald.core.cohort_matrix import median
from piebald.methods.aggregation.base import Aggregator


class Robust(Aggregator):
    """An aggregator that looks at individual updates.  Subclasses override `merge`, and say in `tolerates` how many
    attackers they tolerate.

    `merge` gets trained parameters only, so that no decision depends on the running statistics of batch norms, which
    may be most of an update's length.  These buffers are merged by themselves, see `merge_buffers`.

    Attributes:
        needs: what it needs besides the updates, in words.
    """

    axis = "aggregation"
    needs: ClassVar[str] = "nothing but the updates"
    takes_statistics: ClassVar[bool] = True

    def tolerates(self, count: int) -> int:
        """Of `count` updates, how many may be anything at all while the result stays near the others."""
        raise NotImplementedError

    def merge(self, matrix: Tensor, cohort: Cohort) -> tuple[Tensor, Tensor]:
        """The average change [t] of the trained parameters, and shares [n] that sum to one.

        Args:
            matrix: changes [n, t] of the trained parameters.
            cohort: the updates that they belong to.
        """
        raise NotImplementedError

    def merge_buffers(self, buffers: Tensor, shares: Tensor) -> Tensor:
        """The change [b] of the buffers, from the clients' [n, b]: the median of each, whatever the shares.

        So an attacker whose parameters look honest and are chosen cannot set them: fewer than half of the updates have
        no say in a median.
        """
        return median(buffers)

    def aggregate(self, cohort: Cohort, context: ServerContext) -> tuple[Tensor, list[float]]:
        average, shares = self.merge(cohort.parameters, cohort)
        return self.with_buffers(average, shares, cohort), [float(share) for share in shares]

    def with_buffers(self, average: Tensor, shares: Tensor, cohort: Cohort) -> Tensor:
        """The average change [s] of all numbers, from that [t] of the trained parameters."""
        buffers = cohort.buffers
        if not buffers.shape[1]:
            return average
        if float(shares.sum()) <= 0:  # nobody is believed, so nothing changes
            return torch.cat([average, torch.zeros_like(buffers[0])])
        return torch.cat([average, self.merge_buffers(buffers, shares)])


class ExpectsAttackers(Robust):
    """An aggregator with a bound on the number of attackers.

    Attributes:
        attackers: share of the updates, in [0, 0.5), or their number in every step; rounded up, and cut down to what
            the method tolerates where few updates arrived.
    """

    axis = "aggregation"
    needs: ClassVar[str] = "a bound on the number of attackers"

    attackers: int | float = Field(default=0.2, ge=0)

    def model_post_init(self, _: object) -> None:
        """Refuse a share that no defence of this kind tolerates."""
        if isinstance(self.attackers, float) and not self.attackers < self.most():
            from piebald.core.errors import SettingError

            raise SettingError(
                f"aggregation {self.kind!r}: attackers must be a number of updates (2) or a share below "
                f"{self.most():g}, got {self.attackers}"
            )

    def most(self) -> float:
        """The largest share of attackers that the method tolerates, as the cohort grows."""
        return 0.5

    def tolerates(self, count: int) -> int:
        # strictly fewer than the share: half of an even number is too many already
        return max(0, math.ceil(self.most() * count) - 1)

    def expected(self, count: int) -> int:
        """Return how many attackers to reckon with among `count` updates."""
        # 0.28 * 25 is a little above 7 in floating point, and must not be rounded up to 8
        attackers = math.ceil(self.attackers * count - 1e-9) if isinstance(self.attackers, float) else self.attackers
        return min(int(attackers), self.tolerates(count))


Weighting = Literal["equal", "examples"]


def shares_of(cohort: Cohort, weighting: Weighting) -> Tensor:
    """Shares [n] in float64 that sum to one: all alike, or by examples (which attackers can claim as they like)."""
    sizes = [float(update.counts) if weighting == "examples" else 1.0 for update in cohort.updates]
    shares = torch.tensor(sizes, dtype=torch.float64)
    # all alike where nobody has rows, as shares must sum to one
    return shares / shares.sum() if float(shares.sum()) > 0 else torch.full_like(shares, 1 / max(1, len(shares)))


def even(chosen: Tensor, count: int) -> Tensor:
    """Equal shares [count] of the chosen rows, 0 for the others."""
    shares = torch.zeros(count, dtype=torch.float64)
    shares[chosen] = 1 / len(chosen)
    return shares
