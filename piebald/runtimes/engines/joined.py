"""The joined engine: the rows of many clients in one batch through one module, see `layers`.

Dense layers need not form any client's weights where all clients start from the same ones (`lowrank`); which layers
that pays for is decided by counting.  Clients of unequal size are treated as in `stacked`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from piebald.contracts import Descended, Descent
from piebald.parameters import Layout, Slot
from piebald.runtimes.engines.algebra import Walk
from piebald.runtimes.engines.feed import Gathered, Places
from piebald.runtimes.engines.layers import Factored, Turn, join
from piebald.runtimes.engines.lean import Lean
from piebald.runtimes.engines.lowrank import LowRank
from piebald.runtimes.engines.stacked import Leaves, Stacked, Words, descended, laid_out, pad_rows, rows_of

# Keeping factors costs products of a client's rows with one another, R^2 (in + out) multiplications each way for R rows
# in all; forming the weights costs steps * in * out numbers read and written several times over.  One of these is about
# as dear as so many multiplications.
_MULTIPLICATIONS = 24
_FORMED = 1 << 23  # numbers of a stack whose weights are formed; beyond, one client after another is kinder to memory


class Joined(Stacked):
    """Trains all clients of a stack at once, in one pass of a joined module."""

    name = "joined"

    def walk(self, walk: Walk) -> Descended:
        if self.traits.random or not self.traits.each or walk.descent.privacy is not None:
            return super().walk(walk)
        pool, plans, words, order = self.planned(walk)
        base = _common(walk)
        factored = [] if base is None else self._worth_factoring(walk, base[1], plans)
        form = self._form(factored)
        if form is None or not plans[0]:
            return super().walk(walk)
        if not factored and len(plans) * self.work.layout.size > _FORMED:
            return Lean.walk(self, walk)
        journey = _Journey(self, form, walk, order, None if base is None else base[0])
        journey.look_ahead(pool, plans)
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

    def _worth_factoring(self, walk: Walk, common: int, plans: Sequence[Sequence[Places]]) -> list[Slot]:
        """Dense layers whose weights need not be formed: their steps are linear in gradients, and it is cheaper."""
        descent = walk.descent
        nonlinear = descent.clip is not None or isinstance(descent.lr, Tensor)
        apart = walk.shift is not None or walk.velocity is not None or (walk.pull and walk.anchor is not walk.model)
        if nonlinear or apart or (self.traits.mixes and len(plans) > 1):
            return []
        found, steps = [], len(plans[0])
        for layer in self._dense_layers:
            (out, inside), rows = layer.slot.shape, layer.rows * sum(len(batch) for batch in plans[0])
            if layer.slot.stop <= common and rows * rows * (out + inside) < _MULTIPLICATIONS * steps * out * inside:
                found.append(layer.slot)
        return found

    @cached_property
    def _dense_layers(self) -> list[_Seen]:
        """Dense layers that are used once a pass."""
        return _seen_rows(self.module, self.work.layout, self.feed.sample())

    def _form(self, factored: Sequence[Slot]) -> _Form | None:
        """The joined module for these factored layers, made once for each choice of them."""
        names, made = tuple(slot.name for slot in factored), self._forms
        if names not in made:
            joined = join(self.work.model, self.work.layout, names)
            if joined is not None:
                joined[0].to(self.device).train()
            direct = {layer.slot.name for layer in self._dense_layers if layer.itself} if names else set()
            made[names] = None if joined is None else _Form(*joined, _without(self.work.layout, names), direct)
        return made[names]


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """A joined module, the turn its layers follow, its factored layers, the layout of all other numbers, and the names
    of layers that see the model's inputs themselves.
    """

    module: nn.Module
    turn: Turn
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

    With g_t the gradient of step t, a factored layer's weights and velocity are  keep W0 + sum_t scale_t g_t  and
    swing W0 + sum_t push_t g_t; Metis' eq. 2 with weight decay and pull is a recursion of these numbers alone.
    """

    def __init__(self, engine: Joined, form: _Form, walk: Walk, order: list[int], base: Tensor | None) -> None:
        self.engine, self.form, self.order, self.base = engine, form, order, base
        layout, self.spans = form.rest
        own = dataclasses.replace(
            walk,
            model=self._own(walk.model),
            anchor=None if walk.anchor is None else self._own(walk.anchor),
            shift=None if walk.shift is None else self._own(walk.shift),
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
        self.keep, self.swing, self.scale, self.push = 1.0, 0.0, list[float](), list[float]()
        self.past = [(self.keep, self.swing, self.scale, self.push)]
        self.total = torch.zeros(len(order), device=engine.device)
        form.turn.scale, form.turn.share = [], 1.0
        form.turn.hook = torch.zeros((), device=engine.device, requires_grad=True)
        for layer in form.factored:
            assert base is not None
            layer.begin(base)
        self.ahead: _Ahead | None = None

    def _own(self, matrix: Tensor) -> Tensor:
        """The numbers of a [c, p] matrix that are not factored."""
        if isinstance(matrix, LowRank):
            parts = [matrix.columns(here.start, here.stop) for here, _ in self.spans]
        else:
            parts = [matrix[:, here] for here, _ in self.spans]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim=1) if parts else self.engine.vector.new_zeros(len(matrix), 0)

    def look_ahead(self, pool: Gathered, plans: Sequence[Sequence[Places]]) -> None:
        """Fetch the rows of all steps at once where a layer sees them as they are, and make its products in one go."""
        layers = [layer for layer in self.form.factored if layer.slot.name in self.form.direct]
        if not layers:
            return
        layers = [layer for layer in layers if layer.slot.shape[1] == layers[0].slot.shape[1]]  # rows cut in one way
        index, ends = laid_out(plans)
        rows = pool.x.index_select(0, torch.from_numpy(index.ravel()).to(self.engine.device))
        inside = layers[0].slot.shape[1]
        self.ahead = _Ahead(rows.view(*index.shape, *rows.shape[1:]), ends, rows[0].numel() // inside)
        for layer in layers:
            layer.look_ahead(rows.view(len(index), -1, inside))

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
        turn, task = self.form.turn, self.engine.work.task
        turn.count, turn.tensors = hi - lo, self.leaves(lo, hi)[0]
        with self.engine.precision(), self.engine.dropping(keys):
            losses = task.loss(self.form.module(self.engine.shaped(x)), y).view(hi - lo, -1)
        return losses.mean(1) if mask is None else (losses * mask).sum(1) / mask.sum(1)

    def _advance(self, descent: Descent) -> None:
        """The recursion of the factored layers' scalars."""
        if not self.form.factored:
            return
        lr, decay, pull = self.walk.rate, descent.weight_decay, self.walk.pull
        self.swing = descent.momentum * self.swing - lr * (decay * self.keep + pull * (self.keep - 1))
        push = [descent.momentum * e - lr * (decay + pull) * c for e, c in zip(self.push, self.scale, strict=True)]
        self.push = [*push, -lr]
        self.keep += self.swing
        self.scale = [c + e for c, e in zip([*self.scale, 0.0], self.push, strict=True)]
        self.form.turn.share, self.form.turn.scale = self.keep, self.scale
        self.past.append((self.keep, self.swing, self.scale, self.push))

    def end(self, taken: Sequence[int]) -> Descended:
        """Where the clients ended; `taken` says how many steps each took."""
        self.leaves.finish()
        steps = torch.tensor([float(count) for count in taken], device=self.w.device)
        if not self.form.factored:
            return descended(self.w, steps, self.total / steps, self.u, self.order)
        order = torch.tensor(self.order, device=self.w.device)
        back = order.argsort()
        means = (self.total / steps)[back]
        factors = [layer.factor() for layer in self.form.factored]
        width = max(taken)

        def ended(own: Tensor, kept: Sequence[float], scales: Sequence[Sequence[float]]) -> LowRank:
            rows = own.new_tensor([[*scale, *[0.0] * (width - len(scale))] for scale in scales])
            straight = None if self.order == sorted(self.order) else order
            assert self.base is not None
            return LowRank(self.base, own, self.spans, factors, rows, own.new_tensor(kept), straight)

        keeps, swings, scales, pushes = zip(*(self.past[count] for count in taken), strict=True)
        velocity = None if self.u is None else ended(self.u, swings, pushes)
        return Descended(ended(self.w, keeps, scales), steps[back], means, velocity)


def _common(walk: Walk) -> tuple[Tensor, int] | None:
    """A model [p] that all clients of a walk start from, and how many of its numbers it is true of."""
    model = walk.model
    if isinstance(model, LowRank):
        return None if model.factors else (model.base, min((here.start for here, _ in model.spans), default=0))
    if len(model) == 1 or model.stride(0) == 0:
        return model[0], model.shape[1]
    return None


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


class _Seen(NamedTuple):
    """The weights of a dense layer, how many rows it sees for one of the model's (more than one in sequences), and
    whether these are the model's inputs themselves, in another shape at most.
    """

    slot: Slot
    rows: int
    itself: bool


def _seen_rows(model: nn.Module, layout: Layout, x: Tensor) -> list[_Seen]:
    """What dense layers that are used once a pass see of the inputs x."""
    slots, seen = {slot.name: slot for slot in layout.slots}, list[_Seen]()
    hooks = []
    for path, layer in model.named_modules():
        slot = slots.get(f"{path}.weight")
        if type(layer) is nn.Linear and slot is not None:

            def note(_: nn.Module, inputs: tuple[Tensor, ...], slot: Slot = slot) -> None:
                itself = inputs[0].data_ptr() == x.data_ptr() and inputs[0].is_contiguous()
                itself &= x.is_contiguous() and inputs[0].dtype == x.dtype and inputs[0].numel() == x.numel()
                seen.append(_Seen(slot, inputs[0].shape[:-1].numel() // len(x), itself))

            hooks.append(layer.register_forward_pre_hook(note))
    was = model.training
    try:
        with torch.no_grad():
            model.eval()(x)
    finally:
        model.train(was)
        for hook in hooks:
            hook.remove()
    names = [one.slot.name for one in seen]
    return [one for one in seen if names.count(one.slot.name) == 1]
