"""Trees as tables of numbers, in which form they travel and are checked, and the settings that they grow by.

A tree is a full binary tree of its largest depth, its nodes in the order of a heap: the children of node i are nodes
2 i + 1 and 2 i + 2.  So no node says where its children are, and a table that has a cycle, a shared child or an index
outside cannot be written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from piebald.contracts.component import Component
from piebald.core.errors import SettingError
from piebald.core.metrics import Auc
from piebald.core.moments import Floats
from piebald.core.targets import Weighted

Floats32 = NDArray[np.float32]

PARTS = 4  # numbers of a node: split, number, gain, rows
SENT = 2  # those that a client needs to predict
LEAF, ABSENT = -1, -2  # what stands in place of a split
MOST_ROWS = 1 << 24  # training rows of a client: what float32 counts exactly
MOST_TREES = 100_000
MOST_COLUMNS = 4096
_LARGEST = 1e30  # of a threshold or a leaf: sums of many stay finite


def nodes(depth: int) -> int:
    """Return the number of nodes of a full tree."""
    return int(2 ** (depth + 1) - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Trees in the order in which they are added up; for G groups (classes) tree t belongs to group t mod G.

    Attributes:
        table: [t, nodes, 2 or 4] float32.  Of a node: "split", which is 2 * column + (1 if gaps go to the left) or -1
            for a leaf and -2 where there is no node; the threshold of the split, below which a number goes to the
            left, or the leaf's weight; and, where they are known, the split's gain and the node's training rows.
        depth: of the largest tree that fits.
    """

    table: Floats32
    depth: int

    @classmethod
    def empty(cls, depth: int, parts: int = PARTS) -> Forest:
        """Return a forest without trees."""
        return cls(np.zeros((0, nodes(depth), parts), dtype=np.float32), depth)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def sent(self) -> Floats32:
        """The table that a client needs to predict [t, nodes, 2]."""
        return np.ascontiguousarray(self.table[:, :, :SENT])

    def weighted(self, weight: float) -> Forest:
        """Return the same trees with all leaves multiplied."""
        table = self.table.copy()
        # only leaves: of inner nodes the same place of the table holds a threshold
        table[:, :, 1] = np.where(table[:, :, 0] == LEAF, table[:, :, 1] * np.float32(weight), table[:, :, 1])
        return Forest(table, self.depth)

    def joined(self, other: Forest) -> Forest:
        """Return these trees and then the others."""
        return Forest(np.concatenate([self.table, other.table]), self.depth)

    def first(self, trees: int) -> Forest:
        """Return the first trees alone."""
        return Forest(self.table[:trees], self.depth)

    def leaves(self, x: Floats32, tree: int) -> NDArray[np.int64]:
        """Return the node [n] in which each of some rows [n, d] ends; NaN is a gap."""
        split = self.table[tree, :, 0].astype(np.int64)
        number = self.table[tree, :, 1]
        place = np.zeros(len(x), dtype=np.int64)
        rows = np.arange(len(x))
        # all rows go down one level at a time
        for _ in range(self.depth):
            code = split[place]
            inner = code >= 0
            if not inner.any():
                break
            # rows that have arrived read column 0, and the outer `where` ignores what they read
            value = x[rows, np.where(inner, code >> 1, 0)]
            # strictly less, as xgboost compares: a number at the threshold goes to the right
            goes_left = np.where(np.isnan(value), (code & 1) == 1, value < number[place])
            place = np.where(inner, 2 * place + np.where(goes_left, 1, 2), place)
        return place

    def add_to(self, margins: Floats32, x: Floats32) -> None:
        """Add the trees to margins [n, G] of rows [n, d], one after the other as xgboost does, in float32."""
        groups = margins.shape[1]
        for tree in range(len(self)):
            # one by one in float32: another order of additions would round unlike xgboost in the last bits
            margins[:, tree % groups] += self.table[tree, self.leaves(x, tree), 1]


def reject_reason(
    table: NDArray[np.float32], columns: int, depth: int, rows: int | None = None, largest: float = _LARGEST
) -> str | None:
    """Return why a table [t, nodes, 2 or 4] is no table of trees, or None.

    Args:
        table: the table.
        columns: how many columns the rows have that the trees are for.
        depth: of the largest tree that is allowed.
        rows: training rows of the client who sent it, which its counts must add up to; None where it has no counts.
        largest: absolute value of a leaf, at most.
    """
    # before any indexing below: all later checks count on this form
    if table.ndim != 3 or table.shape[1:] != (nodes(depth), SENT if rows is None else PARTS):
        return f"sent trees of another form than depth {depth} has"
    # NaN compares as false, so that later checks would let it pass
    if not np.isfinite(table).all() or (np.abs(table[:, :, 1]) > _LARGEST).any():
        return "sent trees with a number that is not finite, or too large"
    split, number = table[:, :, 0], table[:, :, 1]
    if (split != np.round(split)).any() or (split < ABSENT).any() or (split >= 2 * columns).any():
        return f"sent trees with a split of none of the {columns} columns"
    inner = split >= 0
    half = nodes(depth - 1)
    if inner[:, half:].any():
        return f"sent trees with a split below depth {depth}"
    # node i has the children 2 i + 1 and 2 i + 2, so each node but the root is there exactly if its parent splits
    parents = np.repeat(inner[:, :half], 2, axis=1)  # of the nodes 1, 2, 3, ...
    if (split[:, 0] == ABSENT).any() or ((split[:, 1:] != ABSENT) != parents).any():
        return "sent trees with a node without a parent, or a split without one of its sides"
    # no room for hidden numbers: where no node is, a table says nothing
    if table[split == ABSENT][:, 1:].any():
        return "sent trees with numbers where no node is"
    if (np.abs(number[split == LEAF]) > largest).any():
        return f"sent trees with a leaf above {largest:g}"
    return None if rows is None else _counts_reason(table, half, rows)


def _counts_reason(table: Floats32, half: int, rows: int) -> str | None:
    """Return why gains and counts of rows cannot be right, or None."""
    inner, gain, count = table[:, :, 0] >= 0, table[:, :, 2], table[:, :, 3].astype(np.float64)
    if (gain < 0).any() or gain[~inner].any():
        return "sent trees with a negative gain, or a gain where no split is"
    if (count < 0).any() or (count != np.round(count)).any() or (count[:, 0] != rows).any():
        return f"sent trees whose counts are not of the {rows:,} rows it has"
    # left children have odd places and right ones even places, from 1 and 2 on
    sides = count[:, 1::2] + count[:, 2::2]
    if (np.where(inner[:, :half], sides, count[:, :half]) != count[:, :half]).any():
        return "sent trees whose counts do not add up"
    return None


Objective = Literal["binary", "multiclass", "regression"]


class TreeSettings(Component):
    """Settings of boosted trees; those that xgboost has are named as there.

    Attributes:
        form: "bagging": in each round every client grows trees, which count together as one forest; "cyclic": in each
            round one client does, in turn; "histogram": in each round one tree (for more than two classes, one for
            each class) is grown from sums over all clients, level by level, as if their rows were in one place.
        secure: under "histogram", clients send their sums under masks, so that nobody learns more than totals.
        target_bounds: under "histogram", low and high of a regression's target, in whose units its derivatives are
            counted; a target outside counts as the nearer bound.
        largest_weight: under "histogram", the largest weight of a row, in whose units derivatives are counted; a larger
            one counts as this.  It is needed where rows have weights, and must not be taken from them.
        rounds: rounds of boosting, at most.
        local_rounds: trees (for more than two classes, one for each class) that a client grows in a round, one after
            the other.
        weights: under "bagging", a client's trees count by its training "examples", or all clients' the same,
            "uniform".
        patience: rounds without a smaller loss on all clients' validation rows after which training ends; the rounds
            up to the best one are kept.  None for all rounds.
        balanced: weight rows so that all classes have the same weight over all clients.
        least_rows: training rows of each leaf, at least; splits with fewer on a side are taken back.
        missing: a number that stands for a gap, such as -9, besides NaN; None for none.
        max_depth: splits from the root to a leaf, at most.
        learning_rate: factor on the leaves of each round.
        min_child_weight: least sum of second derivatives of the loss in a leaf.
        reg_lambda, reg_alpha: L2 and L1 penalty of leaves.
        gamma: least decrease of the loss by a split.
        max_delta_step: largest leaf before the learning rate, 0 for any; what clients send is checked against it.
        subsample, colsample_bytree: share of rows, and of columns, that each tree sees.
        max_bin: thresholds of a column among which splits are chosen; under "histogram" quantiles of all clients' rows.

    Examples:
        >>> settings = TreeSettings(form="histogram", secure=True, max_depth=4)
        >>> settings.secure, settings.rounds, settings.learning_rate
        (True, 50, 0.3)
    """

    axis = "boosting"
    kind: ClassVar[str] = "trees"

    form: Literal["bagging", "cyclic", "histogram"] = "bagging"
    secure: bool = False
    target_bounds: tuple[float, float] | None = None
    largest_weight: float | None = Field(default=None, gt=0, lt=1e12)
    rounds: int = Field(default=50, ge=1, le=2000)
    local_rounds: int = Field(default=1, ge=1, le=16)
    weights: Literal["examples", "uniform"] = "examples"
    patience: int | None = Field(default=None, ge=1)
    balanced: bool = False
    least_rows: int = Field(default=1, ge=1)
    missing: float | None = None
    max_depth: int = Field(default=6, ge=1, le=10)
    learning_rate: float = Field(default=0.3, gt=0, le=1)
    min_child_weight: float = Field(default=1.0, ge=0)
    reg_lambda: float = Field(default=1.0, ge=0)
    reg_alpha: float = Field(default=0.0, ge=0)
    gamma: float = Field(default=0.0, ge=0)
    max_delta_step: float = Field(default=0.0, ge=0)
    subsample: float = Field(default=1.0, gt=0, le=1)
    colsample_bytree: float = Field(default=1.0, gt=0, le=1)
    max_bin: int = Field(default=256, ge=2, le=4096)

    @field_validator("target_bounds")
    @classmethod
    def _check_bounds(cls, bounds: tuple[float, float] | None) -> tuple[float, float] | None:
        if bounds is not None and not (bounds[0] < bounds[1] and math.isfinite(bounds[1] - bounds[0])):
            raise ValueError(f"target_bounds must be a low and a higher number, got {bounds}")
        return bounds

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if self.form != "histogram":
            if self.secure:
                raise ValueError(f"masks hide sums, and form {self.form!r} has none: take "
                                 "form = 'histogram', or leave secure out")  # fmt: skip
            for name in ("target_bounds", "largest_weight"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is for form 'histogram', got form {self.form!r}: leave it out")
        elif self.local_rounds != 1:
            raise ValueError(f"local_rounds must be 1 under form 'histogram', got {self.local_rounds}: trees are grown "
                             "from the sums of all, so give more rounds")  # fmt: skip
        return self


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
            # an exact sum, so that the start does not depend on the order of rows
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
        # scikit-learn's "balanced" over the rows of all clients, for the classes that occur
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
            # xgboost's files keep the start as a probability, and apply the logit when they are read
            return [float(1 / (1 + np.exp(-np.float64(start[0]))))]
        return [float(margin) for margin in start]

    def row_losses(self, margins: Floats32, y: Floats) -> Floats:
        """Return the loss [n] of margins [n, G]: logarithmic, or half the squared error."""
        wide = margins.astype(np.float64)
        if self.objective == "regression":
            return np.asarray(np.square(y - wide[:, 0]) / 2)
        if self.objective == "binary":
            return np.asarray(np.logaddexp(0.0, wide[:, 0]) - y * wide[:, 0])
        # less the largest, so that no exponential overflows
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

    def scores(self, margins: Floats32, y: Floats, weights: Floats | None = None) -> dict[str, float]:
        """Return the scores of margins [n, G] by name, NaN where they are not defined; rows may have weights [n]."""
        if not len(y):
            return dict.fromkeys(SCORES[self.objective], math.nan)

        def mean(values: Floats) -> float:
            return float(np.average(values, weights=weights))

        loss = mean(self.row_losses(margins, y))
        if self.objective == "regression":
            errors = margins[:, 0].astype(np.float64) - y
            return {"rmse": mean(np.square(errors)) ** 0.5, "mae": mean(np.abs(errors)), "loss": loss}
        auc = Auc()
        outputs = torch.from_numpy(margins.astype(np.float64))
        labels = torch.from_numpy(y.astype(np.int64))
        known = labels.double() if self.objective == "binary" else labels
        auc.update(outputs[:, 0] if self.objective == "binary" else outputs,
                   known if weights is None else Weighted(known, torch.from_numpy(weights)))  # fmt: skip
        right = margins[:, 0] > 0 if self.objective == "binary" else margins.argmax(1)
        return {"auc": float(auc.compute()), "accuracy": mean((right == y).astype(float)), "loss": loss}
