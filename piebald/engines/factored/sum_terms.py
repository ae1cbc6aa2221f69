"""Terms of a sum of matrices: coefficients that cancel, and products that are computed once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

Coefficient = float | Tensor  # a number, or one for each client [c, 1]
KnownProducts = list[tuple[Tensor, Tensor, Tensor]]  # rows, their gradients, and the sums of their products
_ROUNDING = 1e-6  # what rounding leaves of two coefficients that cancel, relative to them


class MatrixTerm(NamedTuple):
    """A matrix [p] for all clients or [c, p], its coefficient, and its version counter when it joined the sum."""

    matrix: Tensor
    share: Coefficient
    version: int

    @classmethod
    def of(cls, matrix: Tensor, share: Coefficient = 1.0) -> MatrixTerm:
        return cls(matrix, share, matrix._version)

    @property
    def is_shared(self) -> bool:
        """True if the term is alike for all clients."""
        return self.matrix.dim() == 1 and isinstance(self.share, float)

    def times(self, share: Coefficient) -> MatrixTerm:
        return MatrixTerm(self.matrix, self.share * share, self.version)

    def part(self, here: slice) -> Tensor:
        """Some of its columns.

        Raises:
            RuntimeError: somebody has written to the matrix since.
        """
        if self.matrix._version != self.version:
            raise RuntimeError("a tensor was changed in place after it had become part of a sum: write `a = a + b`")
        return self.matrix[..., here]

    @property
    def name(self) -> tuple[Any, ...]:
        """A name that two views of the same numbers share, as long as nobody writes to them."""
        matrix = self.matrix
        return matrix.data_ptr(), matrix.shape, matrix.stride(), matrix.dtype, self.version


def added(one: Coefficient, two: Coefficient) -> Coefficient:
    """The sum of two coefficients, zero where only a rounding error is left of it."""
    if isinstance(one, float) and isinstance(two, float):
        return 0.0 if abs(one + two) <= _ROUNDING * (abs(one) + abs(two)) else one + two
    total, size = torch.as_tensor(one + two), torch.as_tensor(one).abs() + torch.as_tensor(two).abs()
    rounded = torch.where(total.abs() <= _ROUNDING * size, 0.0, total)
    return rounded if bool(rounded.any()) else 0.0


def once(x: Tensor, d: Tensor, known: KnownProducts) -> Tensor:
    """The sum over clients of D^T X, from that of a multiple of D where one is known."""
    for rows, other_d, total in known:
        if rows is x:
            flat, before = d.flatten(), other_d.flatten()
            share = torch.dot(flat, before) / torch.dot(before, before).clamp(min=1e-30)
            # torch's norm of infinite order takes ten times as long
            remainder, most = (vector.abs().amax() for vector in (flat.addcmul(before, -share), flat))
            if bool(remainder <= _ROUNDING * most):
                return total * share
    total = d.flatten(0, 1).t() @ x.flatten(0, 1)
    known.append((x, d, total))
    return total
