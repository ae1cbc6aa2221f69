"""One step of SGD for a stack of clients, on flat vectors: its rows, its gradients, and the optimizer's move.

The optimizer of one run on one stack has a state, and one step whatever the rule is; momentum is that of Metis' eq. 2.
Passes in float16 have a loss scale of their own, kept as by `torch.amp.GradScaler`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from piebald.contracts import GroupSettings, LocalLoss, PassSettings, SgdConfig, StateVector, StepSettings
from piebald.contracts.training import Gradients, LocalStep
from piebald.core.errors import RuntimeFault
from piebald.core.machine import float64_device, moved
from piebald.core.parameters import Layout, matching
from piebald.engines.device_copies import BLOCK, Array, moved_together
from piebald.engines.factored.vectors import to_dense
from piebald.engines.row_loader import Positions, RngKey
from piebald.methods.training.optimizers import descend

_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000  # the defaults of GradScaler


@dataclass(frozen=True, slots=True, eq=False)
class SgdRun:
    """One call of `ClientContext.run_sgd` for a stack of clients.

    Attributes:
        clients: the clients' numbers.
        rng_versions: `Task.rng_version` of each client's task.
        phase: how many runs there were before in the same task.
        model: [c, p], where to start.
        config, prox, prox_center, correction, state: as in `ClientContext.run_sgd`.
        secret: as in `ClientStack`.
        local_loss, own: as in `ClientContext.run_sgd`.
        only_step: if given, only this one of the steps is taken, counted from 0, with the batch and the random numbers
            that it has among the others; none where there are not so many.
    """

    clients: Sequence[int]
    rng_versions: Sequence[int | str]
    phase: int
    model: Tensor
    config: SgdConfig
    prox: float = 0.0
    prox_center: Tensor | None = None
    correction: Tensor | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)
    secret: str = ""
    local_loss: LocalLoss | None = None
    own: Mapping[str, Tensor] = field(default_factory=dict)
    only_step: int | None = None

    def formed(self) -> SgdRun:
        """The same run with ordinary tensors as its vectors, where they are sums of factors."""
        center, correction = (
            None if vectors is None else to_dense(vectors) for vectors in (self.prox_center, self.correction)
        )
        return replace(self, model=to_dense(self.model), prox_center=center, correction=correction)

    @property
    def first_step(self) -> int:
        """Number of the first step that is taken."""
        return self.only_step or 0

    @property
    def rate(self) -> float:
        """The learning rate, where it is one number."""
        assert not isinstance(self.config.lr, Tensor)
        return self.config.lr

    @property
    def keeps_velocity(self) -> bool:
        """True if this is SGD with momentum in the form of Metis' eq. 2, or goes on from its velocity."""
        return self.config.rule is None and ("velocity" in self.state or self.config.momentum > 0)

    @property
    def direct(self) -> bool:
        """True if a step goes along nothing but the gradients, by a rule."""
        config = self.config
        return config.rule is not None and not self.prox and self.correction is None and config.clip is None

    @property
    def plain(self) -> bool:
        """True if a step has one learning rate, nothing to remember, and at most one pull on w (`plain_step`)."""
        config = self.config
        remembers = self.state or config.momentum or config.rule is not None
        pulled_twice = self.prox and config.weight_decay
        elsewhere = config.clip or config.step.hides_rows or isinstance(config.lr, Tensor)
        return not (remembers or pulled_twice or elsewhere)


def plain_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    w: Tensor,
    run: SgdRun,
    spans: Sequence[slice],
    rows: slice | int,
    lr: float | Tensor,
) -> None:
    """One plain step, in place on the parameters, views of w [..., p]: `sgd_step` without copying gradients."""
    decay, center = run.config.weight_decay, run.prox_center if run.prox else None
    for span in spans:
        here = w[..., span]
        if center is not None:
            # w - lr prox (w - center) in a single pass over w, and without a copy of the gradients
            here.lerp_(center[rows][..., span], lr * run.prox)
        elif decay:
            # lr decay w is subtracted before the gradient, so that the pull is of the w that the gradient was taken at
            here.mul_(1 - lr * decay)
        if run.correction is not None:
            descend(here, run.correction[rows][..., span], lr)
    if isinstance(lr, Tensor):  # not in place: gradients may share their numbers with one another
        torch._foreach_sub_(list(parameters), torch._foreach_mul(list(gradients), lr))
    else:
        torch._foreach_add_(list(parameters), list(gradients), alpha=-lr)


def sgd_step(
    w: Tensor,
    g: Tensor,
    u: Tensor | None,
    run: SgdRun,
    spans: Sequence[slice],
    rows: slice | int,
    lr: float | Tensor,
) -> None:
    """One step, in place on w and u [..., p]; g [..., p] is overwritten.

    Args:
        w, g, u: parameters, gradients and velocity.
        run: the run with its settings and vectors [c, ...].
        spans: where the parameters are; buffers are not touched.
        rows: which rows of the run's vectors w, g and u belong to.
        lr: learning rate, one number or [..., 1].
    """
    config = run.config
    add_prox_and_clip(w, g, run, spans, rows)
    for span in spans:
        here = g[..., span]
        if run.correction is not None:
            here.add_(run.correction[rows][..., span])
        # after the clip, as with torch, where clip_grad_norm_ comes before the optimizer adds its weight decay
        if config.weight_decay:
            here.add_(w[..., span], alpha=config.weight_decay)
        if u is not None:
            # Metis' eq. 2 has the learning rate inside of the velocity; torch's SGD has it outside
            here = u[..., span].mul_(config.momentum).sub_(here.mul_(lr))
            w[..., span].add_(here)
        elif isinstance(lr, Tensor):
            w[..., span].sub_(here.mul_(lr))
        else:
            w[..., span].add_(here, alpha=-lr)


def add_prox_and_clip(w: Tensor, g: Tensor, run: SgdRun, spans: Sequence[slice], rows: slice | int) -> None:
    """Add the proximal term to the gradients g [..., p] and clip them, in place; the arguments are as in `sgd_step`."""
    config = run.config
    if run.prox and run.prox_center is not None:
        for span in spans:
            g[..., span].add_(w[..., span] - run.prox_center[rows][..., span], alpha=run.prox)
    if config.clip is not None:
        square = sum(
            (g[..., span].square().sum(-1, keepdim=True) for span in spans), start=torch.zeros((), device=g.device)
        )
        g.mul_((config.clip / (square.sqrt() + 1e-6)).clamp(max=1.0))  # 1e-6 as in torch's clip_grad_norm_


class LossScale:
    """The factor on the loss of one client's steps: halved by a gradient that is not finite, and doubled after 2000
    steps in a row without one.

    Attributes:
        factor: the factor, one number on the device.
        skipped: steps that were not made.
    """

    def __init__(self, initial: float, device: torch.device) -> None:
        self.factor = torch.full((), initial, dtype=torch.float32, device=device)
        self.skipped = 0
        self._sound = torch.zeros((), dtype=torch.int32, device=device)  # steps in a row
        self._not_finite = torch.zeros((), dtype=torch.float32, device=device)  # 1 where something was not finite

    @classmethod
    def of(cls, passes: PassSettings, device: torch.device) -> LossScale | None:
        """The scale that a client's steps begin with, None where they need none."""
        return cls(passes.loss_scale, device) if passes.precision == "float16" else None

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide a step's gradients by the factor, in place, and look whether all of them are finite."""
        # by way of float64, as GradScaler takes its reciprocal
        wide = self.factor.to(float64_device(self.factor.device)).double()
        inverse = wide.reciprocal().float().to(self.factor.device)
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), self._not_finite, inverse)

    def takes_step(self) -> bool:
        """Return whether the step can be made, after its last `unscale`; the factor is then that of the next step."""
        torch._amp_update_scale_(self.factor, self._sound, self._not_finite, _GROWTH, _BACKOFF, _INTERVAL)
        # the host waits for the device here, at each step, which is why float16 steps cannot be recorded
        sound = not bool(self._not_finite)
        self._not_finite.zero_()
        self.skipped += not sound
        return sound


Hidden = Callable[[float, float], Gradients]  # from clip and deviation, see `contracts.StepPoint.hidden`


def no_hidden(clip: float, deviation: float) -> Gradients:
    """Refuse to hide rows whose batches and random numbers are no secret of the client."""
    raise RuntimeFault("only a step with hides_rows = True may ask for hidden gradients: set that of its class")


class StackPoint:
    """A `contracts.StepPoint` of a stack.

    Args:
        w: the models [c, p] that the parameters are views of, perhaps with their buffers.
        parameters: those that are trained, [c, ...] each.
        first: losses and gradients at w; buffers take in the batch.
        again: likewise, but for buffers that no view of w holds, which stay as they are.
        hidden: noisy sums of clipped gradients, where single rows are hidden.
    """

    def __init__(
        self,
        w: Tensor,
        parameters: Sequence[Tensor],
        first: Callable[[], Gradients],
        again: Callable[[], Gradients],
        hidden: Hidden | None = None,
    ) -> None:
        self._w, self._parameters, self._first, self._again = w, parameters, first, again
        self._asked, self.hidden = False, hidden or no_hidden

    def gradients(self, away: Iterable[Tensor] | None = None) -> Gradients:
        """See `contracts.StepPoint`."""
        if away is None and not self._asked:
            self._asked = True
            return self._first()
        # buffers that lie in w are put back below; those that do not are left alone by `again`
        compute, self._asked = self._again if self._asked else self._first, True
        # a copy, since adding the distance and subtracting it again would leave rounding errors in w
        before = self._w.detach().clone()
        with torch.no_grad():
            for parameter, distance in zip(self._parameters, away or (), strict=away is not None):
                parameter.detach().add_(distance)
        result = compute()
        with torch.no_grad():
            self._w.copy_(before)
        return result


def gradients_of_one(
    step: LocalStep,
    w: Tensor,
    parameters: Sequence[Tensor],
    compute: Callable[[], tuple[Tensor, Sequence[Tensor]]],
    hidden: Hidden | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return the mean loss and the gradients of a step of one model [p], whose tensors have no axis of clients."""

    def stacked() -> Gradients:
        loss, gradients = compute()
        return loss.unsqueeze(0), [gradient.unsqueeze(0) for gradient in gradients]

    views = [parameter.unsqueeze(0) for parameter in parameters]
    losses, gradients = step.gradients(StackPoint(w.unsqueeze(0), views, stacked, stacked, hidden))
    return losses[0], [gradient[0] for gradient in gradients]


Ranges = Callable[[list[int]], Iterator[tuple[int, int]]]
StepKeys = Callable[[int, int, int], "list[int] | None"]


class PassRows(NamedTuple):
    """The rows of one pass, which some clients of the stack share.

    Attributes:
        lo, hi: these clients.
        positions: of their rows [c, b], arrays or tensors on the device; short batches are filled up with their
            first row.
        mask: [c, b], 1 for real rows and 0 for those that fill up; None where all are real.
        keys: their dropout keys [c], or None where the model has no dropout.
        batch, rng_keys: the positions and the rng key of each client, on the host.
    """

    lo: int
    hi: int
    positions: Any
    mask: Any
    keys: Any
    batch: Sequence[Positions]
    rng_keys: Sequence[RngKey]


def passes(
    plans: Sequence[Sequence[Positions]],
    rng_keys: Sequence[RngKey],
    ranges: Ranges,
    keys: StepKeys,
    device: torch.device,
) -> Iterator[list[PassRows]]:
    """The passes of each step.

    Args:
        plans: each client's mini-batches, those with most steps first.
        rng_keys: each client's rng key.
        ranges: which clients can share a pass, by the lengths of their batches.
        keys: the dropout keys of clients lo to hi in a step, from (lo, hi, step).
        device: where the rows are.
    """
    steps, waiting = list[list[PassRows]](), 0
    for step in range(len(plans[0]) if plans else 0):
        active = sum(len(plan) > step for plan in plans)
        host_rows = list[PassRows]()
        for lo, hi in ranges([len(plan[step]) for plan in plans[:active]]):
            drawn_keys = keys(lo, hi, step)
            batch = [plan[step] for plan in plans[lo:hi]]
            drawn = None if drawn_keys is None else np.array(drawn_keys, dtype=np.int64)
            host_rows.append(PassRows(lo, hi, *pad_rows(batch), drawn, batch, rng_keys[lo:hi]))
            waiting += host_rows[-1].positions.size
        steps.append(host_rows)
        # a copy for each step would cost more than what it carries, and a whole run's positions would fill memory
        if waiting >= BLOCK:
            yield from _moved(steps, device)
            steps, waiting = [], 0
    yield from _moved(steps, device)


def _moved(steps: list[list[PassRows]], device: torch.device) -> Iterator[list[PassRows]]:
    """Some steps' passes on the device, by a copy each of positions, masks and keys."""
    rows = [row for step in steps for row in step]
    positions = iter(moved_together([row.positions for row in rows], device))
    mask = iter(moved_together([row.mask for row in rows if row.mask is not None], device))
    keys = iter(moved_together([row.keys for row in rows if row.keys is not None], device))
    for step in steps:
        yield [
            row._replace(
                positions=next(positions),
                mask=None if row.mask is None else next(mask),
                keys=None if row.keys is None else next(keys),
            )
            for row in step
        ]


def pad_rows(vectors: list[Positions]) -> tuple[Array, Array | None]:
    """Positions [c, b], short batches filled up with their first row, and a mask [c, b] of real rows (None: all)."""
    lengths = np.fromiter(map(len, vectors), np.int64, len(vectors))
    # a row of padding at least: layers may refuse a batch of no rows, as an empty Poisson sample is
    longest = max(1, int(lengths.max()))
    if bool((lengths == longest).all()):
        return np.stack(vectors), None
    real = np.arange(longest) < lengths[:, np.newaxis]
    # any row will do that exists, since its mask is 0
    firsts = np.array([part[0] if len(part) else 0 for part in vectors])
    index = np.repeat(firsts[:, np.newaxis], longest, axis=1)
    index[real] = np.concatenate(vectors)
    return index, real.astype(np.float32)


def lay_out_rows(plans: Sequence[Sequence[Positions]]) -> tuple[Positions, list[int]]:
    """Lay out the positions of all steps' rows side by side.

    Args:
        plans: each client's mini-batches, those with most steps first.

    Returns:
        The positions [c, r], filled up as in `pad_rows`, and where each step begins and ends.
    """
    widths = [max(len(plan[step]) for plan in plans if len(plan) > step) for step in range(len(plans[0]))]
    ends = [0, *itertools.accumulate(widths)]
    index = np.empty((len(plans), ends[-1]), dtype=np.int64)
    for row, plan in zip(index, plans, strict=True):
        row[:] = plan[0][0] if plan else plans[0][0][0]
        # not strict: `ends` is longer by one, and clients with fewer steps stop early
        for batch, start in zip(plan, ends, strict=False):
            row[start : start + len(batch)] = batch
    return index, ends


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
