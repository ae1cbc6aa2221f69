"""The streams of a GPU, followed on the CPU: they find tensors that one lane wrote and another reads without waiting.

Every stream has a clock for each other one (Lamport 1978; Fidge 1988): the last of that one's operations it has waited
for.  An operation may read what was written, and write what was read or written, only before its own stream's clock.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from piebald.engines.recorded_step import Recorder
from tests.devices.recorded_on_cpu import _memory, _tensors, _written

MAIN = 0
aten = torch.ops.aten
_TOUCH_NOTHING = {aten.set_.source_Storage, aten.set_.source_Storage_storage_offset, aten.new_empty.default}


class Streams(TorchDispatchMode):
    """Keeps who touched which memory last; `make` is a maker of recorders, each with a stream of its own.

    Attributes:
        lanes: how many streams there are besides the main one.
        races: operations that did not wait for what they touched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.lanes, self.races = MAIN, 0, list[str]()
        self._clocks: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._seen: dict[int, dict[tuple[int, int, int, bool], int]] = defaultdict(dict)
        self._kept: dict[int, torch.UntypedStorage] = {}  # or another would take the place of one that is gone

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func in _TOUCH_NOTHING:
            return result
        clock, written = self._clocks[self.now], [*_written(func, args, kwargs or {}), *_tensors(result)]
        clock[self.now] += 1
        for tensor in (*_tensors(args, kwargs), *written):
            if not tensor.numel():
                continue
            place, writes, (lo, hi) = _memory(tensor), any(tensor is one for one in written), _span(tensor)
            self._kept[place] = tensor.untyped_storage()
            late = {
                stream
                for (start, stop, stream, wrote), tick in self._seen[place].items()
                if (wrote or writes) and start < hi and lo < stop and stream != self.now and tick > clock[stream]
            }
            if late:
                self.races.append(f"stream {self.now}: {func} of {list(tensor.shape)} did not wait for {sorted(late)}")
            self._seen[place][lo, hi, self.now, writes] = clock[self.now]
        return result

    def wait(self, stream: int, other: int) -> None:
        """Have a stream go on after all that was asked of another."""
        for each, tick in self._clocks[other].items():
            self._clocks[stream][each] = max(self._clocks[stream][each], tick)

    def make(self, _: torch.device) -> Recorder:
        """A recorder that carries out all steps, on a stream of its own."""
        self.lanes += 1
        return _Lane(self, self.lanes)


class _Lane(Recorder):
    def __init__(self, streams: Streams, number: int) -> None:
        self._streams, self._number = streams, number

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        before, self._streams.now = self._streams.now, self._number
        try:
            yield
        finally:
            self._streams.now = before

    def follow(self) -> None:
        self._streams.wait(self._number, MAIN)

    def lead(self) -> None:
        self._streams.wait(MAIN, self._number)


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first place of a tensor in its memory, and the one behind its last."""
    start = tensor.storage_offset()
    return start, start + 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
