"""All that a client must know to serve a run."""

from __future__ import annotations

from dataclasses import dataclass

from piebald.training.base import Rule
from piebald.transforms.base import Stage


@dataclass(frozen=True, slots=True)
class Work:
    """All that a client must know to serve: the same on every site, rebuilt there, never pickled.

    `initial` [p] is the model the run starts from, `shape` that of one input, `outputs` that of what comes out.
    """

    model: nn.Module
    layout: Layout
    initial: Tensor
    rule: Rule
    stages: tuple[Stage, ...]
    task: Task
    seed: int
    shape: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
