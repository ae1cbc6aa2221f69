"""What counts as near: one point of a metric that is a share, one hundredth of the value of another."""

from __future__ import annotations

# metrics from 0 to 1, whose differences are points
SHARES = ("accuracy", "balanced_accuracy", "token_accuracy", "auc", "f1", "concordance")
POINT = 0.01


def nearness(metric: str, value: float) -> float:
    """The difference from a value of the metric that counts as little."""
    return POINT if metric in SHARES else POINT * abs(value)
