"""Dropout whose mask depends on a key and a position, not on the order of calls or on who shares the batch.

torch draws dropout masks from one global stream, so a client's mask would depend on which clients ran before it or
in the same batch.  Inside this mode `torch.nn.functional.dropout` and its channel-wise variants (and so all
`nn.Dropout*` modules) hash (key, call, position) instead.  The key may be batched by `vmap`: then every client of a
stack has its own masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


# splitmix64's odd constants (Steele, Lea, Flood 2014): good avalanche with two multiplications
_STEP = _signed(0x9E3779B97F4A7C15)
_MIX = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def mix(z: Tensor) -> Tensor:
    """Hash int64 numbers to int64 numbers, wrapping like unsigned ones."""
    # torch's shift of int64 drags the sign along; the masks make it the logical one that splitmix64 needs
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX[0]
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX[1]
    return z ^ ((z >> 31) & ((1 << 33) - 1))


class KeyedDropout(TorchFunctionMode):
    """While active, dropout is a function of `key` and the number of the call.

    The key is an int64 tensor without axes, perhaps batched by vmap, or [c] where the rows of c clients are
    concatenated in one batch.
    """

    key: Tensor
    call: int

    def start(self, key: Tensor) -> None:
        """Begin a forward pass with this key."""
        self.key, self.call = key, 0

    def uniform(self, shape: torch.Size | tuple[int, ...], device: torch.device) -> Tensor:
        """Uniform numbers in [0, 1) of this shape for the next call."""
        # or two dropout layers of one pass would have the same mask
        self.call += 1
        clients = self.key.numel() if self.key.dim() else 1  # one key, or one for each client in the batch
        place = torch.arange(torch.Size(shape).numel() // clients, device=device)
        offset = _signed(self.call * _STEP % (1 << 64))  # Python's integers do not wrap
        start = mix(self.key + offset).unsqueeze(-1)
        # 24 bits, which a float32 holds exactly: with more, rounding could give 1.0
        return ((mix(start + place * _STEP) >> 40) & 0xFFFFFF).view(shape).float() / float(1 << 24)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shape = _MASK_SHAPES.get(func)
        if shape is None:
            return func(*args, **(kwargs or {}))
        return self._drop(shape, *args, **(kwargs or {}))

    def _drop(
        self,
        shape: Callable[[Tensor], tuple[int, ...]],
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or p == 0.0:
            return input
        if p == 1.0:
            # 1 / (1 - p) would be infinite, and 0 times infinity NaN
            return input * 0.0
        survives = (self.uniform(shape(input), input.device) >= p).to(input.dtype)
        return input * (survives / (1.0 - p))


_MASK_SHAPES: dict[Callable[..., Any], Callable[[Tensor], tuple[int, ...]]] = {
    functional.dropout: lambda x: tuple(x.shape),
    functional.dropout1d: lambda x: (*x.shape[:-1], 1),
    functional.dropout2d: lambda x: (*x.shape[:2], *[1] * (x.dim() - 2)),  # three axes are [batch, channel, length]
    functional.dropout3d: lambda x: (*x.shape[:-3], 1, 1, 1),
}
