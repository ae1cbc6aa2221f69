"""A stack of models as what they have in common and what each adds to it; formed only when somebody looks.

Under SGD, with momentum, weight decay and a pull to the start too, all that a client does to the weights W0 of a dense
layer is linear in its gradients, and a gradient is a product of the layer's inputs X and its outputs' gradients D:

    W_c = a_c W0 + sum_r b_cr D_cr^T X_cr

So the weights of c clients need not be formed at all while nobody asks for them: their weighted mean is one product of
all rows, and the length of a client's change comes from the Gram matrices X X^T and D D^T, which training has computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from piebald.parameters import Slot
from piebald.runtimes.engines.products import product

_LARGE = 1 << 18  # numbers of a layer, from where on one product a client is worth its call


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """How far one layer's weights have moved, for c clients, those with most steps first.

    Attributes:
        slot: where the weights [out, in] lie in the vector.
        x, d: of each step [c', r, in] and [c', r, out], the inputs and outputs' gradients of those c' that took it.
        inner: of each step s [c', s + 1], the inner products of its gradient D^T X with those of all steps up to it.
        whole: [c, r, in], x of all steps behind one another, where it is at hand.
    """

    slot: Slot
    x: Sequence[Tensor]
    d: Sequence[Tensor]
    inner: Sequence[Tensor]
    whole: Tensor | None = None

    def scaled(self, scale: Tensor) -> list[Tensor]:
        """Each step's D times its factor, from `scale` [c, steps]."""
        return [d * scale[: len(d), step].view(-1, 1, 1) for step, d in enumerate(self.d)]

    def into(self, made: Tensor, scale: Tensor) -> None:
        """Write the sums over steps into `made` [c, out * in], for factors of each step [c, steps]."""
        d, x = _joined(self.scaled(scale), len(scale)), self.whole
        x = _joined(self.x, len(scale)) if x is None else x
        if math.prod(self.slot.shape) < _LARGE:
            made.copy_(torch.bmm(d.transpose(1, 2), x).flatten(1))
            return
        for one, own, rows in zip(made, d, x, strict=True):
            one.copy_(product(own.t(), rows.t()).flatten())

    def pooled(self, scale: Tensor) -> Tensor:
        """The sum over clients of what `into` writes, [out, in], without forming that."""
        if self.whole is not None:
            return product(_joined(self.scaled(scale), len(scale)).flatten(0, 1).t(), self.whole.flatten(0, 1).t())
        d, x = ([part.flatten(0, 1) for part in parts] for parts in (self.scaled(scale), self.x))
        if sum(part.numel() for part in (*d, *x)) < len(d) * math.prod(self.slot.shape):
            d, x = [torch.cat(d)], [torch.cat(x)]  # copying the rows is cheaper than adding up weights
        made = product(d[0].t(), x[0].t())
        for more, rows in zip(d[1:], x[1:], strict=True):
            made += product(more.t(), rows.t())
        return made

    def squares(self, scale: Tensor) -> Tensor:
        """Squared lengths [c] of what `into` writes, from the inner products."""
        total = scale.new_zeros(len(scale))
        for step, inner in enumerate(self.inner):
            mine = scale[: len(inner), step]
            earlier = (inner[:, :step] * scale[: len(inner), :step]).sum(1)
            total[: len(inner)] += mine * (mine * inner[:, step] + 2 * earlier)
        return total

    def along(self, weights: Tensor, scale: Tensor) -> Tensor:
        """Inner products [c] of what `into` writes with weights [out, in]."""
        total = scale.new_zeros(len(scale))
        for x, d in zip(self.x, self.scaled(scale), strict=True):
            total[: len(x)] += (product(x.flatten(0, 1), weights).view(d.shape) * d).sum((1, 2))
        return total


def _joined(steps: Sequence[Tensor], clients: int) -> Tensor:
    """Steps' rows [c', r, n] behind one another, [clients, ..., n]; zeros for clients that took no such step."""
    return torch.cat([torch.nn.functional.pad(part, (0, 0, 0, 0, 0, clients - len(part))) for part in steps], dim=1)


class LowRank(Tensor):
    """Models [c, p].  Any operation of torch on it first forms them, so whoever knows nothing of this class is right.

    Attributes:
        base: [p], what all start from.  Only where `factors` and `own` do not reach are models equal to it.
        keep: [c], the part of `base` that is left in the factors' layers (a_c).
        factors: the layers that are products.
        scale: [c, steps], the factor b_cr of each step's gradient.
        own: [c, q], the other numbers, by `spans`: which slice of p lies in which slice of q.
        order: the client of each row of factors and own, None where they are in order.
    """

    base: Tensor
    keep: Tensor
    factors: Sequence[Factor]
    scale: Tensor
    own: Tensor
    spans: Sequence[tuple[slice, slice]]
    order: Tensor | None
    _dense: Tensor | None

    @staticmethod
    def __new__(cls, base: Tensor, own: Tensor, *_: Any, **__: Any) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, (len(own), base.shape[0]), dtype=base.dtype, device=base.device)
        return made

    def __init__(
        self,
        base: Tensor,
        own: Tensor,
        spans: Sequence[tuple[slice, slice]],
        factors: Sequence[Factor] = (),
        scale: Tensor | None = None,
        keep: Tensor | None = None,
        order: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.base, self.own, self.spans, self.factors = base, own, spans, factors
        self.scale = own.new_zeros(len(own), 0) if scale is None else scale
        self.keep = own.new_ones(len(own)) if keep is None else keep
        self.order = order
        self._dense = None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(LowRank, LowRank.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LowRank({list(self.shape)}, factors={[factor.slot.name for factor in self.factors]})"

    def dense(self) -> Tensor:
        """The models [c, p] as an ordinary tensor."""
        if self._dense is None:
            self._dense = self.columns(0, self.base.shape[0])
        return self._dense

    def columns(self, start: int, stop: int) -> Tensor:
        """Some of their numbers [c, stop - start]; whole layers only."""
        made = self.base[start:stop].repeat(len(self.own), 1)
        for here, there in self.spans:
            lo, hi = max(here.start, start), min(here.stop, stop)
            if lo < hi:
                made[:, lo - start : hi - start] = self.own[:, there.start + lo - here.start :][:, : hi - lo]
        for factor in self.factors:
            if start <= factor.slot.start < stop:
                layer = made[:, factor.slot.start - start : factor.slot.stop - start]
                factor.into(layer, self.scale)
                layer += self.keep.unsqueeze(1) * self.base[factor.slot.start : factor.slot.stop]
        return made if self.order is None else made[self.order.argsort()]

    def change(self, stop: int) -> Tensor:
        """How far each model has moved from `base`, [c, stop], without forming the models on the way."""
        own, layers = self._own_until(stop), [factor for factor in self.factors if factor.slot.start < stop]
        reached = sum(here.stop - here.start for here, _ in own) + sum(math.prod(one.slot.shape) for one in layers)
        made = (self.own.new_empty if reached == stop else self.own.new_zeros)(len(self.own), stop)
        for here, there in own:
            torch.sub(self.own[:, there], self.base[here], out=made[:, here])
        for factor in layers:
            here = slice(factor.slot.start, factor.slot.stop)
            factor.into(made[:, here], self.scale)
            if bool((self.keep != 1).any()):
                made[:, here] += (self.keep - 1).unsqueeze(1) * self.base[here]
        return made if self.order is None else made[self.order.argsort()]

    def lengths(self, stop: int) -> Tensor:
        """How far each model has moved from `base`, [c], in its first `stop` numbers."""
        total = self.own.new_zeros(len(self.own))
        for here, there in self._own_until(stop):
            total += (self.own[:, there] - self.base[here]).square().sum(1)
        shrunk = bool((self.keep != 1).any())
        for factor in self.factors:
            if factor.slot.start >= stop:
                continue
            total += factor.squares(self.scale)
            if shrunk:
                weights = self.base[factor.slot.start : factor.slot.stop].view(factor.slot.shape)
                less = self.keep - 1
                total += less * (less * weights.square().sum() + 2 * factor.along(weights, self.scale))
        total = total.clamp(min=0).sqrt()
        return total if self.order is None else total[self.order.argsort()]

    def moved(self, weights: Tensor, stop: int) -> Tensor:
        """The weighted sum [stop] of the changes since `base`, for weights [c]."""
        if self.order is not None:
            weights = weights[self.order]
        made = self.own.new_zeros(stop)
        for here, there in self._own_until(stop):
            torch.addmv(self.base[here], self.own[:, there].t(), weights, beta=-float(weights.sum()), out=made[here])
        less = float((weights * (self.keep - 1)).sum())
        for factor in self.factors:
            if factor.slot.start < stop:
                here = slice(factor.slot.start, factor.slot.stop)
                made[here] = factor.pooled(self.scale * weights.unsqueeze(1)).flatten()
                if less:
                    made[here].add_(self.base[here], alpha=less)
        return made

    def _own_until(self, stop: int) -> list[tuple[slice, slice]]:
        cut = [(here, there, min(here.stop, stop) - here.start) for here, there in self.spans if here.start < stop]
        return [(slice(h.start, h.start + count), slice(t.start, t.start + count)) for h, t, count in cut]
