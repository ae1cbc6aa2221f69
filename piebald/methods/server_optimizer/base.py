"""The base class of server optimizers."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from piebald.contracts import Component, StepContext


class ServerOptimizer(Component):
    """The rule by which the global model moves, given the averaged change.

    Attributes:
        from_current_model: True where changes are measured from the global model, not from the model that was sent.
    """

    axis = "server_optimizer"
    from_current_model: ClassVar[bool] = False

    @property
    def model_memory(self) -> int | None:
        """Bytes of memory for the last models of all clients, where all of them count in each step; else None."""
        return None

    def initial_state(self, model: Tensor) -> dict[str, Tensor]:
        """Return the named tensors that it keeps from step to step, as they are before the first step.

        Args:
            model: [t], the parameters that the run starts from.
        """
        return {}

    def step(self, model: Tensor, average: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Take one step.

        Args:
            model: [t], the trained parameters of the global model; not to be written to.
            average: [t], their averaged change.
            context: how many updates arrived, how many clients there are, the version, and this optimizer's state.

        Returns:
            The new parameters [t] and the new state.
        """
        raise NotImplementedError

    def statistics_weight(self, context: StepContext) -> float:
        """Return how much the clients' mean counts in new running statistics, in [0, 1]; the old ones count the rest.

        Statistics are no parameters: they are averaged and take no step.
        """
        return 1.0
