"""The optimizer of one run on one stack of clients: its state, and its step whatever the rule is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from piebald.contracts import GroupSettings, SgdConfig, StateVector, StepSettings
from piebald.core.machine import moved
from piebald.core.parameters import Layout, matching
from piebald.engines.factored.vectors import to_dense
from piebald.engines.sgd_step import SgdRun, add_prox_and_clip, sgd_step


class GroupSpan(NamedTuple):
    """Neighbouring parameters with the same settings.

    Attributes:
        span: where they are in the vector.
        share: their learning rate, as a multiple of the run's.
        weight_decay: their weight decay.
    """

    span: slice
    share: float
    weight_decay: float


def tensor_spans(config: SgdConfig, layout: Layout, module: nn.Module) -> tuple[GroupSpan, ...]:
    """The parameters of a layout that are trained, one by one."""
    settings, ungrouped = group_settings(config, module), (1.0, config.weight_decay)
    spans = [(slot.name, slice(slot.start, slot.stop)) for slot in layout.parameters(config.part)]
    return tuple(GroupSpan(span, *settings.get(name, ungrouped)) for name, span in spans)


def joined(tensors: Sequence[GroupSpan]) -> tuple[GroupSpan, ...]:
    """The same parameters, cut only where their settings change."""
    spans: list[GroupSpan] = []
    for group in tensors:
        last = spans[-1] if spans else None
        # each span costs a call of the rule, with its kernels, at every step
        if last is not None and last.span.stop == group.span.start and last[1:] == group[1:]:
            spans[-1] = group._replace(span=slice(last.span.start, group.span.stop))
        else:
            spans.append(group)
    return tuple(spans)


def group_settings(config: SgdConfig, module: nn.Module) -> dict[str, tuple[float, float]]:
    """The share of the learning rate and the weight decay of each tensor that is in a group, by name."""

    def of(group: GroupSettings) -> tuple[float, float]:
        decay = config.weight_decay if group.weight_decay is None else group.weight_decay
        # as a share of the base rate: schedules and rates of single clients then scale all groups alike
        return 1.0 if group.lr is None else group.lr / config.base_lr, decay

    return {name: of(group) for group in config.groups for name in matching(module, group.layers)}


class Stepper:
    """The optimizer of one run.

    Args:
        run: the run, with its clients in the order of the rows of w.
        like: the models w [c, p] that are trained.
        spans: where the parameters are.
        groups: the same parameters, cut where their settings change; unused without a rule, and so are
        tensors: the same parameters, tensor by tensor.
        planned: steps that each client will take.
    """

    def __init__(
        self,
        run: SgdRun,
        like: Tensor,
        spans: Sequence[slice],
        groups: Sequence[GroupSpan],
        tensors: Sequence[GroupSpan],
        planned: Sequence[int],
    ) -> None:
        self.run, self.spans, self.groups, self.tensors, self.planned = run, spans, groups, tensors, planned
        self.behind: Tensor | None = None  # steps behind the state that the run goes on from, [c, 1]
        self.state = {vector.name: _started(vector, like, run.state) for vector in state_vectors(run)}
        if "step" in run.state:
            self.behind = to_dense(run.state["step"])

    @property
    def velocity(self) -> Tensor | None:
        """The velocity [c, p] of Metis' eq. 2, where the run has one."""
        return self.state.get("velocity")

    def step(self, w: Tensor, g: Tensor, rows: slice | int, taken: int, skipped: int = 0) -> None:
        """One step, in place on w [..., p]; g [..., p] is overwritten.

        Args:
            w, g: parameters and gradients.
            rows: which rows of the run's vectors they belong to.
            taken: steps that these clients have come to before, in this run.
            skipped: how many of those they have not made.
        """
        run = self.run
        rule = run.config.rule
        if rule is None:
            velocity = None if self.velocity is None else self.velocity[rows]
            sgd_step(w, g, velocity, run, self.spans, rows, self.rate(rows))
            return
        add_prox_and_clip(w, g, run, self.spans, rows)
        if run.correction is not None:
            # after the clip, as in `sgd_step`: a correction may be longer than what gradients are cut to
            for span in self.spans:
                g[..., span].add_(run.correction[rows][..., span])
        self._update(w, [(group, g[..., group.span]) for group in self.groups], rows, taken, skipped)

    def step_along(
        self, w: Tensor, gradients: Sequence[Tensor], rows: slice | int, taken: int, skipped: int = 0
    ) -> None:
        """One step where `direct`, along the gradients of the parameters in the layout's order: they are not copied."""
        lead = w.dim() - 1
        parts = [(group, gradient.flatten(lead)) for group, gradient in zip(self.tensors, gradients, strict=True)]
        self._update(w, parts, rows, taken, skipped)

    @property
    def direct(self) -> bool:
        """True if a step goes along nothing but the gradients, by the run's rule."""
        return self.run.direct

    def _update(
        self, w: Tensor, parts: Sequence[tuple[GroupSpan, Tensor]], rows: slice | int, number: int, skipped: int
    ) -> None:
        """Let the rule update parts of w [..., p] along their gradients [..., n]."""
        rule, momentum = self.run.config.rule, self.run.config.momentum
        assert rule is not None
        lr, step = self.settings(rows, number, skipped)
        client_state = {name: vector[rows] for name, vector in self.state.items()}
        for (span, share, decay), g in parts:
            state = {name: vector[..., span] for name, vector in client_state.items()}
            # lr may be a tensor, for which a factor of 1 would be a kernel at each step
            rate = lr if share == 1.0 else lr * share
            rule.update(w[..., span], g, state, StepSettings(rate, decay, momentum, step))

    def rate(self, rows: slice | int) -> float | Tensor:
        """The learning rate of a step without a rule: one number, or [..., 1] where it differs between clients."""
        lr = self.run.config.lr
        return lr[rows] if isinstance(lr, Tensor) else lr

    def settings(self, rows: slice | int, taken: int, skipped: int) -> tuple[float | Tensor, float | Tensor]:
        """The learning rate of a step of the rule, and its number since the state began."""
        number = taken - skipped + 1
        return self._rate(rows, taken), float(number) if self.behind is None else self._behind(rows) + number

    def _behind(self, rows: slice | int) -> float | Tensor:
        """Steps behind the state; one number for one client."""
        assert self.behind is not None
        return self._behind_numbers[rows] if isinstance(rows, int) else self.behind[rows]

    @cached_property
    def _behind_numbers(self) -> list[float]:
        """The same as numbers, which the host waits for once."""
        return [] if self.behind is None else self.behind.flatten().tolist()

    @cached_property
    def _rates(self) -> list[float]:
        """The learning rate of each client, as numbers."""
        lr = self.run.config.lr
        return lr.flatten().tolist() if isinstance(lr, Tensor) else [lr] * len(self.planned)

    def _rate(self, rows: slice | int, number: int) -> float | Tensor:
        """The learning rate of this step: one number, or [c, 1] where it differs between clients."""
        config = self.run.config
        lr: float | Tensor = config.lr
        if isinstance(lr, Tensor):
            lr = self._rates[rows] if isinstance(rows, int) else lr[rows]
        if config.schedule is None:
            return lr
        planned = [self.planned[rows]] if isinstance(rows, int) else self.planned[rows]
        # most clients of a stack have equally many steps, so a schedule is asked once for each number of them
        factor_by_steps = {steps: config.schedule.factor(number, steps) for steps in set(planned)}
        if len(factor_by_steps) == 1:
            return lr * factor_by_steps[planned[0]]
        factors = torch.tensor([[factor_by_steps[steps]] for steps in planned], dtype=self.run.model.dtype)
        return lr * moved(factors, self.run.model.device)

    def tables(self) -> tuple[Tensor, Tensor]:
        """The learning rate of each step of each client, and its number since the state began: [c, s] both."""
        config, most = self.run.config, max(self.planned, default=0)
        factors, numbers = np.ones((len(self.planned), most)), torch.arange(1, most + 1, dtype=torch.float32)
        if (schedule := config.schedule) is not None and config.rule is not None:
            shares = {steps: [schedule.factor(step, steps) for step in range(steps)] for steps in set(self.planned)}
            for row, steps in zip(factors, self.planned, strict=True):
                row[:steps] = shares[steps]
        # in float64 and rounded to float32 once, as the product of two Python numbers is (`_rate`)
        rates = factors if isinstance(config.lr, Tensor) else config.lr * factors
        client_rates = torch.from_numpy(rates).float()
        numbers = numbers.expand(client_rates.shape)
        return (
            moved(client_rates, config.lr.device) * config.lr if isinstance(config.lr, Tensor) else client_rates,
            numbers if self.behind is None else self.behind + moved(numbers.contiguous(), self.behind.device),
        )

    def ended(self, steps: Tensor) -> dict[str, Tensor]:
        """The state after so many steps [c] of each client, as in `SgdOutcome`."""
        # only rules read the number of their step, as Adam's bias correction does; eq. 2 has no use for it
        if self.run.config.rule is None or not self.state:
            return dict(self.state)
        before = 0.0 if self.behind is None else self.behind
        return self.state | {"step": before + steps.to(next(iter(self.state.values())).device).unsqueeze(1)}


class TableStepper(Stepper):
    """The optimizer of steps that can be recorded: its state lies in buffers that stay where they are, and it reads
    learning rates and numbers of steps from tables.

    Args:
        whole: the optimizer of the whole run.
        run: the run of some of its clients, whose vectors and state are buffers.
        of_step: the learning rate of the step that is being taken, and its number since the state began: one number,
            or [c, 1].
    """

    def __init__(self, whole: Stepper, run: SgdRun, of_step: Callable[[], tuple[Tensor, Tensor]]) -> None:
        self.run, self.spans, self.groups, self.tensors = run, whole.spans, whole.groups, whole.tensors
        # `behind` is None, since the tables' numbers contain it: it would be added twice
        self.planned, self.behind, self.state, self._of_step = whole.planned, None, dict(run.state), of_step

    def rate(self, rows: slice | int) -> Tensor:
        return self.settings(rows, 0, 0)[0]

    def settings(self, rows: slice | int, taken: int, skipped: int) -> tuple[Tensor, Tensor]:
        rate, number = (value[rows] if value.dim() else value for value in self._of_step())
        return rate, number


def state_vectors(run: SgdRun) -> tuple[StateVector, ...]:
    """The vectors that the optimizer of a run keeps."""
    if run.keeps_velocity:
        return (StateVector("velocity"),)
    return () if run.config.rule is None else tuple(run.config.rule.state_vectors(run.config.momentum))


def _started(kind: StateVector, like: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """A vector of the state [c, p] to write to."""
    if kind.name in state:
        # a rule writes to its state in place, and the caller's must stay as it was sent
        return to_dense(state[kind.name]).clone(memory_format=torch.contiguous_format)
    vector = torch.zeros_like(like, memory_format=torch.contiguous_format)
    return vector.fill_(kind.start) if kind.start else vector
