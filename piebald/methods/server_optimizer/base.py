"""The base class of server optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from piebald.contracts import StepContext
from piebald.contracts.component import Component

if TYPE_CHECKING:
    from torch import Tensor


class ServerOptimizer(Component):
    """How the global model moves, given the averaged change.

    One that keeps a state between steps is a `KeepsServerState`.

    Attributes:
        from_current_model: True where changes are measured from the global model, not from the model that was sent.
    """

    axis = "server_optimizer"
    from_current_model: ClassVar[bool] = False

    def step(self, model: Tensor, average: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Take one step.

        Args:
            model: [s], the global model; not to be written to.
            average: [s], the averaged change.
            context: how many updates arrived, how many clients there are, the version, and this optimizer's state.

        Returns:
            The new model [s] and the new state.
        """
        raise NotImplementedError


@runtime_checkable
class KeepsServerState(Protocol):
    """A server optimizer that keeps named tensors from step to step."""

    def initial_state(self, model: Tensor) -> dict[str, Tensor]:
        """The state before the first step; `model` [s] is the one that the run starts from."""
