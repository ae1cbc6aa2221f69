"""Built-in metrics are those of scikit-learn on the pooled rows of all batches, and torchmetrics' calibration error."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from torch import Tensor

from piebald.core.metrics import LOWER_IS_BETTER
from piebald.core.objective import METRICS, objective_for


def rows(classes: int, seed: int = 0, count: int = 120) -> tuple[Tensor, Tensor]:
    """Logits with some ties, and classes of which the last is rare, with two unknown ones."""
    generator = torch.Generator().manual_seed(seed)
    outputs = (2 * torch.randn(count, classes, generator=generator)).round(decimals=1)
    targets = torch.multinomial(torch.tensor([4.0, *[2.0] * (classes - 2), 1.0]), count, True, generator=generator)
    targets[[3, 50]] = -100
    return outputs, targets


def measured(name: str, outputs: Any, targets: Any, loss: str = "classification") -> float:
    """A metric by its name, over two batches if it sees all rows."""
    metric = objective_for(targets, loss, [name]).metrics[name]
    if not hasattr(metric, "update"):
        values = metric(outputs, targets)
        return float(values[~values.isnan()].mean()) if loss != "classification" else float(values[targets >= 0].mean())
    metric.reset()
    for batch in (slice(0, 40), slice(40, None)):
        metric.update(outputs[batch], targets[batch])
    return float(metric.compute())


def of_classes(name: str, shares: Any, true: Any) -> float:
    """The same by scikit-learn, from probabilities [n, classes]."""
    predicted, classes = shares.argmax(1), shares.shape[1]
    one = classes == 2
    sides = [(true == k, shares[:, k], predicted == k) for k in range(1 if one else 0, classes)]
    return float(
        {
            "accuracy": lambda: sk.accuracy_score(true, predicted),
            "auc": lambda: np.mean([sk.roc_auc_score(positive, score) for positive, score, _ in sides]),
            "average_precision": lambda: np.mean([sk.average_precision_score(*side[:2]) for side in sides]),
            "balanced_accuracy": lambda: sk.balanced_accuracy_score(true, predicted),
            "brier": lambda: sk.brier_score_loss(true, shares[:, 1]) if one else _brier(shares, true),
            "f1": lambda: sk.f1_score(true, predicted, average="macro"),
            "log_loss": lambda: sk.log_loss(true, shares, labels=range(classes)),
            "sensitivity": lambda: np.mean([sk.recall_score(positive, own) for positive, _, own in sides]),
            "specificity": lambda: np.mean([sk.recall_score(~positive, ~own) for positive, _, own in sides]),
        }[name]()
    )


def _brier(shares: Any, true: Any) -> float:
    return sum(sk.brier_score_loss(true == k, shares[:, k]) for k in range(shares.shape[1]))


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize(
    "name",
    [
        "accuracy",
        "auc",
        "average_precision",
        "balanced_accuracy",
        "brier",
        "f1",
        "log_loss",
        "sensitivity",
        "specificity",
    ],
)
def test_metrics_of_classes_are_those_of_scikit_learn_on_pooled_rows(name: str, classes: int) -> None:
    outputs, targets = rows(classes)
    held = targets >= 0
    expected = of_classes(name, outputs[held].double().softmax(1).numpy(), targets[held].numpy())
    of_counts = name in ("balanced_accuracy", "f1", "sensitivity", "specificity")
    assert measured(name, outputs, targets) == pytest.approx(expected, abs=1e-12 if of_counts else 1e-6)


@pytest.mark.parametrize("name", ["mae", "rmse", "r2", "squared_error"])
def test_metrics_of_numbers_are_those_of_scikit_learn_in_the_targets_unit(name: str) -> None:
    """What is trained on are standard scores of the target, of which the metrics know nothing."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(90, 1, generator=generator)
    outputs = scores + 0.5 * torch.randn(90, 1, generator=generator)
    told = {
        "mae": sk.mean_absolute_error, "rmse": sk.root_mean_squared_error, "r2": sk.r2_score,
        "squared_error": sk.mean_squared_error,
    }[name](20 * scores + 100, 20 * outputs + 100)  # fmt: skip
    metric = objective_for(scores, "regression", [name]).in_unit(100, 20).metrics[name]
    if hasattr(metric, "update"):
        metric.reset()
        for batch in (slice(0, 40), slice(40, None)):
            metric.update(outputs[batch], scores[batch])
        assert float(metric.compute()) == pytest.approx(told, rel=1e-5)
    else:
        assert float(metric(outputs, scores).mean()) == pytest.approx(told, rel=1e-5)


@pytest.mark.parametrize("name", ["f1", "sensitivity", "average_precision", "balanced_accuracy"])
def test_metrics_of_labels_are_means_over_labels(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    outputs = torch.randn(80, 3, generator=generator)
    labels = (torch.rand(80, 3, generator=generator) < 0.4).float()
    score: Any = {
        "f1": lambda t, s: sk.f1_score(t, s > 0), "sensitivity": lambda t, s: sk.recall_score(t, s > 0),
        "average_precision": sk.average_precision_score,
        "balanced_accuracy": lambda t, s: sk.balanced_accuracy_score(t, s > 0),
    }[name]  # fmt: skip
    expected = np.mean([score(labels[:, k].numpy(), outputs[:, k].numpy()) for k in range(3)])
    assert measured(name, outputs, labels, "multilabel") == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("classes", [2, 4])
def test_the_calibration_error_is_that_of_torchmetrics(classes: int) -> None:
    functional = pytest.importorskip("torchmetrics.functional.classification")
    outputs, targets = rows(classes)
    held = targets >= 0
    expected = functional.multiclass_calibration_error(outputs[held], targets[held], classes, n_bins=15)
    assert measured("calibration_error", outputs, targets) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("name", ["auc", "average_precision", "sensitivity", "r2"])
def test_what_is_undefined_is_no_number(name: str) -> None:
    """Without an example of the second class, or with one number alone."""
    if name == "r2":
        assert math.isnan(measured(name, torch.zeros(1, 1), torch.zeros(1, 1), "regression"))
    else:
        assert math.isnan(measured(name, torch.randn(5, 2), torch.zeros(5, dtype=torch.int64)))


def test_errors_are_better_where_they_are_smaller() -> None:
    for name, metric in METRICS.items():
        falls = name in LOWER_IS_BETTER
        if hasattr(metric, "higher_is_better"):
            assert metric.higher_is_better != falls, name
        if name not in ("concordance", "label_accuracy", "perplexity", "token_accuracy", "next_token_accuracy"):
            numbers = name in ("r2", "rmse", "mae", "absolute_error", "squared_error")
            targets = torch.zeros(2, 1) if numbers else torch.tensor([0, 1])
            objective = objective_for(targets, "regression" if numbers else "classification", [name])
            assert objective.higher_is_better != falls, name
