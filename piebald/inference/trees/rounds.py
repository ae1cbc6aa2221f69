"""Rounds of boosting over clients, on this machine or at sites: bagging, cyclic training, and trees from sums.

With F the model so far, in a round of bagging each client k grows Newton trees T_k on its rows from F, and the model
becomes F + sum_k w_k T_k, with w_k its share of the training rows, or the same for all: the learning rate is divided
among the clients, so that a round is one step of boosting whose tree is a forest.  In a round of cyclic training one
client grows trees, which count whole.

In a round of trees from sums, the histograms of each level are asked for: sums of derivatives of the loss in each bin
of each column, at each node that may be split.  All answers are whole numbers that are added up, so they can leave
clients under masks, and trees grow as if all rows were in one place.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from piebald.contracts import Split
from piebald.core.errors import SettingError
from piebald.core.moments import Ints
from piebald.core.randomness import select
from piebald.inference.trees.forest import MOST_TREES, Floats32, Forest
from piebald.inference.trees.histograms import LOSS_STEPS, STEPS, SUMS, LevelGrowth, largest_derivative, thresholds_of
from piebald.inference.trees.settings import Target, TargetSums, TreeSettings

MOST_SUMS = 1 << 22  # numbers that a client sends at once: 32 MiB


@dataclass(frozen=True, slots=True)
class Start:
    """The start of boosting, which all clients know before the first round.

    Attributes:
        margins: outputs of the model before the first tree [G].
        class_weights: weight of a row of each class, None where all are 1.
        rows: training rows of each client.
    """

    margins: Floats32
    class_weights: tuple[float, ...] | None
    rows: tuple[int, ...]


class TreeClients(Protocol):
    """Clients that grow trees and score them, here or at their sites; numbers are their places."""

    def sums(self) -> list[TargetSums]:
        """Return sums of each client's training targets."""

    def grow(self, forest: Forest, start: Start, number: int, who: Sequence[int]) -> list[Forest | None]:
        """Return the trees that clients grow in round `number` on top of a forest; None of one that did not answer."""

    def losses(self, forest: Forest, start: Start, split: Split) -> list[tuple[float, int] | None]:
        """Return the sum of the loss over each client's rows, and the number of rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Boosted:
    """A forest after some rounds.

    Attributes:
        start: the start of boosting.
        forest: the trees of all rounds.
        ends: trees after each round, increasing.
        losses: the loss on all clients' validation rows after each round, empty without patience.
    """

    start: Start
    forest: Forest
    ends: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()

    @property
    def best(self) -> int:
        """The number of rounds with the least validation loss; all rounds where it is not known."""
        # of equal losses the first counts: fewer trees
        return len(self.ends) if not self.losses else 1 + int(np.argmin(self.losses))

    def cut(self, rounds: int) -> Boosted:
        """Return the first rounds alone."""
        trees = self.ends[rounds - 1] if rounds else 0
        return Boosted(self.start, self.forest.first(trees), self.ends[:rounds], self.losses)


class Rounds(ABC):
    """Rounds of boosting over clients.

    Args:
        target: the objective.
        settings: of boosting.
        done: called with the state after each round.
    """

    def __init__(
        self, target: Target, settings: TreeSettings, done: Callable[[Boosted], None] = lambda state: None
    ) -> None:
        self.target, self.settings, self.done = target, settings, done

    @abstractmethod
    def started(self) -> Boosted:
        """Return the model before the first round.

        Raises:
            SettingError: there is nothing to predict, or the rounds would make too many trees.
        """

    @abstractmethod
    def grown(self, state: Boosted) -> Forest:
        """Return the forest with the trees of a further round."""

    @abstractmethod
    def loss(self, forest: Forest, start: Start) -> tuple[float, int]:
        """Return the sum of the loss over all clients' validation rows, and the number of rows."""

    def run(self, state: Boosted) -> Boosted:
        """Return the model after all rounds, or the rounds up to the best one, from a state on.

        Raises:
            SettingError: nobody grows a tree, or patience has no validation rows.
        """
        while len(state.ends) < self.settings.rounds and not self._over(state):
            state = self._round(state)
            self.done(state)
        return state.cut(state.best)

    def check_trees(self, growing: int) -> None:
        """Refuse more trees than a forest may have.

        Args:
            growing: how many clients grow trees of their own in a round.

        Raises:
            SettingError: the rounds would make too many.
        """
        # before anything is trained: patience may end earlier, but the largest forest must fit
        trees = self.settings.rounds * self.settings.local_rounds * self.target.groups * growing
        if trees > MOST_TREES:
            raise SettingError(f"rounds would make {trees:,} trees, at most {MOST_TREES:,} are allowed: ask for fewer")

    def start_of(self, sums: Sequence[TargetSums]) -> Boosted:
        """Return the model before the first round, from sums of training targets.

        Raises:
            SettingError: there is nothing to predict.
        """
        if not sum(client.rows for client in sums):
            raise SettingError("there is no training row whose target is known")
        margins, weights = self.target.start(sums, self.settings.balanced)
        start = Start(margins, weights, tuple(client.rows for client in sums))
        return Boosted(start, Forest.empty(self.settings.max_depth))

    def _over(self, state: Boosted) -> bool:
        patience = self.settings.patience
        # without a loss there is no best round to wait from
        return patience is not None and bool(state.losses) and len(state.losses) - state.best >= patience

    def _round(self, state: Boosted) -> Boosted:
        forest = self.grown(state)
        ends = (*state.ends, len(forest))
        if self.settings.patience is None:
            return Boosted(state.start, forest, ends, state.losses)
        total, rows = self.loss(forest, state.start)
        if not rows:
            raise SettingError("patience needs validation rows, and no client has any: give validation = 0.1")
        return Boosted(state.start, forest, ends, (*state.losses, total / rows))


class Boosting(Rounds):
    """Boosting in which each client grows trees on its own rows.

    Args:
        clients: the clients.
        target, settings, done: as of `Rounds`.
    """

    def __init__(
        self, clients: TreeClients, target: Target, settings: TreeSettings,
        done: Callable[[Boosted], None] = lambda state: None,
    ) -> None:  # fmt: skip
        super().__init__(target, settings, done)
        self.clients = clients

    def started(self) -> Boosted:
        """See `Rounds`."""
        sums = self.clients.sums()
        self.check_trees(len(sums) if self.settings.form == "bagging" else 1)
        return self.start_of(sums)

    def grown(self, state: Boosted) -> Forest:
        """See `Rounds`.

        Raises:
            SettingError: nobody grows a tree.
        """
        number, start = len(state.ends), state.start
        # a client without rows would take its turn in cyclic training and add trees of a single leaf
        with_rows = [client for client, rows in enumerate(start.rows) if rows]
        growing = with_rows if self.settings.form == "bagging" else [with_rows[number % len(with_rows)]]
        answers = zip(growing, self.clients.grow(state.forest, start, number, growing), strict=True)
        grown = [(client, trees) for client, trees in answers if trees is not None]
        # in cyclic training a client that does not answer only loses its turn; the round is empty
        if not grown and self.settings.form == "bagging":
            raise SettingError(f"no client has grown a tree in round {number + 1}: see why in the log")
        forest = state.forest
        # shares are of those who answered, so that the leaves of a round always add up to one step
        total = sum(start.rows[client] for client, _ in grown)
        for client, trees in grown:
            share = start.rows[client] / total if self.settings.weights == "examples" else 1 / len(grown)
            forest = forest.joined(trees.weighted(share))
        return forest

    def loss(self, forest: Forest, start: Start) -> tuple[float, int]:
        """See `Rounds`."""
        losses = [loss for loss in self.clients.losses(forest, start, "validation") if loss is not None]
        # exact, so that the order in which clients answer cannot move a tie between rounds
        return math.fsum(total for total, _ in losses), sum(rows for _, rows in losses)


@dataclass(frozen=True, slots=True, eq=False)
class Growing:
    """The state of a round, from which clients make histograms.

    Attributes:
        forest: of the rounds before this one.
        start: the start of boosting.
        number: of the round, from 0.
        grown: this round's trees so far.
        level: the level whose splits are to be found, from 0.
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


class SummedClients(Protocol):
    """Clients that send sums and nothing else, on this machine or at sites.

    Attributes:
        columns: how many inputs they have.
    """

    @property
    def columns(self) -> int: ...

    def targets(self) -> Ints:
        """Return the sum over clients; see `histograms.SummedRows`."""

    def at_most(self, thresholds: Floats32) -> Ints:
        """Return the sum over clients; see `histograms.SummedRows`."""

    def histograms(self, growing: Growing) -> Ints:
        """Return the sum over clients; see `histograms.SummedRows`."""

    def loss(self, forest: Forest, start: Start) -> Ints:
        """Return the loss of all clients' validation rows; see `histograms.summed_loss`."""


class SummedBoosting(Rounds):
    """Boosting by trees from sums over clients.

    Args:
        clients: the clients.
        target, settings, done: as of `Rounds`.
        seed: of the choice of columns.
    """

    def __init__(
        self, clients: SummedClients, target: Target, settings: TreeSettings, seed: int,
        done: Callable[[Boosted], None] = lambda state: None,
    ) -> None:  # fmt: skip
        super().__init__(target, settings, done)
        self.clients, self._seed = clients, seed
        self._thresholds: Floats32 | None = None

    def started(self) -> Boosted:
        """See `Rounds`.

        Raises:
            SettingError: a level may have more sums than a client sends at once.
        """
        self.check_trees(1)
        groups, depth = self.target.groups, self.settings.max_depth
        # the last level that is split has 2^(depth - 1) nodes, the most of all
        most = groups * 2 ** (depth - 1) * self.clients.columns * (self.settings.max_bin + 2) * SUMS
        if most > MOST_SUMS:
            raise SettingError(
                f"trees of depth {depth} from {self.clients.columns:,} columns of {self.settings.max_bin:,} bins take "
                f"up to {most:,} sums of a client at once, at most {MOST_SUMS:,} are allowed: give a smaller max_bin "
                "or max_depth"
            )
        # refuses a regression without bounds before clients are asked
        width = largest_derivative(self.target, self.settings, None)
        sums = self.clients.targets()
        if self.target.objective != "regression":
            # only totals are known, so all clients are one here
            return self.start_of([TargetSums(int(sums.sum()), tuple(sums.astype(float).tolist()))])
        rows, above = map(int, sums)
        low = self.settings.target_bounds[0] if self.settings.target_bounds else 0.0
        # targets were counted above the low bound in steps of the bounds' width: this turns them back
        return self.start_of([TargetSums(rows, (low * rows + width * above / STEPS,))])

    def grown(self, state: Boosted) -> Forest:
        """See `Rounds`."""
        settings, columns, number = self.settings, self.clients.columns, len(state.ends)
        # rows do not change, so neither do their quantiles: they are asked for once
        if self._thresholds is None:
            self._thresholds = thresholds_of(self.clients.at_most, columns, settings.max_bin)
        allowed = np.zeros(columns, dtype=np.bool_)
        # rounded down, but a tree without a column could not split
        drawn = max(1, int(settings.colsample_bytree * columns))
        # the key is the seed and the round, so that a resumed run draws the same columns
        allowed[select(range(columns), drawn, self._seed, "columns", number)] = True
        # sums count in steps of the largest derivative, by which growth turns them back
        largest = largest_derivative(self.target, settings, state.start.class_weights)
        # the second derivative of a squared error is 1 whatever the bounds are
        second = 1.0 if self.target.objective == "regression" else largest
        growth = LevelGrowth(settings, self._thresholds, allowed, largest, second)
        thresholds = self._thresholds

        def ask(grown: Forest, level: int, nodes: int) -> Ints:
            return self.clients.histograms(Growing(state.forest, state.start, number, grown, level, thresholds, nodes))

        return state.forest.joined(growth.grow(ask, self.target.groups))

    def loss(self, forest: Forest, start: Start) -> tuple[float, int]:
        """See `Rounds`."""
        total, rows = self.clients.loss(forest, start)
        # losses of a regression are counted in squared widths of the bounds
        unit = largest_derivative(self.target, self.settings, None) ** 2 if not self.target.classes else 1.0
        return float(total) / LOSS_STEPS * unit, int(rows)
