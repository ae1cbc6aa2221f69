"""One step of SGD on flat vectors, for one client or a stack: the only place where Metis' eq. 2 is written.

Passes in float16 have a loss scale of their own, kept as by `torch.amp.GradScaler`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from piebald.contracts import LocalLoss, PassSettings, SgdConfig
from piebald.core.machine import float64_device
from piebald.engines.factored.vectors import to_dense
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
            here.lerp_(center[rows][..., span], lr * run.prox)
        elif decay:
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
        if config.weight_decay:
            here.add_(w[..., span], alpha=config.weight_decay)
        if u is not None:
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
        wide = self.factor.to(float64_device(self.factor.device)).double()
        inverse = wide.reciprocal().float().to(self.factor.device)
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), self._not_finite, inverse)

    def takes_step(self) -> bool:
        """Return whether the step can be made, after its last `unscale`; the factor is then that of the next step."""
        torch._amp_update_scale_(self.factor, self._sound, self._not_finite, _GROWTH, _BACKOFF, _INTERVAL)
        sound = not bool(self._not_finite)
        self._not_finite.zero_()
        self.skipped += not sound
        return sound
