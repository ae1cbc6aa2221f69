"""What a client tells where trees are grown from sums over all clients: vectors of whole numbers, to be added up.

Derivatives of the loss count in steps of 2^-30 of the largest that there can be.  Sums of whole numbers have no
rounding errors, so trees are the same to the bit whether sums leave under masks or not, and whatever the order of
clients.
"""

from __future__ import annotations

import numpy as np

from piebald.core.errors import SettingError
from piebald.core.moments import Floats, Ints
from piebald.core.randomness import generator
from piebald.statistics.boosting.forest import LEAF, Floats32, Forest
from piebald.statistics.boosting.settings import TreeSettings
from piebald.statistics.boosting.targets import Target
from piebald.statistics.boosting.thresholds import counts_at_most

STEPS = 1 << 30  # that the largest derivative is
PARTS = 3  # numbers of a bin: sums of first and of second derivatives, rows
LOSS_STEPS = 1 << 20  # that a loss of 1 is
_LARGEST_LOSS = 1 << 10  # of a row: sums over 2^31 rows fit 64 bits
_MOST_ROWS = 1 << 23  # of a client: float64, in which numpy counts, has their sums exactly


def largest_derivative(target: Target, settings: TreeSettings, class_weights: tuple[float, ...] | None) -> float:
    """The largest absolute first derivative of a row's loss.

    Raises:
        SettingError: a regression has no bounds.
    """
    if target.objective != "regression":
        return max(class_weights or (1.0,))
    low, high = _bounds(settings)
    return high - low


def open_nodes(grown: Forest, level: int) -> list[tuple[int, int]]:
    """The nodes (tree, place) of a level whose splits are to be found, of trees that end there."""
    places = range(2**level - 1, 2 ** (level + 1) - 1)
    return [(tree, place) for tree in range(len(grown)) for place in places if grown.table[tree, place, 0] == LEAF]


class SummedRows:
    """The rows of one client, of which it tells sums.

    Args:
        x: inputs [n, d] of the rows to train on; NaN is a gap.
        y: their targets [n], a class as its number.
        target: the objective.
        settings: of boosting.

    Raises:
        SettingError: there are too many rows, or a regression has no bounds.
    """

    def __init__(self, x: Floats32, y: Floats, target: Target, settings: TreeSettings) -> None:
        if len(y) > _MOST_ROWS:
            raise SettingError(f"sums are of clients of at most {_MOST_ROWS:,} training rows, got {len(y):,}")
        self._x, self._target, self._settings = x, target, settings
        self._y = np.clip(y, *_bounds(settings)) if target.objective == "regression" else y
        self._bins: tuple[Floats32, Ints] | None = None

    def targets(self) -> Ints:
        """Rows of each class [C]; of a regression, rows and the sum of targets above the low bound [2]."""
        if self._target.objective != "regression":
            return np.bincount(self._y.astype(np.int64), minlength=self._target.classes).astype(np.int64)
        low, high = _bounds(self._settings)
        return np.array([len(self._y), _steps((self._y - low) / (high - low)).sum()], dtype=np.int64)

    def at_most(self, thresholds: Floats32) -> Ints:
        """How many numbers of each column are at most its thresholds [d, t]."""
        return counts_at_most(self._x, thresholds)

    def histograms(
        self, margins: Floats32, grown: Forest, level: int, thresholds: Floats32,
        class_weights: tuple[float, ...] | None, *words: int | str,
    ) -> Ints:  # fmt: skip
        """Sums of derivatives and rows in each bin of each column, at each open node of a level.

        Args:
            margins: of the model before this round [n, G].
            grown: this round's trees so far, one for each group.
            level: whose splits are to be found, from 0.
            thresholds: of each column [d, t].
            class_weights: weight of a row of each class, None where all are 1.
            words: of the random key of this client's subsample in this round.

        Returns:
            [k, d, t + 2, 3]: bin b has the numbers that reach b thresholds, and the last one the gaps.
        """
        bins, width = self._binned(thresholds), thresholds.shape[1] + 2
        first, second = self._derivatives(margins, class_weights)
        chosen = generator(*words).random(len(self._y)) < self._settings.subsample
        found = np.zeros((len(open_nodes(grown, level)), len(thresholds), width, PARTS), dtype=np.int64)
        number = 0
        for tree in range(len(grown)):
            places = [place for other, place in open_nodes(grown, level) if other == tree]
            order = np.full(grown.table.shape[1], -1, dtype=np.int64)
            order[places] = np.arange(len(places))
            node = order[grown.leaves(self._x, tree)]
            held = chosen & (node >= 0)
            weights = (first[held, tree], second[held, tree], None)
            for column in range(len(thresholds)):
                codes = node[held] * width + bins[held, column]
                for part, one in enumerate(weights):
                    counted = np.bincount(codes, one, len(places) * width).astype(np.int64)
                    found[number : number + len(places), column, :, part] = counted.reshape(len(places), width)
            number += len(places)
        return found

    def _binned(self, thresholds: Floats32) -> Ints:
        """The bin of each number [n, d]."""
        if self._bins is None or not np.array_equal(self._bins[0], thresholds):
            made = np.empty(self._x.shape, dtype=np.int64)
            for column, limits in enumerate(thresholds):
                values = self._x[:, column]
                reached = np.searchsorted(limits, values, side="right")
                made[:, column] = np.where(np.isnan(values), len(limits) + 1, reached)
            self._bins = thresholds, made
        return self._bins[1]

    def _derivatives(self, margins: Floats32, class_weights: tuple[float, ...] | None) -> tuple[Floats, Floats]:
        """First and second derivatives of each row's loss [n, G], in steps; those that xgboost takes."""
        if self._target.objective == "regression":
            apart = (margins[:, :1].astype(np.float64) - self._y[:, None]) / largest_derivative(
                self._target, self._settings, None
            )
            return _steps(np.clip(apart, -1.0, 1.0)).astype(np.float64), np.full_like(apart, float(STEPS))
        labels = self._y.astype(np.int64)
        shares = self._target.probabilities(margins)
        weight = np.asarray(class_weights or (1.0,) * self._target.classes)[labels][:, None]
        weight = weight / largest_derivative(self._target, self._settings, class_weights)
        if self._target.objective == "binary":
            first, second = shares[:, 1:] - self._y[:, None], shares[:, :1] * shares[:, 1:]
        else:
            first, second = shares - np.eye(self._target.classes)[labels], 2 * shares * (1 - shares)
        return _steps(first * weight).astype(np.float64), _steps(second * weight).astype(np.float64)


def summed_loss(margins: Floats32, y: Floats, target: Target, settings: TreeSettings) -> Ints:
    """The sum of the loss of some rows in steps, and how many rows they are [2]; no row has more than 1024.

    A regression's is in units of the squared width of its bounds.
    """
    losses = target.row_losses(margins, y)
    if target.objective == "regression":
        losses = losses / largest_derivative(target, settings, None) ** 2
    counted = np.rint(np.minimum(losses, _LARGEST_LOSS) * LOSS_STEPS).astype(np.int64)
    return np.array([counted.sum(), len(y)], dtype=np.int64)


def _steps(shares: Floats) -> Ints:
    return np.asarray(np.rint(shares * STEPS).astype(np.int64))


def _bounds(settings: TreeSettings) -> tuple[float, float]:
    if settings.target_bounds is None:
        raise SettingError("form 'histogram' needs bounds of a target that is a number, which must not be taken from "
                           "the rows: write target_bounds = [low, high]")  # fmt: skip
    return settings.target_bounds
