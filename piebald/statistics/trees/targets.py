"""Objectives of trees: the start of boosting, the loss, and the scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from piebald.core.errors import SettingError
from piebald.core.metrics import Auc
from piebald.core.moments import Floats
from piebald.statistics.trees.forest import Floats32
from piebald.statistics.trees.settings import Objective

SCORES: dict[Objective, tuple[str, ...]] = {
    "binary": ("auc", "accuracy", "loss"),
    "multiclass": ("auc", "accuracy", "loss"),
    "regression": ("rmse", "mae", "loss"),
}


@dataclass(frozen=True, slots=True)
class TargetSums:
    """The sums that a client sends of its training targets before the first round.

    Attributes:
        rows: training rows.
        counts: rows of each class [C]; for a regression the sum of targets alone.
    """

    rows: int
    counts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """An objective and its classes.

    Attributes:
        objective: "binary", "multiclass" or "regression".
        classes: number of classes, 0 for a regression.
    """

    objective: Objective
    classes: int = 0

    @property
    def groups(self) -> int:
        """The number of outputs of a row, which is that of the trees of one step."""
        return self.classes if self.objective == "multiclass" else 1

    def sums(self, y: Floats) -> TargetSums:
        """Return the sums of targets [n]."""
        if self.objective == "regression":
            return TargetSums(len(y), (math.fsum(y.tolist()),))
        return TargetSums(len(y), tuple(np.bincount(y.astype(np.int64), minlength=self.classes).astype(float).tolist()))

    def start(self, sums: Sequence[TargetSums], balanced: bool) -> tuple[Floats32, tuple[float, ...] | None]:
        """Return the margins [G] that boosting starts from, and the weight of a row of each class if they are balanced.

        Raises:
            SettingError: all targets are of one class, so there is nothing to predict.
        """
        rows, totals = sum(client.rows for client in sums), np.sum([client.counts for client in sums], axis=0)
        if self.objective == "regression":
            return np.array([totals[0] / rows], dtype=np.float32), None
        present = totals > 0
        if present.sum() < 2:
            raise SettingError("the target is the same in all training rows, so there is nothing to predict")
        weights = np.where(present, rows / (present.sum() * np.maximum(totals, 1.0)), 0.0) if balanced else None
        mass = totals if weights is None else totals * weights
        # a class without rows would start at minus infinity
        share = np.maximum(mass / mass.sum(), 1e-6).astype(np.float32)
        logs = np.log(share)
        # probabilities of several classes do not change with their mean, so margins are centred
        start = -np.log(1 / share[1:] - 1) if self.objective == "binary" else logs - logs.mean(dtype=np.float32)
        return start.astype(np.float32), None if weights is None else tuple(weights.tolist())

    def base_score(self, start: Floats32) -> list[float]:
        """Return the start in the form of xgboost's files."""
        if self.objective == "binary":
            return [float(1 / (1 + np.exp(-np.float64(start[0]))))]
        return [float(margin) for margin in start]

    def row_losses(self, margins: Floats32, y: Floats) -> Floats:
        """Return the loss [n] of margins [n, G]: logarithmic, or half the squared error."""
        wide = margins.astype(np.float64)
        if self.objective == "regression":
            return np.asarray(np.square(y - wide[:, 0]) / 2)
        if self.objective == "binary":
            return np.asarray(np.logaddexp(0.0, wide[:, 0]) - y * wide[:, 0])
        top = wide.max(1, keepdims=True)
        total = top[:, 0] + np.log(np.exp(wide - top).sum(1))
        return np.asarray(total - wide[np.arange(len(y)), y.astype(np.int64)])

    def probabilities(self, margins: Floats32) -> NDArray[np.float64]:
        """Return probabilities of the classes [n, C], or predictions [n]."""
        wide = margins.astype(np.float64)
        if self.objective == "regression":
            return wide[:, 0]
        logits = np.column_stack([np.zeros(len(wide)), wide[:, 0]]) if self.objective == "binary" else wide
        powers = np.exp(logits - logits.max(1, keepdims=True))  # no overflow
        return np.asarray(powers / powers.sum(1, keepdims=True))

    def scores(self, margins: Floats32, y: Floats) -> dict[str, float]:
        """Return the scores of margins [n, G] by name, NaN where they are not defined."""
        if not len(y):
            return dict.fromkeys(SCORES[self.objective], math.nan)
        loss = float(self.row_losses(margins, y).mean())
        if self.objective == "regression":
            errors = margins[:, 0].astype(np.float64) - y
            return {"rmse": float(np.sqrt(np.square(errors).mean())), "mae": float(np.abs(errors).mean()), "loss": loss}
        auc = Auc()
        outputs = torch.from_numpy(margins.astype(np.float64))
        labels = torch.from_numpy(y.astype(np.int64))
        auc.update(outputs[:, 0] if self.objective == "binary" else outputs,
                   labels.double() if self.objective == "binary" else labels)  # fmt: skip
        right = margins[:, 0] > 0 if self.objective == "binary" else margins.argmax(1)
        return {"auc": float(auc.compute()), "accuracy": float((right == y).mean()), "loss": loss}
