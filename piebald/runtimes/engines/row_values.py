"""Values of losses and metrics on one client's rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piebald import pytree
from piebald.losses import Loss


def value_of(measure: object, outputs: Any, targets: Any) -> Tensor:
    """A metric on one client's rows, from a torchmetrics object or a function whose values are averaged."""
    if hasattr(measure, "update") and hasattr(measure, "compute") and hasattr(measure, "reset"):
        measure.reset()
        measure.update(pytree.logits(outputs), targets)
        return torch.as_tensor(measure.compute()).float().mean()
    return measure(outputs, targets).float().mean()  # type: ignore[operator,no-any-return]


def each_loss(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """The loss of each row, also of a function that returns the mean over its rows."""
    values = loss(outputs, targets)
    if values.dim() and len(values) == pytree.count(targets):
        return values.flatten(1).mean(1) if values.dim() > 1 else values
    rows = [slice(row, row + 1) for row in range(pytree.count(targets))]
    return torch.stack([loss(pytree.take(outputs, row), pytree.take(targets, row)).mean() for row in rows])
