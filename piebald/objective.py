"""What a model is for: the loss a client walks down and the metrics it is judged by.

A loss maps (outputs, targets) to one value an example, [batch], so that engines can mask and stack; a loss that returns
a single mean is accepted too and then runs without masks.  A metric maps (outputs, targets) to one value an example and
is averaged; objects with `update`, `compute` and `reset` (torchmetrics) are accepted and run client by client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from piebald.errors import SettingError, unknown

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits [batch, classes, ...] with class numbers [batch, ...], a value an example."""
    value = functional.cross_entropy(outputs, targets.long(), reduction="none")
    return value if value.dim() == 1 else value.flatten(1).mean(1)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the largest logit is the target's, an example."""
    right = (outputs.argmax(1) == targets).float()
    return right if right.dim() == 1 else right.flatten(1).mean(1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error, the mean over an example's outputs."""
    error = (outputs.reshape(targets.shape) - targets).square()
    return error if error.dim() == 1 else error.flatten(1).mean(1)


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Absolute error, the mean over an example's outputs."""
    error = (outputs.reshape(targets.shape) - targets).abs()
    return error if error.dim() == 1 else error.flatten(1).mean(1)


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of independent labels: logits and 0/1 targets of one shape, the mean over an example's labels."""
    value = functional.binary_cross_entropy_with_logits(
        outputs.reshape(targets.shape), targets.float(), reduction="none"
    )
    return value if value.dim() == 1 else value.flatten(1).mean(1)


class Auc:
    """Area under the ROC curve: the chance that a positive example scores above a negative one, ties counting half.

    For classes it is the mean over the classes that are there of one against the rest, which for two classes is the
    usual one; for independent labels [batch, labels] or one logit [batch] the mean over labels.  It cannot be told
    where only one class is there, and is NaN then.  Worked out from ranks (Mann, Whitney 1947).
    """

    higher_is_better = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all examples."""
        self._seen: list[tuple[Tensor, Tensor]] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take examples: logits [batch, classes] with class numbers [batch], or logits and 0/1 targets of one shape."""
        self._seen.append((outputs.detach(), targets))

    def compute(self) -> Tensor:
        """The area over all examples."""
        outputs, targets = (torch.cat(parts) for parts in zip(*self._seen, strict=True))
        if targets.dtype.is_floating_point or outputs.dim() < 2 or outputs.shape[1] == 1:
            scores = outputs.reshape(len(targets), -1)
            positive = (targets > 0.5).reshape(len(targets), -1)
        elif outputs.shape[1] == 2:
            scores, positive = (outputs[:, 1] - outputs[:, 0]).unsqueeze(1), (targets == 1).unsqueeze(1)
        else:
            scores = outputs.double().softmax(1)
            positive = targets.long().unsqueeze(1) == torch.arange(outputs.shape[1], device=targets.device)
        areas = torch.stack([_area(scores[:, one], positive[:, one]) for one in range(scores.shape[1])])
        return areas.nanmean()


def _area(scores: Tensor, positive: Tensor) -> Tensor:
    """The area for one label: scores [batch], who is positive [batch]."""
    _, place, count = torch.unique(scores, return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    rank = (last - (count - 1) / 2)[place]  # ties share the mean of their ranks
    many = positive.sum().double()
    area: Tensor = (rank[positive].sum() - many * (many + 1) / 2) / (many * (len(scores) - many))
    return area  # 0 / 0 is NaN


def label_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of an example's labels that are right at a logit threshold of 0."""
    right = ((outputs.reshape(targets.shape) > 0) == (targets > 0.5)).float()
    return right if right.dim() == 1 else right.flatten(1).mean(1)


@dataclass(frozen=True)
class Objective:
    """A loss and named metrics.  The first metric is the one that progress bars and tables show.

    Attributes:
        name: "classification", "regression", "multilabel" or "custom".
        higher_is_better: of the first metric.
    """

    name: str
    loss: Loss
    metrics: Mapping[str, Any] = field(default_factory=dict)
    higher_is_better: bool = True

    @property
    def metric(self) -> str:
        """The metric that matters."""
        return next(iter(self.metrics), "loss")


OBJECTIVES = {
    "classification": Objective("classification", cross_entropy, {"accuracy": accuracy}),
    "regression": Objective("regression", squared_error, {"absolute_error": absolute_error}, higher_is_better=False),
    "multilabel": Objective("multilabel", binary_cross_entropy, {"label_accuracy": label_accuracy}),
}


METRICS: dict[str, Any] = {
    "absolute_error": absolute_error,
    "accuracy": accuracy,
    "auc": Auc(),
    "label_accuracy": label_accuracy,
    "squared_error": squared_error,
}


def objective_for(
    targets: Tensor, loss: Loss | str | None = None, metrics: Mapping[str, Any] | Sequence[str] | None = None
) -> Objective:
    """The objective that fits some targets: whole numbers mean classes, real numbers regression, unless `loss` says
    otherwise.

    Args:
        targets: any client's targets.
        loss: None, the name of a objective, or a callable (outputs, targets) -> [batch] or a mean.
        metrics: names out of `METRICS`, or metrics by name, instead of the objective's own.
    """
    if isinstance(loss, str):
        if loss not in OBJECTIVES:
            raise unknown("objective", loss, OBJECTIVES)
        objective = OBJECTIVES[loss]
    else:
        objective = OBJECTIVES["regression" if targets.dtype.is_floating_point else "classification"]
        if loss is not None:
            if not callable(loss):
                raise SettingError(f"loss must be a function of (outputs, targets) or a objective's name, got {loss!r}")
            objective = Objective("custom", loss, objective.metrics, objective.higher_is_better)
    if metrics is not None:
        metrics = _named(metrics)
        for name, metric in metrics.items():
            if not callable(metric) and not _gathers(metric):
                raise SettingError(f"metric {name!r} must be a function or a torchmetrics object, got {metric!r}")
        objective = Objective(objective.name, objective.loss, dict(metrics), _rises(metrics))
    if objective.loss is cross_entropy and targets.dtype not in (
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.int16,
        torch.int8,
    ):
        raise SettingError(f"classification needs whole-number targets, got {targets.dtype}: pass loss='regression'")
    return objective


def _gathers(metric: object) -> bool:
    """Whether a metric takes rows bit by bit and is worked out at the end, as torchmetrics objects are."""
    return all(hasattr(metric, name) for name in ("update", "compute", "reset"))


def _named(metrics: Mapping[str, Any] | Sequence[str]) -> Mapping[str, Any]:
    """Metrics by name, from their names alone."""
    if isinstance(metrics, Mapping):
        return metrics
    if isinstance(metrics, str):
        raise SettingError(f"metrics must be a list of names, got {metrics!r}: write metrics=[{metrics!r}]")
    for name in metrics:
        if name not in METRICS:
            raise unknown("metric", name, METRICS)
    return {name: METRICS[name] for name in metrics}


def _rises(metrics: Mapping[str, Any]) -> bool:
    """Whether more is better of the first metric: as torchmetrics objects say themselves; a loss or an error falls."""
    first = next(iter(metrics.values()), None)
    falls = (None, cross_entropy, squared_error, absolute_error, binary_cross_entropy)
    return not any(first is metric for metric in falls) and getattr(first, "higher_is_better", True) is not False
