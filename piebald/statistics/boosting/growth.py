"""How a client grows trees on its own rows, with xgboost.

xgboost is given this client's rows and a start for each of them, and no tree of anybody else: what came over a network
is added up by `Forest.add_to`, so xgboost's reader of models never sees it.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piebald.core.errors import SettingError
from piebald.core.moments import Floats
from piebald.core.randomness import key
from piebald.statistics.boosting.forest import ABSENT, LEAF, MOST_ROWS, PARTS, Floats32, Forest, nodes
from piebald.statistics.boosting.settings import Objective, TreeSettings
from piebald.statistics.boosting.targets import Target

OBJECTIVES: dict[Objective, str] = {
    "binary": "binary:logistic", "multiclass": "multi:softprob", "regression": "reg:squarederror",
}  # fmt: skip
_OWN = {"form", "secure", "target_bounds", "rounds", "local_rounds", "weights", "patience", "balanced", "least_rows",
        "missing"}  # settings that xgboost does not have  # fmt: skip


def xgboost() -> Any:
    """The package xgboost.

    Raises:
        SettingError: it is not installed.
    """
    try:
        import xgboost
    except ImportError:
        raise SettingError("boosted trees need xgboost: pip install 'piebald[trees]'") from None
    return xgboost


class Grower:
    """The training rows of one client, on which it grows trees.

    Args:
        x: inputs [n, d]; NaN is a gap.
        y: targets [n], a class as its number.
        target: the objective.
        settings: of boosting.
        class_weights: weight of a row of each class, None where all are 1.

    Raises:
        SettingError: there are more rows than a tree can count.
    """

    def __init__(
        self, x: Floats32, y: Floats, target: Target, settings: TreeSettings, class_weights: tuple[float, ...] | None
    ) -> None:
        if len(y) > MOST_ROWS:
            raise SettingError(f"trees are for clients of at most {MOST_ROWS:,} training rows, got {len(y):,}")
        self.x, self._settings, self._target = x, settings, target
        self._rows: Any = None
        self._parameters = settings.model_dump(exclude=_OWN) | {
            "objective": OBJECTIVES[target.objective], "tree_method": "hist", "nthread": 1, "verbosity": 0
        }  # fmt: skip
        # without a score to begin with, xgboost would estimate one, and each row has a start of its own
        self._parameters |= {"num_class": target.classes} if target.groups > 1 else {"base_score": 0.5}
        if len(y):
            weights = None if class_weights is None else np.asarray(class_weights)[y.astype(np.int64)]
            self._rows = xgboost().DMatrix(x, label=y, weight=weights, nthread=1)

    def grow(self, margins: Floats32, *words: int | str) -> Forest:
        """Trees that lead on from margins [n, G], which are changed; `words` are those of the random key."""
        depth, groups = self._settings.max_depth, self._target.groups
        grown = Forest.none(depth)
        for step in range(self._settings.local_rounds):
            if self._rows is None:
                made = Forest(np.stack([_single(depth)] * groups), depth)
            else:
                made = self._trees(margins, key(*words, step))
                made.add_to(margins, self.x)
            grown = grown.joined(made)
        return grown

    def _trees(self, margins: Floats32, seed: int) -> Forest:
        engine, groups, depth = xgboost(), self._target.groups, self._settings.max_depth
        self._rows.set_base_margin(margins if groups > 1 else margins[:, 0])
        booster = engine.train({**self._parameters, "seed": seed % 2**31}, self._rows, 1)
        model = json.loads(bytes(booster.save_raw("json")))["learner"]["gradient_booster"]["model"]
        rate = self._settings.learning_rate
        table = np.stack([_heap(tree, depth) for tree in model["trees"]])
        weights = [_heap_weights(tree, depth, rate) for tree in model["trees"]]
        for tree in range(groups):
            ends = Forest(table[:, :, :2], depth).leaves(self.x, tree)
            table[tree, :, 3] = _counted(ends, depth)
            _take_back(table[tree], weights[tree], self._settings.least_rows)
        return Forest(table, depth)


def _single(depth: int) -> Floats32:
    """The tree of a client without rows: a leaf that adds nothing."""
    table = np.zeros((nodes(depth), PARTS), dtype=np.float32)
    table[1:, 0], table[0, 0] = ABSENT, LEAF
    return table


def _places(tree: dict[str, Any]) -> list[tuple[int, int]]:
    """Nodes of xgboost's tree with their places in a heap."""
    found, open_ = [], [(0, 0)]
    while open_:
        node, place = open_.pop()
        found.append((node, place))
        if tree["left_children"][node] >= 0:
            open_ += [(tree["left_children"][node], 2 * place + 1), (tree["right_children"][node], 2 * place + 2)]
    return found


def _heap(tree: dict[str, Any], depth: int) -> Floats32:
    table = _single(depth)
    for node, place in _places(tree):
        inner = tree["left_children"][node] >= 0
        table[place, 0] = 2 * tree["split_indices"][node] + tree["default_left"][node] if inner else LEAF
        table[place, 1] = tree["split_conditions"][node]
        table[place, 2] = max(tree["loss_changes"][node], 0.0) if inner else 0.0
    return table


def _heap_weights(tree: dict[str, Any], depth: int, rate: float) -> Floats32:
    """What each node would add if it were a leaf; xgboost keeps inner ones without the learning rate."""
    made = np.zeros(nodes(depth), dtype=np.float32)
    for node, place in _places(tree):
        inner = tree["left_children"][node] >= 0
        made[place] = (
            np.float32(tree["base_weights"][node]) * np.float32(rate) if inner else tree["split_conditions"][node]
        )
    return made


def _counted(ends: NDArray[np.int64], depth: int) -> Floats32:
    """Rows of each node from the leaves in which they end."""
    counts = np.bincount(ends, minlength=nodes(depth))
    for place in range(nodes(depth) - 1, 0, -1):
        counts[(place - 1) // 2] += counts[place]
    return counts.astype(np.float32)


def _take_back(table: Floats32, weights: Floats32, least: int) -> None:
    """Take back splits that leave fewer than `least` rows on a side, and what hangs on them."""
    for place in range((len(table) - 1) // 2):
        small = table[place, 0] >= 0 and min(table[2 * place + 1, 3], table[2 * place + 2, 3]) < least
        if small:
            table[place, :3] = LEAF, weights[place], 0.0
        if small or table[place, 0] < 0:
            table[[2 * place + 1, 2 * place + 2]] = ABSENT, 0.0, 0.0, 0.0
