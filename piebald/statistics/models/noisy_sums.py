"""Sums of one client for models under noise: each row adds a vector of length 1 at most, whatever it holds.

Regressors and targets lie in stated bounds, by which they become numbers between -1 and 1.  What a row adds to the
score is weighted by the length of its regressors (Mallows) and its residual is cut, so that its influence is bounded
without a look at the rows (Avella-Medina, Bradshaw and Loh 2023, "Differentially private inference via noisy
optimization").  A proportional-hazards model has a constant baseline hazard within each stated interval, so that it is
a sum over rows as well (Holford 1980).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from piebald.core.moments import Floats, Ints
from piebald.core.stored_vectors import blocks
from piebald.statistics.models.rows import ModelPlan, ModelRows

STEP = 2.0**-30  # of sums, which are whole numbers of steps
_COUNT, _CURVATURE = 0.3, 0.5  # shares of a row's count, and of its information, beside its score
_ROWS = 1 << 14  # whose contributions are held at once


class NoisyPlan(NamedTuple):
    """A model of bounded numbers.

    Attributes:
        plan: the columns of the model.
        bounds: of each regressor, low and high.
        target: low and high of the target; unused for events.
        ends: of the intervals of time [k], increasing; of models of times.
    """

    plan: ModelPlan
    bounds: tuple[tuple[float, float], ...]
    target: tuple[float, float]
    ends: tuple[float, ...]

    @property
    def parameters(self) -> int:
        """The number of parameters: of an intercept or of each interval's log hazard, then of the columns."""
        return len(self.bounds) + (len(self.ends) if self.plan.family == "cox" else 1)

    @property
    def length(self) -> int:
        """The number of sums."""
        if self.plan.family == "survival":
            return 2 * max(len(self.bounds), 1) * (len(self.ends) + 1)
        if self.plan.family == "gaussian":
            return _triangle(self.parameters + 1)
        return 1 + self.parameters + _triangle(self.parameters)

    @property
    def influence(self) -> float:
        """The largest Euclidean length of what changes in the sums when one row takes the place of another."""
        if self.plan.family in ("survival", "gaussian"):
            return math.sqrt(2)  # of one cell to another; of one outer product to another
        # a score may turn around, an information may not
        return math.sqrt(4 + 2 * _CURVATURE**2 + _COUNT**2)

    def vector(self, rows: ModelRows, point: Floats) -> Ints:
        """Return the sums of a client at parameters [q], in steps [length]."""
        total = np.zeros(self.length, dtype=np.int64)
        for part in blocks(len(rows.y), _ROWS):
            # each row is rounded before the sum, so that the total does not depend on their order
            total += np.rint(self.contributions(rows, part, point) / STEP).astype(np.int64).sum(0)
        return total

    def contributions(self, rows: ModelRows, part: slice, point: Floats) -> Floats:
        """Return what some rows add [n, length]."""
        if self.plan.family == "survival":
            return self._cells(rows, part)
        low, high = np.array(self.bounds).reshape(-1, 2).T
        center, half = (low + high) / 2, (high - low) / 2
        x = np.clip((rows.x[part] - center) / half, -1, 1)
        y = rows.y[part]
        if self.plan.family == "gaussian":
            return self._products(x, (y - sum(self.target) / 2) / ((self.target[1] - self.target[0]) / 2))
        terms = self._hazard if self.plan.family == "cox" else self._regression
        score, information = terms(x, rows, part, point)
        upper, scale = _upper(self.parameters)
        flat = information[:, upper[0], upper[1]] * scale
        # rounding must not take a row beyond its share
        parts = _COUNT * np.ones((len(y), 1)), _cut(score, 1.0), _CURVATURE * _cut(flat, 1.0)
        return np.concatenate(parts, axis=1)

    def _cells(self, rows: ModelRows, part: slice) -> Floats:
        groups = rows.x[part] if self.bounds else np.ones((len(rows.y[part]), 1))
        place = np.searchsorted(np.array(self.ends), rows.time[part])
        cells = np.zeros((len(groups), 2, groups.shape[1], len(self.ends) + 1))
        index = np.arange(len(groups))
        # only the first of groups that a row is in, so that it is in one cell
        group = np.argmax(groups > 0, axis=1)
        cells[index, (rows.y[part] <= 0).astype(int), group, place] = groups.max(1) > 0
        return cells.reshape(len(groups), -1)

    def _products(self, x: Floats, y: Floats) -> Floats:
        columns = np.column_stack([np.ones(len(y)), x, np.clip(y, -1, 1)])
        upper, scale = _upper(columns.shape[1])
        products = columns[:, upper[0]] * columns[:, upper[1]] * scale
        return _cut(products / self._size(columns.shape[1] - 1), 1.0)

    def _size(self, columns: int) -> float:
        """The squared length of a row of an intercept and so many columns, above which it counts less."""
        return 1 + columns / 3  # what equally distributed numbers between -1 and 1 have

    def _regression(self, x: Floats, rows: ModelRows, part: slice, point: Floats) -> tuple[Floats, Floats]:
        design = np.column_stack([np.ones(len(x)), x])
        size, (most, steepest) = self._size(x.shape[1]), self.limits
        eta = np.clip(design @ point + rows.offset[part], -50, 50)
        if self.plan.family == "binomial":
            mean = 1 / (1 + np.exp(-eta))
            slope = mean * (1 - mean)
        else:
            mean = np.exp(eta)
            slope = np.minimum(mean, steepest)
        weight = np.minimum(1.0, math.sqrt(size) / np.linalg.norm(design, axis=1))
        residual = np.clip(rows.y[part] - mean, -most, most) / most
        score = (weight * residual / math.sqrt(size))[:, None] * design
        curved = (weight**2 * slope / steepest / size)[:, None, None] * design[:, :, None] * design[:, None, :]
        return score, curved

    def _hazard(self, x: Floats, rows: ModelRows, part: slice, point: Floats) -> tuple[Floats, Floats]:
        ends, size, (most, steepest) = np.array(self.ends), self._size(x.shape[1]), self.limits
        time, count = np.minimum(rows.time[part], ends[-1]), len(ends)
        starts = np.concatenate([[0.0], ends[:-1]])
        exposed = np.clip(time[:, None] - starts, 0, ends - starts) / (ends - starts)
        # an event after the last interval is none yet
        died = (rows.y[part] > 0) & (rows.time[part] <= ends[-1])
        events = np.zeros_like(exposed)
        events[np.arange(len(x)), np.searchsorted(ends, time)] = died
        eta = np.clip(point[:count] + (x @ point[count:] + rows.offset[part])[:, None], -50, 20)
        expected = exposed * np.exp(eta)
        residual = events - expected
        score = np.concatenate([residual, residual.sum(1, keepdims=True) * x], axis=1) / (math.sqrt(size) * most)
        design = np.concatenate([np.broadcast_to(np.eye(count), (len(x), count, count)),
                                 np.broadcast_to(x[:, None], (len(x), count, x.shape[1]))], axis=2)  # fmt: skip
        return score, np.einsum("nk,nki,nkj->nij", expected, design, design) / (size * steepest)

    @property
    def limits(self) -> tuple[float, float]:
        """The largest residual, and the largest variance, of a row."""
        if self.plan.family == "binomial":
            return 1.0, 0.25
        # a row with an event has a residual of 1 at most; one that is observed for long may have less than -1
        return (self.target[1] / 2, self.target[1]) if self.plan.family == "poisson" else (2.0, 2.0)

    def score_units(self) -> tuple[float, float, float]:
        """In which units a sum has the count of rows, the score and the information."""
        size, (most, steepest) = self._size(len(self.bounds)), self.limits
        return 1 / _COUNT, math.sqrt(size) * most, size * steepest / _CURVATURE

    def product_unit(self) -> float:
        """In which unit sums are outer products of an intercept, columns and the target."""
        return self._size(len(self.bounds) + 1)


def matrix_of(flat: Floats, width: int) -> Floats:
    """Return the symmetric matrix [q, q] whose upper triangle, with weights, is this [q (q + 1) / 2]."""
    upper, scale = _upper(width)
    matrix = np.zeros((width, width))
    matrix[upper] = flat / scale
    matrix.T[upper] = flat / scale
    return matrix


def _upper(width: int) -> tuple[tuple[Ints, Ints], Floats]:
    """Return the upper triangle's places, and weights by which its length is that of the matrix."""
    rows, columns = np.triu_indices(width)
    return (rows, columns), np.where(rows == columns, 1.0, math.sqrt(2))


def _triangle(width: int) -> int:
    return width * (width + 1) // 2


def _cut(vectors: Floats, most: float) -> Floats:
    """Return vectors [n, k] that are no longer than this."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    shrunk = vectors * np.minimum(1.0, most / np.maximum(lengths, 1e-300))
    # what is not finite says nothing
    return np.asarray(np.where(np.isfinite(lengths), shrunk, 0.0))
