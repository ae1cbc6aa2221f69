"""Numbers that the host reads from a device all at once, when all stacks of a cohort have been served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from piebald.core.machine import PINNED

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
            places = [place for place, (numbers, _) in enumerate(waiting) if numbers.dtype == dtype]
            parts = [waiting[place][0].flatten() for place in places]
            numbers_read, start = torch.cat(parts).tolist(), 0
            for place, part in zip(places, parts, strict=True):
                values[place] = numbers_read[start : start + part.numel()]
                start += part.numel()
        if copied is not None and not waiting:
            copied.flatten()[:1].tolist()  # the copies were asked for before
        for place, (_, take) in enumerate(waiting):
            take(values[place])
