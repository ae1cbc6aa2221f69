"""DP-SGD: every step hides single rows, by clipping their gradients and adding noise."""

from __future__ import annotations

import dataclasses
from typing import Self

from pydantic import Field, model_validator
from torch import nn

from piebald.contracts import ClientContext, ModelSpec, RowPrivacy, SgdConfig, TrainInput, TrainOutput
from piebald.core.parameters import copied
from piebald.methods.training.augmentation import mixing
from piebald.methods.training.sgd import Sgd


class DpSgd(Sgd):
    """Steps along noisy sums of clipped gradients (Abadi et al. 2016, "Deep learning with differential privacy",
    algorithm 1).

    A row is in a step by itself with probability q = batch * accumulate / rows (Poisson sampling, as the accountants
    assume: steps have uneven numbers of rows).  Its own gradient is scaled down to length `clip`; Gaussian noise of
    deviation noise * clip is added to the sum, and the step goes along that / (q rows).  Momentum, weight decay, other
    optimizers and their state, a proximal term (`mu`) and every transform of the update use nothing else of the rows,
    so the guarantee holds for every vector that leaves the client, also towards the server.  `privacy.accounting`
    computes it for a whole run.

    A row whose gradient is not finite, too long for float32 or an error of the model counts as one whose gradient is
    zero: whether training succeeds does not depend on a single row.  Buffers stay as they came, since what rows do to
    them is neither clipped nor noised.

    Private layers are clipped and noised together with the shared ones, though they never leave.  The gradients of
    shared layers are taken through them: a single row that moved a private layer unhidden would move what all other
    rows send, by more than the noise hides.

    No training loss is reported, since it is a plain mean over rows.  The numbers of rows and steps are reported as
    they are: how many rows a client has is assumed to be known.  How long training takes is not hidden.

    Attributes:
        clip: C, longest gradient of one row (Euclidean norm over all parameters), above 0.
        noise: sigma, standard deviation of the noise in clips, at least 0; 0 only clips.
        batch: expected number of rows in a step, or in each of those that `accumulate` adds up.
        mu: strength of a proximal term as in FedProx, at least 0.

    Examples:
        >>> DpSgd(clip=0.5, noise=1.2).row_privacy()
        RowPrivacy(clip=0.5, noise=1.2)
    """

    protects = True

    clip: float = Field(default=1.0, gt=0)
    noise: float = Field(default=1.0, ge=0)
    mu: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _check_precision(self) -> Self:
        if self.precision == "float16":
            raise ValueError(
                "precision = 'float16' cannot be used with dp_sgd, as whether a step is skipped would depend on single "
                "rows and no noise would hide it: write 'bfloat16'"
            )
        return self

    @model_validator(mode="after")
    def _check_batches(self) -> Self:
        if self.batches != "equal":
            raise ValueError(
                f"batches = {self.batches!r} would have no effect with dp_sgd, whose steps have each row by chance: "
                "leave it out"
            )
        return self

    def row_privacy(self) -> RowPrivacy:
        return RowPrivacy(self.clip, self.noise)

    @property
    def local_step(self) -> RowPrivacy:
        return self.row_privacy()

    def unsupported_model(self, spec: ModelSpec) -> str | None:
        if reason := super().unsupported_model(spec):
            return reason
        if (mixed := mixing(self.augmentation)) is not None:
            return (
                f"dp_sgd clips each row's own gradient but the augmentation {mixed!r} may mix rows: leave it out, or "
                "write by_row = true for a function"
            )
        if spec.objective.compares_rows:
            return (
                f"dp_sgd clips each row's own gradient but the loss {spec.objective.name!r} compares the rows of a "
                "batch: use noise on whole updates ('gaussian') instead"
            )
        norms = nn.modules.batchnorm
        for name, layer in copied(spec.model).train().named_modules():  # a frozen one does not go along
            remembers = isinstance(layer, norms._NormBase) and layer.track_running_stats  # instance norm can, too
            # a row's gradient through such a norm depends on the other rows, so clipping it would bound nothing
            if layer.training and (isinstance(layer, norms._BatchNorm) or remembers):
                return (
                    f"dp_sgd clips each row's own gradient but the norm {name!r} goes by many rows: take group norm "
                    "(nn.GroupNorm) in its place, or freeze it"
                )
        return None

    def train(self, inputs: TrainInput, context: ClientContext) -> TrainOutput:
        return self.output(self.run_sgd(inputs, context, prox=self.mu))

    def sgd_config(self, inputs: TrainInput, epochs: int | None = None) -> SgdConfig:
        return dataclasses.replace(super().sgd_config(inputs, epochs), clip=None)  # which rows have, not steps
