"""Low-rank updates: each weight matrix as a product of two thin ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts.data import ModelSpec
from piebald.core.parameters import Layout
from piebald.core.randomness import generator
from piebald.methods.transforms import compression
from piebald.methods.transforms.bit_fields import Bytes

BASIS = f"{compression.COMPRESSION}basis"


class LowRank(compression.WithErrorFeedback):
    """Send a product of two thin matrices for each weight matrix (PowerSGD; Vogels et al. 2019, algorithm 1).

    The change M [n, m] of a weight is sent as P [n, r] and Q [m, r]: one step of subspace iteration from the client's
    last Q, P = orthogonalized M Q and then Q = M' P, and the server takes P Q'.  In PowerSGD all workers average P
    before Q is computed, in two exchanges a step; here a client sends both at once, of its own change, which is the
    nearest matrix of rank r as its iterations go on.  A weight of more than two dimensions is a matrix by its first.

    Biases, other vectors, and matrices for which r (n + m) numbers would not be fewer than n m are sent whole, so a
    rank as high as the matrices' own loses nothing.  The client keeps its Q from task to task.

    Attributes:
        rank: r, at least 1.
    """

    why_not_summed: ClassVar[str] = "a sum of products is no product of sums:"

    rank: int = Field(default=2, ge=1)

    @property
    def keeps_state(self) -> bool:
        return True  # the basis of the last product

    def initial_state(self, spec: ModelSpec) -> dict[str, Tensor]:
        length = sum(matrix.columns * self.rank for matrix in _matrices(spec.layout, self.rank))
        # random, since a start that is orthogonal to the change, such as zeros, would never find its directions
        basis = generator("low_rank", spec.seed).standard_normal(length).astype(np.float32)
        return super().initial_state(spec) | {BASIS: torch.from_numpy(basis)}

    def encode(
        self, wanted: compression.Numbers, state: Mapping[str, Tensor], context: compression.WireContext
    ) -> tuple[Bytes, Mapping[str, Tensor]]:
        basis, at, parts, bases = state[BASIS].numpy(), 0, list[compression.Numbers](), list[compression.Numbers]()
        whole = np.ones(context.trained, dtype=bool)
        for matrix in _matrices(context.layout, self.rank):
            change = wanted[matrix.span].reshape(matrix.rows, matrix.columns).astype(np.float64)
            last = basis[at : at + matrix.columns * self.rank].reshape(matrix.columns, self.rank)
            # without finite numbers there is no basis: NaN is sent in its place, and refused in the open
            finite = bool(np.isfinite(change).all())
            basis_left = np.linalg.qr(change @ last)[0] if finite else np.full((matrix.rows, self.rank), np.nan)
            # the server multiplies the numbers that are sent, so Q is computed from these
            basis_left = basis_left.astype(np.float32)
            right = (change.T @ basis_left.astype(np.float64)).astype(np.float32)
            parts += [basis_left.ravel(), right.ravel()]
            bases.append(right.ravel())
            at, whole[matrix.span] = at + right.size, False
        return compression.as_bytes(np.concatenate([*parts, wanted[whole]])), {BASIS: torch.from_numpy(_joined(bases))}

    def decode(self, body: Bytes, context: compression.WireContext) -> compression.Numbers:
        numbers, at, change = compression.as_floats(body), 0, np.zeros(context.trained, dtype=np.float32)
        matrices, whole = _matrices(context.layout, self.rank), np.ones(context.trained, dtype=bool)
        for matrix in matrices:
            whole[matrix.span] = False
        expected = int(whole.sum()) + sum(self.rank * (matrix.rows + matrix.columns) for matrix in matrices)
        # before reshaping, so that a client's wrong length is reported as such
        if len(numbers) != expected:
            raise ValueError(f"{len(numbers):,} numbers, where {expected:,} are due")
        for matrix in matrices:
            middle, end = at + matrix.rows * self.rank, at + (matrix.rows + matrix.columns) * self.rank
            basis_left, right = numbers[at:middle].reshape(-1, self.rank), numbers[middle:end].reshape(-1, self.rank)
            change[matrix.span] = (basis_left.astype(np.float64) @ right.T.astype(np.float64)).ravel()
            at = end
        change[whole] = numbers[at:]
        return change


class _Matrix(NamedTuple):
    """A weight matrix in the vector."""

    span: slice
    rows: int
    columns: int


def _matrices(layout: Layout, rank: int) -> list[_Matrix]:
    """The trained and shared weights that products of this rank make smaller."""
    matrices = list[_Matrix]()
    for slot in layout.slots:
        if slot.stop > layout.shared_trained or len(slot.shape) < 2:
            continue
        rows, columns = slot.shape[0], math.prod(slot.shape[1:])
        # strictly fewer: at equal numbers the whole matrix is exact
        if rank * (rows + columns) < rows * columns:
            matrices.append(_Matrix(slice(slot.start, slot.stop), rows, columns))
    return matrices


def _joined(parts: list[compression.Numbers]) -> compression.Numbers:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)
