"""A CUDA graph's stand-in on the CPU: it records steps, replays them on the same memory, and refuses what a graph could
not replay, or would replay wrongly without a word.

A graph keeps the addresses and numbers that its kernels had.  So a step can be replayed only if

1. the host reads nothing of the device's, and sends nothing there, while it is recorded;
2. it reads and writes memory that is still there at replay: declared buffers, or memory of its own;
3. its shapes and its numbers of the host (a learning rate, a step count, a slice) are the same at each step;
4. what is read afterwards was declared: the graph's own memory is used again.

`Recording` checks 1 and 2 as it records, `same_steps` checks 3 by recording a step twice from other contents of the
buffers, and 4 shows since all memory of the recording's own is NaN after each replay.  A replay runs the same
operations on the same tensors, so it has the bits of the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from piebald.engines.recorded_step import Recorder

aten = torch.ops.aten
Step = Callable[[], None]
_HOST_READS = {
    aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.nonzero.default,
    aten.masked_select.default, aten.bincount.default, aten._unique2.default, aten.unique_dim.default,
    aten.unique_consecutive.default, aten.repeat_interleave.Tensor,
}  # fmt: skip
_FROM_HOST = {aten.lift_fresh.default, aten._pin_memory.default}  # torch.tensor(...), torch.as_tensor(...)


class CannotRecord(RuntimeError):
    """What a graph could not replay, or would replay wrongly."""


class _Call(NamedTuple):
    """One operation with the very tensors that it had."""

    function: Any
    args: Any
    kwargs: Any
    result: Any
    with_grad: bool  # the mode, which some operations ask what to keep


class Recording(TorchDispatchMode):
    """One recorded step.

    Args:
        step: the step, which is carried out.
        reads, writes: every buffer that it may read and write beside memory of its own.
    """

    def __init__(self, step: Step, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        super().__init__()
        self._writes = {_memory(buffer) for buffer in writes}
        self._declared = self._writes | {_memory(buffer) for buffer in reads}
        self._buffers = [*reads, *writes]  # keeps them
        self._own: dict[int, Tensor] = {}
        self.calls: list[_Call] = []
        with self:
            step()
        self._forget()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HOST_READS or (func is aten.index.Tensor and any(_is_mask(place) for place in args[1])):
            raise CannotRecord(f"{func}: the host waits for a number or a shape of the device")
        if func in _FROM_HOST:
            raise CannotRecord(f"{func}: numbers of the host become a tensor, which a replay would not send again")
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            raise CannotRecord(f"{func}: it draws from torch's generator")
        for given in _tensors(args, kwargs):
            if _memory(given) not in self._declared and _memory(given) not in self._own:
                raise CannotRecord(f"{func}: reads {_described(given)}, which is no declared buffer")
        result = func(*args, **kwargs)
        for target in _written(func, args, kwargs):
            if _memory(target) in self._declared - self._writes:
                raise CannotRecord(f"{func}: writes to {_described(target)}, which is only to be read")
        for new in _tensors(result):
            if _memory(new) not in self._declared:
                self._own.setdefault(_memory(new), new)
        if not func.is_view:
            self.calls.append(_Call(func, args, kwargs, result, torch.is_grad_enabled()))
        return result

    def replay(self) -> None:
        """Carry the step out again, on what is in the buffers now."""
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for call in self.calls:
                with torch.set_grad_enabled(call.with_grad):
                    made = call.function(*call.args, **call.kwargs)
                for new, held in zip(_tensors(made), _tensors(call.result), strict=True):
                    if _memory(new) != _memory(held):
                        held.copy_(new)  # to where it was when it was recorded
        self._forget()

    def _forget(self) -> None:
        """Overwrite the recording's own memory, as other graphs that share it would."""
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for held in self._own.values():
                # NaN in all float types, -1 in integers
                torch.empty(0, dtype=torch.uint8).set_(held.untyped_storage()).fill_(255)

    def form(self) -> list[tuple[str, str]]:
        """Every operation with the shapes and places of its tensors and its numbers of the host."""
        numbers: dict[int, int] = {}

        def place(given: Tensor) -> Any:
            number = numbers.setdefault(_memory(given), len(numbers))
            return ("tensor", number, tuple(given.shape), given.stride(), given.storage_offset(), given.dtype)

        return [
            (str(call.function), str(tree_map_only(Tensor, place, (call.args, call.kwargs)))) for call in self.calls
        ]


def same_steps(first: Recording, second: Recording) -> None:
    """Refuse two recordings of a step, from other contents of its buffers, that differ: the host decided."""
    pairs = zip(first.form(), second.form(), strict=False)
    for number, (a, b) in enumerate(pairs):
        if a != b:
            raise CannotRecord(f"operation {number}, {a[0]}: the host's {_apart(a[1], b[1])} differ from step to step")
    if len(first.calls) != len(second.calls):
        raise CannotRecord(f"{len(first.calls)} operations in one step and {len(second.calls)} in another")


class StandIn(Recorder):
    """Records on the CPU.

    Attributes:
        recordings: what was recorded, in order.
        replays: how many steps were replayed.
        refused: what could not be recorded.
        closed: how often all of it was freed.
    """

    records: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        self.recordings: list[Recording] = []
        self.replays = self.closed = 0
        self.refused: list[str] = []

    def record(self, step: Step, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Step:
        before = [buffer.detach().clone() for buffer in writes]

        def restore() -> None:
            with torch.no_grad():
                for buffer, value in zip(writes, before, strict=True):
                    buffer.detach().copy_(value)

        try:
            made = Recording(step, reads, writes)
            counter = writes[-1]
            counter.copy_(before[-1] + (-1 if bool(before[-1] > 0) else 1))  # another row of the tables
            same_steps(made, Recording(step, reads, writes))
        except CannotRecord as error:
            self.refused.append(str(error))
            raise
        finally:
            restore()
        self.recordings.append(made)

        def replay() -> None:
            self.replays += 1
            made.replay()

        return replay

    def close(self) -> None:
        self.closed += 1
        self.recordings.clear()


def _tensors(*trees: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(trees)[0] if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    arguments = func._schema.arguments
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    places = {a.name: place for place, a in enumerate(arguments)}
    return _tensors(
        [kwargs[n] if n in kwargs else args[places[n]] for n in names if n in kwargs or places[n] < len(args)]
    )


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that may draw random numbers does: fused attention without dropout does not."""
    given = {
        a.name: (args[place] if place < len(args) else kwargs.get(a.name, a.default_value))
        for place, a in enumerate(func._schema.arguments)
    }
    return bool(given.get("dropout_p", 1.0))


def _is_mask(place: Any) -> bool:
    return isinstance(place, Tensor) and place.dtype == torch.bool


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _apart(a: str, b: str) -> str:
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"...{a[max(0, at - 30) : at + 30]}... and ...{b[max(0, at - 30) : at + 30]}..."
