"""Gradients of single rows, clipped and summed, and losses of a client's own in place of the objective's.

DP-SGD steps along such a sum (Abadi et al. 2016, algorithm 1).  The gradient of a row is that of a batch of one, so
`torch.func` computes the gradients of a batch's rows, for a stack of clients, from the forward pass that every engine
has: the trainer is written for one client, whatever layers a model has.  The tests compare with opacus, which hooks
into the layers that it supports; its accountant is compared with ours (`privacy.accounting`).

A row whose gradient is longer than float32 can say, not finite, or cannot be computed at all counts as one whose
gradient is zero: whether training succeeds may not depend on a single row.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from piebald.contracts import PLAIN_PASSES, LocalLoss, LossBatch, ModelSpec, PassSettings, Rows
from piebald.core import pytree
from piebald.core.errors import failure_reason
from piebald.core.machine import float64_device, moved, raise_if_lost
from piebald.core.metrics import Loss, mean_over_rows
from piebald.core.moments import InputHooks
from piebald.core.parameters import Layout, copied, head
from piebald.core.randomness import NoiseSource, hidden, long_key
from piebald.core.targets import parted
from piebald.engines.batched_layers import KeyedDropout, mix
from piebald.engines.device_copies import fit_to_device
from piebald.engines.model_traits import made_up
from piebald.engines.scoring import ScoringEngine

_log = logging.getLogger(__name__)
MAX_NUMBERS = 1 << 25  # numbers in all rows' gradients together while they are summed
_FIXED = frozenset((type(None), bool, int, float, str, bytes, type, FunctionType, MethodType, nn.Parameter))
_OF_TORCH = frozenset(vars(nn.Module())) - {"_buffers", "_modules"}  # attributes that no forward pass changes


@dataclass(frozen=True, slots=True)
class RowGradients:
    """Computes clipped sums of row gradients.  `module` is in training mode; `loss` is that of the objective."""

    module: nn.Module
    layout: Layout
    loss: Loss

    def clipped_sum(
        self,
        tensors: Mapping[str, Tensor],
        rows: Rows,
        mask: Tensor,
        keys: Tensor,
        clip: float,
        dropout: KeyedDropout | None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Compute the sum of a client's clipped gradients by parameter, and the sum of its losses.

        Args:
            tensors: the client's parameters and buffers by name.
            rows: rows [b, ...].
            mask: [b], 1 for rows that count and 0 for padding.
            keys: dropout keys [b].
            clip: maximum length of a row's gradient.
            dropout: the active mode, or None.
        """
        slots = self.layout.slots
        buffers = {slot.name: tensors[slot.name] for slot in slots if slot.buffer}

        def loss(parameters: dict[str, Tensor], x: Any, y: Any, key: Tensor) -> Tensor:
            if dropout is not None:
                dropout.start(key)
            # vmap takes the axis of rows away, and a model expects one
            x, y = (pytree.mapped(lambda leaf: leaf.unsqueeze(0), tree) for tree in (x, y))
            return self.loss(functional_call(self.module, {**parameters, **buffers}, *pytree.arguments(x)), y).mean()

        parameters = {slot.name: tensors[slot.name].detach() for slot in slots if not slot.buffer}
        gradients, losses = vmap(grad_and_value(loss), in_dims=(None, 0, 0, 0))(parameters, rows.x, rows.y, keys)
        # under autocast a product, and so the sum that noise hides, would be in half precision
        with torch.autocast(mask.device.type, enabled=False):
            squares = [part.reshape(len(rows), -1).square().sum(1) for part in gradients.values()]
            lengths = torch.stack(squares).sum(0).sqrt()
            # masked after shrinking: a row that only fills the batch up has a gradient as well
            factors = shrink(lengths, clip) * mask
            summed = {name: torch.tensordot(factors, finite(part, lengths), 1) for name, part in gradients.items()}
        return summed, (finite(losses, losses) * mask).sum()


def shrink(lengths: Tensor, clip: float) -> Tensor:
    """Factors for vectors of these lengths after which none is longer than `clip`."""
    return (clip / finite(lengths, lengths).clamp(min=1e-12)).clamp(max=1.0)


def finite(vectors: Tensor, lengths: Tensor) -> Tensor:
    """Vectors [..., p] with zeros in place of those whose length [...] is not finite.

    A factor of 0 would not do, since 0 times infinity is NaN.
    """
    missing = vectors.dim() - lengths.dim()
    return vectors.masked_fill(~lengths.isfinite()[(..., *[None] * missing)], 0.0)


@contextlib.contextmanager
def state_restored(module: nn.Module) -> Iterator[None]:
    """Put all that a module keeps back as it was, at the end of a `with` block: rows that moved it are in no clip.

    These are its buffers and its attributes, and what they hold; not what lies elsewhere, as in a global variable.
    """
    undone = list(_undoing(module))
    try:
        yield
    finally:
        with torch.no_grad():
            for undo in undone:
                undo()


def _undoing(module: nn.Module) -> Iterator[Callable[[], object]]:
    """Yield functions that put back each tensor, array and container that a module reaches, but for parameters."""
    waiting, seen = list[Any]([module]), set[int]()
    while waiting:
        value = waiting.pop()
        if type(value) in _FIXED or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            # nothing can write into what overlaps itself
            if not isinstance(value, nn.Parameter) and torch._debug_has_internal_overlap(value) != 1:
                yield partial(value.detach().copy_, value.detach().clone())
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:
                yield partial(np.copyto, value, value.copy())
        elif isinstance(value, dict):
            yield partial(_refill, value, dict(value))
            waiting += value.values()
        elif isinstance(value, list | set | deque):
            yield partial(_refill, value, list(value))
            waiting += value
        elif isinstance(value, tuple):
            waiting += value
        elif isinstance(value, nn.Module):
            yield partial(_refill, vars(value), dict(vars(value)))
            waiting += [inner for name, inner in vars(value).items() if name not in _OF_TORCH]
        elif type(value).__module__.partition(".")[0] not in sys.stdlib_module_names:  # which keeps locks and loggers
            waiting.append(getattr(value, "__dict__", None))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.update if isinstance(container, dict | set) else container.extend)(content)


@contextlib.contextmanager
def surviving(device: torch.device) -> Iterator[list[Any]]:
    """A `with` block that puts its results into a list, which stays empty where a row makes the model fail.

    That row counts as zero then: a failed task would tell that it is there.
    """
    try:
        yield []
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the user's own code may raise at a row, as at a token beyond a vocabulary
        raise_if_lost(error, device)
        _log.warning("rows whose gradient cannot be computed count as zero: %s", failure_reason(error))


def row_keys(keys: Tensor, rows: int) -> Tensor:
    """Dropout keys [c, rows] of single rows, from the keys [c] of a step."""
    return mix(keys.unsqueeze(-1) + torch.arange(rows, device=keys.device))


def noised(
    summed: Mapping[str, Tensor],
    layout: Layout,
    deviation: float,
    lots: Sequence[float],
    step: int,
    rng_keys: Sequence[tuple[int | str, ...]],
) -> list[Tensor]:
    """The noisy gradients of a step, in the layout's order of parameters.

    Args:
        summed: clipped sums [c, ...] by parameter.
        layout: layout of the model.
        deviation: standard deviation of the noise on the sums.
        lots: expected rows in a batch of each client.
        step: number of the step.
        rng_keys: the rng key of each client.
    """
    first = next(iter(summed.values()))
    share = 1 / moved(torch.tensor(lots, dtype=first.dtype), first.device)
    parts = dict(summed)
    if deviation:
        # a key for each step: the same noise in two steps would cancel in their difference
        sources = [NoiseSource.repeatable(long_key("hide", step, *rng_key)) for rng_key in rng_keys]
        drawn = torch.from_numpy(np.stack([source.gaussian(layout.size) for source in sources]))
        drawn = moved(drawn, float64_device(first.device))
        slots = {slot.name: slot for slot in layout.slots}
        for name, part in summed.items():
            noise = drawn[:, slots[name].start : slots[name].stop].view(part.shape)
            parts[name] = hidden(part, noise, deviation)
    # divided last: `hidden` rounds the noisy sum, and what follows is post-processing, which tells nothing more
    return [part * share.view(-1, *[1] * (part.dim() - 1)) for part in parts.values()]


class ClippingEngine(ScoringEngine):
    """Computes sums of clipped gradients with the module that it keeps.

    Attributes:
        loss: the loss of each row, from outputs and targets.
        parameters: the module's parameters, in the layout's order.
    """

    loss: Loss
    parameters: list[Tensor]
    _names: Sequence[str]  # of the parameters
    _vectorizes: bool | None = None

    def _clipped(
        self, rows: Rows, keys: Tensor, clip: float, dropout: KeyedDropout | None, passes: PassSettings
    ) -> tuple[list[Tensor], Tensor]:
        """The sum of these rows' clipped gradients, and the sum of their losses, through vmap."""
        tensors = self.work.layout.views(self.vector.detach())
        with self.precision(passes, vectorized=True), state_restored(self.module):
            mask = torch.ones(len(rows), device=self.device)
            sums, loss = self.row_gradients.clipped_sum(tensors, rows, mask, keys, clip, dropout)
        return [sums[name] for name in self._names], loss

    def _clipped_one_by_one(
        self, rows: Rows, keys: Tensor, clip: float, dropout: KeyedDropout | None, passes: PassSettings
    ) -> tuple[list[Tensor], Tensor]:
        """The same for models that vmap cannot run: recurrent ones, and those that draw random numbers themselves."""
        summed = [torch.zeros_like(parameter) for parameter in self.parameters]
        total = torch.zeros((), device=self.device)
        for row in range(len(rows)):
            if dropout is not None:
                dropout.start(keys[row])
            single = rows[row : row + 1]
            with surviving(self.device) as counted, state_restored(self.module):
                with self.precision(passes):
                    loss = self.loss(pytree.run(self.module, self.shaped(single.x)), single.y).mean()
                counted += torch.autograd.grad(loss, self.parameters, materialize_grads=True)
            if counted:
                length = torch.stack([part.square().sum() for part in counted]).sum().sqrt()  # overflows as above
                shortened = torch._foreach_mul([finite(part, length) for part in counted], shrink(length, clip))
                torch._foreach_add_(summed, shortened)
                total += finite(loss.detach(), loss)
        return summed, total

    @cached_property
    def row_gradients(self) -> RowGradients:
        """Computes gradients of single rows through vmap."""
        return RowGradients(self.module, self.work.layout, self.loss)

    def vectorizes(self, rows: Rows) -> bool:
        """Return whether gradients of single rows can be computed through vmap; tried once, on rows of this form."""
        if self._vectorizes is None:
            # not on these rows themselves: one row would decide how the gradients of all others are computed
            self._vectorizes = not self.traits.random and not self.padded and self._tried(made_up(rows))
        return bool(self._vectorizes)

    def _tried(self, rows: Rows) -> bool:
        keys = torch.arange(len(rows)).to(self.device)
        with KeyedDropout() as dropout, warnings.catch_warnings():
            warnings.filterwarnings("error", message="There is a performance drop")  # vmap falls back to a loop
            expected, _ = self._clipped_one_by_one(rows, keys, 1.0, dropout, PLAIN_PASSES)
            try:
                sums, _ = self._clipped(rows, keys, 1.0, dropout, PLAIN_PASSES)
            except Exception as error:  # whatever torch or the user's own code may raise where it is vectorized
                raise_if_lost(error, self.device)
                return False
        # loose, since vmap's kernels sum in another order; a model that vmap gets wrong is far off
        return all(torch.allclose(a, b, rtol=1e-2, atol=1e-4) for a, b in zip(sums, expected, strict=True))

    @cached_property
    def padded(self) -> bool:
        """True if an embedding has a padding row: under torch's vmap it would get a gradient."""
        tables = (layer for layer in self.module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag))
        return any(table.padding_idx is not None for table in tables)


class LossEvaluator:
    """Evaluates a `contracts.LocalLoss` on one client's batch, also inside `torch.func.vmap`.

    Args:
        local: the loss.
        spec: the model.
        losses: the objective's loss, for training.
        module: the module in training mode that `forward` runs.
        device: where the engine computes.
    """

    def __init__(
        self, local: LocalLoss, spec: ModelSpec, losses: Loss, module: nn.Module, device: torch.device
    ) -> None:
        self.local, self.spec, self.losses, self.module, self.device = local, spec, losses, module, device
        self._heads = [name] if local.reads_features and (name := head(module)) is not None else []
        # a module of its own, since anchors run in evaluation mode while the other stays in training mode
        self._frozen = copied(spec.model, device).eval() if local.anchors else None
        if self._frozen is not None:
            fit_to_device(self._frozen, device)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that it reads besides its arguments."""
        return [] if self._frozen is None else [*self._frozen.parameters(), *self._frozen.buffers()]

    def __call__(self, forward: Callable[[Any], Any], rows: Rows, own: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """The loss of each row [b], or one value for all of them; the arguments are as in `contracts.LossBatch`."""
        features: dict[str, Tensor] = {}
        with InputHooks(self.module, self._heads) as hooks:
            outputs = forward(rows.x)
        for name in self._heads:
            features["model"] = hooks.seen[name].flatten(1)
        for name in self.local.anchors:
            features[name] = self._features(own[name], rows.x)
        return self.local.batch_loss(LossBatch(self.losses, outputs, parted(rows.y)[0], mask, own, features))

    def mean_of_client(
        self, rows: Rows, own: Mapping[str, Tensor], client: int, counted: Tensor | None = None
    ) -> Tensor:
        """The mean loss over the `counted` rows of a client's batch; `own` are the tensors [c, ...] of a stack."""
        client_tensors = {name: stacked[client] for name, stacked in own.items()}
        forward = functools.partial(pytree.run, self.module)
        mask = torch.ones(len(rows), device=self.device) if counted is None else counted.float()
        losses = self(forward, rows, client_tensors, mask)
        return mean_over_rows(losses, counted) if losses.dim() == 1 else losses.mean()

    def _features(self, vector: Tensor, x: Any) -> Tensor:
        """The features of a model [p] in evaluation mode, without a gradient."""
        assert self._frozen is not None
        with torch.no_grad(), InputHooks(self._frozen, self._heads) as hooks:
            functional_call(self._frozen, self.spec.layout.views(vector), *pytree.arguments(x))
        return hooks.seen[self._heads[0]].flatten(1)
