"""Gradients of single rows, clipped and summed: what DP-SGD steps along (Abadi et al. 2016, algorithm 1).

The gradient of a row is that of a batch of one, so `torch.func` computes the gradients of a batch's rows, for a stack
of clients, from the forward pass that every engine has: the trainer is written for one client, whatever layers a model
has.  The tests compare with opacus, which hooks into the layers that it supports; its accountant is compared with ours
(`privacy.accounting`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from piebald.contracts import Rows
from piebald.core import pytree
from piebald.core.losses import Loss
from piebald.core.machine import float64_device, moved
from piebald.core.noise import NoiseSource, hidden
from piebald.core.parameters import Layout
from piebald.core.randomness import long_key
from piebald.engines.keyed_dropout import KeyedDropout, mix

MAX_NUMBERS = 1 << 25  # numbers in all rows' gradients together while they are summed


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
            x, y = (pytree.mapped(lambda leaf: leaf.unsqueeze(0), tree) for tree in (x, y))
            return self.loss(functional_call(self.module, {**parameters, **buffers}, *pytree.arguments(x)), y).mean()

        parameters = {slot.name: tensors[slot.name].detach() for slot in slots if not slot.buffer}
        gradients, losses = vmap(grad_and_value(loss), in_dims=(None, 0, 0, 0))(parameters, rows.x, rows.y, keys)
        square = torch.stack([part.reshape(len(rows), -1).square().sum(1) for part in gradients.values()]).sum(0)
        share = shrink(square.sqrt(), clip) * mask
        return {name: torch.tensordot(share, part, 1) for name, part in gradients.items()}, (losses * mask).sum()


def shrink(norms: Tensor, clip: float) -> Tensor:
    """Factors for vectors of these lengths after which none is longer than `clip`."""
    return (clip / norms.clamp(min=1e-12)).clamp(max=1.0)


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
        sources = [NoiseSource.repeatable(long_key("hide", step, *rng_key)) for rng_key in rng_keys]
        drawn = torch.from_numpy(np.stack([source.gaussian(layout.size) for source in sources]))
        drawn = moved(drawn, float64_device(first.device))
        slots = {slot.name: slot for slot in layout.slots}
        for name, part in summed.items():
            noise = drawn[:, slots[name].start : slots[name].stop].view(part.shape)
            parts[name] = hidden(part, noise, deviation)
    return [part * share.view(-1, *[1] * (part.dim() - 1)) for part in parts.values()]
