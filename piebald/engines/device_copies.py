"""What a GPU asks for: few copies that the host waits for, numbers read at once, layers that take views of a vector.

A copy from ordinary memory makes the host wait until a GPU has done everything that was asked of it before.  So what a
whole cohort is sent is copied once, positions of rows are copied for many steps at once, and both go through pinned
memory (`machine.moved`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from piebald.core.machine import PINNED, moved

Array = np.ndarray[Any, np.dtype[Any]]


BLOCK = 1 << 20  # numbers of arrays that are copied at once


def moved_arrays(arrays: Iterable[Array], device: torch.device) -> Iterator[Tensor]:
    """Arrays of one type on the device, in their order; many small ones are one copy."""
    waiting, numbers = list[Array](), 0
    for array in arrays:
        waiting.append(array)
        numbers += array.size
        if numbers >= BLOCK:
            yield from moved_together(waiting, device)
            waiting, numbers = [], 0
    yield from moved_together(waiting, device)


def moved_together(arrays: list[Array], device: torch.device) -> list[Tensor]:
    """Arrays of one type on the device, by a single copy."""
    if not arrays:
        return []
    flat = moved(torch.from_numpy(np.concatenate([array.ravel() for array in arrays])), device)
    parts = torch.split(flat, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


class CohortCopies:
    """Copies of what all clients of a cohort share, such as the global model: within `with`, one copy for all stacks.

    Tensors of the host may not be written to within it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # by id: the tensor, which keeps its id, and its copy
        self._copies: dict[int, tuple[Tensor, Tensor]] | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """A tensor of the host on the device."""
        if self._copies is None or tensor.device == self.device:
            return moved(tensor, self.device)
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = (tensor, moved(tensor, self.device))
        return self._copies[id(tensor)][1]

    def __enter__(self) -> Self:
        self._copies = {}
        return self

    def __exit__(self, *_: object) -> None:
        self._copies = None


Taker = Callable[[list[Any]], object]


class LaterNumbers:
    """Numbers of a cohort on a device, which the host waits for a single time.

    A GPU has no work while the host waits for it, and a number that is read for each client makes it wait for each.
    On the CPU everything is handed over at once.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Taker]] = []
        self._copied: Tensor | None = None  # a tensor whose copy is under way

    def add(self, numbers: Tensor, take: Taker) -> None:
        """Hand numbers [n] to a function once they are read, in the order of these calls."""
        if numbers.device.type == "cpu":
            take(numbers.tolist())
        else:
            self._waiting.append((numbers, take))

    def fetched(self, tensor: Tensor) -> Tensor:
        """A tensor on the host, whose numbers are there after `read`: a GPU writes them while the host goes on."""
        if tensor.device.type not in PINNED or not tensor.numel():
            return tensor.cpu()
        self._copied = tensor
        return tensor.to("cpu", non_blocking=True)

    def read(self) -> None:
        """Wait, and hand over what waits: one copy for each type of numbers, of which there is hardly more than one."""
        waiting, self._waiting, copied, self._copied = self._waiting, [], self._copied, None
        values: dict[int, list[Any]] = {}
        for dtype in {numbers.dtype: None for numbers, _ in waiting}:
            indices = [index for index, (numbers, _) in enumerate(waiting) if numbers.dtype == dtype]
            parts = [waiting[index][0].flatten() for index in indices]
            numbers_read, start = torch.cat(parts).tolist(), 0
            for index, part in zip(indices, parts, strict=True):
                values[index] = numbers_read[start : start + part.numel()]
                start += part.numel()
        if copied is not None and not waiting:
            copied.flatten()[:1].tolist()  # the copies were asked for before
        for index, (_, take) in enumerate(waiting):
            take(values[index])


def fit_to_device(module: nn.Module, device: torch.device) -> None:
    """Let a module's layers run on a device with tensors that are views: hooks on those that could not."""
    # the CPU's kernels take tensors wherever they lie
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
    # of a copy: flattening would move the layer's own weights out of the flat vector
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
        # also after an error: the layer would keep the joined piece, and miss later writes to its weights
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
