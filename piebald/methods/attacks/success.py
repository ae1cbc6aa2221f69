"""Success rates of backdoors; that of flipped labels is a metric, `piebald.core.metrics.AttackSuccess`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from piebald.core.arguments import checked
from piebald.core.pytree import single

if TYPE_CHECKING:
    from piebald.contracts import Rows


class Trigger(Protocol):
    """A mark on inputs, such as `partition.Backdoor`."""

    target: int

    def mark(self, x: Tensor) -> Tensor:
        """Inputs [n, ...] with the trigger on every one."""


@checked
def backdoor_success(model: nn.Module, rows: Rows, trigger: Trigger) -> float:
    """Of clean rows of other classes, the share that the marked input puts into the target class.

    Args:
        model: any module, e.g. `run.model()`.
        rows: clean test rows, e.g. a federation's `common`.
        trigger: the change that poisoned the clients.
    """
    x, y = (single(part, "the backdoor's success") for part in (rows.x, rows.y))
    of_others = y != trigger.target
    if not bool(of_others.any()):
        return math.nan
    was = model.training
    model.eval()
    with torch.no_grad():
        predicted = torch.cat([model(part).argmax(1) for part in torch.split(trigger.mark(x[of_others]), 1024)])
    model.train(was)
    return float((predicted == trigger.target).float().mean())
