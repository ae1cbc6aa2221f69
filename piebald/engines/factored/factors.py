"""Products of rows in place of weights: changes of a dense layer's weights, weights that are sums, and their terms.

Under SGD (also with momentum, weight decay, a proximal term around the start and a correction of the gradients) the
change of the weights W0 of a dense layer is linear in its gradients, and a gradient is a product of the layer's inputs
X and its outputs' gradients D.  So a client's weights are a sum of existing matrices and products of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from piebald.core.parameters import Slot

KnownFor = Callable[[Tensor], Tensor | None]  # what has been computed already for some rows
_LARGE = 1 << 16  # weights of a layer, from where on a product for each client is worth a call


class Factor:
    """Sums of products D^T X of c clients for one layer, perhaps of several steps.

    Args:
        slot: where the weights [out, in] are in the vector.
        x, d: inputs [c', r, in] and outputs' gradients [c', r, out] of each step, of the c' clients that took it,
            clients with most steps first.
        whole: x of all steps concatenated [c, r, in], where that exists.
        order: the client of each row, None where they are in order.
        positions: [c, r], which of the client's own rows each row of `whole` is, where they are such.
        key: the key of the factor that this one equals, in another order of its rows.
    """

    def __init__(
        self,
        slot: Slot,
        x: Sequence[Tensor],
        d: Sequence[Tensor],
        whole: Tensor | None = None,
        order: Tensor | None = None,
        positions: Tensor | None = None,
        key: object = None,
    ) -> None:
        self.slot, self.d, self.order, self.positions = slot, d, order, positions
        self._x, self._whole, self._key = x, whole, key
        self._d: Tensor | None = None

    @property
    def key(self) -> object:
        """The identity that two equal factors have in common."""
        return self if self._key is None else self._key  # not stored: a reference cycle would keep all rows alive

    @property
    def x(self) -> Sequence[Tensor]:
        """The inputs of each step."""
        return self._x

    @property
    def whole(self) -> Tensor | None:
        """The inputs of all steps concatenated, where that exists."""
        return self._whole

    def scaled(self, scale: Tensor) -> list[Tensor]:
        """Each step's D times its coefficient, from `scale` [c, steps] by client."""
        coefficients = scale if self.order is None else scale[self.order]
        return [d * coefficients[: len(d), step].view(-1, 1, 1) for step, d in enumerate(self.d)]

    def rows(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """X [c, r, in] and the scaled D [c, r, out] of all steps, in the order of this factor."""
        count, whole, coefficients = len(scale), self.whole, scale if self.order is None else scale[self.order]
        self._d = concatenated(self.d, count) if self._d is None else self._d  # several sums read it
        scaled = self._d * coefficients.index_select(1, self._steps).unsqueeze(2)
        return concatenated(self.x, count) if whole is None else whole, scaled

    @cached_property
    def _steps(self) -> Tensor:
        """The step of each row [r]."""
        steps = [step for step, d in enumerate(self.d) for _ in range(d.shape[1])]
        return torch.tensor(steps, device=self.d[0].device)

    def by_client(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """`rows` in the order of clients."""
        x, d = self.rows(scale)
        if self.order is None:
            return x, d
        back = self.order.argsort()
        return x[back], d[back]

    def sums(self, scale: Tensor) -> Tensor:
        """Numbers [c] that are finite where a client's products are."""
        coefficients = scale if self.order is None else scale[self.order]
        total = scale.new_zeros(len(scale))
        for step, d in enumerate(self.d):
            total[: len(d)].add_(d.sum((1, 2)) * coefficients[: len(d), step])
        return total if self.order is None else total[self.order.argsort()]

    def into(self, made: Tensor, scale: Tensor, add: bool = False) -> None:
        """Write the sums over steps into `made` [c, out * in], or add them; `scale` has each step's coefficients [c,
        steps].
        """
        (x, d), write = self.rows(scale), Tensor.add_ if add else Tensor.copy_
        order = range(len(scale)) if self.order is None else self.order.tolist()
        if math.prod(self.slot.shape) < _LARGE and self.order is None:
            write(made, torch.bmm(d.transpose(1, 2), x).flatten(1))
            return
        for client, gradients, rows in zip(order, d, x, strict=True):
            write(made[client].view(self.slot.shape), gradients.t() @ rows)

    def summed(self, scale: Tensor) -> Tensor:
        """The sum over clients of what `into` writes, [out, in], without forming that; for separate steps."""
        d, x = ([part.flatten(0, 1) for part in vectors] for vectors in (self.scaled(scale), self.x))
        if sum(part.numel() for part in (*d, *x)) < len(d) * math.prod(self.slot.shape):
            d, x = [torch.cat(d)], [torch.cat(x)]  # copying the rows is cheaper than adding up weights
        total = d[0].t() @ x[0]
        for gradients, rows in zip(d[1:], x[1:], strict=True):
            total += gradients.t() @ rows
        return total


class ClientRowFactor(Factor):
    """A sum over a client's own rows: d [c, n, out] for its rows in order, which are fetched when needed."""

    def __init__(self, slot: Slot, d: Tensor, fetch: Callable[[], Tensor]) -> None:
        super().__init__(slot, (), [d])
        self._fetch = fetch

    @cached_property
    def _fetched(self) -> Tensor:
        return self._fetch()

    @property
    def x(self) -> Sequence[Tensor]:
        return [self._fetched]

    @property
    def whole(self) -> Tensor | None:
        return self._fetched


class Weights:
    """The weights of one layer for c clients: a sum of matrices and of products of rows, never formed.

    Args:
        matrices: [out, in] for all clients or [c, out, in], each with its coefficient, a number or [c, 1, 1].
        products: x [c, r, in] and d [c, r, out] of each.
    """

    def __init__(
        self, matrices: Sequence[tuple[Tensor, float | Tensor]], products: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        self.matrices, self.products = matrices, products

    def times(self, x: Tensor, gram: KnownFor = lambda _: None) -> Tensor:
        """Outputs [c', b, out] for rows x [c', b, in]; `gram` may know inner products of x with other rows."""
        outputs = None
        for matrix, share in self.matrices:
            outputs = _added(outputs, x @ (matrix[: len(x)] if matrix.dim() > 2 else matrix).mT, share, len(x))
        for rows, d in self.products:
            inner = gram(rows)
            inner = torch.bmm(x, rows[: len(x)].transpose(1, 2)) if inner is None else inner
            part = torch.bmm(inner, d[: len(x)])
            outputs = part if outputs is None else outputs.add_(part)
        assert outputs is not None
        return outputs

    def back(self, d: Tensor) -> Tensor:
        """The gradient [c', b, in] at the inputs, from the gradient at the outputs [c', b, out]."""
        gradient = None
        for matrix, share in self.matrices:
            gradient = _added(gradient, d @ (matrix[: len(d)] if matrix.dim() > 2 else matrix), share, len(d))
        for x, d_of_product in self.products:
            part = torch.bmm(torch.bmm(d, d_of_product[: len(d)].transpose(1, 2)), x[: len(d)])
            gradient = part if gradient is None else gradient.add_(part)
        assert gradient is not None
        return gradient

    def square(self, count: int, known: KnownFor = lambda _: None, gram: KnownFor = lambda _: None) -> Tensor:
        """Squared lengths [count]; `known` may know the outputs for rows that the weights consist of."""
        some = self.matrices[0][0] if self.matrices else self.products[0][0]
        total = some.new_zeros(count)
        flat = [(m.flatten(-2), a if isinstance(a, float) else a.flatten()) for m, a in self.matrices]
        for index, (m1, a) in enumerate(flat):
            # each pair once, with the factor 2 for both of its orders
            for m2, b in flat[: index + 1]:
                inner = (m1 * m2).sum(-1) if m1.dim() == m2.dim() else m2 @ m1 if m1.dim() == 1 else m1 @ m2
                total += inner * a * b * (1 if m1 is m2 else 2)
        alone = Weights([], self.products)
        for x, d in self.products:  # |M + F|^2 = |M|^2 + 2 <M + F, F> - |F|^2
            whole = known(x)
            whole = self.times(x, gram) if whole is None else whole
            total += ((2 * whole - alone.times(x, gram)) * d).sum((1, 2))
        return total


def concatenated(steps: Sequence[Tensor], clients: int) -> Tensor:
    """Steps' rows [c', r, n] concatenated, [clients, ..., n]; zeros for clients that did not take a step."""
    if len(steps) == 1 and len(steps[0]) == clients:
        return steps[0]
    filled = [part if len(part) == clients else pad(part, (0, 0, 0, 0, 0, clients - len(part))) for part in steps]
    return torch.cat(filled, dim=1)


def _added(total: Tensor | None, part: Tensor, share: float | Tensor, count: int) -> Tensor:
    """`made` plus share * more, in place."""
    if isinstance(share, Tensor):
        # in place: `part` is a fresh product, which nobody else holds
        part = part.mul_(share[:count])
    elif share != 1.0:
        part = part.mul_(share)
    return part if total is None else total.add_(part)


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
            # least squares gives the only multiple that D can be; the clamp is for a known D of zeros
            share = torch.dot(flat, before) / torch.dot(before, before).clamp(min=1e-30)
            # torch's norm of infinite order takes ten times as long
            remainder, most = (vector.abs().amax() for vector in (flat.addcmul(before, -share), flat))
            if bool(remainder <= _ROUNDING * most):
                return total * share
    total = d.flatten(0, 1).t() @ x.flatten(0, 1)
    known.append((x, d, total))
    return total
