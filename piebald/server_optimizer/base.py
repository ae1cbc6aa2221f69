"""The base class of server optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from piebald.component import Part

if TYPE_CHECKING:
    from torch import Tensor


class Step(Part):
    """How the community model moves."""

    axis = "step"
    from_now: ClassVar[bool] = False  # True: changes are measured from the community model, not from the one sent
    cached: ClassVar[bool] = False  # True: to the mean of all learners' last models, see `controller.cache`

    def start(self, model: Tensor) -> dict[str, Tensor]:
        """The centre's own memory [s] before the first commit."""
        return {}

    def move(self, model: Tensor, average: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The new model [s] and memory, from the averaged change [s]."""
        raise NotImplementedError
