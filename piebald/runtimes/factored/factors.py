"""Products of rows that stand for weights: how far a dense layer's weights have moved, and weights that are sums.

Under SGD, with momentum, weight decay, a prox to the start and a correction of the gradients too, all that a client does to
the weights W0 of a dense layer is linear in its gradients, and a gradient is a product of the layer's inputs X and its
outputs' gradients D.  So a client's weights are a sum of matrices that are there anyway, and of products of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from piebald.parameters import Slot
from piebald.runtimes.engines.matrix_products import each_product, product

Known = Callable[[Tensor], Tensor | None]  # what is known already of some rows
_LARGE = 1 << 16  # numbers of a layer, from where on one product a client is worth its call


class Factor:
    """Sums of products D^T X of c clients for one layer, perhaps of several steps.

    Args:
        slot: where the weights [out, in] lie in the vector.
        x, d: of each step [c', r, in] and [c', r, out], the inputs and outputs' gradients of those c' that took it,
            clients with most steps first.
        whole: [c, r, in], x of all steps behind one another, where it is at hand.
        order: the client of each row, None where they are in order.
        places: [c, r], which of its own rows each row of `whole` is, where they are a client's rows as they are.
        key: of the factor that this one is, in another order of its rows.
    """

    def __init__(
        self,
        slot: Slot,
        x: Sequence[Tensor],
        d: Sequence[Tensor],
        whole: Tensor | None = None,
        order: Tensor | None = None,
        places: Tensor | None = None,
        key: object = None,
    ) -> None:
        self.slot, self.d, self.order, self.places = slot, d, order, places
        self._x, self._whole, self._key = x, whole, key

    @property
    def key(self) -> object:
        """What says that two factors are the same one."""
        return self if self._key is None else self._key  # not kept: a circle would keep all rows alive

    @property
    def x(self) -> Sequence[Tensor]:
        """The inputs of each step."""
        return self._x

    @property
    def whole(self) -> Tensor | None:
        """The inputs of all steps behind one another, where they are at hand."""
        return self._whole

    def scaled(self, scale: Tensor) -> list[Tensor]:
        """Each step's D times its factor, from `scale` [c, steps] by client."""
        own = scale if self.order is None else scale[self.order]
        return [d * own[: len(d), step].view(-1, 1, 1) for step, d in enumerate(self.d)]

    def rows(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """X [c, r, in] and the scaled D [c, r, out] of all steps, by the order of this factor."""
        count = len(scale)
        whole = self.whole
        return joined(self.x, count) if whole is None else whole, joined(self.scaled(scale), count)

    def by_client(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """`rows` by client."""
        x, d = self.rows(scale)
        if self.order is None:
            return x, d
        back = self.order.argsort()
        return x[back], d[back]

    def sums(self, scale: Tensor) -> Tensor:
        """Numbers [c] that are finite where a client's products are."""
        total = scale.new_zeros(len(scale))
        for part in self.scaled(scale):
            total[: len(part)] += part.sum((1, 2))
        return total if self.order is None else total[self.order.argsort()]

    def into(self, made: Tensor, scale: Tensor) -> None:
        """Write the sums over steps into `made` [c, out * in], for factors of each step [c, steps]."""
        x, d = self.rows(scale)
        order = range(len(scale)) if self.order is None else self.order.tolist()
        if math.prod(self.slot.shape) < _LARGE and self.order is None:
            made.copy_(torch.bmm(d.transpose(1, 2), x).flatten(1))
            return
        for client, own, rows in zip(order, d, x, strict=True):
            made[client].view(self.slot.shape).copy_(product(own.t(), rows.t()))

    def pooled(self, scale: Tensor) -> Tensor:
        """The sum over clients of what `into` writes, [out, in], without forming that, where rows are apart."""
        d, x = ([part.flatten(0, 1) for part in vectors] for vectors in (self.scaled(scale), self.x))
        if sum(part.numel() for part in (*d, *x)) < len(d) * math.prod(self.slot.shape):
            d, x = [torch.cat(d)], [torch.cat(x)]  # copying the rows is cheaper than adding up weights
        made = product(d[0].t(), x[0].t())
        for more, rows in zip(d[1:], x[1:], strict=True):
            made += product(more.t(), rows.t())
        return made


class OwnRows(Factor):
    """What rows of a client's own add up to: d [c, n, out] for its rows in their order, which are fetched when asked
    for.
    """

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
        matrices: [out, in] that all share, or [c, out, in], each with its factor, a number or [c, 1, 1].
        products: x [c, r, in] and d [c, r, out] of each.
    """

    def __init__(
        self, matrices: Sequence[tuple[Tensor, float | Tensor]], products: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        self.matrices, self.products = matrices, products

    def times(self, x: Tensor, gram: Known = lambda _: None) -> Tensor:
        """What the weights make of rows x [c', b, in], [c', b, out]; `gram` may know x's products with other rows."""
        made = None
        for matrix, share in self.matrices:
            made = _added(made, each_product(x, matrix[: len(x)] if matrix.dim() > 2 else matrix), share, len(x))
        for rows, d in self.products:
            inner = gram(rows)
            inner = torch.bmm(x, rows[: len(x)].transpose(1, 2)) if inner is None else inner
            more = torch.bmm(inner, d[: len(x)])
            made = more if made is None else made.add_(more)
        assert made is not None
        return made

    def back(self, d: Tensor) -> Tensor:
        """The gradient [c', b, in] at the inputs, from that at the outputs [c', b, out]."""
        made = None
        for matrix, share in self.matrices:
            turned = matrix.t() if matrix.dim() == 2 else matrix[: len(d)].transpose(1, 2)
            made = _added(made, each_product(d, turned), share, len(d))
        for x, own in self.products:
            more = torch.bmm(torch.bmm(d, own[: len(d)].transpose(1, 2)), x[: len(d)])
            made = more if made is None else made.add_(more)
        assert made is not None
        return made

    def square(self, count: int, known: Known = lambda _: None, gram: Known = lambda _: None) -> Tensor:
        """Squared lengths [count]; `known` may know what the weights make of rows that they consist of."""
        some = self.matrices[0][0] if self.matrices else self.products[0][0]
        total = some.new_zeros(count)
        flat = [(m.flatten(-2), a if isinstance(a, float) else a.flatten()) for m, a in self.matrices]
        for place, (one, a) in enumerate(flat):
            for two, b in flat[: place + 1]:
                inner = (one * two).sum(-1) if one.dim() == two.dim() else two @ one if one.dim() == 1 else one @ two
                total += inner * a * b * (1 if one is two else 2)
        alone = Weights([], self.products)
        for x, d in self.products:  # |M + F|^2 = |M|^2 + 2 <M + F, F> - |F|^2
            whole = known(x)
            whole = self.times(x, gram) if whole is None else whole
            total += ((2 * whole - alone.times(x, gram)) * d).sum((1, 2))
        return total


def joined(steps: Sequence[Tensor], clients: int) -> Tensor:
    """Steps' rows [c', r, n] behind one another, [clients, ..., n]; zeros for clients that took no such step."""
    if len(steps) == 1 and len(steps[0]) == clients:
        return steps[0]
    return torch.cat([pad(part, (0, 0, 0, 0, 0, clients - len(part))) for part in steps], dim=1)


def _added(made: Tensor | None, more: Tensor, share: float | Tensor, count: int) -> Tensor:
    """Made plus share * more, in place."""
    if isinstance(share, Tensor):
        more = more.mul_(share[:count])
    elif share != 1.0:
        more = more.mul_(share)
    return more if made is None else made.add_(more)
