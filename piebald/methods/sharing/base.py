"""The base class of what decides which parameters leave a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piebald.contracts.component import Component

if TYPE_CHECKING:
    from torch import Tensor, nn

    from piebald.core.parameters import Layout


class Sharing(Component):
    """The choice of parameters that leave a client; the others stay private."""

    axis = "sharing"

    def private(self, model: nn.Module) -> frozenset[str]:
        """Names of the model's tensors that never leave the client."""
        raise NotImplementedError

    def initial_private(self, private: Tensor, layout: Layout, client: int) -> Tensor:
        """The private numbers [p - s] that a client begins with, given those of the model that the run starts from."""
        return private
