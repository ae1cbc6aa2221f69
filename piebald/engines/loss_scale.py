"""The loss scale of float16 passes, as `torch.amp.GradScaler` keeps it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from piebald.contracts import PassSettings
from piebald.core.machine import float64_device

_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000  # the defaults of GradScaler


class LossScale:
    """The factor on the loss of one client's steps: halved by a gradient that is not finite, and doubled after 2000
    steps in a row without one.

    Attributes:
        factor: the factor, one number on the device.
        skipped: steps that were not made.
    """

    def __init__(self, initial: float, device: torch.device) -> None:
        self.factor = torch.full((), initial, dtype=torch.float32, device=device)
        self.skipped = 0
        self._sound = torch.zeros((), dtype=torch.int32, device=device)  # steps in a row
        self._not_finite = torch.zeros((), dtype=torch.float32, device=device)  # 1 where something was not finite

    @classmethod
    def of(cls, passes: PassSettings, device: torch.device) -> LossScale | None:
        """The scale that a client's steps begin with, None where they need none."""
        return cls(passes.loss_scale, device) if passes.precision == "float16" else None

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide a step's gradients by the factor, in place, and look whether all of them are finite."""
        wide = self.factor.to(float64_device(self.factor.device)).double()
        inverse = wide.reciprocal().float().to(self.factor.device)
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), self._not_finite, inverse)

    def takes_step(self) -> bool:
        """Return whether the step can be made, after its last `unscale`; the factor is then that of the next step."""
        torch._amp_update_scale_(self.factor, self._sound, self._not_finite, _GROWTH, _BACKOFF, _INTERVAL)
        sound = not bool(self._not_finite)
        self._not_finite.zero_()
        self.skipped += not sound
        return sound
