"""Sums of one client for models under noise: each row adds a vector of length 1 at most, whatever it holds.

Regressors and targets lie in stated bounds, by which they become numbers between -1 and 1.  What a row adds to the
score is weighted by the length of its regressors (Mallows) and its residual is cut, so that its influence is bounded
without a look at the rows (Avella-Medina, Bradshaw and Loh 2023, "Differentially private inference via noisy
optimization").  A proportional-hazards model has a constant baseline hazard within each stated interval, so that it is
a sum over rows as well (Holford 1980).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from piebald.core.moments import Floats, Ints
from piebald.core.tensor_store import blocks
from piebald.inference.columns import STEP
from piebald.inference.models.rows import ModelPlan, ModelRows

_COUNT, _EVENTS, _CURVATURE = 0.3, 0.5, 1.0  # lengths of a row's count, events and information, beside its score
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
        return 2 + len(self.bounds) + 2 * self._intervals + _triangle(1 + len(self.bounds))

    @property
    def _intervals(self) -> int:
        """The number of intervals of which a proportional-hazards model has a parameter each."""
        return len(self.ends) if self.plan.family == "cox" else 0

    @property
    def influence(self) -> float:
        """The largest Euclidean length of what changes in the sums when one row takes the place of another."""
        if self.plan.family in ("survival", "gaussian"):
            return math.sqrt(2)  # of one cell to another; of one outer product to another
        # a score may turn around; an information, and numbers of events, may not, as they are never negative
        by_interval = 4 * _EVENTS**2 * (self._intervals > 0)
        return math.sqrt(4 + 2 * _CURVATURE**2 + by_interval + _COUNT**2)

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
        design, residual, curved, by_interval = terms(x, rows, part, point)
        weight = np.minimum(1.0, math.sqrt(self._size(x.shape[1])) / np.linalg.norm(design, axis=1))[:, None]
        upper, scale = _upper(design.shape[1])
        products = curved[:, None] * design[:, upper[0]] * design[:, upper[1]] * scale
        # nothing is cut but what is not finite: rounding must not take a row beyond its share
        bounded = [
            _cut(weight * residual[:, None] * design / math.sqrt(self._size(x.shape[1])), 1.0),
            *(_EVENTS * _cut(weight * numbers, 1.0) for numbers in by_interval),
            _CURVATURE * _cut(weight * products / self._spread, 1.0),
        ]
        return np.concatenate([_COUNT * np.ones((len(y), 1)), *bounded], axis=1)

    def _cells(self, rows: ModelRows, part: slice) -> Floats:
        groups = rows.x[part] if self.bounds else np.ones((len(rows.y[part]), 1))
        position = np.searchsorted(np.array(self.ends), rows.time[part])
        cells = np.zeros((len(groups), 2, groups.shape[1], len(self.ends) + 1))
        index = np.arange(len(groups))
        # only the first of groups that a row is in, so that it is in one cell
        group = np.argmax(groups > 0, axis=1)
        cells[index, (rows.y[part] <= 0).astype(int), group, position] = groups.max(1) > 0
        return cells.reshape(len(groups), -1)

    def _products(self, x: Floats, y: Floats) -> Floats:
        columns = np.column_stack([np.ones(len(y)), x, np.clip(y, -1, 1)])
        upper, scale = _upper(columns.shape[1])
        products = columns[:, upper[0]] * columns[:, upper[1]] * scale
        return _cut(products / self._size(columns.shape[1] - 1), 1.0)

    def _size(self, columns: int) -> float:
        """The squared length of a row of an intercept and so many columns, above which it counts less."""
        return 1 + columns / 3  # what equally distributed numbers between -1 and 1 have

    @property
    def _spread(self) -> float:
        """The largest weighted outer product of a row with itself."""
        return math.sqrt(self._size(len(self.bounds)) * (1 + len(self.bounds)))

    def _regression(self, x: Floats, rows: ModelRows, part: slice, point: Floats) -> _RowTerms:
        design, (most, steepest) = np.column_stack([np.ones(len(x)), x]), self._limits
        eta = np.clip(design @ point + rows.offset[part], -50, 50)
        if self.plan.family == "binomial":
            mean = 1 / (1 + np.exp(-eta))
            slope = mean * (1 - mean)
        else:
            mean = np.exp(eta)
            slope = np.minimum(mean, steepest)
        return _RowTerms(design, np.clip(rows.y[part] - mean, -most, most) / most, slope / steepest, ())

    def _hazard(self, x: Floats, rows: ModelRows, part: slice, point: Floats) -> _RowTerms:
        """Return the terms of rows that are observed until one event is expected of them.

        When that is follows from regressors and parameters, and not from what happens, so the score still has mean 0 at
        the true parameters (a martingale stopped at a predictable time); its residuals lie between -1 and 1.
        """
        ends, count = np.array(self.ends), len(self.ends)
        time, starts = np.minimum(rows.time[part], ends[-1]), np.concatenate([[0.0], ends[:-1]])
        exposed = np.clip(time[:, None] - starts, 0, ends - starts) / (ends - starts)
        eta = np.clip(point[:count] + (x @ point[count:] + rows.offset[part])[:, None], -50, 20)
        total = np.cumsum(exposed * np.exp(eta), axis=1)
        expected = np.diff(np.minimum(total, 1.0), axis=1, prepend=0.0)
        # an event after the last interval, or after the row has left, is none
        died = (rows.y[part] > 0) & (rows.time[part] <= ends[-1]) & (total[:, -1] <= 1)
        events = np.zeros_like(exposed)
        events[np.arange(len(x)), np.searchsorted(ends, time)] = died
        design = np.column_stack([np.ones(len(x)), x])
        return _RowTerms(design, (events - expected).sum(1), expected.sum(1), (events, expected))

    @property
    def _limits(self) -> tuple[float, float]:
        """The largest residual, and the largest variance, of a row."""
        if self.plan.family == "binomial":
            return 1.0, 0.25
        return (self.target[1] / 2, self.target[1] / 2) if self.plan.family == "poisson" else (1.0, 1.0)

    def read(self, total: Floats, deviation: float) -> NoisyScore:
        """Return the terms of Newton's method in sums with noise [length] of this standard deviation."""
        most, steepest = self._limits
        of_score, of_events = math.sqrt(self._size(len(self.bounds))) * most, steepest / _EVENTS
        of_information, width = steepest / _CURVATURE * self._spread, 1 + len(self.bounds)
        count, score, events, expected, information = np.split(
            total, np.cumsum([1, width, self._intervals, self._intervals])
        )
        return NoisyScore(
            float(count[0]) / _COUNT, score * of_score, events * of_events, expected * of_events,
            _matrix(information * of_information, width),
            deviation * of_score, deviation * of_events, deviation * of_information,
        )  # fmt: skip

    def read_products(self, total: Floats, deviation: float) -> tuple[Floats, float]:
        """Return the outer products of an intercept, columns and the target, summed with noise, and its deviation."""
        unit = self._size(len(self.bounds) + 1)
        return _matrix(total * unit, self.parameters + 1), deviation * unit


class NoisyScore(NamedTuple):
    """Sums of rows with noise, and the standard deviation of the noise of a number of each.

    Attributes:
        rows: how many.
        score: of an intercept, or of all intervals together, and of the columns [1 + p].
        events, expected: numbers of events in each interval of a proportional-hazards model [k], else [0].
        information: of an intercept and the columns [1 + p, 1 + p]; a number beside the diagonal has noise less by the
            root of 2.
        score_noise, event_noise, information_noise: the standard deviations.
    """

    rows: float
    score: Floats
    events: Floats
    expected: Floats
    information: Floats
    score_noise: float
    event_noise: float
    information_noise: float

    @classmethod
    def mean(cls, scores: Sequence[NoisyScore]) -> NoisyScore:
        """Return the means of sums, whose noise is independent."""
        means: Any = [np.mean(values, axis=0) for values in zip(*scores, strict=True)]
        return cls(*means[:5], *(noise / math.sqrt(len(scores)) for noise in means[5:]))


class _RowTerms(NamedTuple):
    """Terms of rows: an intercept and regressors [n, 1 + p], residuals [n] between -1 and 1, variances [n] between 0
    and 1, and numbers of events by interval [n, k], which happened and which were expected, if there are intervals.
    """

    design: Floats
    residual: Floats
    curved: Floats
    by_interval: tuple[Floats, ...]


def _matrix(flat: Floats, width: int) -> Floats:
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
