"""Class patterns: the classes that each client holds, and its rows of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from piebald.data.partition.split import Bools, Ints

if TYPE_CHECKING:
    from numpy.random import Generator


def pattern(each: Ints, wanted: Ints, stock: Ints, rng: Generator) -> Bools:
    """Draw the classes of each client [clients, classes]: the largest clients choose first, and take the classes with
    the most rows left.

    Args:
        each: number of classes of each client [clients], at most the number of classes.
        wanted: number of rows of each client [clients].
        stock: number of rows of each class [classes].
        rng: random generator that breaks ties.
    """
    held = np.zeros((len(each), len(stock)), dtype=bool)
    remaining = stock.astype(np.float64)
    for client in np.argsort(-wanted, kind="stable"):
        order = np.lexsort((rng.random(len(stock)), -remaining, held.any(0) & (remaining <= 0)))[: each[client]]
        held[client, order] = True
        remaining[order] -= wanted[client] / each[client]
    return held


def fill(held: Bools, wanted: Ints, stock: Ints) -> Ints | None:
    """Rows of each class for each client [clients, classes]: at least one where it holds the class, none elsewhere.

    As even as sizes and stock allow (iterative proportional fitting), rounded by a maximum flow.

    Args:
        held: which classes each client holds [clients, classes].
        wanted: number of rows of each client [clients].
        stock: number of rows of each class [classes].

    Returns:
        The counts, or None where no such counts exist.
    """
    ones = held.astype(np.int64)
    row, column = wanted - ones.sum(1), np.where(held.any(0), stock - ones.sum(0), 0)
    if row.min() < 0 or column.min() < 0 or row.sum() > column.sum():
        return None
    fitted = _proportions(held, row, column * (row.sum() / max(int(column.sum()), 1)))
    for start in (np.floor(fitted + 1e-9).astype(np.int64), np.zeros_like(ones)):
        open_rows, open_columns = row - start.sum(1), column - start.sum(0)
        if open_rows.min() < 0 or open_columns.min() < 0:
            continue
        flow = _flow(held, open_rows, open_columns)
        if int(flow.sum()) == int(open_rows.sum()):
            counts: Ints = ones + start + flow
            return counts
    return None


def _proportions(held: Bools, row: Ints, column: NDArray[np.float64], passes: int = 300) -> NDArray[np.float64]:
    """Numbers where `held`, with these sums of rows and columns, if there are any (Deming, Stephan 1940)."""
    tiny = 1e-100  # such small numbers only shrink: the pattern cannot have these sizes, which the flow will find
    x = held.astype(np.float64)
    for _ in range(passes):
        x *= (column / np.maximum(x.sum(0), tiny))[None]
        x *= (row / np.maximum(x.sum(1), tiny))[:, None]
        if np.abs(x.sum(0) - column).max() < 1e-6:
            break
    return x


def _flow(held: Bools, row: Ints, column: Ints) -> Ints:
    """The most whole rows [clients, classes] that can be dealt inside these limits."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    clients, classes = held.shape
    edges = np.zeros((clients + classes + 2, clients + classes + 2), dtype=np.int32)
    source, sink = clients + classes, clients + classes + 1
    edges[source, :clients], edges[clients : clients + classes, sink] = row, column
    edges[:clients, clients : clients + classes] = np.where(held, np.minimum(row[:, None], column), 0)
    flow = maximum_flow(csr_array(edges), source, sink).flow.toarray()
    dealt: Ints = np.maximum(flow[:clients, clients : clients + classes], 0).astype(np.int64)
    return dealt
