"""Rounds of boosting over clients, on this machine or at sites: bagging, cyclic training, and trees from sums.

With F the model so far, in a round of bagging each client k grows Newton trees T_k on its rows from F, and the model
becomes F + sum_k w_k T_k, with w_k its share of the training rows, or the same for all: the learning rate is divided
among the clients, so that a round is one step of boosting whose tree is a forest.  In a round of cyclic training one
client grows trees, which count whole.

In a round of trees from sums, the histograms of each level are asked for: sums of derivatives of the loss in each bin
of each column, at each node that may be split.  All answers are whole numbers that are added up, so they can leave
clients under masks, and trees grow as if all rows were in one place.

Thresholds of each column are quantiles of the pooled numbers, from counts alone: the order of all float32 numbers is
divided by 16 again and again, and the clients count how many of their numbers are at most each limit.  After 9
questions the order statistics are known to the bit; no bounds of a column are needed.  Derivatives of the loss count in
steps of 2^-30 of the largest one that is possible.  Sums of whole numbers have no rounding errors, so trees are the
same to the bit whether sums leave under masks or not, and whatever the order of clients.  From the sums of a level's
nodes in each bin, the best splits follow (Chen and Guestrin 2016, sections 2.2 and 3.4).
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
from piebald.core.moments import Floats, Ints, counts_at_most, keys_of, number32_of, order_statistics
from piebald.core.randomness import generator, select
from piebald.inference.trees.forest import (
    ABSENT,
    LEAF,
    MOST_TREES,
    PARTS,
    Floats32,
    Forest,
    Target,
    TargetSums,
    TreeSettings,
    nodes,
)

STEPS = 1 << 30  # steps of the largest derivative
SUMS = 3  # numbers of a bin: sums of first and of second derivatives, rows
LOSS_STEPS = 1 << 20  # steps of a loss of 1
NOWHERE = np.finfo(np.float32).max  # fills the list of a column with fewer thresholds than others
_LARGEST_LOSS = 1 << 10  # of a row: sums over 2^31 rows fit 64 bits
_MOST_ROWS = 1 << 23  # of a client: float64, in which numpy counts, has their sums exactly
_LEAST_GAIN = 1e-6  # of a split, as in xgboost
_PARTS = 16  # of the numbers that are left; more would be fewer questions of more numbers


def thresholds_of(count: Callable[[Floats32], Ints], columns: int, most: int) -> Floats32:
    """Return quantiles of each column, its least and its largest number among them.

    Args:
        count: counts the numbers of all clients in each column that are at most some thresholds [d, t].
        columns: d.
        most: thresholds of a column, at most.  Where no more rows than that have a number, each number is one; else a
            number that few rows have may be none, also where there are fewer different ones.

    Returns:
        Different thresholds [d, t] in increasing order, and then `NOWHERE`.
    """
    # no number is above the largest float32, so this counts all that are no gaps
    present = count(np.full((columns, 1), NOWHERE, dtype=np.float32))[:, 0]
    # whole-number division, so that all sites and versions of numpy agree on the ranks
    ranks = (np.arange(most) * np.maximum(present - 1, 0)[:, None]) // max(most - 1, 1)
    low, high = keys_of(np.array([-NOWHERE, NOWHERE])).tolist()
    # a search over the 2^32 keys of float32: it ends at numbers that occur and needs no bounds
    places = order_statistics(lambda keys: count(number32_of(keys)), ranks, low - 1, high, _PARTS)
    # adding 0 makes -0 and 0 one threshold
    distinct = [
        np.unique(number32_of(keys) + np.float32(0)) if count else keys[:0]
        for keys, count in zip(places, present, strict=True)
    ]
    thresholds = np.full((columns, max(1, *map(len, distinct))), NOWHERE, dtype=np.float32)
    for column, numbers in enumerate(distinct):
        thresholds[column, : len(numbers)] = numbers
    return thresholds


def largest_derivative(target: Target, settings: TreeSettings, class_weights: tuple[float, ...] | None) -> float:
    """Return the largest absolute first derivative of a row's loss.

    Raises:
        SettingError: a regression has no bounds.
    """
    if target.objective != "regression":
        # a probability less 0 or 1 is at most 1 in absolute value, times the weight of the row's class
        return max(class_weights or (1.0,))
    low, high = _bounds(settings)
    return high - low


def open_nodes(grown: Forest, level: int) -> list[tuple[int, int]]:
    """Return the nodes (tree, place) of a level where trees end so far, whose splits are to be found."""
    places = range(2**level - 1, 2 ** (level + 1) - 1)
    # in a fixed order, by which the server reads the histograms that sites send without names
    return [(tree, place) for tree in range(len(grown)) for place in places if grown.table[tree, place, 0] == LEAF]


class SummedRows:
    """The rows of one client, of which it sends sums.

    Args:
        x: inputs [n, d] of the rows to train on; NaN is a gap.
        y: their targets [n], a class as its number.
        target: the objective.
        settings: of boosting.
        weights: how much each row counts [n], None where all count alike.

    Raises:
        SettingError: there are too many rows, or a regression has no bounds, or weights have none.
    """

    def __init__(
        self, x: Floats32, y: Floats, target: Target, settings: TreeSettings, weights: Floats | None = None
    ) -> None:
        if len(y) > _MOST_ROWS:
            raise SettingError(f"sums are of clients of at most {_MOST_ROWS:,} training rows, got {len(y):,}")
        self._x, self._target, self._settings = x, target, settings
        # an outlier adds no more than the bounds allow, on which steps and the room for their sums count
        self._y = np.clip(y, *_bounds(settings)) if target.objective == "regression" else y
        self._bins: tuple[Floats32, Ints] | None = None
        self._shares = shares_of_weights(weights, len(y), settings)[:, None]

    def targets(self) -> Ints:
        """Return the rows of each class [C]; of a regression, rows and the sum of targets above the low bound [2]."""
        if self._target.objective != "regression":
            return np.bincount(self._y.astype(np.int64), minlength=self._target.classes).astype(np.int64)
        low, high = _bounds(self._settings)
        return np.array([len(self._y), _steps((self._y - low) / (high - low)).sum()], dtype=np.int64)

    def at_most(self, thresholds: Floats32) -> Ints:
        """Count the numbers of each column that are at most its thresholds [d, t]."""
        return counts_at_most([np.sort(column[~np.isnan(column)]) for column in self._x.T], thresholds)

    def histograms(
        self, margins: Floats32, grown: Forest, level: int, thresholds: Floats32,
        class_weights: tuple[float, ...] | None, *words: int | str,
    ) -> Ints:  # fmt: skip
        """Return sums of derivatives and rows in each bin of each column, at each open node of a level.

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
        # drawn anew for each level from the same key, so that all levels of a tree see the same rows
        chosen = generator(*words).random(len(self._y)) < self._settings.subsample
        sums = np.zeros((len(open_nodes(grown, level)), len(thresholds), width, SUMS), dtype=np.int64)
        number = 0
        for tree in range(len(grown)):
            places = [place for number_of_tree, place in open_nodes(grown, level) if number_of_tree == tree]
            # -1 for nodes that are not open: rows that have ended in a leaf are in no histogram
            order = np.full(grown.table.shape[1], -1, dtype=np.int64)
            order[places] = np.arange(len(places))
            node = order[grown.leaves(self._x, tree)]
            inside = chosen & (node >= 0)
            weights = (first[inside, tree], second[inside, tree], None)  # None counts rows
            for column in range(len(thresholds)):
                # node and bin in one number, so that one `bincount` sums all nodes of a column
                codes = node[inside] * width + bins[inside, column]
                for part, weight in enumerate(weights):
                    # float64 sums whole numbers exactly here, as `_MOST_ROWS` rows of `STEPS` stay within 2^53
                    counted = np.bincount(codes, weight, len(places) * width).astype(np.int64)
                    sums[number : number + len(places), column, :, part] = counted.reshape(len(places), width)
            number += len(places)
        return sums

    def _binned(self, thresholds: Floats32) -> Ints:
        """Return the bin of each number [n, d]."""
        # thresholds are the same in all rounds; only a new search makes other bins
        if self._bins is None or not np.array_equal(self._bins[0], thresholds):
            bins = np.empty(self._x.shape, dtype=np.int64)
            for column, limits in enumerate(thresholds):
                values = self._x[:, column]
                # side "right" counts thresholds that a number reaches, so one at a threshold goes to the right of it
                reached = np.searchsorted(limits, values, side="right")
                bins[:, column] = np.where(np.isnan(values), len(limits) + 1, reached)
            self._bins = thresholds, bins
        return self._bins[1]

    def _derivatives(self, margins: Floats32, class_weights: tuple[float, ...] | None) -> tuple[Floats, Floats]:
        """Return the first and second derivatives of each row's loss [n, G], in steps, as xgboost takes them."""
        if self._target.objective == "regression":
            errors = margins[:, :1].astype(np.float64) - self._y[:, None]
            errors = errors / largest_derivative(self._target, self._settings, None)
            # margins may lie outside the bounds, and a derivative beyond the largest would break the steps
            first, second = np.clip(errors, -1.0, 1.0) * self._shares, np.ones_like(errors) * self._shares
            return _steps(first).astype(np.float64), _steps(second).astype(np.float64)
        labels = self._y.astype(np.int64)
        shares = self._target.probabilities(margins)
        weight = np.asarray(class_weights or (1.0,) * self._target.classes)[labels][:, None]
        weight = self._shares * weight / largest_derivative(self._target, self._settings, class_weights)
        if self._target.objective == "binary":
            first, second = shares[:, 1:] - self._y[:, None], shares[:, :1] * shares[:, 1:]
        else:
            # 2 p (1 - p) as xgboost takes it for softmax: a diagonal in place of the whole Hessian
            first, second = shares - np.eye(self._target.classes)[labels], 2 * shares * (1 - shares)
        return _steps(first * weight).astype(np.float64), _steps(second * weight).astype(np.float64)


def shares_of_weights(weights: Floats | None, rows: int, settings: TreeSettings) -> Floats:
    """Return the weights of rows [n] as shares of the largest one that counts, 1 where all count alike.

    Raises:
        SettingError: nobody says which weight that is.
    """
    most = settings.largest_weight
    if weights is not None and most is None:
        raise SettingError("form 'histogram' needs the largest weight of a row, which must not be taken from the rows: "
                           "write largest_weight = 10")  # fmt: skip
    return np.minimum((np.ones(rows) if weights is None else weights) / (most or 1.0), 1.0)


def summed_loss(
    margins: Floats32, y: Floats, target: Target, settings: TreeSettings, weights: Floats | None = None
) -> Ints:
    """Return the sum of the loss of some rows in steps, and the number of rows [2]; no row counts more than 1024.

    The loss of a regression is in units of the squared width of its bounds, and where rows have weights, it is in
    those of the largest one.
    """
    losses = target.row_losses(margins, y) * shares_of_weights(weights, len(y), settings)
    if target.objective == "regression":
        losses = losses / largest_derivative(target, settings, None) ** 2
    # a hopeless row has a loss without limit; capped, the sum of 2^31 rows fits 64 bits
    counted = np.rint(np.minimum(losses, _LARGEST_LOSS) * LOSS_STEPS).astype(np.int64)
    return np.array([counted.sum(), len(y)], dtype=np.int64)


def _steps(shares: Floats) -> Ints:
    return np.asarray(np.rint(shares * STEPS).astype(np.int64))


def _bounds(settings: TreeSettings) -> tuple[float, float]:
    if settings.target_bounds is None:
        raise SettingError("form 'histogram' needs bounds of a target that is a number, which must not be taken from "
                           "the rows: write target_bounds = [low, high]")  # fmt: skip
    return settings.target_bounds


@dataclass(frozen=True, slots=True)
class LevelGrowth:
    """The growth of trees from histograms.

    Attributes:
        settings: of boosting.
        thresholds: of each column [d, t].
        columns: whether splits may use each of them [d].
        largest: the first derivative that is `STEPS` steps.
        largest_second: likewise the second one.
    """

    settings: TreeSettings
    thresholds: Floats32
    columns: np.ndarray[tuple[int], np.dtype[np.bool_]]
    largest: float
    largest_second: float

    def grow(self, ask: Callable[[Forest, int, int], Ints], groups: int) -> Forest:
        """Return one tree for each group.

        Args:
            ask: returns the histograms [k, d, t + 2, 3] of a level's k open nodes, of trees as far as they are grown.
            groups: how many trees.
        """
        table = np.zeros((groups, nodes(self.settings.max_depth), PARTS), dtype=np.float32)
        # each tree begins as one leaf, the root, which is open on level 0
        table[:, 1:, 0], table[:, 0, 0] = ABSENT, LEAF
        forest = Forest(table, self.settings.max_depth)
        for level in range(self.settings.max_depth):
            places = open_nodes(forest, level)
            if not places:
                break
            for (tree, place), sums in zip(places, ask(forest, level, len(places)), strict=True):
                self._split(table[tree], place, self._in_units(sums))
        return forest

    def _in_units(self, sums: Ints) -> Floats:
        """Return histograms in units of the loss and in rows."""
        return np.asarray(sums * np.array([self.largest / STEPS, self.largest_second / STEPS, 1.0]))

    def _split(self, table: Floats32, place: int, sums: Floats) -> None:
        """Split a node in the best way, if there is one; `sums` are its histograms [d, t + 2, 3]."""
        # each row is in one bin of every column, gaps included, so any column has the sums of the node
        total = sums[0].sum(0)
        if not place:
            table[0, 1], table[0, 3] = self._leaf(total), total[2]
        gaps = sums[:, -1]
        below = sums[:, :-2].cumsum(1)  # the sums on the left of each threshold
        left_sums = np.stack([below, below + gaps[:, None]], 1)  # [d, 2, t, 3]: gaps go to the right, to the left
        gain = self._gain(left_sums) + self._gain(total - left_sums) - self._gain(total)
        allowed = self._allowed(left_sums) & self._allowed(total - left_sums)
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
        for child, side_sums in ((2 * place + 1, left_sums[best]), (2 * place + 2, total - left_sums[best])):
            table[child] = LEAF, self._leaf(side_sums), 0.0, side_sums[2]

    def _allowed(self, sums: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Return whether sides have enough rows, and enough of the second derivative."""
        enough: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = sums[..., 2] >= self.settings.least_rows
        return enough & (sums[..., 1] >= self.settings.min_child_weight)

    def _weight(self, sums: Floats) -> Floats:
        """Return the best leaf for some sums (equation 5, with an L1 penalty and a largest weight)."""
        first, most = sums[..., 0], self.settings.max_delta_step
        shrunk = np.sign(first) * np.maximum(np.abs(first) - self.settings.reg_alpha, 0.0)
        # without an L2 penalty a node may have no second derivative at all, such as one of certain rows
        weight = -shrunk / np.maximum(sums[..., 1] + self.settings.reg_lambda, 1e-16)
        return np.clip(weight, -most, most) if most else np.asarray(weight)

    def _gain(self, sums: Floats) -> Floats:
        """Return the decrease of twice the loss with the best leaf (equation 6)."""
        weight = self._weight(sums)
        curved = (sums[..., 1] + self.settings.reg_lambda) * weight**2
        return np.asarray(-(2 * sums[..., 0] * weight + curved + 2 * self.settings.reg_alpha * np.abs(weight)))

    def _leaf(self, sums: Floats) -> float:
        return float(self.settings.learning_rate * self._weight(sums))


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
        most = settings.largest_weight or 1.0
        largest = most * largest_derivative(self.target, settings, state.start.class_weights)
        # the second derivative of a squared error is 1 whatever the bounds are
        second = most if self.target.objective == "regression" else largest
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
        return float(total) / LOSS_STEPS * unit * (self.settings.largest_weight or 1.0), int(rows)
