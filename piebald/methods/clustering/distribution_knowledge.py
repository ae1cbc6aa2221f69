"""Distribution knowledge: inputs made so that a model's batch norms see what they saw on the clients' data.

DistFL (Liu et al. 2021), section 3: z noises are optimised until the mean and variance of what goes into each
batch-norm layer match its running statistics (eq. 2), over the channels with the largest scaling factors (eq. 4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from piebald.core.moments import InputHooks, mean_and_variance

Loss = Literal["squared", "published"]
_PATIENCE, _PROGRESS = 10, 0.98  # steps without getting below this share of the best mismatch before


@dataclass(frozen=True, slots=True, eq=False)
class BatchNormTarget:
    """The statistics that one layer's inputs should have: mean and variance [k] of the chosen channels [k]."""

    layer: str
    chosen: Tensor
    mean: Tensor
    variance: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Synthesis:
    """Synthesised inputs [z, ...], how far their statistics are off at last (`mismatch`), and the steps it took."""

    x: Tensor
    mismatch: float
    steps: int


def batch_norm_targets(module: nn.Module, share: float, signed: bool = False) -> list[BatchNormTarget]:
    """The running statistics of every batch norm, over a share of its channels, those of the largest scaling factors.

    Args:
        module: the model.
        share: E of the paper, in (0, 1]; rounded up to whole channels.
        signed: the largest factors gamma as published, not the largest |gamma|.  A channel with a large negative factor
            counts as much as one with a positive one, which is why the latter is ours.
    """
    targets = []
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None:
            assert layer.running_var is not None
            # without affine parameters all channels scale alike, and the first ones are taken
            scale = torch.ones_like(layer.running_mean) if layer.weight is None else layer.weight.detach()
            chosen = largest(scale if signed else scale.abs(), share)
            targets.append(
                BatchNormTarget(name, chosen, layer.running_mean[chosen].clone(), layer.running_var[chosen].clone())
            )
    return targets


def moment_targets(module: nn.Module, layers: Sequence[str], moments: Tensor, share: float) -> list[BatchNormTarget]:
    """The same from uploaded statistics of layers' inputs, for models without batch norm.

    A channel's scaling factor is here the sum of the absolute weights that the layer has for it.

    Args:
        module: the model.
        layers: names, as clients were asked for them.
        moments: for each layer all means, then all variances, one after another [m].
        share: as in `batch_norm_targets`.
    """
    named = dict(module.named_modules())
    targets, start = [], 0
    for name in layers:
        weight = named[name].weight
        assert isinstance(weight, Tensor)
        channels = weight.shape[1]
        mean, variance = moments[start : start + channels], moments[start + channels : start + 2 * channels]
        chosen = largest(weight.detach().abs().transpose(0, 1).flatten(1).sum(1), share)
        # clients may send any number, and a variance is not negative
        targets.append(BatchNormTarget(name, chosen, mean[chosen], variance[chosen].clamp(min=0)))
        start += 2 * channels
    return targets


def largest(values: Tensor, share: float) -> Tensor:
    """Places of the largest values [k], at least one, in increasing order; of equal ones the first."""
    # 0.28 * 25 is a little above 7 in floating point, and must not become 8
    count = max(1, math.ceil(share * len(values) - 1e-9))
    # stable, so that equal scaling factors, as of fresh layers, choose the same channels on every machine
    return values.argsort(descending=True, stable=True)[:count].sort().values


def distance(
    x: Tensor, module: nn.Module, targets: Sequence[BatchNormTarget], loss: Loss = "squared"
) -> tuple[Tensor, float]:
    """The loss of eq. 2 and 4 of inputs [z, ...] (with its gradient) and their mismatch.

    As "published", the loss is the sum over layers of the lengths of the differences of means and of variances.  By
    default the lengths are "squared", which is ours: their gradient shrinks as the statistics fit, where that of a
    length does not, and the steps of the synthesis do not jump about the optimum.  The mismatch is the mean over all
    channels of |difference of means| / deviation and |difference of variances| / variance, halved: 0 where all fits,
    whatever the layers' scales, so one limit does for all models.
    """
    total, apart, count = x.new_zeros(()), list[Tensor](), 0
    with InputHooks(module, [target.layer for target in targets]) as inputs:
        module(x)
    for target in targets:
        mean, variance = mean_and_variance(inputs.seen[target.layer])
        away, wide = mean[target.chosen] - target.mean, variance[target.chosen] - target.variance
        for part in (away, wide):
            total = total + (part.square().sum() if loss == "squared" else torch.linalg.vector_norm(part))
        # the mismatch only decides when to stop, and its gradient would cost a graph
        with torch.no_grad():
            spread = target.variance.clamp(min=1e-6)
            apart.append((away.abs() / spread.sqrt() + wide.abs() / spread).sum())
        count += len(target.chosen)
    # a GPU is waited for once, not for each layer
    mismatch = sum(torch.stack(apart).tolist()) / 2 if apart else 0.0
    # without a target the loss is a constant, and there is nothing to divide
    return total, mismatch / max(count, 1)


def synthesise(
    module: nn.Module,
    targets: Sequence[BatchNormTarget],
    start: Tensor,
    steps: int,
    lr: float,
    fit: float,
    loss: Loss = "squared",
) -> Synthesis:
    """Optimise inputs until the statistics fit, until they get no better, or for so many steps, by Adam.

    Args:
        module: the model, in evaluation mode.
        targets: what to fit.
        start: [z, ...], noise, or what was synthesised before (a warm start).
        steps: at most.
        lr: Adam's step size.
        fit: the mismatch to stop at.
        loss: see `distance`.
    """
    x = start.clone().requires_grad_()
    adam = torch.optim.Adam([x], lr=lr)
    # the best inputs so far, as Adam's last step may well overshoot
    best, best_x, recent, since = math.inf, start, math.inf, 0
    # one turn more than steps: the inputs after the last step are measured as well
    for step in range(steps + 1):
        adam.zero_grad()
        with torch.enable_grad():
            away, mismatch = distance(x, module, targets, loss)
        if mismatch < best:
            best, best_x = mismatch, x.detach().clone()
        # steady but negligible progress must not use up all steps, so a gain below 2% does not reset the patience
        recent, since = (mismatch, 0) if mismatch < _PROGRESS * recent else (recent, since + 1)
        if mismatch <= fit or since >= _PATIENCE or step == steps or not math.isfinite(mismatch):
            break
        # of x alone: backward() would fill the gradients of all the module's parameters, too
        (gradient,) = torch.autograd.grad(away, [x])
        x.grad = gradient
        adam.step()
    return Synthesis(best_x, best, step)
