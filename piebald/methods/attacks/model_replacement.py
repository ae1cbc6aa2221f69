"""Model replacement: an update scaled up until the average becomes the attacker's model."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from piebald.methods.attacks.base import Attack


class ModelReplacement(Attack):
    """The attacker's change times a factor (Bagdasaryan et al. 2020, "How to backdoor federated learning", eq. 3).

    With the factor n / (the attacker's share of the weight times n) - for equal weights the number of updates in the
    cohort - the average of a settled federation becomes the attacker's own model.  What that model does depends on the
    rows it was trained on: see the data changes `backdoor` and `flip_to`.

    Attributes:
        scale: the factor, gamma of the paper.
        longest: if given, the change is cut to this length after scaling, to pass under a bound on norms.
    """

    scale: float = Field(default=10.0)
    longest: float | None = Field(default=None, gt=0)

    def corrupt(self, change: Tensor, keys: Sequence[int]) -> Tensor:
        scaled = change * self.scale
        if self.longest is None:
            return scaled
        norm = scaled.norm(dim=1, keepdim=True)
        # after scaling, since a defence measures what is sent; at most 1, so that a short change is not lengthened
        cut: Tensor = scaled * (self.longest / norm.clamp(min=1e-30)).clamp(max=1.0)
        return cut
