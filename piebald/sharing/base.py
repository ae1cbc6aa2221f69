"""The base class of what decides which parameters leave a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piebald.component import Part

if TYPE_CHECKING:
    from torch import Tensor, nn

    from piebald.parameters import Layout


class Share(Part):
    """What leaves the client.  `private` names the layers that stay: patterns or roles that `parameters.Layout`
    resolves.
    """

    axis = "share"

    def private(self, model: nn.Module) -> frozenset[str]:
        """Names of the tensors of the model that never leave the client."""
        raise NotImplementedError

    def first(self, private: Tensor, layout: Layout, client: int) -> Tensor:
        """The private numbers [p - s] that a client begins with; `private` are those of the model the run starts
        from.
        """
        return private
