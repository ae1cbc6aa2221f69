"""Training alone: the model that a client would have had without the federation, with the same work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from piebald.contracts import ClientContext, TrainInput, Trains
from piebald.methods.training.sgd import Sgd


def plain_sgd(trainer: Trains) -> Sgd:
    """The settings of a trainer as SGD without a term that ties it to others, and without noise.

    A model that never leaves its client needs neither.  A trainer that is no kind of SGD has no such settings: then it
    is SGD with its defaults.
    """
    if not isinstance(trainer, Sgd):
        return Sgd()
    settings = {name: getattr(trainer, name) for name in Sgd.model_fields}
    if trainer.protects:
        settings["clip"] = None  # that of single rows' gradients
    return Sgd(**settings)


def local_work(trainer: Trains, rows: int, steps: int) -> int:
    """The passes over a client's rows that a training task made.

    Args:
        trainer: the run's.
        rows: the client's training rows.
        steps: the optimizer steps that the client took, 0 where it does not say.
    """
    plain = plain_sgd(trainer)
    each = max(1, -(-rows // plain.step_rows))
    # fewer steps may come from a lone last row or a skipped step, and are full passes all the same
    return plain.epochs if steps <= plain.epochs * each else round(steps / each)


def train_alone(
    trainer: Trains, inputs: TrainInput, context: ClientContext, tasks: Sequence[str], passes: Sequence[int]
) -> Tensor:
    """The models [c, p] of clients that train alone, from the run's initial model.

    They make the same tasks as in the run: with its learning rates, and with the same order of rows.  So the outcome is
    that of the recipe `local`.

    Args:
        trainer: the run's.
        inputs: of the clients.
        context: of the clients.
        tasks: `Task.rng_version` of each task that they made.
        passes: the passes over their rows in each of them.
    """
    # from the run's first model, and with its learning rates and orders of rows: the recipe `local`
    plain, model = plain_sgd(trainer), context.initial.expand(len(inputs.versions), -1)
    state = {name: part.expand(len(model), *part.shape) for name, part in plain.initial_state(model[0], 0).items()}
    for task, epochs in zip(tasks, passes, strict=True):
        version, _, attempt = task.partition(".")
        task_inputs = replace(inputs, model=model, state=state, vectors={}, versions=[int(version)] * len(model))
        # the same type as in the run: a key of text and one of a number are not the same
        again = context.with_rng(task if attempt else int(version))
        output = plain.model_copy(update={"epochs": epochs}).train(task_inputs, again)
        model, state = output.model, dict(output.state)
    return model
