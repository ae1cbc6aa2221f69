"""The base class of what decides which parameters leave a client."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from torch import Tensor, nn

from piebald.contracts.component import Component
from piebald.core.parameters import Layout, matching

Patterns = str | tuple[str, ...]


class Sharing(Component):
    """The choice of parameters that leave a client; the others stay private.

    Attributes:
        inputs: by name of an input, the layers that belong to it (roles, names or patterns, see `parameters.matching`):
            a client that lacks the input has no say for them, even where they run without it.
    """

    axis = "sharing"

    inputs: dict[str, Patterns] | None = None

    def belonging(self, model: nn.Module, lacked: Iterable[str]) -> frozenset[str]:
        """Names of the model's tensors that belong to some inputs."""
        patterns = [as_tuple((self.inputs or {}).get(name, ())) for name in lacked]
        return matching(model, chain(*patterns))

    def private(self, model: nn.Module) -> frozenset[str]:
        """Names of the model's tensors that never leave the client."""
        raise NotImplementedError

    def initial_private(self, private: Tensor, layout: Layout, client: int) -> Tensor:
        """The private numbers [p - s] that a client begins with, given those of the model that the run starts from."""
        return private


def as_tuple(patterns: Patterns) -> tuple[str, ...]:
    """Return one pattern or several as several."""
    return (patterns,) if isinstance(patterns, str) else patterns
