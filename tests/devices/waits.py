"""What makes the host wait for a device: counted as torch dispatches it, on a GPU as on the pretended one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from piebald.engines.recorded_step import Lane

aten = torch.ops.aten
# operations whose result is a number of the host, or has a shape that the host must know
_WAITS = {
    aten._local_scalar_dense.default: "item",
    aten.is_nonzero.default: "item",
    aten.equal.default: "equal",
    aten.nonzero.default: "nonzero",
    aten.bincount.default: "bincount",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.unique_dim.default: "unique",
    aten.unique_consecutive.default: "unique",
    aten.repeat_interleave.Tensor: "repeat_interleave",
}


class Waits(TorchDispatchMode):
    """Counts in `seen` what the host waits for; in `sent` and `fetched` copies there and back without waiting.

    A step that is recorded is compared with itself, once and never again: that is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.sent = self.fetched = 0
        self.models_sent = 0  # of these, vectors of numbers
        self._records = False

    def __enter__(self) -> Waits:
        self._record, counts = Lane._record, self

        def record(lane: Lane, *args: Any) -> None:
            counts._records = True
            try:
                counts._record(lane, *args)
            finally:
                counts._records = False

        Lane._record = record  # type: ignore[method-assign]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        Lane._record = self._record  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._records:
            return func(*args, **kwargs)
        if func in (aten._to_copy.default, aten.copy_.default):
            self._copied(func, args, kwargs)
        elif any(is_of_the_device(one) for one in tree_flatten((args, kwargs))[0]):
            if func in _WAITS:
                self.seen[_WAITS[func]] += 1
            places = args[1] if func is aten.index.Tensor else ()
            self.seen["mask"] += sum(1 for one in places if one is not None and one.dtype == torch.bool)
            self.seen["places"] += sum(1 for one in places if one is not None and not is_of_the_device(one))
        return func(*args, **kwargs)

    def _copied(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        target, source = (args[0], args[1]) if func is aten.copy_.default else (None, args[0])
        wanted = kwargs.get("device")
        kept = is_of_the_device(source if target is None else target)
        goes = kept if target is not None or wanted is None else _is_there(wanted)
        if is_of_the_device(source) == goes or not source.numel():
            return
        free = kwargs.get("non_blocking") or args[2:3] == (True,)
        if free and not goes:
            self.fetched += 1
        elif free:
            self.sent += 1
            self.models_sent += source.dim() == 1 and source.dtype == torch.float32 and source.numel() > 100
        else:
            self.seen["to the device" if goes else "to the host"] += 1


def is_of_the_device(one: object) -> bool:
    return isinstance(one, Tensor) and _is_there(one.device)


def _is_there(device: torch.device | str) -> bool:
    return torch.device(device).type != "cpu"
