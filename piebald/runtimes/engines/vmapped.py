"""The vmapped engine: many clients at once, each with its own numbers, through `torch.func.vmap` over the forward pass.

Only the forward pass is vectorised; the gradient of the summed losses with respect to the stacked tensors is ordinary
autograd, since a sum over clients has no cross terms.  Clients of unequal size are never truncated: those that have
finished leave the stack (it is sorted by steps), a short batch is padded and masked, or, where the model mixes the
rows of a batch, clients with equally long batches run together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from piebald.contracts import SgdOutcome
from piebald.parameters import Layout
from piebald.runtimes.engines.keyed_dropout import KeyedDropout
from piebald.runtimes.engines.row_gradients import ROOM, noised, row_keys
from piebald.runtimes.engines.row_loader import Gathered, Places, batches
from piebald.runtimes.engines.sequential import SequentialEngine, step_key
from piebald.runtimes.engines.sgd_step import SgdRun, advance, slide

Words = tuple[int | str, ...]


class VmappedEngine(SequentialEngine):
    """Trains all clients of a stack at once."""

    name = "vmapped"

    def walk(self, walk: SgdRun) -> SgdOutcome:
        if self.traits.random or self.padded or not self._hides_together(walk):
            return super().walk(walk)
        pool, plans, words, order = self.planned(walk)
        sorted_walk = rows_of(walk, order)
        w = sorted_walk.model.clone(memory_format=torch.contiguous_format)
        u = None
        if walk.velocity is not None or walk.descent.momentum:
            u = torch.zeros_like(w) if sorted_walk.velocity is None else sorted_walk.velocity.clone()
        total = torch.zeros(len(plans), device=self.device)
        g = None if walk.plain else torch.zeros_like(w)
        leaves = Leaves(self.work.layout, w)
        lots = [float(min(walk.descent.batch, len(pool.places[row]))) for row in order]
        for step in range(len(plans[0]) if plans else 0):
            active = sum(len(plan) > step for plan in plans)
            for lo, hi in self.runs([len(plan[step]) for plan in plans[:active]]):
                index, mask = pad_rows([plan[step] for plan in plans[lo:hi]], self.device)
                keys = self.keys(words[lo:hi], step)
                tensors, parameters = leaves(lo, hi)
                x, y = pool.x[index], pool.y[index]
                if (privacy := walk.descent.privacy) is None:
                    losses = self._losses(tensors, x, y, keys, mask)
                    gradients: Sequence[Tensor] = torch.autograd.grad(losses.sum(), parameters, materialize_grads=True)
                else:
                    losses, summed = self._clipped_sums(tensors, x, y, keys, mask, privacy.clip)
                    gradients = noised(summed, self.work.layout, privacy, lots[lo:hi], step, words[lo:hi])
                with torch.no_grad():
                    total[lo:hi] += losses.detach()
                    self.step(sorted_walk, leaves, w, g, u, gradients, lo, hi)
        leaves.finish()
        steps = torch.tensor([float(len(plan)) for plan in plans], device=self.device)
        return descended(w, steps, total / steps, u, order)

    def _hides_together(self, walk: SgdRun) -> bool:
        """Whether rows are not hidden at all, or all clients' gradients of single rows may be made at once."""
        if walk.descent.privacy is None:
            return True
        fits = len(walk.clients) * walk.descent.batch * self.work.layout.size <= ROOM
        return fits and self.vectorises(self.feed.gather(walk.clients, "train"))

    def planned(self, walk: SgdRun) -> tuple[Gathered, list[list[Places]], list[Words], list[int]]:
        """The rows, each client's mini-batches and the words of its randomness, both sorted by steps, and the order."""
        pool = self.feed.gather(walk.clients, "train")
        words = [
            self.feed.words(self.work.seed, client, moment, walk.phase)
            for client, moment in zip(walk.clients, walk.moments, strict=True)
        ]
        plans = [
            list(batches(place, walk.descent, self.traits.mixes, *word))
            for place, word in zip(pool.places, words, strict=True)
        ]
        order = sorted(range(len(plans)), key=lambda row: (-len(plans[row]), -len(pool.places[row]), row))
        return pool, [plans[row] for row in order], [words[row] for row in order], order

    def keys(self, words: Sequence[Words], step: int) -> Tensor | None:
        """The dropout keys [c] of one step, None where the model has no dropout."""
        if not self.traits.dropout:
            return None
        return torch.tensor([step_key(word, step) for word in words], device=self.device)

    @contextlib.contextmanager
    def dropping(self, keys: Tensor | None) -> Iterator[None]:
        """Dropout by these keys [c], where there are some."""
        if keys is None:
            yield
            return
        with KeyedDropout() as dropout:
            dropout.start(keys)
            yield

    def runs(self, lengths: list[int]) -> Iterator[tuple[int, int]]:
        """Ranges of the active clients that can share one pass."""
        if not self.traits.mixes and self.traits.each:
            yield 0, len(lengths)
            return
        lo = 0
        for hi in range(1, len(lengths) + 1):
            if hi == len(lengths) or lengths[hi] != lengths[lo]:
                yield lo, hi
                lo = hi

    def _losses(
        self, tensors: dict[str, Tensor], x: Tensor, y: Tensor, keys: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """The mean loss [c] of each client's batch x [c, b, ...]."""
        self.module.train()
        forward: Callable[..., Tensor] = self._one
        with self.precision():
            if keys is None:
                losses = vmap(forward)(tensors, x, y)
            else:
                with KeyedDropout() as dropout:
                    losses = vmap(lambda t, x, y, k: (dropout.start(k), forward(t, x, y))[1])(tensors, x, y, keys)
        if losses.dim() == 1:
            return losses
        return losses.mean(1) if mask is None else (losses * mask).sum(1) / mask.sum(1)

    def _clipped_sums(
        self,
        tensors: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        keys: Tensor | None,
        mask: Tensor | None,
        clip: float,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss [c] of each client's batch, and the sums [c, ...] of its rows' clipped gradients."""
        self.module.train()
        counts = torch.ones(x.shape[:2], device=self.device) if mask is None else mask
        steps = torch.zeros(len(x), dtype=torch.int64, device=self.device) if keys is None else keys
        with KeyedDropout() if keys is not None else contextlib.nullcontext() as dropout, self.precision():
            summed, losses = self.rowwise.many(tensors, x, y, counts, row_keys(steps, x.shape[1]), clip, dropout)
        return losses / counts.sum(1).clamp(min=1), summed

    def _one(self, tensors: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return self.work.objective.loss(functional_call(self.module, tensors, (x,)), y)

    def step(
        self,
        walk: SgdRun,
        leaves: Leaves,
        w: Tensor,
        g: Tensor | None,
        u: Tensor | None,
        gradients: Sequence[Tensor],
        lo: int,
        hi: int,
    ) -> None:
        """One optimiser step of the clients from lo to hi; w, g and u hold all clients' numbers in `leaves`' layout."""
        rows, spans = slice(lo, hi), leaves.layout.trained
        if g is None:
            slide(leaves(lo, hi)[1], gradients, w[rows], walk, spans, rows)
            return
        for slot, gradient in zip(leaves.trained, gradients, strict=True):
            g[rows, slot.start : slot.stop] = gradient.flatten(1)
        advance(w[rows], g[rows], None if u is None else u[rows], walk, spans, rows)


class Leaves:
    """A stack's tensors for any range of its clients: parameters as autograd leaves, views of the stack; buffers apart.

    Buffers are kept contiguous, since vmap's batch norm updates a copy where running statistics are strided views, and
    are written back into the stack by `finish`.
    """

    def __init__(self, layout: Layout, w: Tensor) -> None:
        self.layout, self.w = layout, w
        self.trained = [slot for slot in layout.slots if not slot.buffer]
        views = layout.views(w)
        self._buffers = {slot.name: views[slot.name].contiguous() for slot in layout.slots if slot.buffer}
        self._made: dict[tuple[int, int], tuple[dict[str, Tensor], list[Tensor]]] = {}

    def __call__(self, lo: int, hi: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        if (lo, hi) not in self._made:
            views = self.layout.views(self.w[lo:hi])
            parameters = [views[slot.name].detach().requires_grad_() for slot in self.trained]
            tensors = {slot.name: leaf for slot, leaf in zip(self.trained, parameters, strict=True)}
            tensors |= {name: buffer[lo:hi] for name, buffer in self._buffers.items()}
            self._made[lo, hi] = tensors, parameters
        return self._made[lo, hi]

    def finish(self) -> None:
        """Put the buffers back into the stack."""
        views = self.layout.views(self.w)
        for name, buffer in self._buffers.items():
            views[name].copy_(buffer)


def rows_of(walk: SgdRun, order: list[int]) -> SgdRun:
    """The same walk with its rows in another order."""
    if order == list(range(len(order))):
        return walk

    def pick(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows[order]

    lr = walk.descent.lr
    descent = dataclasses.replace(walk.descent, lr=lr[order]) if isinstance(lr, Tensor) else walk.descent
    return SgdRun(
        [walk.clients[row] for row in order],
        [walk.moments[row] for row in order],
        walk.phase,
        walk.model[order],
        descent,
        walk.prox,
        pick(walk.prox_center),
        pick(walk.correction),
        pick(walk.velocity),
    )


def descended(w: Tensor, steps: Tensor, loss: Tensor, u: Tensor | None, order: list[int]) -> SgdOutcome:
    """Where a walk ended, its rows in the order in which they were asked for."""
    if order == list(range(len(order))):  # a copy of a stack is dear
        return SgdOutcome(w, steps, loss, u)
    back = torch.tensor(np.argsort(order), device=w.device)
    return SgdOutcome(w[back], steps[back], loss[back], None if u is None else u[back])


def laid_out(plans: Sequence[Sequence[Places]]) -> tuple[Places, list[int]]:
    """The positions of all steps' rows side by side [c, r], filled up as in `pad_rows`, and where steps begin and end.

    Args:
        plans: each client's mini-batches, those with most steps first.
    """
    widths = [max(len(plan[step]) for plan in plans if len(plan) > step) for step in range(len(plans[0]))]
    ends = [0, *itertools.accumulate(widths)]
    index = np.empty((len(plans), ends[-1]), dtype=np.int64)
    for row, plan in zip(index, plans, strict=True):
        row[:] = plan[0][0] if plan else plans[0][0][0]
        for batch, start in zip(plan, ends, strict=False):
            row[start : start + len(batch)] = batch
    return index, ends


def pad_rows(vectors: list[Places], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Positions [c, b], short batches filled up with their first row, and a mask [c, b] of what counts (None: all)."""
    longest = max(1, *(len(part) for part in vectors))
    if all(len(part) == longest for part in vectors):
        return torch.from_numpy(np.stack(vectors)).to(device), None
    index = np.stack(
        [np.pad(part, (0, longest - len(part)), constant_values=part[0] if len(part) else 0) for part in vectors]
    )
    mask = np.arange(longest) < np.array([[len(part)] for part in vectors])
    return torch.from_numpy(index).to(device), torch.from_numpy(mask).float().to(device)
