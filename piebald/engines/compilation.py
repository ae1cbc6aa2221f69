"""Passes through `torch.compile`, on NVIDIA's GPUs with CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from piebald.core.errors import SettingError
from piebald.engines.model_traits import Traits

ENGINES = ("sequential", "vmapped")  # whose passes can be compiled


def compiled(
    function: Callable[..., Any], traits: Traits, device: torch.device, recorded: bool = False
) -> Callable[..., Any]:
    """A module or a function of tensors, compiled when it is first called, and for each new form of its arguments.

    With "reduce-overhead" the kernels of a pass are recorded as a CUDA graph and started by a single call; inside of
    steps that are `recorded` themselves there can be no other graph.

    Raises:
        SettingError: the model draws random numbers, for which keys are taken from Python at each pass.
    """
    if traits.dropout or traits.random:
        raise SettingError("compiled = true is for models without dropout and other random numbers: leave it out")
    options: dict[str, Any] = {"mode": "reduce-overhead"} if device.type == "cuda" and not recorded else {}
    passes: Callable[..., Any] = torch.compile(function, **options)
    return passes
