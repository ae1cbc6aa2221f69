"""One optimiser step on flat vectors, for one client or a stack: the only place where the update rule is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from piebald.contracts import SgdConfig


@dataclass(frozen=True, slots=True, eq=False)
class SgdRun:
    """All that one call of `Local.descend` asks for, for a stack of clients."""

    clients: Sequence[int]
    moments: Sequence[int | str]
    phase: int
    model: Tensor
    descent: SgdConfig
    prox: float = 0.0
    prox_center: Tensor | None = None
    correction: Tensor | None = None
    velocity: Tensor | None = None

    @property
    def rate(self) -> float:
        """The learning rate where it is one number."""
        assert not isinstance(self.descent.lr, Tensor)
        return self.descent.lr

    @property
    def plain(self) -> bool:
        """Whether a step is just  w <- w - lr * (g + correction)  with one learning rate, see `slide`."""
        extra = self.prox or self.velocity is not None
        settings = self.descent.momentum or self.descent.weight_decay or self.descent.clip or self.descent.privacy
        return not extra and not settings and not isinstance(self.descent.lr, Tensor)


def slide(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    w: Tensor,
    walk: SgdRun,
    spans: Sequence[slice],
    rows: slice | int,
) -> None:
    """One plain step, in place on the parameters, views of w [..., p]: `advance` without copying gradients."""
    torch._foreach_add_(list(parameters), list(gradients), alpha=-walk.rate)
    if walk.correction is not None:
        for span in spans:
            w[..., span].add_(walk.correction[rows][..., span], alpha=-walk.rate)


def advance(w: Tensor, g: Tensor, u: Tensor | None, walk: SgdRun, spans: Sequence[slice], rows: slice | int) -> None:
    """One step, in place on w and u [..., p]; g [..., p] is used up.

    Args:
        spans: where the parameters are; buffers are not touched.
        rows: which rows of the walk's [c, ...] vectors w, g and u are.
    """
    descent = walk.descent
    if walk.prox and walk.prox_center is not None:
        for span in spans:
            g[..., span].add_(w[..., span] - walk.prox_center[rows][..., span], alpha=walk.prox)
    if descent.clip is not None:
        square = sum(
            (g[..., span].square().sum(-1, keepdim=True) for span in spans), start=torch.zeros((), device=g.device)
        )
        g.mul_((descent.clip / (square.sqrt() + 1e-6)).clamp(max=1.0))  # 1e-6 as in torch's clip_grad_norm_
    lr = descent.lr[rows] if isinstance(descent.lr, Tensor) else descent.lr
    for span in spans:
        here = g[..., span]
        if walk.correction is not None:
            here.add_(walk.correction[rows][..., span])
        if descent.weight_decay:
            here.add_(w[..., span], alpha=descent.weight_decay)
        if u is not None:
            here = u[..., span].mul_(descent.momentum).sub_(here.mul_(lr))
            w[..., span].add_(here)
        elif isinstance(lr, Tensor):
            w[..., span].sub_(here.mul_(lr))
        else:
            w[..., span].add_(here, alpha=-lr)
