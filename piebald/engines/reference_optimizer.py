"""The optimizers of `torch.optim` themselves, tensor by tensor: what the engine "reference" trains with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from piebald.contracts import UpdateRule
from piebald.core.parameters import Layout, Slot
from piebald.engines.sgd_step import SgdRun
from piebald.engines.stepper import group_settings
from piebald.methods.training.optimizers import Optimizer, RuleOptimizer


class ReferenceOptimizer:
    """The optimizer of one client in a run with a rule.

    Args:
        run: the run.
        row: which of its clients this is.
        module: the client's module; its parameters are stepped along their gradients.
        layout: layout of the module.
        planned: steps that the client will take.
    """

    def __init__(self, run: SgdRun, row: int, module: nn.Module, layout: Layout, planned: int) -> None:
        config, rule = run.config, run.config.rule
        assert rule is not None
        self.run, self.planned = run, planned
        parameters, settings = dict(module.named_parameters()), group_settings(config, module)
        self.slots = layout.parameters(config.part)
        self.parameters = [parameters[slot.name] for slot in self.slots]
        self.settings = [settings.get(slot.name, (1.0, config.weight_decay)) for slot in self.slots]
        self.lr = float(config.lr[row]) if isinstance(config.lr, Tensor) else config.lr
        self.behind = float(run.state["step"][row]) if "step" in run.state else 0.0
        self.names = [vector.name for vector in rule.state_vectors(config.momentum)]
        self.vectors = {
            vector.name: torch.full((layout.size,), vector.start) for vector in rule.state_vectors(config.momentum)
        }
        self.vectors |= {name: run.state[name][row].clone() for name in self.names if run.state}
        self.torch = self._torch(rule, config.momentum)

    def _torch(self, rule: UpdateRule, momentum: float) -> torch.optim.Optimizer:
        pairs = zip(self.parameters, self.settings, strict=True)
        groups = [
            {"params": [parameter], "lr": self.lr * share, "weight_decay": decay} for parameter, (share, decay) in pairs
        ]
        if isinstance(rule, Optimizer):
            optimizer = rule.as_torch(groups, self.lr, 0.0, momentum)
        else:
            optimizer = RuleOptimizer(groups, rule, self.lr, 0.0, momentum)
        if self.behind or not isinstance(rule, Optimizer):
            for slot, parameter in zip(self.slots, self.parameters, strict=True):
                state = {name: _part(vector, slot).clone() for name, vector in self.vectors.items()}
                optimizer.state[parameter] = {"step": torch.tensor(self.behind), **state}
        return optimizer

    def step(self, taken: int) -> None:
        """One step after `taken` others, along the parameters' `grad`."""
        schedule = self.run.config.schedule
        factor = 1.0 if schedule is None else schedule.factor(taken, self.planned)
        for group, (share, _) in zip(self.torch.param_groups, self.settings, strict=True):
            group["lr"] = self.lr * share * factor
        self.torch.step()

    def ended(self, steps: int) -> dict[str, Tensor]:
        """The client's state [p] after so many steps in this run, and "step" [1]."""
        if not self.names:
            return {}
        for slot, parameter in zip(self.slots, self.parameters, strict=True):
            state = self.torch.state[parameter]
            for name in self.names:
                if state.get(name) is not None:
                    _part(self.vectors[name], slot).copy_(state[name])
        return self.vectors | {"step": torch.tensor([self.behind + steps])}


def _part(vector: Tensor, slot: Slot) -> Tensor:
    return vector[slot.start : slot.stop].view(slot.shape)
