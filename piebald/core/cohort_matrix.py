"""Arithmetic on a cohort matrix [n, s] in blocks of columns, so that memory stays bounded however long the model is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from piebald.core.machine import float64_device, moved
from piebald.core.tensor_store import numel_of, part_of

BUDGET = 1 << 24  # numbers of a temporary: 64 MiB of float32
_CACHED = 1 << 18  # numbers of a temporary that stays in a processor's cache
_AT_ONCE = 1 << 25  # of one on a GPU, where each block costs several launches and no cache is so large: 256 MiB


def blocks(matrix: Tensor, copies: int = 1, budget: int = BUDGET) -> Iterator[tuple[slice, Tensor]]:
    """Slices of columns and the matrix's blocks [n, width], float64 nowhere, each a view.

    Args:
        matrix: [n, s].
        copies: numbers that the caller makes of each number of a block, e.g. n for all pairs of rows.
        budget: how many numbers a temporary may have.
    """
    rows, columns = matrix.shape
    # a column at least, also where one alone is beyond the budget
    width = max(1, budget // max(1, rows * copies))
    for start in range(0, columns, width):
        span = slice(start, min(start + width, columns))
        yield span, matrix[:, span]


def by_column(matrix: Tensor, rule: Callable[[Tensor], Tensor], copies: int = 1) -> Tensor:
    """A function [n, width] -> [width] carried out on all columns: [s]."""
    result = matrix.new_empty(matrix.shape[1])
    for span, block in blocks(matrix, copies):
        result[span] = rule(block)
    return result


def too_many_pairs(name: str, count: int, copies: int) -> str | None:
    """Return why a component cannot compare all pairs of `count` clients on this machine, or None.

    Args:
        name: of the component.
        count: clients of a step.
        copies: float64 numbers that it holds for each pair at once.
    """
    needed, memory = 8 * copies * count**2, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed <= memory:
        return None
    return (
        f"{name} compares all pairs of the {count:,} clients of a step, which takes {needed / 1e9:,.0f} GB, and this "
        f"machine has {memory / 1e9:,.0f} GB: ask fewer clients at a step, like cohort = 1000"
    )


def median(matrix: Tensor, weights: Tensor | None = None) -> Tensor:
    """The median of each column [s] of a matrix [n, s]; of an even number of rows the mean of the middle two.

    Args:
        matrix: [n, s].
        weights: how much each row counts [n], None for all alike.  The weighted median has at most half of the weight
            on either side; where exactly half lies below, it is the mean of the two values next to that place.

    Examples:
        >>> median(torch.tensor([[1.0], [2.0], [30.0]])).tolist()
        [2.0]
        >>> median(torch.tensor([[1.0], [2.0], [30.0]]), weights=torch.tensor([1.0, 1.0, 4.0])).tolist()
        [30.0]
    """
    rows = len(matrix)
    if weights is None:
        # the same place twice for an odd number of rows: their mean is then that value to the bit
        low, high = (rows - 1) // 2, rows // 2
        return by_column(matrix, lambda block: block.sort(dim=0).values[[low, high]].mean(0), copies=3)
    shares = (weights.double() / weights.double().sum()).to(matrix.device)

    def middle(block: Tensor) -> Tensor:
        values, places = block.sort(dim=0, stable=True)
        below = shares[places].cumsum(0)
        # half of the weight to within rounding: shares of 1/n do not sum to exactly 1/2
        near = [(below < bound).sum(0).clamp(max=rows - 1)[None] for bound in (0.5 - 1e-9, 0.5 + 1e-9)]
        return torch.cat([values.gather(0, place) for place in near]).mean(0)

    return by_column(matrix, middle, copies=8)


def gram(matrix: Tensor, about: Tensor | None = None) -> Tensor:
    """Inner products of all rows [n, n] in float64, of their differences from `about` [s] if given."""
    products = torch.zeros(len(matrix), len(matrix), dtype=torch.float64, device=matrix.device)
    for span, block in blocks(matrix, copies=2):
        wide = block.double() if about is None else block.double() - about[span].double()
        products += wide @ wide.T
    return (products + products.T) / 2  # a product of a matrix with itself is not symmetric to the last bit


def squared_distances(matrix: Tensor) -> Tensor:
    """Squared Euclidean distances of all rows [n, n] in float64, the diagonal exactly 0.

    By matrix products about the first row, not about the origin: the small differences of large vectors survive.
    """
    # |a - b|^2 = |a|^2 + |b|^2 - 2 ab, which rounding may make slightly negative
    inner = gram(matrix, matrix[0])
    squares = inner.diagonal()
    distances = (squares[:, None] + squares[None, :] - 2 * inner).clamp(min=0)
    return distances.fill_diagonal_(0)


def norms(matrix: Tensor, about: Tensor | None = None) -> Tensor:
    """Euclidean length of each row [n] in float64, of its difference from `about` [s] if given."""
    squares = torch.zeros(len(matrix), dtype=torch.float64, device=matrix.device)
    for span, block in blocks(matrix, copies=2):
        wide = block.double() if about is None else block.double() - about[span].double()
        squares += wide.square().sum(1)
    return squares.sqrt()


def mean(matrix: Tensor, shares: Tensor) -> Tensor:
    """Weighted mean [s] with shares [n] that sum to one; rows that count nothing are left out, whatever is in them."""
    # 0 times infinity is NaN, so a row that counts nothing must not enter the product
    rows = torch.nonzero(shares).flatten()
    counted = matrix if len(rows) == len(matrix) else matrix[rows]
    return shares[rows].to(matrix.dtype) @ counted


def weighted_sum(matrix: Tensor, weights: Sequence[float]) -> Tensor:
    """Weighted sum of rows, [s] in float64.

    Each addition rounds at 1e-16 of the numbers and not at 6e-8, so that once the sum is rounded to float32 the order
    of the rows, and how they were divided among processes and machines, practically never shows.
    """
    matrix = matrix.to(float64_device(matrix.device))
    factors = moved(torch.tensor(weights, dtype=torch.float64), matrix.device)
    total = torch.empty(matrix.shape[1], dtype=torch.float64, device=matrix.device)
    for span, block in _summed_blocks(matrix):  # also for one row: both types at once take two more
        wide = block.double()
        if len(matrix) == 1:
            torch.mul(wide[0], factors, out=total[span])
        else:
            torch.mv(wide.T, factors, out=total[span])
    return total


def _summed_blocks(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    return blocks(matrix, budget=_summed_at_once(matrix.device))


def _summed_at_once(device: torch.device) -> int:
    return _CACHED if device.type == "cpu" else _AT_ONCE


def held_mean(matrix: Tensor, held: Tensor, weights: Sequence[float]) -> tuple[Tensor, list[float]]:
    """The weighted mean [s] of each number over those rows that hold it, 0 where none does; and each row's mean share.

    Args:
        matrix: changes [n, s].
        held: which numbers each row holds [n, s].
        weights: of the rows.
    """
    count = weighted_sum(held.float(), weights)
    summed, somebody = weighted_sum(torch.where(held, matrix, 0.0), weights), count > 0
    # the inner `where` keeps divisions finite, since torch computes both branches
    inverse = torch.where(somebody, 1 / torch.where(somebody, count, 1.0), 0.0)
    average = torch.where(somebody, summed / torch.where(somebody, count, 1.0), 0.0).float()
    # 0 shares and not 0 / 0 where nobody holds anything
    numbers = max(int(somebody.sum()), 1)
    return average, [weight * float((held[row] * inverse).sum()) / numbers for row, weight in enumerate(weights)]


def held_mask(matrix: Tensor, held: Sequence[Tensor | None]) -> Tensor:
    """Return which numbers each row of a matrix [n, s] holds, from their positions, None for all."""
    mask = torch.zeros(matrix.shape, dtype=torch.bool)
    for row, positions in enumerate(held or [None] * len(matrix)):
        mask[row, slice(None) if positions is None else positions] = True
    return mask


def divided(total: Tensor, whole: float) -> Tensor:
    """A sum [...] in float64 divided by a number and rounded to float32 once, without a quotient in float64 in memory.

    By blocks, since torch computes a result of another type than its arguments' in a temporary of theirs.
    """
    quotient = total.new_empty(total.shape, dtype=torch.float32)
    if total.device.type != "cpu":
        return torch.div(total, whole, out=quotient)
    flat = quotient.view(1, -1)
    for span, block in blocks(total.reshape(1, -1), budget=_CACHED):
        flat[0, span] = block[0] / whole
    return quotient


def weighted_mean(vectors: Sequence[Mapping[str, Tensor]], name: str, weights: Sequence[float], whole: float) -> Tensor:
    """The weighted sum of vectors [s] divided by a number, without a matrix of them, which may lie in files.

    The numbers are those of `divided(weighted_sum(matrix, weights), whole)`, to the bit: the same blocks are added.

    Args:
        vectors: of each update; the one that is meant counts as flat.
        name: the one that is meant.
        weights: of each update.
        whole: what their sum is divided by.
    """
    size, count = numel_of(vectors[0], name), len(vectors)
    device = part_of(vectors[0], name, slice(0, 0)).device
    factors, width = moved(torch.tensor(weights, dtype=torch.float64), device), max(1, _summed_at_once(device) // count)
    columns = width * max(1, BUDGET // 32 // (width * count))  # columns that are read at a time
    average, room = factors.new_empty(size, dtype=torch.float32), factors.new_empty(min(width, size))
    for first in range(0, size, columns):
        matrix = torch.stack([part_of(tensors, name, slice(first, first + columns)) for tensors in vectors])
        for start in range(0, matrix.shape[1], width):
            block = matrix[:, start : start + width].double()
            total = block[0] * factors if count == 1 else torch.mv(block.T, factors, out=room[: block.shape[1]])
            torch.div(total, whole, out=average[first + start : first + start + block.shape[1]])
    return average


def add_weighted(total: Tensor, matrix: Tensor, weights: Sequence[float]) -> None:
    """Add the weighted sum of rows to `total` [s], in float64 and in place.

    The numbers are those of `total += weighted_sum(matrix, weights)`, without a new vector: for a long model, most of
    its time would go into memory pages that the system has to clear.
    """
    matrix = matrix.to(total.device)
    if matrix.device.type != "cpu" and len(matrix) == 1:
        total.add_(matrix[0], alpha=weights[0])  # one launch, which converts as it adds
        return
    factors = moved(torch.tensor(weights, dtype=torch.float64), matrix.device)
    for span, block in _summed_blocks(matrix):
        wide = block.double()
        total[span].add_(wide[0] * factors if len(matrix) == 1 else torch.mv(wide.T, factors))


def coordinates(matrix: Tensor) -> Tensor:
    """Points [n, n] in float64 with the distances that the rows [n, s] have (classical scaling, exact)."""
    inner = gram(matrix, matrix.mean(0))
    # rounding leaves eigenvalues just below 0, which have no root
    values, vectors = torch.linalg.eigh(inner)
    points: Tensor = vectors * values.clamp(min=0).sqrt()
    return points
