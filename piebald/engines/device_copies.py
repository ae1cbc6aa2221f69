"""Copies from the host to the device that computes: few, and none that the host waits for.

A copy from ordinary memory makes the host wait until a GPU has done everything that was asked of it before.  So what a
whole cohort is sent is copied once, positions of rows are copied for many steps at once, and both go through pinned
memory (`machine.moved`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from piebald.core.machine import moved

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
        self._copies: dict[int, tuple[Tensor, Tensor]] | None = (
            None  # by id: the tensor, which keeps its id, and its copy
        )

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
