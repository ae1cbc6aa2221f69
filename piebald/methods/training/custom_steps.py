"""The common parts of trainers with steps of their own, a `contracts.VectorStep`."""

from __future__ import annotations

from torch import Tensor

from piebald.contracts import SgdOutcome, StepsOutcome, TrainInput, TrainOutput
from piebald.methods.training.sgd import Sgd


def check_settings(trainer: Sgd) -> None:
    """Refuse settings of SGD that a step along several gradients has no place for.

    Raises:
        ValueError: it has momentum, another optimizer, a schedule or groups within the task, or float16 passes.
    """
    beyond = "momentum" if trainer.momentum else trainer.beyond_plain_sgd()
    if beyond:
        raise ValueError(f"{beyond} cannot be used with {trainer.kind}, whose steps are its own: leave it out")
    if trainer.precision == "float16":
        raise ValueError(
            f"precision = 'float16' cannot be used with {trainer.kind}, whose steps have several gradients and no "
            "common loss scale: write 'bfloat16'"
        )


def rates(trainer: Sgd, inputs: TrainInput) -> Tensor:
    """The learning rate of each client [c, 1]."""
    return inputs.model.new_ones(len(inputs.versions), 1) * trainer.rate(inputs)


def output(trainer: Sgd, ended: StepsOutcome, **state: Tensor) -> TrainOutput:
    """Return the output of training: the vector "model", and client state."""
    return trainer.output(SgdOutcome(ended.vectors["model"], ended.steps, ended.loss), state=state)
