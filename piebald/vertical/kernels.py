"""Kernels of the maximum mean discrepancy, pairwise and in moment form.

    MMD^2 = K_ss + K_tt - 2 K_st,     K_xy = mean over i, j of k(x_i, y_j)      (all pairs, also i = j: the V-statistic)

K_ss and K_tt are local.  K_st needs both parties, but is linear in moments of y, with coefficients that the party with
x knows.  So its gradient is a few products C S + K: the *owner* of y encrypts S and adds K, the *evaluator* knows C.

Shapes: x [n, d] and y [m, d] are rows of an aligned layer.  Pairwise forms are torch and differentiable; moment forms
are NumPy, float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from piebald.contracts.component import Component

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ProductStatistics:
    """The owner's input to a product: `matrix` S [p, w], encrypted, and `constant` K [w] or [n, w], added later.

    Without rows in S, the product is K whatever the evaluator knows, and K is sent as it is.
    """

    matrix: Floats
    constant: Floats


@dataclass(frozen=True, slots=True)
class ProductSize:
    """The shape of a product C [rows, inner] S [inner, width], and a `bound` on the absolute value of C S + K.

    An `inner` of 0 is for a constant, which is not encrypted: the evaluator learns it in any case.
    """

    rows: int
    inner: int
    width: int
    bound: float


class Kernel(Component):
    """Similarity of two hidden rows.

    The moment form of a kernel is exact for `expand`.  That is `value`, except for the Gaussian, where it is the
    expansion.
    """

    axis = "kernel"
    order: ClassVar[int] = 1  # degree of the moment form as a polynomial in x

    def value(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the exact kernel of all pairs [n, m]."""
        raise NotImplementedError

    def expand(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the kernel of all pairs [n, m] that the moment form computes."""
        return self.value(x, y)

    def statistics(self, y: Floats) -> list[ProductStatistics]:
        """Return the statistics that the owner of y puts into each product."""
        raise NotImplementedError

    def coefficients(self, x: Floats) -> list[Floats]:
        """Return the evaluator's coefficients C of each product."""
        raise NotImplementedError

    def gradient(self, x: Floats, results: list[Floats]) -> Floats:
        """Return the gradient of K_st with respect to x [n, d], from the products C S + K."""
        raise NotImplementedError

    def sizes(self, rows: int, width: int, longest: float) -> list[ProductSize]:
        """Return the sizes of the products for `rows` rows of the evaluator, with hidden rows up to `longest`."""
        raise NotImplementedError

    def at_zero(self, y: Floats) -> float:
        """Return K_st at x = 0, which the owner of y can compute alone."""
        return 0.0

    def moments(self, width: int, unit: bool) -> int:
        """Return the count of unknown numbers in the statistics of a batch, fewer for rows of length 1 (`unit`)."""
        raise NotImplementedError

    def sensitivity(self, longest: float, rows: int) -> float:
        """Return the largest change of all statistics together (Frobenius norm) by another row in the place of one.

        Args:
            longest: bound on the length of a row.
            rows: rows of the owner, over which statistics are means.
        """
        raise NotImplementedError


class LinearKernel(Kernel):
    """x.y: MMD compares means.

    Examples:
        >>> LinearKernel().sensitivity(longest=1.0, rows=100)
        0.02
    """

    def value(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y.T

    def statistics(self, y: Floats) -> list[ProductStatistics]:
        return [ProductStatistics(np.zeros((0, y.shape[1])), y.mean(0))]

    def coefficients(self, x: Floats) -> list[Floats]:
        return [np.zeros((1, 0))]

    def gradient(self, x: Floats, results: list[Floats]) -> Floats:
        # the gradient depends on no x, so the product has one row for all
        return np.repeat(results[0] / len(x), len(x), axis=0)

    def sizes(self, rows: int, width: int, longest: float) -> list[ProductSize]:
        return [ProductSize(1, 0, width, longest)]

    def moments(self, width: int, unit: bool) -> int:
        return width

    def sensitivity(self, longest: float, rows: int) -> float:
        return 2 * longest / rows


class PolynomialKernel(Kernel):
    """(x.y + c)^degree.

    Attributes:
        c: at least 0.
        degree: 2 or 3.  With degree 3 the evaluator learns the third moments, from which single rows may be recovered.
    """

    c: float = Field(default=0.0, ge=0)
    degree: Literal[2, 3] = 2

    def value(self, x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.T + self.c) ** self.degree

    @property
    def order(self) -> int:  # type: ignore[override]  # a constant of other kernels
        """The degree."""
        return self.degree

    def statistics(self, y: Floats) -> list[ProductStatistics]:
        mean, second = y.mean(0), y.T @ y / len(y)
        if self.degree == 2:
            return [ProductStatistics(second, 2 * self.c * mean)]
        third = pairs(y).T @ y / len(y)
        matrix = np.concatenate([third, second]) if self.c else third
        return [ProductStatistics(matrix, 3 * self.c**2 * mean)]

    def coefficients(self, x: Floats) -> list[Floats]:
        if self.degree == 2:
            return [2 * x]
        # a product of two different coordinates stands for both of their orders
        twice = 3 * pairs(x) * np.where(np.equal(*upper(x.shape[1])), 1.0, 2.0)
        return [np.concatenate([twice, 6 * self.c * x], axis=1) if self.c else twice]

    def gradient(self, x: Floats, results: list[Floats]) -> Floats:
        return results[0] / len(x)

    def sizes(self, rows: int, width: int, longest: float) -> list[ProductSize]:
        inner = width if self.degree == 2 else width * (width + 1) // 2 + (width if self.c else 0)
        # the longest gradient of (x.y + c)^degree by x for rows of this length
        return [ProductSize(rows, inner, width, self.degree * longest * (longest**2 + self.c) ** (self.degree - 1))]

    def at_zero(self, y: Floats) -> float:
        return self.c**self.degree

    def moments(self, width: int, unit: bool) -> int:
        mean, second, third = (math.comb(width + degree - 1, degree) for degree in (1, 2, 3))
        if self.degree == 2:
            # the second moments of rows of length 1 have a known sum on the diagonal
            return second - unit + (mean if self.c else 0)
        return third + (second + mean if self.c else 0)

    def sensitivity(self, longest: float, rows: int) -> float:
        mean = 2 * longest * self.degree * self.c ** (self.degree - 1)
        # |aa' - bb'| is largest for orthogonal rows a and b; an odd moment changes its sign with that of the row
        second, third = 2**0.5 * longest**2, 2 * longest**3
        parts = [mean, second] if self.degree == 2 else [mean, third, *([second] if self.c else [])]
        return float(np.linalg.norm(parts)) / rows


class GaussianKernel(Kernel):
    """exp(-u) with u = |x - y|^2 / 2 sigma^2; in moment form 1 - u + u^2/2.

    The expansion makes rows more alike only where u < 1 and less alike beyond, so rows are scaled to length 1 first.
    It is not positive definite: its MMD^2 can fall below 0.

    Attributes:
        sigma: the width, above 0.
    """

    sigma: float = Field(default=1.0, gt=0)

    order: ClassVar[int] = 4

    def value(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(-self._distance(x, y))

    def expand(self, x: Tensor, y: Tensor) -> Tensor:
        u = self._distance(x, y)
        return 1 - u + u**2 / 2

    def _distance(self, x: Tensor, y: Tensor) -> Tensor:
        squares = (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * x @ y.T
        return squares / (2 * self.sigma**2)

    def outside(self, x: Tensor) -> float:
        """Return the share of a party's own pairs with u > 1, where the expansion makes rows less alike."""
        return float((self._distance(x, x) > 1).double().mean())

    def statistics(self, y: Floats) -> list[ProductStatistics]:
        mean, second, squares = y.mean(0), y.T @ y / len(y), (y**2).sum(1)
        cubic = (squares[:, None] * y).mean(0)
        constant = mean - cubic / (2 * self.sigma**2)
        return [
            ProductStatistics(np.concatenate([second, mean[None]]), constant),
            ProductStatistics(mean[:, None], np.array([squares.mean()])),
        ]

    def coefficients(self, x: Floats) -> list[Floats]:
        squares = (x**2).sum(1, keepdims=True)
        return [np.concatenate([x, -squares / 2], axis=1) / self.sigma**2, -2 * x]

    def gradient(self, x: Floats, results: list[Floats]) -> Floats:
        # with u_i = mean over j of u(x_i, y_j) = (|x_i|^2 + results[1]_i) / 2 sigma^2,
        # n sigma^2 times the gradient is (u_i - 1) x_i + results[0]_i.
        mean = ((x**2).sum(1, keepdims=True) + results[1]) / (2 * self.sigma**2)
        gradient: Floats = ((mean - 1) * x + results[0]) / (self.sigma**2 * len(x))
        return gradient

    def sizes(self, rows: int, width: int, longest: float) -> list[ProductSize]:
        # by the triangle inequality: L of the mean, and L^3 / sigma^2 times 1, 1/2 and 1/2 of the second moments, of
        # |x|^2 mean / 2 and of the cubic constant
        vector = longest + 2 * longest**3 / self.sigma**2
        return [ProductSize(rows, width + 1, width, vector), ProductSize(rows, width, 1, 3 * longest**2)]

    def at_zero(self, y: Floats) -> float:
        u = (y**2).sum(1) / (2 * self.sigma**2)
        return float((1 - u + u**2 / 2).mean())

    def moments(self, width: int, unit: bool) -> int:
        second = width * (width + 1) // 2
        return width + second - 1 if unit else 2 * width + second  # in rows of length 1, the cubic one is the mean

    def sensitivity(self, longest: float, rows: int) -> float:
        # means (twice: in the matrix and alone), second moments, the constants of both products
        mean, second = 2 * longest, 2**0.5 * longest**2
        constant = mean + longest**3 / self.sigma**2
        return float(np.linalg.norm([mean, mean, second, constant, longest**2])) / rows


def mmd2(kernel: Kernel, x: Tensor, y: Tensor, exact: bool = True) -> Tensor:
    """Return MMD^2 of two sets of hidden rows over all pairs, with the exact kernel or with its expansion.

    Examples:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> float(mmd2(LinearKernel(), x, x)), float(mmd2(LinearKernel(), x, -x))
        (0.0, 2.0)
    """
    k = kernel.value if exact else kernel.expand
    return k(x, x).mean() + k(y, y).mean() - 2 * k(x, y).mean()


def nodes(kernel: Kernel) -> tuple[Floats, Floats]:
    """Return nodes t in (0, 1) and weights of a quadrature of K_st.

    K_st is `at_zero` plus the sum of weight <x, gradient of K_st at t x> over the nodes.

    K_st is a polynomial in x, so along the line from 0 to x its slope has degree `order` - 1, and Gauss' rule gives its
    integral exactly.  Thus the loss can be computed from products of the same shape as those of the gradient.
    """
    places, weights = np.polynomial.legendre.leggauss((kernel.order + 1) // 2)
    return (places + 1) / 2, weights / 2


def upper(width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return index pairs b <= c of coordinates."""
    first, second = np.triu_indices(width)
    return first.astype(np.int64), second.astype(np.int64)


def pairs(x: Floats) -> Floats:
    """Return products of coordinates b <= c [n, d (d + 1) / 2]."""
    first, second = upper(x.shape[1])
    return x[:, first] * x[:, second]
