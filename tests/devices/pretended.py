"""A pretended GPU: tensors that say they are on another device and compute on the CPU.

Inside `pretended()` the device "meta" holds real numbers, and what a GPU would refuse is refused: an operation on
tensors of the host and of the device.  So whole runs can be made on it, and end with the bits of the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

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


class Mixed(RuntimeError):
    """An operation on tensors of the host and of the device."""


class OnDevice(Tensor):
    """A tensor of the pretended device; `held` are its numbers."""

    held: Tensor

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


def python_function(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A function or method of torch's, with the numbers of the device where it would look into its memory."""
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
    if func in _COPIES:
        there = isinstance(args[0], OnDevice) if wanted is None else torch.device(wanted) == DEVICE
    elif wanted is not None:
        there = torch.device(wanted) == DEVICE
    elif there:
        _check_places(func, args, kwargs)
    held_args, held_kwargs = tree_map_only(OnDevice, lambda one: one.held, (args, kwargs))
    if "device" in held_kwargs:
        held_kwargs["device"] = None if held_kwargs["device"] is None else torch.device("cpu")
    if func is aten._to_copy.default and not there and isinstance(args[0], OnDevice):
        return func(*held_args, **held_kwargs)
    made = func(*held_args, **held_kwargs)
    if not there:
        return made
    wrapped = tree_map_only(Tensor, lambda one: one if isinstance(one, OnDevice) else OnDevice(one), made)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if tensors else wrapped


def _check_places(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse tensors of the host beside those of the device, but single numbers and places to index by."""
    own = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
    places = []
    if func in _TAKES_HOST_PLACES and isinstance(args[0], OnDevice):
        places = [one for one in args[1] if isinstance(one, Tensor) and not isinstance(one, OnDevice)]
    for one in own:
        if not isinstance(one, OnDevice) and one.dim() and not any(one is place for place in places):
            shapes = ", ".join(f"{list(t.shape)} {'there' if isinstance(t, OnDevice) else 'here'}" for t in own)
            raise Mixed(f"{func}: tensors of the host and of the device: {shapes}")


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """While active, there is a pretended GPU under the name "meta"."""
    with _Device(), _Python():
        yield
