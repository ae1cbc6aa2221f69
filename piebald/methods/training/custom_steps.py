"""The base of trainers with steps of their own, a `contracts.VectorStep`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from pydantic import model_validator
from torch import Tensor

from piebald.contracts import ClientContext, SgdOutcome, Slopes, TrainInput, TrainOutput
from piebald.methods.training.sgd import Sgd


class CustomSteps(Sgd):
    """Base class of trainers whose steps go along gradients at several points."""

    axis = "training"  # a base class, not a choice

    @model_validator(mode="after")
    def _check_custom_steps(self) -> Self:
        beyond = "momentum" if self.momentum else self.beyond_plain_sgd()
        if beyond:
            raise ValueError(f"{beyond} cannot be used with {self.kind}, whose steps are its own: leave it out")
        if self.precision == "float16":
            raise ValueError(
                f"precision = 'float16' cannot be used with {self.kind}, whose steps have several gradients and no "
                "common loss scale: write 'bfloat16'"
            )
        return self

    def step(self, at: Mapping[str, Tensor], slopes: Slopes) -> dict[str, Tensor]:
        """Return the vectors after one step, see `contracts.VectorStep`."""
        raise NotImplementedError

    def take_steps(
        self,
        inputs: TrainInput,
        context: ClientContext,
        vectors: Mapping[str, Tensor] | None = None,
        *,
        keep: Sequence[str] = (),
        batches: int = 1,
    ) -> TrainOutput:
        """Take the steps of a task.

        Args:
            inputs, context: as of `train`.
            vectors: that steps start from, beside "model" [c, p] and "lr" [c, 1].
            keep: the names of those that become client state.
            batches: gradients of different batches in each step, see `contracts.ClientContext.run_steps`.
        """
        # one rate for each client in any case: steps are written for vectors alone
        rates = inputs.model.new_ones(len(inputs.versions), 1) * self.rate(inputs)
        start = {"model": inputs.model, "lr": rates, **(vectors or {})}
        ended = context.run_steps(start, self.sgd_config(inputs), self.step, batches=batches)
        state = {name: ended.vectors[name] for name in keep}
        return self.output(SgdOutcome(ended.vectors["model"], ended.steps, ended.loss), state=state)
