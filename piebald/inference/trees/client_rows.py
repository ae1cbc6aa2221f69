"""The rows of one client, wherever it is: trees that it grows on them, margins, and a model that it boosts by itself.

xgboost gets this client's rows and a start for each of them, and no tree of anybody else: trees that came over a
network are added up by `Forest.add_to`, so xgboost's reader of models never sees them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piebald.contracts import Split
from piebald.core.errors import SettingError, import_extra
from piebald.core.moments import Floats
from piebald.core.randomness import key
from piebald.inference.trees.encoding import TreeRows
from piebald.inference.trees.forest import (
    ABSENT,
    LEAF,
    MOST_ROWS,
    PARTS,
    Floats32,
    Forest,
    Objective,
    Target,
    TargetSums,
    TreeSettings,
    nodes,
)
from piebald.inference.trees.rounds import Boosted, Boosting, Start, SummedRows


class SplitRows:
    """The rows of one split of a client, and what is computed of them in each round.

    Args:
        x: inputs [n, d]; NaN is a gap.
        y: targets [n], a class as its number.
        target: the objective.
        settings: of boosting.
        weights: how much each row counts [n], None where all count alike.
    """

    def __init__(
        self, x: Floats32, y: Floats, target: Target, settings: TreeSettings, weights: Floats | None = None
    ) -> None:
        self.x, self.y, self._target, self._settings, self.weights = x, y, target, settings, weights
        self._grower: tuple[tuple[float, ...] | None, Grower] | None = None
        # the start and the trees that these are the margins of
        self._margins: tuple[Floats32, Floats32, Floats32] | None = None

    def __len__(self) -> int:
        return len(self.y)

    @cached_property
    def summed(self) -> SummedRows:
        """The same rows, for sums; bins of rows are kept from round to round."""
        return SummedRows(self.x, self.y, self._target, self._settings, self.weights)

    def grow(self, forest: Forest, start: Start, *words: int | str) -> Forest:
        """Return trees that lead on from a forest; `words` are those of the random key."""
        # a grower keeps rows as xgboost's matrix, so that they are converted once and not in each round
        if self._grower is None or self._grower[0] != start.class_weights:
            grower = Grower(self.x, self.y, self._target, self._settings, start.class_weights, self.weights)
            self._grower = start.class_weights, grower
        # a copy, since a grower adds its trees to the margins
        return self._grower[1].grow(self.margins(forest, start).copy(), *words)

    def margins(self, forest: Forest, start: Start) -> Floats32:
        """Return margins [n, G] of a forest, from those of its first trees if they are known."""
        known, sent = self._margins, forest.sent
        same_start = known is not None and np.array_equal(known[0], start.margins)
        if known is not None and same_start and np.array_equal(known[1], sent[: len(known[1])]):
            margins = known[2]
            # only the trees since the last call: all of them each round would cost the square of the rounds
            Forest(forest.table[len(known[1]) :], forest.depth).add_to(margins, self.x)
        else:
            margins = margins_of(self.x, forest, start)
        self._margins = start.margins, sent, margins
        return margins

    def losses(self, forest: Forest, start: Start) -> Floats:
        """Return the loss of each row [n], by its weight over the mean weight."""
        losses = self._target.row_losses(self.margins(forest, start), self.y)
        return losses if self.weights is None else losses * self.weights / self.weights.mean()

    def scores(self, boosted: Boosted) -> dict[str, float]:
        """Return the scores of a model on these rows."""
        return self._target.scores(self.margins(boosted.forest, boosted.start), self.y, self.weights)


def split_rows(rows: TreeRows, split: Split, target: Target, settings: TreeSettings) -> SplitRows:
    """Return the rows of a client's split."""
    return SplitRows(rows.x[split], rows.y[split], target, settings, rows.weights.get(split))


def margins_of(x: Floats32, forest: Forest, start: Start) -> Floats32:
    """Return the margins [n, G] of a forest."""
    margins = np.tile(start.margins, (len(x), 1)).astype(np.float32)
    forest.add_to(margins, x)
    return margins


class _Lone:
    """A client that boosts by itself (`rounds.TreeClients`)."""

    def __init__(self, train: SplitRows, validation: SplitRows, target: Target, *words: int | str) -> None:
        self._train, self._validation, self._target, self._words = train, validation, target, words

    def sums(self) -> list[TargetSums]:
        """See `rounds.TreeClients`."""
        return [self._target.sums(self._train.y)]

    def grow(self, forest: Forest, start: Start, number: int, who: Sequence[int]) -> list[Forest | None]:
        """See `rounds.TreeClients`."""
        return [self._train.grow(forest, start, *self._words, number)]

    def losses(self, forest: Forest, start: Start, split: Split) -> list[tuple[float, int] | None]:
        """See `rounds.TreeClients`."""
        return [(float(self._validation.losses(forest, start).sum()), len(self._validation))]


def alone(rows: TreeRows, target: Target, settings: TreeSettings, seed: int) -> Boosted | None:
    """Return the model that a client boosts by itself; None where its targets are all the same.

    Under all forms a single client does the same: usual boosting, by xgboost.  A client without validation rows has no
    patience.
    """
    if not len(rows.y["train"]):
        return None
    # of one client bagging is usual boosting, and settings of sums have no meaning for it
    plain = (
        {"form": "bagging", "secure": False, "target_bounds": None, "largest_weight": None}
        if settings.form == "histogram"
        else {}
    )
    settings = settings.model_copy(update=plain if len(rows.y["validation"]) else {**plain, "patience": None})
    if target.objective != "regression" and len(np.unique(rows.y["train"])) < 2:
        return None
    train, validation = (split_rows(rows, split, target, settings) for split in ("train", "validation"))
    boosting = Boosting(_Lone(train, validation, target, seed, "trees", 0), target, settings)
    return boosting.run(boosting.started())


OBJECTIVES: dict[Objective, str] = {
    "binary": "binary:logistic", "multiclass": "multi:softprob", "regression": "reg:squarederror",
}  # fmt: skip


# settings that xgboost does not have
_NOT_XGBOOST = {"form", "secure", "target_bounds", "largest_weight", "rounds", "local_rounds", "weights", "patience",
                "balanced", "least_rows", "missing"}  # fmt: skip


def xgboost() -> Any:
    """Return the package xgboost.

    Raises:
        SettingError: it is not installed.
    """
    return import_extra("xgboost", "trees", "boosted trees need xgboost")


class Grower:
    """The training rows of one client, on which it grows trees.

    Args:
        x: inputs [n, d]; NaN is a gap.
        y: targets [n], a class as its number.
        target: the objective.
        settings: of boosting.
        class_weights: weight of a row of each class, None where all are 1.
        row_weights: weight of each row [n] besides, None where all are 1.

    Raises:
        SettingError: there are more rows than a tree can count.
    """

    def __init__(
        self, x: Floats32, y: Floats, target: Target, settings: TreeSettings, class_weights: tuple[float, ...] | None,
        row_weights: Floats | None = None,
    ) -> None:  # fmt: skip
        # counts of rows travel as float32, which has whole numbers up to 2^24
        if len(y) > MOST_ROWS:
            raise SettingError(f"trees are for clients of at most {MOST_ROWS:,} training rows, got {len(y):,}")
        self.x, self._settings, self._target = x, settings, target
        self._rows: Any = None
        self._parameters = settings.model_dump(exclude=_NOT_XGBOOST) | {
            # one thread: clients grow trees side by side, each in a thread of the pool
            "objective": OBJECTIVES[target.objective], "tree_method": "hist", "nthread": 1, "verbosity": 0
        }  # fmt: skip
        # without a score to begin with, xgboost would estimate one, and each row has a start of its own
        self._parameters |= {"num_class": target.classes} if target.groups > 1 else {"base_score": 0.5}
        if len(y):
            weights = row_weights
            if class_weights is not None:
                weights = np.asarray(class_weights)[y.astype(np.int64)] * (1.0 if row_weights is None else row_weights)
            self._rows = xgboost().DMatrix(x, label=y, weight=weights, nthread=1)

    def grow(self, margins: Floats32, *words: int | str) -> Forest:
        """Return trees that lead on from margins [n, G], which are changed; `words` are those of the random key."""
        depth, groups = self._settings.max_depth, self._target.groups
        grown = Forest.empty(depth)
        for step in range(self._settings.local_rounds):
            if self._rows is None:
                trees = Forest(np.stack([_single(depth)] * groups), depth)
            else:
                trees = self._trees(margins, key(*words, step))
                trees.add_to(margins, self.x)
            grown = grown.joined(trees)
        return grown

    def _trees(self, margins: Floats32, seed: int) -> Forest:
        engine, groups, depth = xgboost(), self._target.groups, self._settings.max_depth
        # the forest so far, so that xgboost grows the next tree and knows none of the earlier ones
        self._rows.set_base_margin(margins if groups > 1 else margins[:, 0])
        # xgboost takes seeds of 31 bits; one round, since each step starts from new margins
        booster = engine.train({**self._parameters, "seed": seed % 2**31}, self._rows, 1)
        model = json.loads(bytes(booster.save_raw("json")))["learner"]["gradient_booster"]["model"]
        rate = self._settings.learning_rate
        heaps = [_heap(tree, depth, rate) for tree in model["trees"]]
        table = np.stack([heap for heap, _ in heaps])
        for tree in range(groups):
            # rows are counted here: xgboost has sums of second derivatives, and these are no counts
            ends = Forest(table[:, :, :2], depth).leaves(self.x, tree)
            table[tree, :, 3] = _counted(ends, depth)
            _take_back(table[tree], heaps[tree][1], self._settings.least_rows)
        return Forest(table, depth)


def _single(depth: int) -> Floats32:
    """Return the tree of a client without rows: a leaf that adds nothing."""
    table = np.zeros((nodes(depth), PARTS), dtype=np.float32)
    table[1:, 0], table[0, 0] = ABSENT, LEAF
    return table


def _places(tree: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the nodes of a tree of xgboost with their places in a heap."""
    places, queue = [], [(0, 0)]
    while queue:
        node, place = queue.pop()
        places.append((node, place))
        if tree["left_children"][node] >= 0:
            queue += [(tree["left_children"][node], 2 * place + 1), (tree["right_children"][node], 2 * place + 2)]
    return places


def _heap(tree: dict[str, Any], depth: int, rate: float) -> tuple[Floats32, Floats32]:
    """Return a tree of xgboost as a table, and the weight [nodes] that each node would have as a leaf."""
    table, weights = _single(depth), np.zeros(nodes(depth), dtype=np.float32)
    for node, index in _places(tree):
        if tree["left_children"][node] >= 0:
            column, side = tree["split_indices"][node], tree["default_left"][node]
            gain = max(tree["loss_changes"][node], 0.0)
            table[index, :3] = 2 * column + side, tree["split_conditions"][node], gain
            # xgboost keeps the weights of inner nodes without the learning rate
            weights[index] = np.float32(tree["base_weights"][node]) * np.float32(rate)
        else:
            table[index, :3] = LEAF, tree["split_conditions"][node], 0.0
            weights[index] = tree["split_conditions"][node]
    return table, weights


def _counted(ends: NDArray[np.int64], depth: int) -> Floats32:
    """Return the rows of each node from the leaves in which they end."""
    counts = np.bincount(ends, minlength=nodes(depth))
    # from the last node up: a parent comes before its children in a heap, so theirs are complete
    for index in range(nodes(depth) - 1, 0, -1):
        counts[(index - 1) // 2] += counts[index]
    return counts.astype(np.float32)


def _take_back(table: Floats32, weights: Floats32, least: int) -> None:
    """Take back splits that leave fewer than `least` rows on a side, and all nodes below them."""
    # from the root down, so that what lies below a split that was taken back goes with it
    for index in range((len(table) - 1) // 2):
        small = table[index, 0] >= 0 and min(table[2 * index + 1, 3], table[2 * index + 2, 3]) < least
        if small:
            table[index, :3] = LEAF, weights[index], 0.0
        if small or table[index, 0] < 0:
            table[[2 * index + 1, 2 * index + 2]] = ABSENT, 0.0, 0.0, 0.0
