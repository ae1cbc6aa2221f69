"""The batched engine: the rows of many clients in one batch through one module, see `layers`.

Dense layers need not form any client's weights (`factors`), whether all clients start from the same ones or not; which
layers that pays for is decided by counting.  Clients of unequal size are treated as in `vmapped`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from piebald.contracts import SgdConfig, SgdOutcome
from piebald.parameters import Layout, Slot
from piebald.runtimes.engines.batched_layers import BatchedPass, Factored, join
from piebald.runtimes.engines.row_loader import Gathered, Places
from piebald.runtimes.engines.sequential import SequentialEngine
from piebald.runtimes.engines.sgd_step import SgdRun
from piebald.runtimes.engines.vmapped import Leaves, VmappedEngine, Words, descended, laid_out, pad_rows, rows_of
from piebald.runtimes.factored.client_state import in_steps, own_places
from piebald.runtimes.factored.factors import OwnRows
from piebald.runtimes.factored.vectors import FactoredVectors

# Keeping factors costs products of a client's rows with one another, R^2 (in + out) multiplications each way for R rows
# in all; forming the weights costs steps * in * out numbers read and written several times over.  One of these is about
# as dear as so many multiplications.
_MULTIPLICATIONS = 24
_FORMED = 1 << 23  # numbers of a stack whose weights are formed; beyond, one client after another is kinder to memory


class BatchedEngine(VmappedEngine):
    """Trains all clients of a stack at once, in one pass of a joined module."""

    name = "batched"
    lazy = True

    def walk(self, walk: SgdRun) -> SgdOutcome:
        if self.traits.random or not self.traits.each or walk.descent.privacy is not None:
            return super().walk(walk)
        pool, plans, words, order = self.planned(walk)
        start, correction = (
            FactoredVectors.of(walk.model),
            None if walk.correction is None else FactoredVectors.of(walk.correction),
        )
        factored = self._worth_factoring(walk, start, correction, plans)
        form = self._form(factored)
        if form is None or not plans[0]:
            return super().walk(walk)
        if not factored and len(plans) * self.work.layout.size > _FORMED:
            return SequentialEngine.walk(self, walk)
        journey = _Journey(self, form, walk, order, start, correction)
        journey.begin(pool, plans)
        for step in range(len(plans[0])):
            journey.step(step, pool, plans, words)
        return journey.end([len(plan) for plan in plans])

    @cached_property
    def _forms(self) -> dict[tuple[str, ...], _Form | None]:
        return {}

    @property
    def joins(self) -> bool:
        """Whether the model's layers can be joined; if not, stacks run through vmap."""
        return not self.traits.random and self.traits.each and self._form(()) is not None

    def _worth_factoring(
        self,
        walk: SgdRun,
        start: FactoredVectors,
        correction: FactoredVectors | None,
        plans: Sequence[Sequence[Places]],
    ) -> list[Slot]:
        """Dense layers whose weights need not be formed: their steps are linear in gradients, and it is cheaper."""
        descent = walk.descent
        nonlinear = descent.clip is not None or isinstance(descent.lr, Tensor)
        apart = walk.velocity is not None or (walk.prox and walk.prox_center is not walk.model) or start.factors
        twice = correction is not None and (
            walk.prox or descent.weight_decay
        )  # the start and the correction, see `moved`
        if nonlinear or apart or twice or (self.traits.mixes and len(plans) > 1):
            return []
        found, steps = [], len(plans[0])
        for layer in self.packer.layers:
            (out, inside), rows = layer.slot.shape, layer.rows * sum(len(batch) for batch in plans[0])
            free = all(one is None or one.has_terms(layer.slot) for one in (start, correction))
            products = (
                [] if correction is None else [factor for factor, _ in correction.factors if factor.slot == layer.slot]
            )
            others = rows * (1 + len(products))  # those of a product are as many, more or less
            if free and rows * others * (out + inside) < _MULTIPLICATIONS * steps * out * inside:
                found.append(layer.slot)
        return found

    def _form(self, factored: Sequence[Slot]) -> _Form | None:
        """The joined module for these factored layers, made once for each choice of them."""
        names, made = tuple(slot.name for slot in factored), self._forms
        if names not in made:
            joined = join(self.work.model, self.work.layout, names)
            if joined is not None:
                joined[0].to(self.device).train()
            direct = {layer.slot.name for layer in self.packer.layers if layer.itself} if names else set()
            made[names] = None if joined is None else _Form(*joined, _without(self.work.layout, names), direct)
        return made[names]


@dataclasses.dataclass(frozen=True, slots=True)
class _Scalars:
    """What a walk's factored layers are made of after some steps, see `_Journey`."""

    keep: float = 1.0
    swing: float = 0.0
    drift: float = 0.0
    tow: float = 0.0
    scale: list[float] = dataclasses.field(default_factory=list)
    push: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """A joined module, the turn its layers follow, its factored layers, the layout of all other numbers, and the names
    of layers that see the model's inputs themselves.
    """

    module: nn.Module
    turn: BatchedPass
    factored: list[Factored]
    rest: tuple[Layout, list[tuple[slice, slice]]]
    direct: set[str]


class _Ahead(NamedTuple):
    """The rows x [c, r, ...] of all steps, where each step's begin and end, and how many rows of a layer one is."""

    x: Tensor
    ends: list[int]
    each: int


class _Journey:
    """One walk of one stack: own numbers [c, q] step by step, and scalars that say what became of factored layers.

    With g_t the gradient of step t and S the correction, a factored layer's weights and velocity are
    keep W0 + drift S + sum_t scale_t g_t  and  swing W0 + tow S + sum_t push_t g_t; Metis' eq. 2 with weight decay,
    prox and correction is a recursion of these numbers alone.
    """

    def __init__(
        self,
        engine: BatchedEngine,
        form: _Form,
        walk: SgdRun,
        order: list[int],
        start: FactoredVectors,
        correction: FactoredVectors | None,
    ) -> None:
        self.engine, self.form, self.order, self.start, self.correction = engine, form, order, start, correction
        layout, self.spans = form.rest
        own = dataclasses.replace(
            walk,
            model=self._own(walk.model),
            prox_center=None if walk.prox_center is None else self._own(walk.prox_center),
            correction=None if walk.correction is None else self._own(walk.correction),
            velocity=None if walk.velocity is None else self._own(walk.velocity),
        )
        self.walk = rows_of(own, order)
        self.w = self.walk.model.clone()
        momentum = walk.velocity is not None or bool(walk.descent.momentum)
        self.u = None
        if momentum:
            self.u = torch.zeros_like(self.w) if self.walk.velocity is None else self.walk.velocity.clone()
        self.g = None if walk.plain else torch.zeros_like(self.w)
        self.leaves = Leaves(layout, self.w)
        straight = order == sorted(order)
        self.sorted = None if straight else torch.tensor(order, device=engine.device)
        self.at = _Scalars()
        self.past = [self.at]
        self.total = torch.zeros(len(order), device=engine.device)
        form.turn.scale, form.turn.shares = [], self._shares()
        form.turn.hook = torch.zeros((), device=engine.device, requires_grad=True)
        self.ahead: _Ahead | None = None
        self.places: Tensor | None = None

    def _own(self, matrix: Tensor) -> Tensor:
        """The numbers of a [c, p] matrix that are not factored."""
        if isinstance(matrix, FactoredVectors):
            vectors = [matrix.columns(here.start, here.stop) for here, _ in self.spans]
        else:
            vectors = [matrix[:, here] for here, _ in self.spans]
        if len(vectors) == 1:
            return vectors[0]
        return torch.cat(vectors, dim=1) if vectors else self.engine.vector.new_zeros(len(matrix), 0)

    def begin(self, pool: Gathered, plans: Sequence[Sequence[Places]]) -> None:
        """Tell the factored layers what they start from.  Where one sees the rows as they are, fetch those of all steps
        at once, and make its products in one go.
        """
        direct = [layer for layer in self.form.factored if layer.slot.name in self.form.direct]
        direct = [layer for layer in direct if layer.slot.shape[1] == direct[0].slot.shape[1]]  # rows cut in one way
        if direct:
            index, ends = laid_out(plans)
            rows = pool.x.index_select(0, torch.from_numpy(index.ravel()).to(self.engine.device))
            inside = direct[0].slot.shape[1]
            self.ahead = _Ahead(rows.view(*index.shape, *rows.shape[1:]), ends, rows[0].numel() // inside)
            seen = rows.view(len(index), -1, inside)
            if self.correction is not None and self.engine.feed.pooled and self.ahead.each == 1:
                places = [pool.places[row] for row in self.order]
                self.places, first = (part.to(self.w.device) for part in own_places(index, ends, plans, places))
                self.correction = self._by_steps(self.correction, seen, self.places, first)
        starts = [self.start] if self.correction is None else [self.start, self.correction]
        for layer in self.form.factored:
            layer.begin([one.layer(layer.slot, self.sorted) for one in starts])
        for layer in direct:
            layer.look_ahead(seen)

    def _by_steps(self, correction: FactoredVectors, x: Tensor, places: Tensor, first: Tensor) -> FactoredVectors:
        """The correction, with sums over a client's rows by the rows of its steps x [c, r, in]."""
        factors = []
        for factor, scale in correction.factors:
            made = in_steps(factor, x, places, first, self.sorted) if isinstance(factor, OwnRows) else None
            factors.append((made or factor, scale))
        return correction.like(correction.matrices, factors, correction.own)

    def _inputs(self, step: int, pool: Gathered, flat: Tensor, active: int) -> Tensor:
        """The rows of a step."""
        ahead, turn = self.ahead, self.form.turn
        if ahead is None:
            return pool.x.index_select(0, flat)
        lo, hi = ahead.ends[step : step + 2]
        x = ahead.x[:active, lo:hi].flatten(0, 1)
        turn.rows, turn.batch = slice(lo * ahead.each, hi * ahead.each), (x.data_ptr(), x._version)
        return x

    def step(self, step: int, pool: Gathered, plans: Sequence[Sequence[Places]], words: Sequence[Words]) -> None:
        """One step of all clients that still have one."""
        engine = self.engine
        active = sum(len(plan) > step for plan in plans)
        for lo, hi in engine.runs([len(plan[step]) for plan in plans[:active]]):
            index, mask = pad_rows([plan[step] for plan in plans[lo:hi]], engine.device)
            flat = index.flatten()  # one axis: much quicker to gather by than two
            rows = self._inputs(step, pool, flat, active), pool.y.index_select(0, flat)
            losses = self._losses(lo, hi, *rows, engine.keys(words[lo:hi], step), mask)
            parameters = self.leaves(lo, hi)[1]
            assert self.form.turn.hook is not None
            *gradients, _ = torch.autograd.grad(
                losses.sum(), [*parameters, self.form.turn.hook], allow_unused=True, materialize_grads=True
            )
            with torch.no_grad():
                self.total[lo:hi] += losses.detach()
                if parameters:
                    engine.step(self.walk, self.leaves, self.w, self.g, self.u, gradients, lo, hi)
        self._advance(self.walk.descent)

    def _losses(self, lo: int, hi: int, x: Tensor, y: Tensor, keys: Tensor | None, mask: Tensor | None) -> Tensor:
        """The mean loss [c] of each client's rows in x and y [c * b, ...]."""
        turn, objective = self.form.turn, self.engine.work.objective
        turn.count, turn.tensors = hi - lo, self.leaves(lo, hi)[0]
        with self.engine.precision(), self.engine.dropping(keys):
            losses = objective.loss(self.form.module(self.engine.shaped(x)), y).view(hi - lo, -1)
        return losses.mean(1) if mask is None else (losses * mask).sum(1) / mask.sum(1)

    def _shares(self) -> list[float]:
        """Of the starts of factored layers."""
        return [self.at.keep] if self.correction is None else [self.at.keep, self.at.drift]

    def _advance(self, descent: SgdConfig) -> None:
        """The recursion of the factored layers' scalars."""
        if not self.form.factored:
            return
        at, lr, decay, prox = self.at, self.walk.rate, descent.weight_decay, self.walk.prox
        swing = descent.momentum * at.swing - lr * (decay * at.keep + prox * (at.keep - 1))
        tow = descent.momentum * at.tow - lr * (self.correction is not None)
        push = [descent.momentum * e - lr * (decay + prox) * c for e, c in zip(at.push, at.scale, strict=True)]
        push.append(-lr)
        scale = [c + e for c, e in zip([*at.scale, 0.0], push, strict=True)]
        self.at = _Scalars(at.keep + swing, swing, at.drift + tow, tow, scale, push)
        self.form.turn.shares, self.form.turn.scale = self._shares(), self.at.scale
        self.past.append(self.at)

    def end(self, taken: Sequence[int]) -> SgdOutcome:
        """Where the clients ended; `taken` says how many steps each took."""
        self.leaves.finish()
        steps = torch.tensor([float(count) for count in taken], device=self.w.device)
        if not self.form.factored:
            return descended(self.w, steps, self.total / steps, self.u, self.order)
        back = slice(None) if self.sorted is None else self.sorted.argsort()
        factors = [layer.factor(self.sorted, self.places) for layer in self.form.factored]
        ends, width = [self.past[count] for count in taken], max(taken)

        def by_client(values: Sequence[float]) -> float | Tensor:
            """A number for each client [c, 1], one for all where they are equal."""
            return values[0] if len(set(values)) == 1 else self.w.new_tensor(values)[back].unsqueeze(1)

        def ended(own: Tensor, kept: Sequence[float], drift: Sequence[float], scale: Tensor) -> FactoredVectors:
            terms = [term.times(by_client(kept)) for term in self.start.matrices]
            found = [(factor, scale[back]) for factor in factors]
            if self.correction is not None:
                terms += [term.times(by_client(drift)) for term in self.correction.matrices]
                found += [(factor, own * by_client(drift)) for factor, own in self.correction.factors]
            return self.start.like(
                [term for term in terms if isinstance(term.share, Tensor) or term.share], found, own[back], self.spans
            )

        scale, push = (self._rectangle([getattr(at, name) for at in ends], width) for name in ("scale", "push"))
        model = ended(self.w, [at.keep for at in ends], [at.drift for at in ends], scale)
        shares = [self.w.new_tensor([at.keep - 1 for at in ends]), self.w.new_tensor([at.drift for at in ends])]
        model.start = self.start.alone
        model.moved = {layer.slot.start: layer.moved(scale, shares)[back] for layer in self.form.factored}
        velocity = None
        if self.u is not None:
            velocity = ended(self.u, [at.swing for at in ends], [at.tow for at in ends], push)
        return SgdOutcome(model, steps[back], (self.total / steps)[back], velocity)

    def _rectangle(self, rows: Sequence[Sequence[float]], width: int) -> Tensor:
        """Rows of unequal length, with zeros behind."""
        return self.w.new_tensor([[*row, *[0.0] * (width - len(row))] for row in rows])


def _without(layout: Layout, names: Sequence[str]) -> tuple[Layout, list[tuple[slice, slice]]]:
    """A layout of all but some tensors, and which slice of the whole vector is which slice of its own."""
    slots: list[Slot] = []
    spans: list[tuple[slice, slice]] = []
    for slot in layout.slots:
        if slot.name in names:
            continue
        start = slots[-1].stop if slots else 0
        slots.append(Slot(slot.name, slot.shape, start, slot.buffer))
        if spans and spans[-1][0].stop == slot.start:
            whole, own = spans.pop()
            spans.append((slice(whole.start, slot.stop), slice(own.start, slots[-1].stop)))
        else:
            spans.append((slice(slot.start, slot.stop), slice(start, slots[-1].stop)))
    size = slots[-1].stop if slots else 0
    return Layout(tuple(slots), size, size), spans
