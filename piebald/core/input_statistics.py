"""Mean and variance of the inputs of a model's layers, for each channel."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor, nn

from piebald.core.errors import unknown


class InputHooks:
    """Context manager that records the inputs of some layers while a model runs.

    Args:
        module: the model.
        names: names of its layers, as in `named_modules`.

    Raises:
        SettingError: the model has no such layer.
    """

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        layers = dict(module.named_modules())
        self.seen: dict[str, Tensor] = {}
        self._layers = {}
        for name in names:
            if name not in layers or not name:
                raise unknown("layer of this model called", name, (layer for layer in layers if layer))
            self._layers[name] = layers[name]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> InputHooks:
        for name, layer in self._layers.items():

            def record(_: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                self.seen[name] = inputs[0]

            self._hooks.append(layer.register_forward_pre_hook(record))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()


def mean_and_variance(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance [channels] of a batch [n, channels, ...], over all axes but the second; the variance divides by
    the number of values.
    """
    axes = [axis for axis in range(x.dim()) if axis != 1]
    return x.mean(axes), x.var(axes, unbiased=False)


def sums(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Sum and sum of squares [channels] in float64 of a batch [n, channels, ...], and the number of values of each."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    wide = x.double()
    return wide.sum(axes), wide.square().sum(axes), x.numel() // max(1, x.shape[1])
