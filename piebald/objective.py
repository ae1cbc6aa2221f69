"""Objectives: the loss that clients minimize, and the metrics of evaluation.

A loss maps (outputs, targets) to one value per example, [batch], so that engines can mask and batch them; a loss that
returns a single mean is also accepted and runs without masks.  A metric maps (outputs, targets) to one value per
example and is averaged; objects with `update`, `compute` and `reset` (torchmetrics) are also accepted and run client by
client.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from piebald.errors import SettingError, shown, unknown
from piebald.pytree import Tree, described, logits

Loss = Callable[[Any, Any], Tensor]


def on_logits(function: Callable[[Tensor, Any], Tensor]) -> Loss:
    """A loss or metric of scores, for any output of a model that has them (`pytree.logits`)."""

    @functools.wraps(function)
    def of_outputs(outputs: Any, targets: Any) -> Tensor:
        return function(logits(outputs), targets)

    return of_outputs


@on_logits
def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits [batch, classes, ...] with class numbers [batch, ...], one value per example."""
    value = functional.cross_entropy(outputs, targets.long(), reduction="none")
    return value if value.dim() == 1 else value.flatten(1).mean(1)


@on_logits
def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 if the largest logit is that of the target, else 0; one value per example."""
    right = (outputs.argmax(1) == targets).float()
    return right if right.dim() == 1 else right.flatten(1).mean(1)


@on_logits
def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error, the mean over an example's outputs."""
    error = (outputs.reshape(targets.shape) - targets).square()
    return error if error.dim() == 1 else error.flatten(1).mean(1)


@on_logits
def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Absolute error, the mean over an example's outputs."""
    error = (outputs.reshape(targets.shape) - targets).abs()
    return error if error.dim() == 1 else error.flatten(1).mean(1)


@on_logits
def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of independent labels: logits and 0/1 targets of one shape, the mean over an example's labels."""
    value = functional.binary_cross_entropy_with_logits(
        outputs.reshape(targets.shape), targets.float(), reduction="none"
    )
    return value if value.dim() == 1 else value.flatten(1).mean(1)


class Auc:
    """Area under the ROC curve: the probability that a positive example scores above a negative one; ties count half.

    For classes it is the mean of one class against the rest over all classes that occur, which for two classes is the
    usual definition; for independent labels [batch, labels] or one logit [batch] it is the mean over labels.  It is
    undefined if only one class occurs, and NaN then.  Computed from ranks (Mann, Whitney 1947).
    """

    higher_is_better = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all examples."""
        self._seen: list[tuple[Tensor, Tensor]] = []

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Add examples: logits [batch, classes] with class numbers [batch], or logits and 0/1 targets of one shape."""
        self._seen.append((logits(outputs).detach(), targets))

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
    """The area for one label: scores [batch], mask of positive examples [batch]."""
    _, place, count = torch.unique(scores, return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    rank = (last - (count - 1) / 2)[place]  # ties share the mean of their ranks
    many = positive.sum().double()
    area: Tensor = (rank[positive].sum() - many * (many + 1) / 2) / (many * (len(scores) - many))
    return area  # 0 / 0 is NaN


@on_logits
def label_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of an example's labels that are predicted correctly with a logit threshold of 0."""
    right = ((outputs.reshape(targets.shape) > 0) == (targets > 0.5)).float()
    return right if right.dim() == 1 else right.flatten(1).mean(1)


@dataclass(frozen=True)
class Objective:
    """A loss and named metrics.  The first metric is the main one, shown in progress bars and tables.

    Attributes:
        name: "classification", "regression", "multilabel" or "custom".
        loss: function of (outputs, targets).
        metrics: metrics by name.
        higher_is_better: whether higher values of the first metric are better.
    """

    name: str
    loss: Loss
    metrics: Mapping[str, Any] = field(default_factory=dict)
    higher_is_better: bool = True

    @property
    def metric(self) -> str:
        """Name of the main metric."""
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
    targets: Tree, loss: Loss | str | None = None, metrics: Mapping[str, Any] | Sequence[str] | None = None
) -> Objective:
    """Choose the objective for targets: classification for whole numbers, regression for real numbers, or that of
    `loss`.

    Args:
        targets: any client's targets.
        loss: None, the name of an objective, or a callable (outputs, targets) -> [batch] or a mean.
        metrics: names from `METRICS`, or metrics by name, instead of the objective's own.
    """
    if isinstance(loss, str):
        if loss not in OBJECTIVES:
            raise unknown("objective", loss, OBJECTIVES)
        objective = OBJECTIVES[loss]
    else:
        whole = isinstance(targets, Tensor) and not targets.dtype.is_floating_point
        objective = OBJECTIVES["classification" if whole else "regression"]
        if loss is None and not isinstance(targets, Tensor):
            raise SettingError(
                f"targets of several tensors ({described(targets)}) need a loss: pass loss, a function of "
                "(outputs, targets)"
            )
        if loss is not None:
            if not callable(loss):
                raise SettingError(
                    f"loss must be a function of (outputs, targets) or the name of an objective, got {shown(loss)}"
                )
            objective = Objective("custom", loss, objective.metrics, objective.higher_is_better)
    if metrics is not None:
        metrics = _named(metrics)
        for name, metric in metrics.items():
            if not callable(metric) and not _accumulates(metric):
                raise SettingError(f"metric {name!r} must be a function or a torchmetrics object, got {shown(metric)}")
        objective = Objective(objective.name, objective.loss, dict(metrics), _higher_is_better(metrics))
    if objective.loss is cross_entropy:
        _check_classes(targets)
    return objective


def _check_classes(targets: Tree) -> None:
    whole = (torch.int64, torch.int32, torch.uint8, torch.int16, torch.int8)
    if not isinstance(targets, Tensor) or targets.dtype not in whole:
        got = targets.dtype if isinstance(targets, Tensor) else described(targets)
        raise SettingError(f"classification needs whole-number targets, got {got}: pass loss='regression'")


def _accumulates(metric: object) -> bool:
    """Whether a metric accumulates examples and is computed at the end, as torchmetrics objects are."""
    return all(hasattr(metric, name) for name in ("update", "compute", "reset"))


def _named(metrics: Mapping[str, Any] | Sequence[str]) -> Mapping[str, Any]:
    """Metrics by name, looked up if only names are given."""
    if isinstance(metrics, Mapping):
        return metrics
    if isinstance(metrics, str):
        raise SettingError(f"metrics must be a list of names, got {shown(metrics)}: write metrics=[{shown(metrics)}]")
    for name in metrics:
        if name not in METRICS:
            raise unknown("metric", name, METRICS)
    return {name: METRICS[name] for name in metrics}


def _higher_is_better(metrics: Mapping[str, Any]) -> bool:
    """Whether higher values of the first metric are better: not for losses and errors, else as the metric declares."""
    first = next(iter(metrics.values()), None)
    falls = (None, cross_entropy, squared_error, absolute_error, binary_cross_entropy)
    return not any(first is metric for metric in falls) and getattr(first, "higher_is_better", True) is not False
