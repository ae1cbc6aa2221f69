"""Modules in a form that can be recorded: tensors by place or by name go in, and scores alone come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from piebald.core import pytree
from piebald.core.pytree import Tree

_ROWS = {0: torch.export.Dim.AUTO}  # the first axis stays free


@dataclass(frozen=True, slots=True)
class Recorded:
    """A module with the example that it is recorded on.

    Attributes:
        module: the module, or one around it that returns its scores alone.
        inputs: its arguments: tensors, or one dict of tensors by name.
        dynamic_shapes: the axes that stay free, for `torch.export`.
        names: of the tensors, in order.
        wrapped: whether `module` is a wrapper around the module.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    dynamic_shapes: tuple[Any, ...]
    names: tuple[str, ...]
    wrapped: bool = True

    @classmethod
    def of(cls, module: nn.Module, rows: Tree) -> Recorded:
        """A module and a row or more of inputs [n, ...], of which two are taken: torch takes one for a constant."""
        # an axis of one row would be recorded as a constant
        batch = pytree.mapped(lambda leaf: torch.cat([leaf[:1], leaf[:1]]), rows)
        if isinstance(batch, Mapping):
            return cls(_ScoresByName(module), (dict(batch),), (dict.fromkeys(batch, _ROWS),), tuple(batch))
        inputs, _ = pytree.arguments(batch)
        free_axes = tuple(_ROWS for _ in inputs)
        if len(inputs) > 1:
            return cls(_Scores(module), inputs, (free_axes,), tuple(f"input_{place}" for place in range(len(inputs))))
        with torch.no_grad():
            plain = isinstance(pytree.run(module, batch), Tensor)
        if plain:
            return cls(module, inputs, free_axes, ("input",), wrapped=False)
        return cls(_Scores(module), inputs, (free_axes,), ("input",))

    def program(self) -> torch.export.ExportedProgram:
        """The computation; torch raises many kinds of errors, for what a module does that cannot be recorded."""
        return torch.export.export(self.module, self.inputs, dynamic_shapes=self.dynamic_shapes)


class _Scores(nn.Module):
    """A module that takes tensors and returns the scores of another one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Tensor:
        return pytree.logits(self.module(*inputs))


class _ScoresByName(nn.Module):
    """A module that takes a dict of tensors, the arguments of another one by name, and returns that one's scores."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return pytree.logits(self.module(**inputs))
