"""What a device is asked to do: operations that are kernels there, counted as torch dispatches them."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.devices.waits import is_of_the_device

_NO_KERNEL = ("empty", "detach", "_unsafe_view", "_local_scalar_dense")


class Launches(TorchDispatchMode):
    """Counts operations on the device by name; views and memory without numbers are none."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.name()
        there = any(is_of_the_device(one) for one in tree_flatten((args, kwargs, made))[0])
        if there and not func.is_view and not any(word in name for word in _NO_KERNEL):
            self.seen[name] += 1
        return made

    @property
    def count(self) -> int:
        """All of them."""
        return self.seen.total()


class Alive(TorchDispatchMode):
    """Bytes of a pretended device that are in use: now, and at most so far; without those that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {id(one) for one in tree_flatten((args, kwargs))[0]}
        for one in tree_flatten(made)[0] if not func.is_view else ():
            if is_of_the_device(one) and id(one) not in given:
                self.now += one.nbytes
                self.most = max(self.most, self.now)
                weakref.finalize(one, self._free, one.nbytes)
        return made

    def _free(self, count: int) -> None:
        self.now -= count
