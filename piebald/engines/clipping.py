"""Clipping for DP-SGD: the gradients of single rows, at once through vmap or one after another."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from piebald.contracts import PLAIN_PASSES, PassSettings, Rows
from piebald.core import pytree
from piebald.core.losses import Loss
from piebald.core.machine import raise_if_lost
from piebald.engines.keyed_dropout import KeyedDropout
from piebald.engines.row_gradients import RowGradients, shrink
from piebald.engines.scoring import ScoringEngine


class ClippingEngine(ScoringEngine):
    """Computes sums of clipped gradients with the module that it keeps.

    Attributes:
        loss: the loss of each row, from outputs and targets.
        parameters: the module's parameters, in the layout's order.
    """

    loss: Loss
    parameters: list[Tensor]
    _names: Sequence[str]  # of the parameters
    _vectorizes: bool | None = None

    def _clipped(
        self, rows: Rows, keys: Tensor, clip: float, dropout: KeyedDropout | None, passes: PassSettings
    ) -> tuple[list[Tensor], Tensor]:
        """The sum of these rows' clipped gradients, and the sum of their losses."""
        tensors = self.work.layout.views(self.vector.detach())
        with self.precision(passes, vectorized=True):
            mask = torch.ones(len(rows), device=self.device)
            sums, loss = self.row_gradients.clipped_sum(tensors, rows, mask, keys, clip, dropout)
        return [sums[name] for name in self._names], loss

    def _clipped_one_by_one(
        self, rows: Rows, keys: Tensor, clip: float, dropout: KeyedDropout | None, passes: PassSettings
    ) -> tuple[list[Tensor], Tensor]:
        """The same for models that vmap cannot run: recurrent ones, and those that draw random numbers themselves."""
        summed = [torch.zeros_like(parameter) for parameter in self.parameters]
        total = torch.zeros((), device=self.device)
        for row in range(len(rows)):
            if dropout is not None:
                dropout.start(keys[row])
            with self.precision(passes):
                single = rows[row : row + 1]
                loss = self.loss(pytree.run(self.module, self.shaped(single.x)), single.y).mean()
            gradients = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
            torch._foreach_mul_(gradients, shrink(torch.stack(torch._foreach_norm(gradients)).norm(), clip))
            torch._foreach_add_(summed, gradients)
            total += loss.detach()
        return summed, total

    @cached_property
    def row_gradients(self) -> RowGradients:
        """Computes gradients of single rows through vmap."""
        return RowGradients(self.module, self.work.layout, self.loss)

    def vectorizes(self, rows: Rows) -> bool:
        """Return whether gradients of single rows can be computed through vmap; tried once, on two of some rows."""
        if self._vectorizes is None and len(rows):
            self._vectorizes = not self.traits.random and not self.padded and self._tried(rows[:2])
        return bool(self._vectorizes)

    def _tried(self, rows: Rows) -> bool:
        keys = torch.arange(len(rows)).to(self.device)
        with KeyedDropout() as dropout, warnings.catch_warnings():
            warnings.filterwarnings("error", message="There is a performance drop")  # vmap falls back to a loop
            expected, _ = self._clipped_one_by_one(rows, keys, 1.0, dropout, PLAIN_PASSES)
            try:
                sums, _ = self._clipped(rows, keys, 1.0, dropout, PLAIN_PASSES)
            except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, UserWarning) as error:
                raise_if_lost(error, self.device)
                return False
        return all(torch.allclose(a, b, rtol=1e-2, atol=1e-4) for a, b in zip(sums, expected, strict=True))

    @cached_property
    def padded(self) -> bool:
        """True if an embedding has a padding row: under torch's vmap it would get a gradient."""
        tables = (layer for layer in self.module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag))
        return any(table.padding_idx is not None for table in tables)
