"""The model of a run, and what it is trained for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from piebald.objective import Task
    from piebald.parameters import Layout


@dataclass(frozen=True, slots=True)
class ModelSpec:
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
