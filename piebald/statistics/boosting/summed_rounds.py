"""Rounds of boosting in which trees are grown from sums over all clients, as if their rows were in one place.

A round asks for the histograms of each level: sums of derivatives of the loss in each bin of each column, at each node
that may be split.  All answers are whole numbers that are added up, so they can leave clients under masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from piebald.core.errors import SettingError
from piebald.core.moments import Ints
from piebald.core.randomness import select
from piebald.statistics.boosting.forest import Floats32, Forest
from piebald.statistics.boosting.level_growth import LevelGrowth
from piebald.statistics.boosting.rounds import Boosted, Rounds, Start, nothing
from piebald.statistics.boosting.settings import TreeSettings
from piebald.statistics.boosting.summed_rows import LOSS_STEPS, PARTS, STEPS, largest_derivative
from piebald.statistics.boosting.targets import Target, TargetSums
from piebald.statistics.boosting.thresholds import thresholds_of

MOST_SUMS = 1 << 22  # numbers that a client tells at once: 32 MiB


@dataclass(frozen=True, slots=True, eq=False)
class Growing:
    """What clients must know to tell histograms.

    Attributes:
        forest: of the rounds before this one.
        start: where boosting starts.
        number: of the round, from 0.
        grown: this round's trees so far.
        level: whose splits are to be found, from 0.
        thresholds: of each column [d, t].
        nodes: how many nodes may be split.
    """

    forest: Forest
    start: Start
    number: int
    grown: Forest
    level: int
    thresholds: Floats32
    nodes: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the histograms."""
        return self.nodes, len(self.thresholds), self.thresholds.shape[1] + 2, PARTS


class SummedClients(Protocol):
    """Clients whose sums are asked for, here or at their sites; nothing else of them is told.

    Attributes:
        columns: how many inputs they have.
    """

    @property
    def columns(self) -> int: ...

    def targets(self) -> Ints:
        """See `summed_rows.SummedRows`; the sum over clients."""

    def at_most(self, thresholds: Floats32) -> Ints:
        """Likewise."""

    def histograms(self, growing: Growing) -> Ints:
        """Likewise."""

    def loss(self, forest: Forest, start: Start) -> Ints:
        """The loss of all clients' validation rows, as of `summed_rows.summed_loss`."""


class SummedBoosting(Rounds):
    """Boosting by trees from sums over clients.

    Args:
        clients: who tells sums.
        target, settings, done: as of `Rounds`.
        seed: of the choice of columns.
    """

    def __init__(
        self, clients: SummedClients, target: Target, settings: TreeSettings, seed: int,
        done: Callable[[Boosted], None] = nothing,
    ) -> None:  # fmt: skip
        super().__init__(target, settings, done)
        self.clients, self._seed = clients, seed
        self._thresholds: Floats32 | None = None

    def started(self) -> Boosted:
        """See `Rounds`.

        Raises:
            SettingError: besides, a level may have more sums than a client tells at once.
        """
        self.check_trees(1)
        groups, depth = self.target.groups, self.settings.max_depth
        most = groups * 2 ** (depth - 1) * self.clients.columns * (self.settings.max_bin + 2) * PARTS
        if most > MOST_SUMS:
            raise SettingError(
                f"trees of depth {depth} from {self.clients.columns:,} columns of {self.settings.max_bin:,} bins take "
                f"up to {most:,} sums of a client at once, at most {MOST_SUMS:,} are allowed: give a smaller max_bin "
                "or max_depth"
            )
        width = largest_derivative(self.target, self.settings, None)  # of a regression, that of the bounds
        told = self.clients.targets()
        if self.target.objective != "regression":
            return self.start_of([TargetSums(int(told.sum()), tuple(told.astype(float).tolist()))])
        rows, above = map(int, told)
        low = self.settings.target_bounds[0] if self.settings.target_bounds else 0.0
        return self.start_of([TargetSums(rows, (low * rows + width * above / STEPS,))])

    def grown(self, state: Boosted) -> Forest:
        """See `Rounds`."""
        settings, columns, number = self.settings, self.clients.columns, len(state.ends)
        if self._thresholds is None:
            self._thresholds = thresholds_of(self.clients.at_most, columns, settings.max_bin)
        allowed = np.zeros(columns, dtype=np.bool_)
        drawn = max(1, int(settings.colsample_bytree * columns))
        allowed[select(range(columns), drawn, self._seed, "columns", number)] = True
        largest = largest_derivative(self.target, settings, state.start.class_weights)
        second = 1.0 if self.target.objective == "regression" else largest
        growth = LevelGrowth(settings, self._thresholds, allowed, largest, second)
        thresholds = self._thresholds

        def ask(grown: Forest, level: int, nodes: int) -> Ints:
            return self.clients.histograms(Growing(state.forest, state.start, number, grown, level, thresholds, nodes))

        return state.forest.joined(growth.grow(ask, self.target.groups))

    def loss(self, forest: Forest, start: Start) -> tuple[float, int]:
        """See `Rounds`."""
        told = self.clients.loss(forest, start)
        unit = largest_derivative(self.target, self.settings, None) ** 2 if not self.target.classes else 1.0
        return float(told[0]) / LOSS_STEPS * unit, int(told[1])
