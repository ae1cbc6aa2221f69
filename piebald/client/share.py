"""What leaves the client: which layers are shared and which stay private."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piebald.parameters import Layout, matching
from piebald.parts import Share

if TYPE_CHECKING:
    from torch import nn

Patterns = str | tuple[str, ...]


def _tuple(patterns: Patterns) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else patterns


class Everything(Share):
    """The whole model is shared."""

    def private(self, model: nn.Module) -> frozenset[str]:
        return frozenset()


class AllBut(Share):
    """Everything but some layers, which stay private: HDAFL's classifier, FedBN's batch norm.

    Attributes:
        private_layers: roles, layer names or patterns, see `parameters.matching`; none means that everything is shared.
    """

    private_layers: Patterns = ()

    def private(self, model: nn.Module) -> frozenset[str]:
        return matching(model, _tuple(self.private_layers))


class Only(Share):
    """Only some layers are shared: LG-FedAvg's head.

    Attributes:
        shared_layers: roles, layer names or patterns, see `parameters.matching`.
    """

    shared_layers: Patterns

    def private(self, model: nn.Module) -> frozenset[str]:
        return frozenset(slot.name for slot in Layout.of(model).slots) - matching(model, _tuple(self.shared_layers))


class Nothing(Share):
    """Nothing is shared: every client learns alone and sends no number."""

    def private(self, model: nn.Module) -> frozenset[str]:
        return frozenset(slot.name for slot in Layout.of(model).slots)
