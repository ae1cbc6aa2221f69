"""A pretended GPU: tensors that say they are on another device and compute on the CPU.

Inside `pretended()` the device "meta" holds real numbers, and what a GPU would refuse is refused: an operation on
tensors of the host and of the device.  So whole runs can be made on it, and end with the bits of the CPU.

It also does what an H100 did to version 0.1: batch norm of images in channels-last order, whose statistics do not begin
at a multiple of 16 bytes, loses the device, which then refuses everything; memory is pinned in a forked process only if
that computes with one thread; and what is copied to the host without waiting is not there before the host waits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

from piebald.core import machine

DEVICE = torch.device("meta")
aten = torch.ops.aten
_TAKES_HOST_PLACES = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
_COPIES = {aten.copy_.default, aten._to_copy.default, aten.copy.default}
# Besides elementwise operations, those to which a GPU takes single numbers of the host.
_TAKES_NUMBERS = {
    *_TAKES_HOST_PLACES,
    aten.fill.Tensor,
    aten.fill_.Tensor,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Tensor,
    aten.where.self,
}

# Of those that autocast computes in low precision, or in float32, the ones that networks here consist of.
_LOW = {
    functional.linear, functional.conv1d, functional.conv2d, functional.conv3d, torch.matmul, Tensor.matmul,
    Tensor.__matmul__, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum,
}  # fmt: skip
_FULL = {functional.cross_entropy, functional.softmax, functional.log_softmax, functional.layer_norm, torch.softmax}


# Operations after which the host has what was copied to it without waiting, besides copies that it waits for.
WAITS = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.nonzero.default}
_NORMS = {
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._batch_norm_with_update.default,
}


class State:
    """What has happened to the device."""

    lost = ""  # the error that it answers everything with
    coming: list[tuple[Tensor, Tensor]] = []  # noqa: RUF012 - tensors of the host, and what they will be
    process = 0  # that began to use it

    @classmethod
    def begin(cls) -> None:
        """Start anew."""
        cls.lost, cls.coming, cls.process = "", [], os.getpid()

    @classmethod
    def arrive(cls) -> None:
        """Write what was copied without waiting."""
        for host, numbers in cls.coming:
            host.copy_(numbers)
        cls.coming = []

    @classmethod
    def lose(cls, why: str) -> None:
        """Refuse everything from now on."""
        cls.lost = f"CUDA error: {why}"
        cls.check()

    @classmethod
    def check(cls) -> None:
        """Raise the error of a device that is lost."""
        if cls.lost:
            raise torch.AcceleratorError(cls.lost)


class Mixed(RuntimeError):
    """An operation on tensors of the host and of the device."""


class OnDevice(Tensor):
    """A tensor of the pretended device; `held` are its numbers."""

    held: Tensor
    kinds_refused: frozenset[torch.dtype] = frozenset()  # of the device

    @staticmethod
    def __new__(cls, held: Tensor, grad: bool = False) -> OnDevice:
        made: OnDevice = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=DEVICE,
            requires_grad=grad,
        )
        if held.dtype in cls.kinds_refused:
            raise TypeError(f"Cannot convert a tensor of the device to {held.dtype}")
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.held!r})"

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _others(types):
            return NotImplemented  # as beside an ordinary tensor, which has no say
        with torch._C.DisableTorchFunctionSubclass():
            return python_function(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # inside of other tensors' own dispatch, where no mode is
        return NotImplemented if _others(types) else compute(func, args, kwargs or {})


def _others(types: Any) -> bool:
    """Whether tensors of other classes take part, such as sums that form themselves first."""
    return any(kind is not Tensor and not issubclass(kind, OnDevice | torch.nn.Parameter) for kind in types)


class _Device(TorchDispatchMode):
    """Makes tensors of the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if _others(types) else compute(func, args, kwargs or {})


class _Python(TorchFunctionMode):
    """What torch does before it dispatches: it would make empty tensors on the device "meta"."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if _others([kind]) and torch._C._is_torch_function_enabled():
                with self:  # it looks into tensors' memory as well
                    return kind.__torch_function__(func, types, args, kwargs)
        return python_function(func, args, kwargs or {})


class Autocast:
    """Autocast on the device: torch's own leaves tensors alone that dispatch themselves."""

    wanted: torch.dtype | None = None
    own = torch.autocast

    def __new__(cls, kind: str, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls) if kind == DEVICE.type else cls.own(kind, *args, **kwargs)

    def __init__(self, _: str, dtype: torch.dtype = torch.float16, enabled: bool = True) -> None:
        self.dtype = dtype if enabled else None

    def __enter__(self) -> Self:
        self.before, Autocast.wanted = Autocast.wanted, self.dtype
        return self

    def __exit__(self, *_: object) -> None:
        Autocast.wanted = self.before

    @classmethod
    def cast(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """The arguments of a function in the precision that it computes in."""
        dtype = None if cls.wanted is None else cls.wanted if func in _LOW else torch.float32 if func in _FULL else None
        if dtype is None:
            return args, kwargs
        low = lambda one: one.to(dtype) if one.device == DEVICE and one.is_floating_point() else one  # noqa: E731
        return tree_map_only(Tensor, low, (args, kwargs))


def python_function(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A function or method of torch's, with the numbers of the device where it would look into its memory."""
    args, kwargs = Autocast.cast(func, args, kwargs)
    if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
        others = {name: value for name, value in kwargs.items() if name != "device"}
        return func(*args, **others).to(kwargs["device"])
    if args and isinstance(args[0], OnDevice):
        if func is Tensor.new_tensor:
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype} | kwargs).to(DEVICE)
        if func is Tensor.data_ptr:
            return args[0].held.data_ptr()
        if func is Tensor.tolist:
            return args[0].cpu().tolist()
        if func is Tensor.numpy:
            raise TypeError("can't convert a tensor of the device to numpy: use Tensor.cpu()")
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], _with_places(args[1]), *args[2:])
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            args[0].held = args[1].held
    return func(*args, **kwargs)


def _with_places(index: Any) -> Any:
    """An index with its lists as tensors of the host."""
    if isinstance(index, tuple):
        return tuple(_with_places(one) for one in index)
    return torch.tensor(index) if isinstance(index, list) else index


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Carry out one operation where its tensors are."""
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
    there = any(isinstance(one, OnDevice) for one in tensors)
    wanted = kwargs.get("device")
    if there or (wanted is not None and torch.device(wanted) == DEVICE):
        State.check()
    if func in _NORMS and there:
        _check_alignment(args)
    if func in WAITS and there:
        State.arrive()
    if func in _COPIES:
        there = isinstance(args[0], OnDevice) if wanted is None else torch.device(wanted) == DEVICE
    elif wanted is not None:
        there = torch.device(wanted) == DEVICE
        if there:
            _check_places(func, (), {"generator": kwargs.get("generator")})
    elif there:
        _check_places(func, args, kwargs)
    held_args, held_kwargs = tree_map_only(OnDevice, lambda one: one.held, (args, kwargs))
    if "device" in held_kwargs:
        held_kwargs["device"] = None if held_kwargs["device"] is None else torch.device("cpu")
    made = func(*held_args, **held_kwargs)
    if func in _COPIES and not there and any(isinstance(one, OnDevice) for one in tensors):
        return _to_the_host(made, bool(kwargs.get("non_blocking")) or args[2:3] == (True,))
    if not there:
        return made
    wrapped = tree_map_only(Tensor, lambda one: one if isinstance(one, OnDevice) else OnDevice(one), made)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if tensors else wrapped


def _to_the_host(made: Tensor, without_waiting: bool) -> Tensor:
    """A copy on the host, which is filled with nonsense as long as the host has not waited for it."""
    if without_waiting:
        State.coming.append((made, made.clone()))
        return made.fill_(torch.nan if made.is_floating_point() else 77)
    State.arrive()
    return made


def _check_alignment(args: Any) -> None:
    """Lose the device where cuDNN's batch norm for channels-last order meets vectors that begin in between 16 bytes."""
    x, vectors = args[0].held, [one.held for one in args[1:5] if isinstance(one, OnDevice)]
    turned = x.dim() == 4 and x.stride() == torch.empty(x.shape).to(memory_format=torch.channels_last).stride()
    if turned and x.stride() != torch.empty(x.shape).stride() and any(one.data_ptr() % 16 for one in vectors):
        State.lose("misaligned address")


def _pinned(tensor: Tensor) -> Tensor:
    """A tensor as if in pinned memory."""
    if os.getpid() != State.process and torch.get_num_threads() > 1:
        raise RuntimeError("pin_memory() in a forked process with several threads, where CUDA would wait for ever")
    return tensor


def _check_places(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse tensors of the host beside those of the device, but places to index by and what `_may_be_a_number`."""
    every = tree_flatten((args, kwargs))[0]
    if any(isinstance(one, torch.Generator) for one in every):
        raise Mixed(f"{func}: a generator of the host draws nothing on the device")
    own = [one for one in every if isinstance(one, Tensor)]
    places = []
    if func in _TAKES_HOST_PLACES and isinstance(args[0], OnDevice):
        places = [one for one in args[1] if isinstance(one, Tensor) and not isinstance(one, OnDevice)]
    here = [one for one in own if not isinstance(one, OnDevice) and not any(one is place for place in places)]
    if here and not _may_be_a_number(func, here, args):
        shapes = ", ".join(f"{list(t.shape)} {'there' if isinstance(t, OnDevice) else 'here'}" for t in own)
        raise Mixed(f"{func}: tensors of the host and of the device: {shapes}")


def _may_be_a_number(func: Any, here: list[Tensor], args: Any) -> bool:
    """Whether an operation takes these tensors of the host: a single number, once, and not to write to."""
    if any(one.dim() for one in here) or (func._schema.is_mutable and here[0] is args[0]):
        return False
    return func in _TAKES_NUMBERS or (torch.Tag.pointwise in func.tags and len(here) == 1)


@contextlib.contextmanager
def _pins() -> Iterator[None]:
    """While active, the device reads and writes pinned memory."""
    machine.PINNED.add(DEVICE.type)
    try:
        yield
    finally:
        machine.PINNED.discard(DEVICE.type)


@contextlib.contextmanager
def pretended(float64: bool = True) -> Iterator[None]:
    """While active, there is a pretended GPU under the name "meta"; without float64, as Apple's has none."""
    refused, without = (frozenset(), set()) if float64 else (frozenset({torch.float64}), {DEVICE.type})
    State.begin()
    with (
        _Device(),
        _Python(),
        mock.patch.object(torch, "autocast", Autocast),
        mock.patch.object(OnDevice, "kinds_refused", refused),
        mock.patch.object(machine, "WITHOUT_FLOAT64", machine.WITHOUT_FLOAT64 | without),
        mock.patch.object(Tensor, "pin_memory", _pinned),
        _pins(),
    ):
        yield
