"""Help for layers on a GPU whose tensors are views of a flat vector, which begin anywhere in it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


def fit_to_device(module: nn.Module, device: torch.device) -> None:
    """Let a module's layers run on a device with tensors that are views: hooks on those that could not."""
    if device.type == "cpu":
        return
    for layer in module.modules():
        if isinstance(layer, _NormBase):
            layer.register_forward_pre_hook(_in_rows)
        elif isinstance(layer, nn.RNNBase):
            if names := chunk_order(layer, device):
                InOneChunk(layer, names)
            layer.flatten_parameters = _stay  # type: ignore[method-assign]


def _stay() -> None:
    """In place of what a model's own forward pass may call: its weights would leave the flat vector without a word."""


def rows_first(x: Tensor) -> Tensor:
    """A tensor in torch's own memory order, also by its strides where sizes of 1 would allow another one.

    cuDNN's batch norm for the other order reads 16 bytes at a time, and statistics behind a bias of 10 classes begin 8
    bytes off: the process loses the GPU.
    """
    return x.contiguous().flatten().view(x.shape) if x.dim() > 3 else x


def _in_rows(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(rows_first(x) if isinstance(x, Tensor) else x for x in inputs)


def chunk_order(layer: nn.RNNBase, device: torch.device) -> list[str]:
    """The names of a recurrent layer's tensors in the order in which cuDNN wants them in one piece, if any."""
    if device.type != "cuda":
        return []
    duplicate = copy.deepcopy(layer).to(device)
    type(duplicate).flatten_parameters(duplicate)
    tensors = {name: getattr(duplicate, name) for name in duplicate._flat_weights_names}
    if len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) > 1:
        return []
    return sorted(tensors, key=lambda name: int(tensors[name].storage_offset()))


class InOneChunk:
    """Gives a recurrent layer its weights in one piece in each pass, by one copy, and takes its own back afterwards.

    cuDNN would copy them one by one and warn.

    Args:
        layer: whose weights lie anywhere.
        names: of them, in the order that is wanted.
    """

    def __init__(self, layer: nn.RNNBase, names: Sequence[str]) -> None:
        self.names = names
        layer.register_forward_pre_hook(self._join)
        layer.register_forward_hook(self._restore, always_call=True)

    def _join(self, layer: Any, _: object) -> None:
        tensors = [getattr(layer, name) for name in self.names]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        pieces: Sequence[Tensor] = torch.split(flat, [tensor.numel() for tensor in tensors])
        views = (piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True))
        joined = dict(zip(self.names, views, strict=True))
        layer._flat_weights = [joined[name] for name in layer._flat_weights_names]

    def _restore(self, layer: Any, *_: object) -> None:
        layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]
