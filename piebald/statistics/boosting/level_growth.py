"""Trees that are grown level by level from sums of derivatives (Chen and Guestrin 2016, sections 2.2 and 3.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from piebald.core.moments import Floats, Ints
from piebald.statistics.boosting.forest import ABSENT, LEAF, Floats32, Forest, nodes
from piebald.statistics.boosting.forest import PARTS as TOLD
from piebald.statistics.boosting.settings import TreeSettings
from piebald.statistics.boosting.summed_rows import STEPS, open_nodes
from piebald.statistics.boosting.thresholds import NOWHERE

_LEAST_GAIN = 1e-6  # of a split, as in xgboost


@dataclass(frozen=True, slots=True)
class LevelGrowth:
    """How trees are grown from histograms.

    Attributes:
        settings: of boosting.
        thresholds: of each column [d, t].
        columns: which of them splits may use [d].
        largest: the first derivative that is `STEPS` steps.
        largest_second: likewise the second one.
    """

    settings: TreeSettings
    thresholds: Floats32
    columns: np.ndarray[tuple[int], np.dtype[np.bool_]]
    largest: float
    largest_second: float

    def grow(self, ask: Callable[[Forest, int, int], Ints], groups: int) -> Forest:
        """One tree for each group.

        Args:
            ask: the histograms [k, d, t + 2, 3] of a level's k open nodes, of trees as far as they are grown.
            groups: how many trees.
        """
        table = np.zeros((groups, nodes(self.settings.max_depth), TOLD), dtype=np.float32)
        table[:, 1:, 0], table[:, 0, 0] = ABSENT, LEAF
        forest = Forest(table, self.settings.max_depth)
        for level in range(self.settings.max_depth):
            places = open_nodes(forest, level)
            if not places:
                break
            for (tree, place), told in zip(places, ask(forest, level, len(places)), strict=True):
                self._split(table[tree], place, self._sums(told))
        return forest

    def _sums(self, told: Ints) -> Floats:
        """Histograms in units of the loss and in rows."""
        return np.asarray(told * np.array([self.largest / STEPS, self.largest_second / STEPS, 1.0]))

    def _split(self, table: Floats32, place: int, sums: Floats) -> None:
        """Split a node in the best way, if there is one; `sums` are its histograms [d, t + 2, 3]."""
        total = sums[0].sum(0)
        if not place:
            table[0, 1], table[0, 3] = self._leaf(total), total[2]
        gaps = sums[:, -1]
        below = sums[:, :-2].cumsum(1)  # what is left of each threshold
        left = np.stack([below, below + gaps[:, None]], 1)  # [d, 2, t, 3]: with the gaps on the right, on the left
        gain = self._gain(left) + self._gain(total - left) - self._gain(total)
        allowed = self._allowed(left) & self._allowed(total - left)
        allowed &= (self.columns[:, None] & (self.thresholds < NOWHERE))[:, None]
        allowed[:, 1] &= gaps[:, None, 2] > 0  # without gaps both are the same split
        offered = np.where(allowed, gain, -np.inf)
        offered[:, 1] = offered[:, 1, ::-1]  # of equal splits the first counts, and xgboost looks at these backwards
        column, side, threshold = map(int, np.unravel_index(np.argmax(offered), gain.shape))
        threshold = gain.shape[2] - 1 - threshold if side else threshold
        best = column, side, threshold
        if not allowed[best] or gain[best] <= max(_LEAST_GAIN, self.settings.gamma):
            return
        table[place, :3] = 2 * column + side, self.thresholds[column, threshold], gain[best]
        for child, one in ((2 * place + 1, left[best]), (2 * place + 2, total - left[best])):
            table[child] = LEAF, self._leaf(one), 0.0, one[2]

    def _allowed(self, sums: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Whether sides have enough rows, and enough of the second derivative."""
        enough: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = sums[..., 2] >= self.settings.least_rows
        return enough & (sums[..., 1] >= self.settings.min_child_weight)

    def _weight(self, sums: Floats) -> Floats:
        """The best leaf for some sums (equation 5, with an L1 penalty and a largest weight besides)."""
        first, most = sums[..., 0], self.settings.max_delta_step
        shrunk = np.sign(first) * np.maximum(np.abs(first) - self.settings.reg_alpha, 0.0)
        weight = -shrunk / np.maximum(sums[..., 1] + self.settings.reg_lambda, 1e-16)
        return np.clip(weight, -most, most) if most else np.asarray(weight)

    def _gain(self, sums: Floats) -> Floats:
        """By how much twice the loss falls with the best leaf (equation 6)."""
        weight = self._weight(sums)
        curved = (sums[..., 1] + self.settings.reg_lambda) * weight**2
        return np.asarray(-(2 * sums[..., 0] * weight + curved + 2 * self.settings.reg_alpha * np.abs(weight)))

    def _leaf(self, sums: Floats) -> float:
        return float(self.settings.learning_rate * self._weight(sums))
