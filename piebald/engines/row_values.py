"""Values of losses and metrics on clients' rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from piebald.core import pytree
from piebald.core.losses import Loss
from piebald.core.objective import METRICS


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


def has_value_for_each(metric: object) -> bool:
    """Whether a metric is known to have a value for each row that no other row changes.

    One of the user's own may compare the rows that it is given, so that it is given those of one client.
    """
    return not hasattr(metric, "update") and any(metric is own for own in METRICS.values())


def by_client(outputs: Any, targets: Any, sizes: Sequence[int]) -> Iterator[tuple[Any, Any]]:
    """Outputs and targets of each client, from those of all clients one after another; nothing without rows."""
    if outputs is not None:
        yield from zip(pytree.split(outputs, sizes), pytree.split(targets, sizes), strict=True)
