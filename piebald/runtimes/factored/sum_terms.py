"""Terms of a sum of matrices: shares that cancel, and products that are made once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from piebald.runtimes.engines.matrix_products import product

Sharing = float | Tensor  # a number, or one for each client [c, 1]
Known = list[tuple[Tensor, Tensor, Tensor]]  # rows, their gradients, and the sums of their products
_ROUNDING = 1e-6  # what is left of two shares that cancel, relative to them


class Term(NamedTuple):
    """A matrix [p] that all clients share, or [c, p], its share, and how often it had been written to."""

    matrix: Tensor
    share: Sharing
    version: int

    @classmethod
    def of(cls, matrix: Tensor, share: Sharing = 1.0) -> Term:
        return cls(matrix, share, matrix._version)

    def times(self, share: Sharing) -> Term:
        return Term(self.matrix, self.share * share, self.version)

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
        """What is the same for two views of the same numbers, as long as nobody writes to them."""
        matrix = self.matrix
        return matrix.data_ptr(), matrix.shape, matrix.stride(), matrix.dtype, self.version


def added(one: Sharing, two: Sharing) -> Sharing:
    """The sum of two shares; where only rounding is left of them, nothing is."""
    made: Sharing = one + two
    size = torch.as_tensor(one).abs().add(torch.as_tensor(two).abs())
    if isinstance(made, float):
        return 0.0 if abs(made) <= _ROUNDING * float(size) else made
    left = torch.where(made.abs() <= _ROUNDING * size, 0.0, made)
    return left if bool(left.any()) else 0.0


def once(x: Tensor, d: Tensor, known: Known) -> Tensor:
    """The sum over clients of D^T X, unless that of a multiple of D is known."""
    for rows, other, made in known:
        if rows is x:
            share = (d * other).sum() / other.square().sum().clamp(min=1e-30)
            if bool((d - share * other).abs().amax() <= _ROUNDING * d.abs().amax()):
                return made * share
    made = product(d.flatten(0, 1).t(), x.flatten(0, 1).t())
    known.append((x, d, made))
    return made
