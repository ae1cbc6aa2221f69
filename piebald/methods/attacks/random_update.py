"""Gaussian attack: noise instead of an update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from piebald.core.randomness import torch_generator
from piebald.methods.attacks.base import Attack


class RandomUpdate(Attack):
    """Gaussian noise in place of the change (Blanchard et al. 2017, the Gaussian attack).

    Attributes:
        sigma: standard deviation of each number (the paper's 200 is refused as too long a step by the default check).
    """

    sigma: float = Field(default=1.0, gt=0)

    def corrupt(self, change: Tensor, keys: Sequence[int]) -> Tensor:
        # by each client's key and on the CPU, so that noise does not depend on which clients share a stack
        noise = [torch.randn(change.shape[1:], generator=torch_generator(key)) for key in keys]
        return self.sigma * torch.stack(noise).to(change)
