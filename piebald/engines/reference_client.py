"""One client of the reference engine: its module, and its steps written tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from piebald.core.parameters import Layout
from piebald.engines.reference_optimizer import ReferenceOptimizer
from piebald.engines.sgd_step import SgdRun


class ReferenceClient:
    """The steps of one client in a run, along the gradients that its module holds.

    Args:
        run: the run.
        row: which of its clients this is.
        module: the client's module.
        layout: layout of the module.
        planned: steps that the client will come to.

    Attributes:
        scaler: torch's own scaler of the loss, which does nothing unless passes are in float16.
    """

    def __init__(self, run: SgdRun, row: int, module: nn.Module, layout: Layout, planned: int) -> None:
        config = run.config
        self.run, self.row, self.module = run, row, module
        self.slots = layout.parameters(config.part)
        self.parameters = {slot.name: module.get_parameter(slot.name) for slot in self.slots}
        self.lr = float(config.lr[row]) if isinstance(config.lr, Tensor) else config.lr
        has_velocity = "velocity" in run.state
        self.velocity = run.state["velocity"][row].clone() if has_velocity else torch.zeros(layout.size)
        self.rule = None if config.rule is None else ReferenceOptimizer(run, row, module, layout, planned)
        passes = config.passes
        self.scaler = torch.amp.GradScaler("cpu", passes.loss_scale, enabled=passes.precision == "float16")
        self._optimizer = _Steps(list(self.parameters.values()), self._update)
        self._taken, self._made = 0, False

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to those of the module."""
        torch.autograd.backward(self.scaler.scale(loss))

    def step(self, taken: int) -> bool:
        """The step after `taken` others, or none where the scaler skips it; whether it was made."""
        self._taken, self._made = taken, False
        self.scaler.step(self._optimizer)
        self.scaler.update()
        return self._made

    def _update(self) -> None:
        self._made = True
        run, config = self.run, self.run.config
        with torch.no_grad():
            for slot in self.slots:
                if not run.prox or run.prox_center is None:
                    continue
                away = self.parameters[slot.name] - run.prox_center[self.row][slot.start : slot.stop].view(slot.shape)
                grad = self.parameters[slot.name].grad
                self.parameters[slot.name].grad = run.prox * away if grad is None else grad + run.prox * away
        if config.clip is not None:
            torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), config.clip)
        with torch.no_grad():
            for slot in self.slots:
                here, w = slice(slot.start, slot.stop), self.parameters[slot.name]
                g = torch.zeros_like(w) if w.grad is None else w.grad
                if run.correction is not None:
                    g = g + run.correction[self.row][here].view(slot.shape)
                if self.rule is not None:
                    w.grad = g
                    continue
                g = g + config.weight_decay * w
                self.velocity[here] = config.momentum * self.velocity[here] - self.lr * g.flatten()
                w.add_(self.velocity[here].view(slot.shape))
        if self.rule is not None:
            self.rule.step(self._taken)

    def ended(self, made: int) -> dict[str, Tensor]:
        """The optimizer's state [p] after so many steps."""
        if self.rule is not None:
            return self.rule.ended(made)
        return {"velocity": self.velocity} if self.run.keeps_velocity else {}


class _Steps(torch.optim.Optimizer):
    """The optimizer that a `GradScaler` steps, with a function in place of an optimizer's update."""

    def __init__(self, parameters: list[nn.Parameter], update: Callable[[], None]) -> None:
        super().__init__(parameters, {})
        self._update = update

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._update()
