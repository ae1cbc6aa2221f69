"""One step of SGD for a stack of clients, on flat vectors: its rows, its gradients, and Metis' eq. 2.

Passes in float16 have a loss scale of their own, kept as by `torch.amp.GradScaler`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from piebald.contracts import LocalLoss, PassSettings, SgdConfig
from piebald.contracts.local_step import Gradients, LocalStep
from piebald.core.errors import RuntimeFault
from piebald.core.machine import float64_device
from piebald.engines.device_copies import BLOCK, Array, moved_together
from piebald.engines.factored.vectors import to_dense
from piebald.engines.row_loader import Places, RngKey
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
        places: positions [c, b] of their rows, arrays or tensors on the device; short batches are filled up with their
            first row.
        mask: [c, b], 1 for real rows and 0 for those that fill up; None where all are real.
        keys: their dropout keys [c], or None where the model has no dropout.
        batch, rng_keys: the positions and the rng key of each client, on the host.
    """

    lo: int
    hi: int
    places: Any
    mask: Any
    keys: Any
    batch: Sequence[Places]
    rng_keys: Sequence[RngKey]


def passes(
    plans: Sequence[Sequence[Places]],
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
            waiting += host_rows[-1].places.size
        steps.append(host_rows)
        # a copy for each step would cost more than what it carries, and a whole run's positions would fill memory
        if waiting >= BLOCK:
            yield from _moved(steps, device)
            steps, waiting = [], 0
    yield from _moved(steps, device)


def _moved(steps: list[list[PassRows]], device: torch.device) -> Iterator[list[PassRows]]:
    """Some steps' passes on the device, by a copy each of positions, masks and keys."""
    rows = [row for step in steps for row in step]
    places = iter(moved_together([row.places for row in rows], device))
    mask = iter(moved_together([row.mask for row in rows if row.mask is not None], device))
    keys = iter(moved_together([row.keys for row in rows if row.keys is not None], device))
    for step in steps:
        yield [
            row._replace(
                places=next(places),
                mask=None if row.mask is None else next(mask),
                keys=None if row.keys is None else next(keys),
            )
            for row in step
        ]


def pad_rows(vectors: list[Places]) -> tuple[Array, Array | None]:
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


def lay_out_rows(plans: Sequence[Sequence[Places]]) -> tuple[Places, list[int]]:
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
