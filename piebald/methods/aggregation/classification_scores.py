"""Scores of a classifier from its confusion matrix [C, C], rows by true class.  Each is 0 where nothing was counted."""

from __future__ import annotations

import torch
from torch import Tensor


def accuracy(matrix: Tensor) -> float:
    """Share of rows on the diagonal."""
    whole = float(matrix.sum())
    return float(matrix.diagonal().sum()) / whole if whole else 0.0


def micro_f1(matrix: Tensor) -> float:
    """2 TP / (2 TP + FP + FN), counts added over classes (Metis, eq. 3).

    With one label a row every miss is a false positive of one class and a false negative of another, so this is the
    accuracy.
    """
    hits = float(matrix.diagonal().sum())
    misses = float(matrix.sum()) - hits
    return 2 * hits / (2 * hits + misses + misses) if hits else 0.0


def macro_f1(matrix: Tensor) -> float:
    """Mean over the classes that have rows or were predicted of 2 TP / (2 TP + FP + FN)."""
    hits = matrix.diagonal()
    either = matrix.sum(0) + matrix.sum(1)  # 2 TP + FP + FN
    met = either > 0
    return float((2 * hits[met] / either[met]).mean()) if bool(met.any()) else 0.0


def geometric_mean(matrix: Tensor) -> float:
    """Geometric mean of the recalls of the classes that have rows; 0 as soon as one is never found."""
    rows = matrix.sum(1)
    met = rows > 0
    recalls = matrix.diagonal()[met] / rows[met]
    return float(recalls.double().log().mean().exp()) if bool(met.any()) else 0.0


def matthews(matrix: Tensor) -> float:
    """Matthews correlation for many classes (Gorodkin 2004), from -1 to 1; 0 where it is not defined."""
    matrix = matrix.double()
    whole, hits = matrix.sum(), matrix.diagonal().sum()
    true, predicted = matrix.sum(1), matrix.sum(0)
    spread = (whole**2 - predicted @ predicted) * (whole**2 - true @ true)
    return float((hits * whole - true @ predicted) / torch.sqrt(spread)) if float(spread) > 0 else 0.0


SCORES = {
    "accuracy": accuracy,
    "micro_f1": micro_f1,
    "macro_f1": macro_f1,
    "geometric_mean": geometric_mean,
    "matthews": matthews,
}
