"""The vmapped engine: many clients at once, each with its own parameters, through `torch.func.vmap` over the forward
pass.

Only the forward pass is vectorized; the gradient of the summed losses with respect to the stacked tensors is ordinary
autograd, since a sum over clients has no cross terms.  Clients of unequal size are never truncated: those that have
finished leave the stack (it is sorted by steps), a short batch is padded and masked, or, where the model mixes the
rows of a batch, clients with equally long batches run together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from piebald.contracts import PLAIN_PASSES, LocalStep, PassSettings, Rows, SgdOutcome
from piebald.contracts.training import Gradients
from piebald.core import pytree
from piebald.core.machine import moved, raise_if_lost
from piebald.core.metrics import mean_over_rows
from piebald.core.parameters import Layout, Part
from piebald.engines.batched_layers import KeyedDropout
from piebald.engines.compilation import compiled
from piebald.engines.factored.vectors import to_dense
from piebald.engines.recorded_step import BY_HAND, Lane, side_by_side
from piebald.engines.row_gradients import MAX_NUMBERS, LossEvaluator, noised, row_keys, state_restored, surviving
from piebald.engines.row_loader import Gathered, Positions, RngKey, augmented
from piebald.engines.sequential import SequentialEngine, step_key
from piebald.engines.sgd_step import (
    Hidden,
    PassRows,
    SgdRun,
    StackPoint,
    Stepper,
    TableStepper,
    lay_out_rows,
    pad_rows,
    passes,
    plain_step,
)
from piebald.engines.static_buffers import StaticBuffers, StepTables, rows_at

_STACK_SIZES = 2  # of which there are resident models


class VmappedEngine(SequentialEngine):
    """Trains all clients of a stack at once through vmap."""

    name = "vmapped"
    _compiled: Callable[..., Tensor] | None = None

    def compile(self) -> None:
        """See `SequentialEngine.compile`; runs that are computed as that engine does are compiled as well."""
        super().compile()
        self._compiled = compiled(vmap(self._client_loss), self.traits, self.device, self.recorded)

    def run_sgd(self, run: SgdRun) -> SgdOutcome:
        alone = self.traits.random or self.padded or run.config.passes.alone or self.refusal is not None
        if alone or not self._fits_privacy(run):
            return super().run_sgd(run)
        if not run.config.step.hides_rows:
            return self._train_stack(run)
        with surviving(self.device) as outcomes:
            outcomes.append(self._train_stack(run))
        return outcomes[0] if outcomes else super().run_sgd(run)

    def _train_stack(self, run: SgdRun) -> SgdOutcome:
        """Train clients at once."""
        gathered, plans, rng_keys, order = self.planned(run)
        if self.reads_tables(run) and self.shares_passes(plans):
            return self._train_by_tables(run, gathered, plans, rng_keys, order, self._gradients_of)
        ordered = rows_of(run, order)
        w = ordered.model.clone(memory_format=torch.contiguous_format)
        stepper = self.stepper(ordered, w, [len(plan) for plan in plans])
        total = torch.zeros(len(plans), device=self.device)
        # a second matrix as large as the stack: plain steps, and rules along gradients alone, do without
        g = None if run.plain or stepper.direct else torch.zeros_like(w)
        leaves = Leaves(self.work.layout, w, run.config.part)
        # DP-SGD divides by the expected rows of a batch: the number that was drawn would tell of single rows
        lots = [float(min(run.config.step_rows, len(gathered.positions[row]))) for row in order]
        for step, shared in enumerate(self.passes(plans, rng_keys, run.first_step)):
            for pass_rows in shared:
                lo, hi, mask, keys = pass_rows.lo, pass_rows.hi, pass_rows.mask, pass_rows.keys
                rows = self.stacked(gathered, pass_rows, run, step)
                tensors, parameters = leaves(lo, hi)
                batch = (parameters, rows, keys, mask)
                gradients_of = functools.partial(self._gradients_of, ordered, slice(lo, hi))
                hidden: Hidden | None = None
                if run.config.step.hides_rows:
                    who = (lots[lo:hi], run.first_step + step, rng_keys[lo:hi])
                    hidden = functools.partial(self._stack_hidden_gradients, tensors, batch, run.config.passes, who)
                losses, gradients = self._stack_gradients(
                    run.config.step, leaves, w[lo:hi], gradients_of, tensors, batch, hidden
                )
                with torch.no_grad():
                    total[lo:hi] += losses.detach()
                    self.step(stepper, leaves, w, g, gradients, slice(lo, hi), step)
        leaves.finish()
        steps = moved(torch.tensor([float(len(plan)) for plan in plans]), self.device)
        # a client without steps has the loss 0 / 0, NaN, as in the sequential engine
        return restored_order(w, steps, total / steps, stepper.ended(steps), order)

    @cached_property
    def refusal(self) -> str | None:
        """The reason why vmap cannot run the model, or None; tried once, on two rows."""
        if any(getattr(layer, "momentum", 0.0) is None for layer in self.module.modules()):
            return "a norm with momentum = None weighs batches by their number, which is another one for each client"
        few = self.row_loader.trial_rows()
        few = few[[0, 0]] if len(few) < 2 else few[:2]  # batch norm refuses a single row
        rows = Rows(*(pytree.mapped(lambda x: moved(x, self.device).unsqueeze(0), part) for part in (few.x, few.y)))
        # a copy: the trial is in training mode, and would move the running statistics that all clients start from
        start = self.work.initial.to(self.device, copy=True).unsqueeze(0)
        tensors = {name: view.contiguous() for name, view in self.work.layout.views(start).items()}
        keys = torch.zeros(1, dtype=torch.int64, device=self.device) if self.traits.dropout else None
        try:
            with torch.no_grad():
                self._losses(tensors, rows, keys, None, PLAIN_PASSES)
        except Exception as error:  # whatever torch or the user's own code may raise where it is vectorized
            raise_if_lost(error, self.device)
            return str(error).strip().split("\n")[0] or type(error).__name__
        return None

    @staticmethod
    def _stack_gradients(
        step: LocalStep,
        leaves: Leaves,
        w: Tensor,
        gradients_of: Callable[..., tuple[Tensor, Sequence[Tensor]]],
        tensors: dict[str, Tensor],
        batch: tuple[Any, ...],
        hidden: Hidden | None = None,
    ) -> Gradients:
        """The mean losses [c] and the gradients that a step of the models w [c, p] takes; `batch` begins with their
        parameters.
        """

        def again() -> Gradients:
            # a second pass must not move running statistics again
            copies = tensors | {name: tensors[name].clone() for name in leaves.buffers}
            return gradients_of(copies, *batch)

        first = functools.partial(gradients_of, tensors, *batch)
        if not step.changes_gradients:
            return first()
        return step.gradients(StackPoint(w, batch[0], first, again, hidden))

    def _stack_hidden_gradients(
        self,
        tensors: dict[str, Tensor],
        batch: tuple[Any, ...],
        passes: PassSettings,
        who: tuple[Sequence[float], int, Sequence[RngKey]],
        clip: float,
        deviation: float,
    ) -> Gradients:
        """See `contracts.StepPoint.hidden`; `who` are the expected rows of each client, the step and the rng keys."""
        _, rows, keys, mask = batch
        losses, sums = self._clipped_sums(tensors, rows, keys, mask, clip, passes)
        return losses, noised(sums, self.work.layout, deviation, *who)

    # -- training by steps that read tables, which can be recorded

    def shares_passes(self, plans: Sequence[Sequence[Positions]]) -> bool:
        """Return whether all clients that have a step can take it in one pass."""
        steps = len(plans[0]) if plans else 0
        active = ([len(plan[step]) for plan in plans if len(plan) > step] for step in range(steps))
        shares = all(len(list(self.ranges(lengths))) == 1 for lengths in active)
        if not shares:
            self.notes[f"{self.name}, batches that cannot be filled up have unequal lengths"] = BY_HAND
        return shares and steps > 0

    def _stack(self, count: int) -> _ResidentStack:
        """The resident models of so many clients; there are those of two sizes, as the last stack of a cohort may be
        smaller.
        """
        stacks = self._stacks
        if count not in stacks:
            if len(stacks) == _STACK_SIZES:
                # recordings write to addresses of the models that go, so they must go with them
                stacks.pop(next(iter(stacks))).lane.forget()
            assert self.make_recorder is not None
            stacks[count] = _ResidentStack(self.work.layout, count, Lane(self.make_recorder, self.device, self.notes))
        return stacks[count]

    @property
    def lanes(self) -> list[Lane]:
        return [*super().lanes, *(stack.lane for stack in self._stacks.values())]

    @cached_property
    def _stacks(self) -> dict[int, _ResidentStack]:
        return {}

    def _train_by_tables(
        self,
        run: SgdRun,
        gathered: Gathered,
        plans: Sequence[Sequence[Positions]],
        rng_keys: Sequence[RngKey],
        order: list[int],
        gradients_of: Callable[..., tuple[Tensor, Sequence[Tensor]]],
        reads: Sequence[Tensor] = (),
    ) -> SgdOutcome:
        """Train the clients of a stack by steps that can be recorded.

        A step is the same for all clients, for half of them, a quarter and so on: those that have finished are copied
        out, and go on unread.

        Args:
            run: the run.
            gathered, plans, rng_keys, order: from `planned`.
            gradients_of: losses and gradients, as of `_gradients_of`.
            reads: what that reads besides its arguments and the module.
        """
        ordered, count = rows_of(run, order), len(plans)
        end = to_dense(ordered.model).clone(memory_format=torch.contiguous_format)
        planned = [len(plan) for plan in plans]
        # NaN stays where a client has no step
        stepper, loss = self.stepper(ordered, end, planned), torch.full((count,), torch.nan, device=self.device)
        tables, forms = self._stack_tables(run, plans, rng_keys, stepper)
        rows, stack = self.static.rows(gathered, self.row_loader.lasts(gathered)), self._stack(count)

        def steps() -> Iterator[bool]:
            resident = stack.static.run(ordered, slice(0, count), stepper.state)
            inner = TableStepper(stepper, resident, functools.partial(tables.of_step, stack.lane.number))
            leaves, total = stack.begin(end, run.config.part)
            stack.lane.number.zero_()
            writes = [stack.w, total, *leaves.buffers.values(), *resident.state.values(), *stack.gradient(inner)]
            buffers = [
                [*self.module_reads(resident), *reads, *tables.held, *pytree.leaves(rows.x), *pytree.leaves(rows.y)],
                [*writes, *self._integer_buffers],
            ]
            # how many steps of a form are still to come decides whether recording it pays (`Lane.step`)
            form, remaining = self.form(resident, *buffers), Counter(forms)
            step = functools.partial(self._take_stack_step, stack, inner, leaves, total, tables, rows, gradients_of)
            for number, (width, active, masked) in enumerate(forms):
                remaining[width, active, masked] -= 1
                stack.lane.step(
                    form._replace(rows=(active, width), masked=masked),
                    functools.partial(step, active, width, masked),
                    remaining[width, active, masked],
                    (buffers[0], buffers[1]),
                )
                # clients are sorted by steps, so those that end here lie next to each other
                ended = slice(sum(steps > number + 1 for steps in planned), sum(steps > number for steps in planned))
                if ended.start < ended.stop:
                    # before w is read: running statistics lie beside it in tensors of their own (`Leaves`)
                    leaves.finish(ended)
                    end[ended], loss[ended] = stack.w[ended], total[ended] / (number + 1)
                    for name, vectors in stepper.state.items():
                        vectors[ended] = resident.state[name][ended]
                yield False

        side_by_side([(stack.lane.recorder, steps())])
        steps_made = moved(torch.tensor(planned, dtype=torch.float32), self.device)
        return restored_order(end, steps_made, loss, stepper.ended(steps_made), order)

    def _stack_tables(
        self, run: SgdRun, plans: Sequence[Sequence[Positions]], rng_keys: Sequence[RngKey], stepper: Stepper
    ) -> tuple[StepTables, list[tuple[int, int, bool]]]:
        """The tables of a stack's steps, and of each step the rows of a batch, how many clients take it, and whether
        some rows only fill batches up.
        """
        table, first, count, most = self.static.table, run.first_step, len(plans), len(plans[0])
        index, ends = lay_out_rows(plans)
        width = max(end - start for start, end in itertools.pairwise(ends))
        positions, mask = (
            np.zeros((most, count, width), dtype=np.int64),
            np.ones((most, count, width), dtype=np.float32),
        )
        forms = []
        for step, (start, end) in enumerate(itertools.pairwise(ends)):
            positions[step, :, : end - start] = index[:, start:end]
            lengths = [len(plan[step]) for plan in plans if len(plan) > step]
            for row, length in enumerate(lengths):
                mask[step, row, length:] = 0
            # clients beyond the active ones are computed in vain: each other width would need a recording of its own
            forms.append((end - start, _halved(count, len(lengths)), min(lengths) < end - start))
        masked = any(form[2] for form in forms)
        keys = None
        if self.traits.dropout:
            drawn = [[step_key(rng_key, first + step) for rng_key in rng_keys] for step in range(most)]
            keys = table("keys", torch.tensor(drawn, dtype=torch.int64))
        rates, numbers = stepper.tables()  # [c, s]
        one_rate = not isinstance(run.config.lr, Tensor) and run.config.schedule is None
        tables = StepTables(
            table("positions", torch.from_numpy(positions)),
            table("mask", torch.from_numpy(mask)) if masked else None,
            keys,
            table("rates", rates[0] if one_rate else rates.T.unsqueeze(2)),
            table("numbers", numbers[0] if stepper.behind is None else numbers.T.unsqueeze(2)),
        )
        return tables, forms

    def _take_stack_step(
        self,
        stack: _ResidentStack,
        stepper: TableStepper,
        leaves: Leaves,
        total: Tensor,
        tables: StepTables,
        gathered: Gathered,
        gradients_of: Callable[..., tuple[Tensor, Sequence[Tensor]]],
        active: int,
        width: int,
        masked: bool,
    ) -> None:
        """One step of the first clients of a resident stack, all by the tables."""
        number, here = stack.lane.number, slice(0, active)
        positions, mask, keys = (tables.row(table, number) for table in (tables.positions, tables.mask, tables.keys))
        assert positions is not None
        tensors, parameters = leaves(0, active)
        rows = rows_at(gathered, positions[here, :width])
        shown = mask[here, :width] if masked and mask is not None else None
        batch = (parameters, rows, None if keys is None else keys[here], shown)
        gradients_here = functools.partial(gradients_of, stepper.run, here)
        change = stepper.run.config.step
        losses, gradients = self._stack_gradients(change, leaves, stack.w[here], gradients_here, tensors, batch)
        with torch.no_grad():
            total[here] += losses.detach()
            g = next(iter(stack.gradient(stepper)), None)
            self.step(stepper, leaves, stack.w, g, gradients, here, 0)
            # on the device and not on the host: a recorded step moves on by itself at each replay
            number += 1

    # -- training with DP-SGD

    def _fits_privacy(self, run: SgdRun) -> bool:
        """Return whether rows are not hidden, or the gradients of all clients' single rows fit into memory at once."""
        if not run.config.step.hides_rows:
            return True
        if len(run.clients) * run.config.step_rows * self.work.layout.size > MAX_NUMBERS:
            return False
        gathered = self.row_loader.gather(run.clients, "train")
        return self.vectorizes(
            gathered.take(moved(torch.from_numpy(np.concatenate(gathered.positions)[:2]), self.device))
        )

    def stacked(self, gathered: Gathered, one: PassRows, run: SgdRun, step: int) -> Rows:
        """The rows [c, b, ...] of one step of some clients.

        Augmentation sees each client's own batch without padding, as it does where one client trains after another.
        """
        if not run.config.augmentation:
            return gathered.take(one.positions)
        filled = pad_rows([np.arange(len(positions)) for positions in one.batch])[0]
        client_rows = []
        for positions, rng_key, order in zip(one.batch, one.rng_keys, filled, strict=True):
            held = positions if len(positions) else np.zeros(1, dtype=np.int64)  # what is all padding counts nowhere
            fetched = gathered.take(moved(torch.from_numpy(held), self.device))
            shown = augmented(fetched, run.config, run.first_step + step, rng_key) if len(positions) else fetched
            client_rows.append(shown[moved(torch.from_numpy(order), self.device)])
        x, y = ([part(rows) for rows in client_rows] for part in (attrgetter("x"), attrgetter("y")))
        return Rows(pytree.stacked(x), pytree.stacked(y))

    def planned(self, run: SgdRun) -> tuple[Gathered, list[list[Positions]], list[RngKey], list[int]]:
        """The rows, then each client's mini-batches and rng key, both sorted by steps, and the order."""
        gathered = self.row_loader.for_training(run.clients, run.config)
        rng_keys = [self.rng_key(run, row) for row in range(len(run.clients))]
        plans = [list(self.batches_of(run, row, positions)) for row, positions in enumerate(gathered.positions)]
        # with most steps first, the clients still active are always the first rows: a view of the stack, no copy
        order = sorted(range(len(plans)), key=lambda row: (-len(plans[row]), -len(gathered.positions[row]), row))
        return gathered, [plans[row] for row in order], [rng_keys[row] for row in order], order

    def passes(
        self, plans: Sequence[Sequence[Positions]], rng_keys: Sequence[RngKey], first: int
    ) -> Iterator[list[PassRows]]:
        """The passes of each step, from what `planned` returned."""

        def keys(lo: int, hi: int, step: int) -> list[int] | None:
            return [step_key(rng_key, first + step) for rng_key in rng_keys[lo:hi]] if self.traits.dropout else None

        return passes(plans, rng_keys, self.ranges, keys, self.device)

    @contextlib.contextmanager
    def dropping(self, keys: Tensor | None) -> Iterator[None]:
        """Keyed dropout with these keys [c], if any."""
        if keys is None:
            yield
            return
        with KeyedDropout() as dropout:
            dropout.start(keys)
            yield

    def ranges(self, lengths: list[int]) -> Iterator[tuple[int, int]]:
        """Ranges of the active clients that can share one forward pass."""
        if not self.traits.mixes and self.traits.each:
            # padding may only be masked where each row has its own loss and changes no other row's output
            yield 0, len(lengths)
            return
        lo = 0
        for hi in range(1, len(lengths) + 1):
            if hi == len(lengths) or lengths[hi] != lengths[lo]:
                yield lo, hi
                lo = hi

    def _gradients_of(
        self,
        run: SgdRun,
        clients: slice,
        tensors: dict[str, Tensor],
        parameters: Sequence[Tensor],
        rows: Rows,
        keys: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The mean loss [c] of each client's batch and its gradients; `clients` are their positions in the run."""
        if run.local_loss is None:
            losses = self._losses(tensors, rows, keys, mask, run.config.passes)
        else:
            tensors_of_loss = {name: stacked[clients] for name, stacked in run.own.items()}
            evaluator, passes = self.evaluator(run.local_loss), run.config.passes
            losses = self._local_losses(evaluator, tensors, tensors_of_loss, rows, keys, mask, passes)
        # materialized: a parameter that the loss does not reach, as of an unused head, has a gradient of zeros
        return losses, torch.autograd.grad(losses.sum(), parameters, materialize_grads=True)

    def _losses(
        self, tensors: dict[str, Tensor], rows: Rows, keys: Tensor | None, mask: Tensor | None, passes: PassSettings
    ) -> Tensor:
        """The mean loss [c] of each client's batch of rows [c, b, ...]."""
        self.module.train()
        forward: Callable[..., Tensor] = self._client_loss
        with self.precision(passes, vectorized=True):
            if keys is None:
                losses = (self._compiled or vmap(forward))(tensors, rows.x, rows.y)
            else:
                with KeyedDropout() as dropout:
                    losses = vmap(lambda t, x, y, k: (dropout.start(k), forward(t, x, y))[1])(
                        tensors, rows.x, rows.y, keys
                    )
        return self._means(losses, rows, mask)

    def _local_losses(
        self,
        evaluator: LossEvaluator,
        tensors: dict[str, Tensor],
        own: dict[str, Tensor],
        rows: Rows,
        keys: Tensor | None,
        mask: Tensor | None,
        passes: PassSettings,
    ) -> Tensor:
        """The same of a `contracts.LocalLoss`, with the clients' own tensors [c, ...]."""
        self.module.train()

        def one(
            tensors: dict[str, Tensor], extra: dict[str, Tensor], x: Any, y: Any, at: Tensor, key: Tensor
        ) -> Tensor:
            if dropout is not None:
                dropout.start(key)
            return evaluator(
                lambda x: functional_call(self.module, tensors, *pytree.arguments(x)), Rows(x, y), extra, at
            )

        shape = pytree.leaves(rows.x)[0].shape[:2]
        counted = self.row_loader.counted(rows.y, mask, axes=2)
        counts = torch.ones(shape, device=self.device) if counted is None else counted.float()
        steps = torch.zeros(len(rows), dtype=torch.int64, device=self.device) if keys is None else keys
        with KeyedDropout() if keys is not None else contextlib.nullcontext() as dropout, self.precision(passes, True):
            return self._means(vmap(one)(tensors, own, rows.x, rows.y, counts, steps), rows, mask)

    def _clipped_sums(
        self,
        tensors: dict[str, Tensor],
        rows: Rows,
        keys: Tensor | None,
        mask: Tensor | None,
        clip: float,
        passes: PassSettings,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss [c] of each client's batch, and the sums [c, ...] of its rows' clipped gradients."""
        self.module.train()
        shape = pytree.leaves(rows.x)[0].shape[:2]
        counts = torch.ones(shape, device=self.device) if mask is None else mask
        steps = torch.zeros(len(rows), dtype=torch.int64, device=self.device) if keys is None else keys
        with KeyedDropout() if keys is not None else contextlib.nullcontext() as dropout, self.precision(passes, True):

            def of_client(tensors: Any, x: Any, y: Any, mask: Tensor, keys: Tensor) -> tuple[dict[str, Tensor], Tensor]:
                return self.row_gradients.clipped_sum(tensors, Rows(x, y), mask, keys, clip, dropout)

            with state_restored(self.module):
                summed, losses = vmap(of_client)(dict(tensors), rows.x, rows.y, counts, row_keys(steps, shape[1]))
        # the clamp is for an empty Poisson sample, whose loss is 0 and not 0 / 0
        counted = self.row_loader.counted(rows.y, counts, axes=2)
        return losses / (counts if counted is None else counted).sum(1).clamp(min=1), summed

    def _means(self, losses: Tensor, rows: Rows, mask: Tensor | None) -> Tensor:
        """The mean loss [c] of each client's rows [c, b] that count, or what is a mean already."""
        return losses if losses.dim() == 1 else mean_over_rows(losses, self.row_loader.counted(rows.y, mask, axes=2))

    def _client_loss(self, tensors: dict[str, Tensor], x: Any, y: Any) -> Tensor:
        return self.loss(functional_call(self.module, tensors, *pytree.arguments(x)), y)

    def step(
        self,
        stepper: Stepper,
        leaves: Leaves,
        w: Tensor,
        g: Tensor | None,
        gradients: Sequence[Tensor],
        rows: slice,
        taken: int,
    ) -> None:
        """One optimizer step of some clients after `taken` others; w and g are all clients', in the layout of
        `leaves`.
        """
        if stepper.direct:
            stepper.step_along(w[rows], gradients, rows, taken)
            return
        if g is None:
            parameters = leaves(rows.start, rows.stop)[1]
            plain_step(parameters, gradients, w[rows], stepper.run, stepper.spans, rows, stepper.rate(rows))
            return
        for slot, gradient in zip(leaves.trained, gradients, strict=True):
            g[rows, slot.start : slot.stop] = gradient.flatten(1)
        stepper.step(w[rows], g[rows], rows, taken)


class Leaves:
    """A stack's tensors for any range of its clients: parameters as autograd leaves that are views of the stack.

    Buffers are separate contiguous tensors, since vmap's batch norm updates a copy where running statistics are strided
    views; `finish` writes them back into the stack.
    """

    def __init__(self, layout: Layout, w: Tensor, part: Part = "all") -> None:
        self.layout, self.w = layout, w
        self.trained = layout.parameters(part)
        self.untrained = [slot for slot in layout.parameters() if slot not in self.trained]
        views = layout.views(w)
        self.buffers = {slot.name: views[slot.name].contiguous() for slot in layout.slots if slot.buffer}
        self._made: dict[tuple[int, int], tuple[dict[str, Tensor], list[Tensor]]] = {}

    def __call__(self, lo: int, hi: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        # leaves stay valid from step to step, since w is only ever written in place
        if (lo, hi) not in self._made:
            views = self.layout.views(self.w[lo:hi])
            parameters = [views[slot.name].detach().requires_grad_() for slot in self.trained]
            tensors = {slot.name: leaf for slot, leaf in zip(self.trained, parameters, strict=True)}
            tensors |= {slot.name: views[slot.name].detach() for slot in self.untrained}
            tensors |= {name: buffer[lo:hi] for name, buffer in self.buffers.items()}
            self._made[lo, hi] = tensors, parameters
        return self._made[lo, hi]

    def begin(self) -> None:
        """Read the buffers out of the stack again."""
        views = self.layout.views(self.w)
        for name, buffer in self.buffers.items():
            buffer.copy_(views[name])

    def finish(self, clients: slice = slice(None)) -> None:
        """Write the buffers back into the stack."""
        views = self.layout.views(self.w)
        for name, buffer in self.buffers.items():
            views[name][clients].copy_(buffer[clients])


class _ResidentStack:
    """The models of a stack, which stay where they are while one stack of so many clients after another is trained.

    Attributes:
        w: models [c, p].
        lane: their recorded steps.
        static: what else these steps need.
    """

    def __init__(self, layout: Layout, count: int, lane: Lane) -> None:
        self.layout, self.lane, self.static = layout, lane, StaticBuffers(lane.device)
        self.w = torch.zeros(count, layout.size, device=lane.device)
        self._leaves: dict[Part, Leaves] = {}

    def begin(self, models: Tensor, part: Part) -> tuple[Leaves, Tensor]:
        """The tensors of these models, of which a part is trained, and sums of losses [c], which are 0."""
        self.w.copy_(models)
        if part not in self._leaves:
            self._leaves[part] = Leaves(self.layout, self.w, part)
        self._leaves[part].begin()
        return self._leaves[part], self.static.like("total", models[:, 0]).zero_()

    def gradient(self, stepper: Stepper) -> list[Tensor]:
        """The gradients [c, p] where the optimizer of a run needs them in one piece."""
        return [] if stepper.run.plain or stepper.direct else [self.static.like("gradient", self.w)]


def _halved(count: int, active: int) -> int:
    """The least of a stack, half of it, a quarter and so on, that holds so many clients."""
    while active <= count // 2:
        count -= count // 2
    return count


def rows_of(run: SgdRun, order: list[int]) -> SgdRun:
    """The same run with its clients in another order."""
    if order == list(range(len(order))):
        return run

    def pick(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows[order]

    lr = run.config.lr
    config = dataclasses.replace(run.config, lr=lr[order]) if isinstance(lr, Tensor) else run.config
    return dataclasses.replace(
        run,
        clients=[run.clients[row] for row in order],
        rng_versions=[run.rng_versions[row] for row in order],
        model=run.model[order],
        config=config,
        prox_center=pick(run.prox_center),
        correction=pick(run.correction),
        state={name: vector[order] for name, vector in run.state.items()},
        own={name: vector[order] for name, vector in run.own.items()},
    )


def restored_order(w: Tensor, steps: Tensor, loss: Tensor, state: Mapping[str, Tensor], order: list[int]) -> SgdOutcome:
    """The outcome of a run, with its clients in the original order."""
    if order == list(range(len(order))):  # copying a stack is expensive
        return SgdOutcome(w, steps, loss, state)
    back = moved(torch.tensor(np.argsort(order)), w.device)
    return SgdOutcome(w[back], steps[back], loss[back], {name: vector[back] for name, vector in state.items()})
