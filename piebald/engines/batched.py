"""The batched engine: the rows of many clients in one batch through one module (`batched_layers`).

The weights of dense layers need not be formed for any client (`factored.factors`), whether all clients start from the
same weights or not; counting multiplications decides for which layers this pays.  Clients of unequal size are treated
as in `vmapped`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from piebald.contracts import PassSettings, Rows, SgdConfig, SgdOutcome
from piebald.core import pytree
from piebald.core.machine import moved
from piebald.core.metrics import mean_over_rows
from piebald.core.parameters import Layout, Slot
from piebald.engines.batched_layers import BatchedPass, FactoredDense, batch_layers
from piebald.engines.factored.client_state import client_row_positions, in_step_rows
from piebald.engines.factored.factors import ClientRowFactor
from piebald.engines.factored.vectors import FactoredVectors
from piebald.engines.row_loader import Gathered, Positions
from piebald.engines.sequential import SequentialEngine
from piebald.engines.sgd_step import PassRows, SgdRun, lay_out_rows
from piebald.engines.vmapped import Leaves, VmappedEngine, restored_order, rows_of

# Keeping factors costs products of a client's rows with one another: R^2 (in + out) multiplications in each direction
# for R rows in all.  Forming the weights reads and writes steps * in * out numbers several times.  One such number
# costs about as much as this many multiplications.
_MULTIPLICATIONS = 24
_FORMED = 1 << 23  # parameters of a stack whose weights are formed on a CPU; larger ones train one after another


class BatchedEngine(VmappedEngine):
    """Trains all clients of a stack at once, in one pass through one module."""

    name = "batched"
    takes_factored = True

    def run_sgd(self, run: SgdRun) -> SgdOutcome:
        change = run.config.step
        # a step of a method's own may ask for gradients at points that no batched pass shares
        elsewhere = change.changes_gradients and not change.hides_rows
        if run.local_loss is not None or elsewhere or run.config.passes.alone:
            return SequentialEngine.run_sgd(self, run)  # vmap cannot run all that has a batched form
        if self.traits.random or not self.traits.each or change.hides_rows:
            return super().run_sgd(run)
        gathered, plans, rng_keys, order = self.planned(run)
        if self.reads_tables(run) and self.shares_passes(plans) and (whole := self._module(())) is not None:
            # without factors, of which each step adds another
            gradients_of, held = functools.partial(self._batched_gradients, whole), list(whole.module.buffers())
            return self._train_by_tables(run, gathered, plans, rng_keys, order, gradients_of, held)
        start, shifts = FactoredVectors.of(run.model), _shifts(run)
        factored = self._worth_factoring(run, start, [shift.vectors for shift in shifts], plans)
        module = self._module(factored)
        if module is None or not plans[0]:
            return super().run_sgd(run)
        large = self.device.type == "cpu" and len(plans) * self.work.layout.size > _FORMED
        if not factored and large:
            return SequentialEngine.run_sgd(self, run)
        batched = _BatchedRun(self, module, run, order, start, shifts, [len(plan) for plan in plans])
        batched.begin(gathered, plans)
        for step, passes in enumerate(self.passes(plans, rng_keys, run.first_step)):
            batched.step(step, gathered, passes)
        return batched.end([len(plan) for plan in plans])

    def _batched_gradients(
        self,
        whole: _BatchedModule,
        run: SgdRun,
        clients: slice,
        tensors: dict[str, Tensor],
        parameters: Sequence[Tensor],
        rows: Rows,
        keys: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """As `_gradients_of`, through the module in its batched form."""
        flat, passes = Rows(pytree.flattened(rows.x), pytree.flattened(rows.y)), run.config.passes
        whole.batched_pass.in_one_piece = run.direct and not self.bfloat16 and passes.precision == "float32"
        # `clients` begins at 0, since all of a step's clients share its pass (`shares_passes`)
        losses = self.stack_losses(whole, tensors, clients.stop, flat, keys, mask, passes)
        return losses, torch.autograd.grad(losses.sum(), parameters, materialize_grads=True)

    def stack_losses(
        self,
        module: _BatchedModule,
        tensors: dict[str, Tensor],
        count: int,
        rows: Rows,
        keys: Tensor | None,
        mask: Tensor | None,
        passes: PassSettings,
    ) -> Tensor:
        """The mean loss [c] of each client's rows [c * b, ...]."""
        module.batched_pass.count, module.batched_pass.tensors = count, tensors
        with self.precision(passes), self.dropping(keys):
            losses = self.loss(pytree.run(module.module, self.shaped(rows.x)), rows.y).view(count, -1)
        counted = self.row_loader.counted(rows.y, None if mask is None else mask.view(-1))
        return mean_over_rows(losses, None if counted is None else counted.view(count, -1))

    @cached_property
    def _modules(self) -> dict[tuple[str, ...], _BatchedModule | None]:
        return {}

    @property
    def can_batch(self) -> bool:
        """True if every layer of the model has a batched form; if not, stacks run through vmap."""
        return not self.traits.random and self.traits.each and self._module(()) is not None

    def _worth_factoring(
        self,
        run: SgdRun,
        start: FactoredVectors,
        shifts: Sequence[FactoredVectors],
        plans: Sequence[Sequence[Positions]],
    ) -> list[Slot]:
        """Dense layers whose weights need not be formed: their steps are linear in the gradients, and it is cheaper."""
        config = run.config
        nonlinear = config.clip is not None or isinstance(config.lr, Tensor) or config.rule is not None
        nonlinear = nonlinear or bool(config.augmentation)  # factors are products of the rows as they are stored
        nonlinear = nonlinear or config.part != "all"
        if nonlinear or run.state or start.factors or (self.traits.mixes and len(plans) > 1):
            return []
        slots, steps = [], len(plans[0])
        for layer in self.packer.layers:
            (out, inside), rows = layer.slot.shape, layer.rows * sum(len(batch) for batch in plans[0])
            free = all(vectors.has_terms(layer.slot) for vectors in (start, *shifts))
            products = [factor for shift in shifts for factor, _ in shift.factors if factor.slot == layer.slot]
            factor_rows = rows * (1 + len(products))  # a product has about as many rows
            if free and rows * factor_rows * (out + inside) < _MULTIPLICATIONS * steps * out * inside:
                slots.append(layer.slot)
        return slots

    def _module(self, factored: Sequence[Slot]) -> _BatchedModule | None:
        """The batched module with these factored layers, made once for each choice of them."""
        names, modules = tuple(slot.name for slot in factored), self._modules
        if names not in modules:
            batched = batch_layers(self.work.model, self.work.layout, names)
            if batched is not None:
                batched[0].to(self.device).train()
            direct = {layer.slot.name for layer in self.packer.layers if layer.is_model_input} if names else set()
            modules[names] = (
                None if batched is None else _BatchedModule(*batched, _without(self.work.layout, names), direct)
            )
        return modules[names]


class _Shift(NamedTuple):
    """Vectors [c, p], and the multiple of them that is added to the gradients at every step."""

    vectors: FactoredVectors
    share: float


def _shifts(run: SgdRun) -> list[_Shift]:
    """The shifts of gradients: the correction, and the proximal term's center where that is not the start."""
    shifts = [] if run.correction is None else [_Shift(FactoredVectors.of(run.correction), 1.0)]
    # a center that is the start needs no term of its own: it joins the start's coefficient (`to_start`)
    if run.prox and run.prox_center is not None and run.prox_center is not run.model:
        shifts.append(_Shift(FactoredVectors.of(run.prox_center), -run.prox))
    return shifts


@dataclasses.dataclass(frozen=True, slots=True)
class _Scalars:
    """Coefficients of weights and velocity of the factored layers after some steps (see `_BatchedRun`).

    Attributes:
        start, shifts, gradients: coefficients of the weights.
        u_start, u_shifts, u_gradients: coefficients of the velocity.
    """

    start: float
    shifts: list[float]
    gradients: list[float]
    u_start: float
    u_shifts: list[float]
    u_gradients: list[float]


@dataclasses.dataclass(frozen=True, slots=True)
class _BatchedModule:
    """A module in its batched form.

    Attributes:
        module: the module.
        batched_pass: what its layers read during a pass.
        factored: its factored layers.
        rest: the layout of all other tensors, and which slice of the whole vector is which slice of theirs.
        direct: names of the factored weights whose layers see the model's inputs themselves.
    """

    module: nn.Module
    batched_pass: BatchedPass
    factored: list[FactoredDense]
    rest: tuple[Layout, list[tuple[slice, slice]]]
    direct: set[str]


class _Ahead(NamedTuple):
    """The rows x [c, r, ...] of all steps, where each step begins and ends, and rows of a layer for each of them."""

    x: Tensor
    ends: list[int]
    each: int


class _BatchedRun:
    """One run of SGD on one stack.

    Parameters outside of factored layers [c, q] are updated step by step.  For factored layers only coefficients are:
    with g_t the gradient of step t and S_i what gradients are shifted by, their weights and velocity are  a W0 + sum_i
    b_i S_i + sum_t c_t g_t,  and Metis' eq. 2 with weight decay, a proximal term and a correction is a recursion of a,
    b and c alone.
    """

    def __init__(
        self,
        engine: BatchedEngine,
        module: _BatchedModule,
        run: SgdRun,
        order: list[int],
        start: FactoredVectors,
        shifts: Sequence[_Shift],
        planned: Sequence[int],
    ) -> None:
        self.engine, self.module, self.order, self.start, self.shifts = engine, module, order, start, shifts
        self.to_start = run.prox if run.prox_center is run.model else 0.0
        layout, self.spans = module.rest
        rest = dataclasses.replace(
            run,
            model=self._outside_factored(run.model),
            prox_center=None if run.prox_center is None else self._outside_factored(run.prox_center),
            correction=None if run.correction is None else self._outside_factored(run.correction),
            state={name: self._outside_factored(vector) for name, vector in run.state.items() if name != "step"}
            | {name: vector for name, vector in run.state.items() if name == "step"},
        )
        self.run = rows_of(rest, order)
        self.w = self.run.model.clone()
        self.stepper = engine.stepper(self.run, self.w, planned, layout)
        self.g = None if run.plain or self.stepper.direct else torch.zeros_like(self.w)
        self.leaves = Leaves(layout, self.w, run.config.part)
        straight = order == sorted(order)
        self.sorted = None if straight else moved(torch.tensor(order), engine.device)
        self.scalars = _Scalars(1.0, [0.0] * len(shifts), [], 0.0, [0.0] * len(shifts), [])
        # each client ends with the coefficients of its own last step (`end`)
        self.history = [self.scalars]
        self.total = torch.zeros(len(order), device=engine.device)
        module.batched_pass.scale, module.batched_pass.shares = [], self._shares()
        module.batched_pass.in_one_piece = (
            self.stepper.direct and not engine.bfloat16 and run.config.passes.precision == "float32"
        )
        module.batched_pass.hook = torch.zeros((), device=engine.device, requires_grad=True)
        self.ahead: _Ahead | None = None
        self.positions: Tensor | None = None

    def _outside_factored(self, matrix: Tensor) -> Tensor:
        """The columns of a [c, p] matrix outside of factored layers."""
        if isinstance(matrix, FactoredVectors):
            if list(matrix.spans) == self.spans:
                return matrix.own
            vectors = [matrix.columns(here.start, here.stop) for here, _ in self.spans]
        else:
            vectors = [matrix[:, here] for here, _ in self.spans]
        if len(vectors) == 1:
            return vectors[0]
        return torch.cat(vectors, dim=1) if vectors else self.engine.vector.new_zeros(len(matrix), 0)

    def begin(self, gathered: Gathered, plans: Sequence[Sequence[Positions]]) -> None:
        """Start the factored layers.  Where one sees the model's inputs, fetch the rows of all steps at once and
        compute its products ahead.
        """
        direct = [layer for layer in self.module.factored if layer.slot.name in self.module.direct]
        direct = [layer for layer in direct if layer.slot.shape[1] == direct[0].slot.shape[1]]  # of one width
        if direct:
            index, ends = lay_out_rows(plans)
            rows = gathered.take(torch.from_numpy(index.ravel()).to(self.engine.device)).x
            assert isinstance(rows, Tensor)  # for the type checker; no layer sees inputs of several tensors as such
            inside = direct[0].slot.shape[1]
            self.ahead = _Ahead(rows.view(*index.shape, *rows.shape[1:]), ends, rows[0].numel() // inside)
            inputs = rows.view(len(index), -1, inside)
            if self.run.correction is not None and self.engine.row_loader.indexed and self.ahead.each == 1:
                positions = [gathered.positions[row] for row in self.order]
                self.positions, first = (
                    part.to(self.w.device) for part in client_row_positions(index, ends, plans, positions)
                )
                self.shifts = [
                    _Shift(self._by_steps(vectors, inputs, self.positions, first), share)
                    for vectors, share in self.shifts
                ]
        starts = [self.start, *(shift.vectors for shift in self.shifts)]
        for layer in self.module.factored:
            layer.begin([vectors.layer(layer.slot, self.sorted) for vectors in starts])
        for layer in direct:
            layer.look_ahead(inputs)

    def _by_steps(self, vectors: FactoredVectors, x: Tensor, positions: Tensor, first: Tensor) -> FactoredVectors:
        """The vectors, with sums over a client's rows expressed by the rows of its steps x [c, r, in]."""
        factors = []
        for factor, scale in vectors.factors:
            form = (
                in_step_rows(factor, x, positions, first, self.sorted) if isinstance(factor, ClientRowFactor) else None
            )
            factors.append((form or factor, scale))
        return vectors.like(vectors.matrices, factors, vectors.own)

    def _rows(self, step: int, gathered: Gathered, pass_rows: PassRows, active: int) -> tuple[Rows, Tensor | None]:
        """The rows [c * b, ...] of a step of some clients, with a mask [c, b] as in `pad_rows`."""
        ahead, batched_pass = self.ahead, self.module.batched_pass
        if self.run.config.augmentation:
            rows = self.engine.stacked(gathered, pass_rows, self.run, step)
            return Rows(pytree.flattened(rows.x), pytree.flattened(rows.y)), pass_rows.mask
        flat = pass_rows.positions.flatten()  # one axis: much quicker to gather by than two
        if ahead is None:
            return gathered.take(flat), pass_rows.mask
        lo, hi = ahead.ends[step : step + 2]
        x = ahead.x[:active, lo:hi].flatten(0, 1)
        batched_pass.rows, batched_pass.batch = slice(lo * ahead.each, hi * ahead.each), (x.data_ptr(), x._version)
        return Rows(x, pytree.take(gathered.y, flat)), pass_rows.mask

    def step(self, step: int, gathered: Gathered, passes: Sequence[PassRows]) -> None:
        """One step of all clients that still have one."""
        engine, active = self.engine, passes[-1].hi
        for part in passes:
            lo, hi = part.lo, part.hi
            rows, mask = self._rows(step, gathered, part, active)
            tensors, parameters = self.leaves(lo, hi)
            losses = engine.stack_losses(self.module, tensors, hi - lo, rows, part.keys, mask, self.run.config.passes)
            assert self.module.batched_pass.hook is not None
            *gradients, _ = torch.autograd.grad(
                losses.sum(), [*parameters, self.module.batched_pass.hook], allow_unused=True, materialize_grads=True
            )
            with torch.no_grad():
                self.total[lo:hi] += losses.detach()
                if parameters:
                    engine.step(self.stepper, self.leaves, self.w, self.g, gradients, slice(lo, hi), step)
        self._advance(self.run.config)

    def _shares(self) -> list[float]:
        """Coefficients of the terms that factored layers start from."""
        return [self.scalars.start, *self.scalars.shifts]

    def _advance(self, config: SgdConfig) -> None:
        """The recursion of the factored layers' coefficients."""
        if not self.module.factored:
            return
        now, lr, pull = self.scalars, self.run.rate, config.weight_decay + self.run.prox
        # u' = m u - lr g with g = g_t + pull w - to_start W0 + sum_i share_i S_i, term by term; then w' = w + u'
        start = config.momentum * now.u_start - lr * (pull * now.start - self.to_start)
        shifts = [
            config.momentum * u - lr * (pull * b + shift.share)
            for u, b, shift in zip(now.u_shifts, now.shifts, self.shifts, strict=True)
        ]
        pairs = zip(now.u_gradients, now.gradients, strict=True)
        # the gradient of this step enters the velocity with -lr, and the weights through it
        push = [*(config.momentum * u - lr * pull * c for u, c in pairs), -lr]
        gradients = [c + u for c, u in zip([*now.gradients, 0.0], push, strict=True)]
        moved = [b + u for b, u in zip(now.shifts, shifts, strict=True)]
        self.scalars = _Scalars(now.start + start, moved, gradients, start, shifts, push)
        self.module.batched_pass.shares, self.module.batched_pass.scale = self._shares(), gradients
        self.history.append(self.scalars)

    def end(self, taken: Sequence[int]) -> SgdOutcome:
        """The outcome, from how many steps each client took."""
        self.leaves.finish()
        steps = moved(torch.tensor([float(count) for count in taken]), self.w.device)
        if not self.module.factored:
            return restored_order(self.w, steps, self.total / steps, self.stepper.ended(steps), self.order)
        back = slice(None) if self.sorted is None else self.sorted.argsort()
        factors = [layer.factor(self.sorted, self.positions) for layer in self.module.factored]
        ends, width = [self.history[count] for count in taken], max(taken)

        def by_client(values: Sequence[float]) -> float | Tensor:
            """A number for each client [c, 1], or one number where all are equal."""
            return values[0] if len(set(values)) == 1 else self.w.new_tensor(values)[back].unsqueeze(1)

        def ended(
            own: Tensor, start: Sequence[float], shifts: Sequence[Sequence[float]], scale: Tensor
        ) -> FactoredVectors:
            terms = [term.times(by_client(start)) for term in self.start.matrices]
            products = [(factor, scale[back]) for factor in factors]
            for (vectors, _), share in zip(self.shifts, zip(*shifts, strict=True), strict=True):
                terms += [term.times(by_client(share)) for term in vectors.matrices]
                products += [(factor, coefficients * by_client(share)) for factor, coefficients in vectors.factors]
            return self.start.like(
                [term for term in terms if isinstance(term.share, Tensor) or term.share],
                products,
                own[back],
                self.spans,
            )

        scale = self._rectangle([at.gradients for at in ends], width)
        model = ended(self.w, [at.start for at in ends], [at.shifts for at in ends], scale)
        changes = self.w.new_tensor([[at.start - 1, *at.shifts] for at in ends]).unbind(1)
        if sum(bool(change.any()) for change in changes) < 2:  # else products of these terms would be needed, too
            model.start = self.start.alone
            model.moved = {layer.slot.start: layer.moved(scale, changes)[back] for layer in self.module.factored}
        state = {}
        if (velocity := self.stepper.velocity) is not None:
            push = self._rectangle([at.u_gradients for at in ends], width)
            state["velocity"] = ended(velocity, [at.u_start for at in ends], [at.u_shifts for at in ends], push)
        return SgdOutcome(model, steps[back], (self.total / steps)[back], state)

    def _rectangle(self, rows: Sequence[Sequence[float]], width: int) -> Tensor:
        """Rows of unequal length as one tensor, filled up with zeros."""
        return self.w.new_tensor([[*row, *[0.0] * (width - len(row))] for row in rows])


def _without(layout: Layout, names: Sequence[str]) -> tuple[Layout, list[tuple[slice, slice]]]:
    """A layout without some tensors, and which slice of the whole vector is which slice of the new one."""
    slots: list[Slot] = []
    spans: list[tuple[slice, slice]] = []
    for slot in layout.slots:
        if slot.name in names:
            continue
        start = slots[-1].stop if slots else 0
        slots.append(Slot(slot.name, slot.shape, start, slot.buffer))
        if spans and spans[-1][0].stop == slot.start:
            whole, shrunk = spans.pop()
            spans.append((slice(whole.start, slot.stop), slice(shrunk.start, slots[-1].stop)))
        else:
            spans.append((slice(slot.start, slot.stop), slice(start, slots[-1].stop)))
    shared = sum(
        slot.stop - slot.start for slot in layout.slots if slot.stop <= layout.shared and slot.name not in names
    )
    return Layout(tuple(slots), shared, slots[-1].stop if slots else 0), spans
