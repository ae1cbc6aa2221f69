"""An update rule as an optimizer of `torch.optim`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from piebald.contracts import StepSettings, UpdateRule


class RuleOptimizer(torch.optim.Optimizer):
    """Steps parameters by a rule, one tensor after another.

    Args:
        groups: groups of parameters, as `torch.optim` takes them.
        rule: the rule.
        lr, weight_decay, momentum: settings of groups that have none of their own.
    """

    def __init__(
        self, groups: Iterable[Mapping[str, Any]], rule: UpdateRule, lr: float, weight_decay: float, momentum: float
    ) -> None:
        self.rule = rule
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__([dict(group) for group in groups], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of all parameters that have a gradient."""
        for group in self.param_groups:
            vectors = self.rule.state_vectors(group["momentum"])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {vector.name: torch.full_like(parameter, vector.start) for vector in vectors}
                    state["step"] = torch.tensor(0.0)
                state["step"] += 1
                vectors_by_name = {vector.name: state[vector.name] for vector in vectors}
                settings = StepSettings(group["lr"], group["weight_decay"], group["momentum"], float(state["step"]))
                self.rule.update(parameter, parameter.grad, vectors_by_name, settings)
