"""Clip every update, add Gaussian noise: at the client (local) or at the server (central)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from piebald.contracts import StepContext
from piebald.contracts.component import RecipeComponents
from piebald.core.machine import float64_device
from piebald.core.randomness import NoiseSource
from piebald.methods.aggregation.base import Aggregator
from piebald.methods.transforms.base import Transform


class Gaussian(Transform):
    """The Gaussian mechanism on the change of the shared parameters (McMahan et al. 2018; Geyer et al. 2017).

    Each update is scaled down to norm `clip`.  Noise of standard deviation noise * clip is added to every update before
    it leaves (where = "client"), or once to their mean (where = "server").  Private layers are never sent and get no
    noise.  A model that shares running statistics (batch norm) is refused: noise would spoil them, and without it they
    would tell of the rows.  With noise = 0, which promises nothing, they are averaged, and in no length.
    `privacy.accounting` computes the privacy budget of a whole run.

    At the server, the sum of the updates is divided by the number m of updates that a round expects, whoever arrives,
    and the noise has the deviation noise * clip / m (McMahan et al. 2018, the estimator with the fixed denominator).
    So an update that is there or not moves the result by clip / m at most.  The mean over those who arrived would move
    by up to twice that, since the weights of the others grow where one is missing.  Weights must be equal: weights by
    examples would let a client's data decide how far it moves the mean.  Where steps are no rounds of one cluster that
    wait for everybody, there is no such m.  The mean is then over those who arrived, the deviation is noise * clip *
    (largest weight), and no budget is stated.

    Instead of `noise` an `epsilon` may be given, as DistFL (2021) does for its local models: the multiplier is then
    sqrt(2 ln(1.25 / delta)) / epsilon, the classic calibration (Dwork and Roth 2014, theorem A.1).  That epsilon is for
    ONE upload and for an update being there or not (sensitivity `clip`), and the theorem holds up to epsilon = 1.  Over
    a run it adds up, and between any two updates the distance is twice the clip: the privacy budget takes both into
    account.

    Attributes:
        clip: largest norm of an update, above 0.
        noise: multiplier of the noise, at least 0; 0 only clips.
        epsilon: of one upload, instead of `noise`; above 0.
        delta: of one upload, where epsilon is given.
        where: where the noise is added.

    Examples:
        >>> from piebald import recipes
        >>> noise = Gaussian(clip=1.0, noise=0.5)
        >>> recipes.fedavg().with_(transforms=[noise], aggregation="equal_weighted").noises_mean
        True
    """

    protects = True
    protects_model_only = True

    clip: float = Field(gt=0)
    noise: float = Field(default=1.0, ge=0)
    epsilon: float | None = Field(default=None, gt=0)
    delta: float = Field(default=1e-5, gt=0, lt=1)
    where: Literal["client", "server"] = "server"

    @property
    def multiplier(self) -> float:
        """Standard deviation of the noise in clips."""
        if self.epsilon is None:
            return self.noise
        return math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon

    def on_client(
        self, vectors: Mapping[str, Tensor], keys: Sequence[int], clients: Sequence[int]
    ) -> Mapping[str, Tensor]:
        change = vectors["model"]
        # the bound is a promise: a norm rounded down in float32 would let an update exceed the clip
        wide = change.to(float64_device(change.device))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True, dtype=torch.float64)
        share = (self.clip / norm.clamp(min=1e-12)).clamp(max=1.0).to(change)
        # an update that is not finite would be refused in the open: it counts as no change instead
        change = torch.where(norm.isfinite().to(change.device), change * share, 0.0)
        # the noise belongs to one task, so an update that is sent again is the same to the bit
        if self.noises_update():
            sources = [NoiseSource.repeatable(key) for key in keys]
            deviation = self.multiplier * self.clip
            noisy = [source.add_to(row, deviation) for source, row in zip(sources, change, strict=True)]
            change = torch.stack(noisy)
        return {**vectors, "model": change}

    def on_server(self, average: Tensor, context: StepContext) -> Tensor:
        if not self.noises_mean():
            return average
        # one client moves a mean by at most its share of the clip
        most = max(context.shares, default=0.0)
        if context.expected is not None:
            # the mean over those who arrived becomes their sum over m, whoever is missing
            average, most = average * (context.arrived / context.expected), 1 / context.expected
        return NoiseSource.repeatable(context.rng_key).add_to(average, self.multiplier * self.clip * most)

    def hides(self) -> bool:
        return self.multiplier > 0

    def noises_mean(self) -> bool:
        return self.where == "server" and self.multiplier > 0

    def noises_update(self) -> bool:
        return self.where == "client" and self.multiplier > 0

    def incompatible_with(self, recipe: RecipeComponents) -> str | None:
        aggregator = recipe.aggregation
        if not self.noises_mean() or (isinstance(aggregator, Aggregator) and not aggregator.reads_data()):
            return None
        return (
            "gaussian at the server hides a client in a mean with equal weights but "
            f"{aggregator.kind} lets a client's data decide how much it counts: set aggregation = 'equal_weighted', or "
            "where = 'client'"
        )
