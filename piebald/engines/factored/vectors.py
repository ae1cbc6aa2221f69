"""A stack of vectors kept as sums, which are formed only when their numbers are read.

Models that were trained without forming any client's weights (`factors`) stay factored through the arithmetic of
trainers: sums, differences, multiples by a number for each client.  For c clients,

    v_c = sum_i a_ci M_i (or M_ci) + sum_f sum_t b_cft D_cft^T X_cft

and equal terms cancel.  So the weighted mean of updates is a single product of all rows, and SCAFFOLD's variate c_k - c
+ (w_t - w) / (K lr) is, as in the paper, the mean of a client's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from piebald.core.parameters import Slot
from piebald.engines.factored.factors import Coefficient, Factor, KnownProducts, MatrixTerm, Weights, added, once

Factors = Sequence[tuple[Factor, Tensor]]
Spans = Sequence[tuple[slice, slice]]


class FactoredVectors(Tensor):
    """Vectors [c, p] as sums.  Sums, differences and multiples of them are factored again; any other operation of torch
    first forms them, so code that does not know this class computes the right numbers.

    Attributes:
        matrices: terms that exist as tensors; they may not be written to.
        factors: layers that are products, each with the coefficients [c, steps] of the steps.
        own: numbers [c, q] that replace all terms in some columns.
        spans: which slice of p is which slice of q.
        start: what SGD started from, where these are models that it ended with.
        moved: then squared lengths [c] of the change of each layer that is a product, by the layer's first column.
        sliced: whether these are the first columns of other vectors, which torch would allow to be written to through
            them.
    """

    matrices: Sequence[MatrixTerm]
    factors: Factors
    own: Tensor
    spans: Spans
    start: MatrixTerm | None
    moved: Mapping[int, Tensor]
    sliced: bool
    _formed: Tensor | None

    @staticmethod
    def __new__(cls, like: Tensor, count: int, size: int, *_: Any, **__: Any) -> Self:
        wrapper: Self = Tensor._make_wrapper_subclass(cls, (count, size), dtype=like.dtype, device=like.device)
        return wrapper

    def __init__(
        self,
        like: Tensor,
        count: int,
        size: int,
        matrices: Sequence[MatrixTerm],
        factors: Factors = (),
        own: Tensor | None = None,
        spans: Spans = (),
        start: MatrixTerm | None = None,
        moved: Mapping[int, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.matrices, self.factors, self.spans = matrices, factors, spans
        self.own = like.new_empty(count, 0) if own is None else own
        self.start, self.moved, self.sliced, self._formed = start, moved or {}, False, None

    @classmethod
    def of(cls, vectors: Tensor) -> FactoredVectors:
        """Ordinary vectors [c, p] as a single term; a vector that all clients share is not copied."""
        if isinstance(vectors, FactoredVectors):
            return vectors
        shared = len(vectors) == 1 or vectors.stride(0) == 0
        return cls(vectors, len(vectors), vectors.shape[1], [MatrixTerm.of(vectors[0] if shared else vectors)])

    @classmethod
    def zeros(cls, like: Tensor) -> FactoredVectors:
        """Zeros of the same shape."""
        return cls(like, len(like), like.shape[1], ())

    def like(
        self, matrices: Sequence[MatrixTerm], factors: Factors, own: Tensor, spans: Spans | None = None
    ) -> FactoredVectors:
        """Vectors of the same shape from other terms."""
        return FactoredVectors(
            self.own, len(self), self.shape[1], matrices, factors, own, self.spans if spans is None else spans
        )

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # not __torch_dispatch__, whose first call costs a second: it imports all of torch.distributed.tensor
        name, kwargs = func.__name__, kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if name in _ABOUT:
                return func(*args, **kwargs)
            linear = _LINEAR.get(name)
            result = None if linear is None else linear(*args, **kwargs)
            if result is not None:
                return result
            written = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
            if written and isinstance(args[0], FactoredVectors) and args[0].sliced:
                raise RuntimeError(
                    "a slice of sums cannot be written to, since they would not notice: take its clone()"
                )
            args, kwargs = tree_map_only(FactoredVectors, FactoredVectors.dense, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(
            FactoredVectors, FactoredVectors.dense, (args, kwargs or {})
        )  # for operations that torch calls by itself
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FactoredVectors({list(self.shape)}, factors={[factor.slot.name for factor, _ in self.factors]})"

    # -- formed

    def dense(self) -> Tensor:
        """The vectors [c, p] as an ordinary tensor, which replaces the terms from now on: it may be written to."""
        if self._formed is None:
            formed = self.columns(0, self.shape[1])
            self.own, self.spans = formed, [(slice(0, formed.shape[1]), slice(0, formed.shape[1]))]
            self.matrices, self.factors, self.start, self.moved = (), (), None, {}
            self._formed = formed
        return self._formed

    def columns(self, start: int, stop: int) -> Tensor:
        """Some columns [c, stop - start]; whole layers only."""
        columns = self.own.new_empty(len(self), stop - start)
        for here, index in _cut(self.spans, start, stop):
            columns[:, here.start - start : here.stop - start] = self.own[:, index]
        written = set[int]()  # first columns of layers that have been written
        for gap in _gaps(self.spans, start, stop):
            self._sum_of_matrices(gap, columns[:, gap.start - start : gap.stop - start])
        for factor, scale in self.factors:
            slot = factor.slot
            if not start <= slot.start < stop:
                continue
            layer = columns[:, slot.start - start : slot.stop - start]
            # `columns` begins without values: where there are no matrices, a layer's first product has to overwrite
            factor.into(layer, scale, add=bool(self.matrices) or slot.start in written)
            written.add(slot.start)
        return columns

    def _sum_of_matrices(self, gap: slice, columns: Tensor) -> None:
        """Write the sum of the matrices into `made`; zeros where there is none, unless a factor will write there."""
        if not self.matrices:
            slots = {factor.slot.start: factor.slot for factor, _ in self.factors}.values()
            if sum(slot.stop - slot.start for slot in slots) < self.shape[1] - self.own.shape[1]:
                columns.zero_()
            return
        # terms that are alike for all clients first, as one vector: `made` is written once for each of the others
        total = columns.new_zeros(())
        for term in sorted(self.matrices, key=lambda term: not term.is_shared):
            part, out = term.part(gap), None if term.is_shared else columns
            if isinstance(term.share, float):
                total = torch.add(total, part, alpha=term.share, out=out)
            else:
                total = torch.addcmul(total, part, term.share, out=out)
        if total is not columns:
            columns.copy_(total)

    def first(self, stop: int) -> FactoredVectors:
        """The first columns [c, stop]; whole layers only."""
        spans = _cut(self.spans, 0, stop)
        numbers = self.own[:, : spans[-1][1].stop if spans else 0]
        factors = [(factor, scale) for factor, scale in self.factors if factor.slot.start < stop]
        matrices = [MatrixTerm.of(term.part(slice(0, stop)), term.share) for term in self.matrices]
        cut = FactoredVectors(self.own, len(self), stop, matrices, factors, numbers, spans, self.start, self.moved)
        cut.sliced = True
        return cut

    # -- summed and measured

    def total(self, weights: Tensor, known: KnownProducts | None = None) -> Tensor:
        """The weighted sum [p] for weights [c]; `known` keeps products for other sums over the same rows."""
        total = self.own.new_zeros(self.shape[1])
        for gap in _gaps(self.spans, 0, self.shape[1]):
            for term in self.matrices:
                part, share = term.part(gap), term.share
                coefficients = weights * (share if isinstance(share, float) else share.flatten())
                if part.dim() == 1:
                    total[gap].addcmul_(part, coefficients.sum())
                else:
                    total[gap].add_(coefficients @ part)  # += would also copy it to itself
        for here, index in self.spans:
            total[here] = weights @ self.own[:, index]
        together: dict[tuple[int, int], tuple[Factor, Tensor]] = {}  # sums of factors with the same rows
        for factor, scale in self.factors:
            coefficients, here = scale * weights.unsqueeze(1), slice(factor.slot.start, factor.slot.stop)
            if factor.whole is None:
                total[here].add_(factor.summed(coefficients).flatten())
                continue
            # by identity: comparing rows by their numbers would read all of them
            key, (_, d) = (here.start, id(factor.whole)), factor.rows(coefficients)
            together[key] = (factor, together[key][1] + d if key in together else d)
        for factor, d in together.values():
            assert factor.whole is not None
            product = once(factor.whole, d, [] if known is None else known)
            total[factor.slot.start : factor.slot.stop].add_(product.flatten())
        return total

    def lengths(self) -> Tensor:
        """Lengths [c] of the change since `start`, where these are models that SGD ended with."""
        assert self.start is not None
        total = self.own.new_zeros(len(self))
        for here, index in self.spans:
            total += (self.own[:, index] - self.start.part(here)).square().sum(1)
        for layer in sorted({factor.slot.start for factor, _ in self.factors}):
            total += self.moved[layer]
        # squares of layers that are products are sums with both signs, which rounding may leave below 0
        return total.clamp(min=0).sqrt()

    def sums(self) -> Tensor:
        """Numbers [c] that are finite where a client's vector is."""
        total = self.own.sum(1)
        for term in self.matrices:
            share = term.share if isinstance(term.share, float) else term.share.flatten()
            total = total + term.part(slice(None)).sum(-1) * share
        for factor, scale in self.factors:
            total = total + factor.sums(scale)
        return total

    # -- as the weights of a layer

    @property
    def alone(self) -> MatrixTerm | None:
        """The only matrix term, where its coefficient is 1 and there are no factors; otherwise None."""
        if len(self.matrices) != 1 or self.factors:
            return None
        (term,) = self.matrices
        return term if isinstance(term.share, float) and term.share == 1.0 else None

    def has_terms(self, slot: Slot) -> bool:
        """Return whether the weights of a layer are sums, not in `own`."""
        products = any(factor.slot.start == slot.start for factor, _ in self.factors)
        return not _cut(self.spans, slot.start, slot.stop) and (bool(self.matrices) or products)

    def layer(self, slot: Slot, order: Tensor | None) -> Weights:
        """The weights of a layer that `has_terms`, clients in this order."""
        matrices: list[tuple[Tensor, float | Tensor]] = []
        for term in self.matrices:
            part, share = term.part(slice(slot.start, slot.stop)), term.share
            part = part if order is None or part.dim() == 1 else part[order]
            if isinstance(share, Tensor):
                share = (share if order is None else share[order]).unsqueeze(2)
            matrices.append((part.view(*part.shape[:-1], *slot.shape), share))
        products = []
        for factor, scale in self.factors:
            if factor.slot.start == slot.start:
                x, d = factor.rows(scale) if factor.order is order else factor.by_client(scale)
                products.append((x, d) if factor.order is order or order is None else (x[order], d[order]))
        return Weights(matrices, products)

    def plus(self, other: FactoredVectors, share: float) -> FactoredVectors | None:
        """The sum of these and `share` times others, or None where their `spans` differ."""
        spans = self.spans or other.spans
        if (self.spans and other.spans and list(self.spans) != list(other.spans)) or self.shape != other.shape:
            return None
        first, second = (part.own if part.spans or not spans else part._columns_of(spans) for part in (self, other))
        numbers = torch.add(first, second, alpha=share)
        terms: dict[Any, MatrixTerm] = {}
        for term in (*self.matrices, *(term.times(share) for term in other.matrices)):
            before = terms.get(term.name)
            terms[term.name] = term if before is None else before._replace(share=added(before.share, term.share))
        matrices = [term for term in terms.values() if isinstance(term.share, Tensor) or term.share != 0.0]
        products: dict[Any, tuple[Factor, Coefficient]] = {}
        for factor, scale in (*self.factors, *((factor, share * scale) for factor, scale in other.factors)):
            old = products.get(factor.key)
            products[factor.key] = (factor, scale) if old is None else (old[0], added(old[1], scale))
        factors = [(factor, scale) for factor, scale in products.values() if isinstance(scale, Tensor)]
        return self.like(matrices, factors, numbers, spans)

    def _columns_of(self, spans: Spans) -> Tensor:
        shared = self.alone if not self.spans else None
        if shared is not None and shared.matrix.dim() == 1:  # read for each client, but not written for each
            return torch.cat([shared.part(here) for here, _ in spans]).expand(len(self), -1)
        vectors = [self.columns(here.start, here.stop) for here, _ in spans]
        return vectors[0] if len(vectors) == 1 else torch.cat(vectors, dim=1)

    def scaled(self, share: float | Tensor) -> FactoredVectors:
        """Multiples, by one number or by one for each client [c, 1]."""
        return self.like(
            [term.times(share) for term in self.matrices],
            [(factor, scale * share) for factor, scale in self.factors],
            self.own * share,
        )


def to_dense(vectors: Tensor) -> Tensor:
    """Vectors as an ordinary tensor."""
    return vectors.dense() if isinstance(vectors, FactoredVectors) else vectors


def _coefficient(value: object, count: int) -> float | Tensor | None:
    """A number, or a tensor with one number for each client, as a coefficient."""
    if isinstance(value, int | float):
        return float(value)
    if not isinstance(value, Tensor) or isinstance(value, FactoredVectors) or value.dim() > 2:
        return None
    if value.dim() == 2 and value.shape[1] == 1 and value.shape[0] in (1, count):
        return value.float().expand(count, 1)
    return value.float().expand(count, 1) if value.numel() == 1 and value.dim() < 2 else None


def _plus(left: Any, right: Any, *, alpha: float = 1.0) -> FactoredVectors | None:
    vectors = [part for part in (left, right) if isinstance(part, FactoredVectors)]
    if not all(isinstance(part, Tensor) and part.shape == vectors[0].shape for part in (left, right)):
        return None
    if any(part.dtype != vectors[0].dtype for part in (left, right)):
        return None
    return FactoredVectors.of(left).plus(FactoredVectors.of(right), float(alpha))


def _times(left: Any, right: Any) -> FactoredVectors | None:
    vectors, by = (left, right) if isinstance(left, FactoredVectors) else (right, left)
    share = _coefficient(by, len(vectors))
    return None if share is None else vectors.scaled(share)


def _over(left: Any, right: Any) -> FactoredVectors | None:
    share = _coefficient(right, len(left)) if isinstance(left, FactoredVectors) else None
    return None if share is None else left.scaled(1 / share)


def _first(vectors: FactoredVectors, key: Any) -> FactoredVectors | None:
    """`vectors[:, :stop]` or `vectors[..., :stop]`, unless it cuts a layer."""
    if not isinstance(key, tuple) or len(key) != 2:
        return None
    rows, columns = key
    if rows is not Ellipsis and not (isinstance(rows, slice) and rows == slice(None)):
        return None
    if not isinstance(columns, slice) or columns.start not in (None, 0) or columns.step not in (None, 1):
        return None
    stop = len(range(vectors.shape[1])[columns])
    cuts = any(factor.slot.start < stop < factor.slot.stop for factor, _ in vectors.factors)
    return None if cuts else vectors.first(stop)


# What torch knows about a tensor without reading its numbers.
_ABOUT = {"__get__", "__len__", "dim", "ndimension", "size", "stride", "numel", "element_size", "is_floating_point"}
_LINEAR: dict[str, Callable[..., FactoredVectors | None]] = {
    "add": _plus,
    "__add__": _plus,
    "__radd__": _plus,
    "sub": lambda left, right, *, alpha=1: _plus(left, right, alpha=-alpha),
    "__sub__": lambda left, right: _plus(left, right, alpha=-1),
    "rsub": lambda left, right: _plus(right, left, alpha=-1),
    "__rsub__": lambda left, right: _plus(right, left, alpha=-1),
    "mul": _times,
    "__mul__": _times,
    "__rmul__": _times,
    "div": _over,
    "__truediv__": _over,
    "__getitem__": _first,
}


def _cut(spans: Spans, start: int, stop: int) -> list[tuple[slice, slice]]:
    """The parts of spans between two columns."""
    parts = []
    for here, place in spans:
        lo, hi = max(here.start, start), min(here.stop, stop)
        if lo < hi:
            parts.append((slice(lo, hi), slice(place.start + lo - here.start, place.start + hi - here.start)))
    return parts


def _gaps(spans: Spans, start: int, stop: int) -> list[slice]:
    """The columns between spans."""
    gaps, at = [], start
    for here, _ in _cut(spans, start, stop):
        if at < here.start:
            gaps.append(slice(at, here.start))
        at = here.stop
    if at < stop:
        gaps.append(slice(at, stop))
    return gaps
