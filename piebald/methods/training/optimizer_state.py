"""The state of a client's optimizer between two tasks.

Three answers are in the literature:

- "fresh": every task starts a new state.  The client keeps nothing, as devices that are seldom asked must (Wang et al.
  2021, "Local adaptivity in federated learning: convergence and consistency", where local optimizers restart in every
  round).
- "kept": the client goes on with its own state, as the workers of DiLoCo do with their AdamW (Douillard et al. 2023,
  algorithm 1).  The state is client state: it stays with the client and survives an interruption.
- "averaged": the state is sent with the update, the server averages it, and every task starts from the mean, as both
  moments do in Local Adam (Cheng, Glasgow 2025, "Convergence of distributed adaptive optimization with local
  updates"), the second ones in Local AMSGrad (Chen et al. 2020, "Toward communication efficient adaptive gradient
  method"), and the momentum in Yu et al. 2019 ("On the linear speedup analysis of communication efficient momentum SGD
  for distributed non-convex optimization").  It costs the bytes of one or two more models in each direction.

FedLADA (Sun et al. 2023, "Efficient federated learning via local adaptive amended optimizer with linear speedup") also
amends each local step by the mean change of the last round, which is not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from piebald.contracts import StateVector, TrainInput

PREFIX = "optimizer_"  # of the names of its vectors in client state and in updates
STEP = StateVector("step")  # how many steps are behind the state: one number


def zero_state(kept: Sequence[StateVector], size: int) -> dict[str, Tensor]:
    """The state before the first step, for so many parameters, with the names of client state."""
    state = {PREFIX + vector.name: torch.full((size,), vector.start) for vector in kept}
    return state | {PREFIX + STEP.name: torch.zeros(1)} if kept else {}


def without_step(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state without its number of steps."""
    return {name: vector for name, vector in state.items() if name != PREFIX + STEP.name}


def kept_start(kept: Sequence[StateVector], inputs: TrainInput) -> dict[str, Tensor]:
    """Return the optimizer's state at the start of a task, from client state."""
    return {vector.name: inputs.state[PREFIX + vector.name] for vector in (*kept, STEP)}


def averaged_start(kept: Sequence[StateVector], inputs: TrainInput) -> dict[str, Tensor]:
    """Return the state at the start of a task: the averages that were sent, and the clients' own for private layers."""
    state = {STEP.name: inputs.vectors[PREFIX + STEP.name]}
    for vector in kept:
        sent, private = inputs.vectors[PREFIX + vector.name], inputs.state.get(PREFIX + vector.name)
        # in the order of a model's numbers, where private ones come last
        state[vector.name] = sent if private is None else torch.cat([sent, private], dim=1)
    return state


def average(
    kept: Sequence[StateVector], vectors: Mapping[str, Tensor], means: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The server's state after a step: the plain means of those that arrived.

    Squares and steps are not negative, so that no client's update can make them so for all others.
    """
    # a negative mean square would be a NaN under the root, for every client
    positive = {PREFIX + vector.name for vector in kept if vector.squares} | {PREFIX + STEP.name}
    return {
        name: means[name].clamp(min=0) if name in positive and name in means else means.get(name, vector)
        for name, vector in vectors.items()
    }


def named(state: Mapping[str, Tensor], start: int = 0, stop: int | None = None) -> dict[str, Tensor]:
    """Columns of an optimizer's vectors with the names of client state; the number of steps is left out."""
    # one number cannot be cut into a shared and a private part
    return {PREFIX + name: vector[:, start:stop] for name, vector in state.items() if name != STEP.name}
