"""Trees as tables of numbers: the form in which they travel, are checked and are computed with.

A tree is a full binary tree of its largest depth, its nodes in the order of a heap: the children of node i are nodes
2 i + 1 and 2 i + 2.  So no node says where its children are, and a table that has a cycle, a shared child or an index
outside cannot be written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
