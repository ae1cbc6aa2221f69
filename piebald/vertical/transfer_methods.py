"""Methods that align the parties' hidden layers or add up their scores, and the noise that hides a party's rows.

An attacker who knows everything else, except the noise, learns little about one of a party's own rows: another row
could be in its place, with other features and the other label.  A step uses the rows of one chunk, and the chunk of a
row follows from its number and the party's secret, not from its contents.  Two kinds of numbers are released from them,
each with Gaussian noise whose standard deviation is `noise` times the largest change (Euclidean norm) by another row:

1. the *moments* of the aligned layers, and at the source the translator.  The other party gets nothing else.  This
   party, too, goes on with them and not with the exact ones, so that
2. the *gradient* of each row depends on this row and on numbers that have noise already.  It is clipped to `clip` (all
   weights together), and only the sum with noise changes the weights (Abadi et al. 2016).

So every message, in all steps, is computed from these releases and from numbers that do not depend on own rows.
The source also releases its share of positives once, which gives the labels their weights, and the final translator.
Releases of Gaussian noise compose exactly, whatever the later ones are chosen by: *k* with noise z are as one with
z / sqrt(k) (Dong, Roth, Su 2022, corollary 3.3).  Chunks are disjoint, so k counts the uses of one chunk.

Rows of the translator are 2 u - 1, clipped to length 1: hidden units lie in (0, 1), and around 1/2 the difference of
both labels' means is not small beside the means themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from piebald.contracts.component import Component
from piebald.core.errors import SettingError
from piebald.privacy.accounting import gaussian_epsilon
from piebald.vertical.disclosure_ledger import DisclosureKind, DisclosureLedger
from piebald.vertical.kernels import Floats, GaussianKernel, Kernel, PolynomialKernel, ProductStatistics
from piebald.vertical.loss_terms import AlignmentTerm, DiscrepancyTerm, LossTerm, PartyView, ResidualTerm
from piebald.vertical.party_network import row_gradients
from piebald.vertical.party_secret import PartySecret
from piebald.vertical.protocol import Role


class Method(Component):
    """How the two parties' models belong together: a term of the loss."""

    axis = "method"

    @model_validator(mode="before")
    @classmethod
    def _refuse_noise(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if "noise" in fields and "noise" not in cls.model_fields:
            raise ValueError(
                "there is no noise, since what it tells is of co-occurring rows, which none hides: leave noise out, or "
                "take method = 'smmd', whose noise hides each party's own rows"
            )
        return fields

    def term(self, role: Role, batch: int, overlap_batch: int, widths: Sequence[int]) -> LossTerm:
        """Return the term at one party, for these batch sizes and widths of aligned layers."""
        raise NotImplementedError

    @property
    def joint(self) -> bool:
        """True if both parties' features make one score, so that the target cannot predict alone."""
        return False

    @property
    def unit(self) -> bool:
        """True if rows are scaled to length 1 before they are aligned."""
        return False

    @property
    def aligns_common(self) -> bool:
        """True if hidden rows of the co-occurring batches are aligned, in place of those of each party's own."""
        return False

    @property
    def hides_rows(self) -> bool:
        """True if noise hides single rows of a party's own."""
        return False

    def row_noise(self, balanced: bool, secret: PartySecret, ledger: DisclosureLedger) -> RowNoise | None:
        """Return the noise on the numbers that one party computes from its own rows, or None; see `RowNoise`."""
        return None

    @property
    def disclosure(self) -> str:
        """The information that the method gives each party about the other's rows, in words."""
        raise NotImplementedError

    def statement(self, role: Role, releases: int) -> str:
        """Return the statement about differential privacy of a party after some releases about one of its rows."""
        return (
            "no noise is added, and nothing is claimed about differential privacy; method = 'smmd' with noise hides "
            "single rows of a party's own"
        )


class Smmd(Method):
    """Secure maximum mean discrepancy (Zhang, Chen, Wang): alpha * MMD^2 between both parties' hidden rows.

    Attributes:
        rows: the rows that are compared: "own", a batch of each party's own (eq. 1), or "common", the co-occurring ones
            (eq. 5 to 7).
        kernel: linear, polynomial or gaussian.
        alpha: weight in the loss, at least 0.
        normalize: scale hidden rows to length 1 before they are compared.  The Gaussian's expansion needs it, and it
            keeps the meaning of alpha the same for all kernels.
        noise: standard deviation of Gaussian noise on every number that depends on a party's own rows (`RowNoise`), in
            units of the largest change by one row; 0 for none.  With noise no losses are computed, since they would
            have none.
        clip: with noise, the largest norm of a row's gradient.
        delta: delta of the statement about differential privacy.
    """

    rows: Literal["own", "common"] = "own"
    kernel: Kernel = GaussianKernel()
    alpha: float = Field(default=1.0, ge=0)
    normalize: bool = True
    noise: float = Field(default=0.0, ge=0)
    clip: float = Field(default=0.1, gt=0)
    delta: float = Field(default=1e-5, gt=0, lt=1)

    @property
    def unit(self) -> bool:
        return self.normalize

    @property
    def disclosure(self) -> str:
        third = isinstance(self.kernel, PolynomialKernel) and self.kernel.degree == 3
        moments = "third moments, from which single hidden rows may be recovered, and others" if third else "moments"
        return f"each party learns {moments} of the other's batches; the target learns the labels of co-occurring rows"

    def term(self, role: Role, batch: int, overlap_batch: int, widths: Sequence[int]) -> LossTerm:
        common = overlap_batch if self.aligns_common else None
        return DiscrepancyTerm(role, self.kernel, self.alpha, batch, widths, self.unit, self.hides_rows, common)

    @property
    def aligns_common(self) -> bool:
        return self.rows == "common"

    @property
    def hides_rows(self) -> bool:
        return self.noise > 0

    def row_noise(self, balanced: bool, secret: PartySecret, ledger: DisclosureLedger) -> RowNoise | None:
        return RowNoise(self.noise, self.clip, self.kernel, balanced, secret, ledger) if self.hides_rows else None

    def model_post_init(self, _: object) -> None:
        if self.noise and not self.normalize:
            raise SettingError("noise needs normalize = true: without it, a row can change the moments without bound")
        if self.noise and self.aligns_common:
            raise SettingError('noise hides a party\'s own rows: it needs rows = "own", got "common"')

    def statement(self, role: Role, releases: int) -> str:
        if not self.hides_rows:
            return super().statement(role, releases)
        epsilon = gaussian_epsilon(self.noise / math.sqrt(releases), self.delta) if releases else 0.0
        label = ", another label included" if role == "source" else ""
        return (
            f"from a partner that follows the protocol, all that the {role} has sent in this run is "
            f"({epsilon:.3g}, {self.delta:g})-differentially private for one of its own rows replaced{label}, by "
            f"{releases} releases about one row, errors that ended the run included, that were counted before they "
            "were sent. A partner that deviates may send keys under which masks hide nothing. Not covered are "
            "co-occurring rows, the preparation of columns unless by given bounds and values, and other runs on the "
            "same rows"
        )


class Ftl(Method):
    """Federated transfer learning (Liu, Chen, Yang 2018): co-occurring rows are made similar, row by row.

    Attributes:
        kappa: weight in the loss, at least 0.
    """

    kappa: float = Field(default=0.01, ge=0)

    @property
    def disclosure(self) -> str:
        return "each party learns the other's hidden rows of all co-occurring samples, and the target their labels"

    def term(self, role: Role, batch: int, overlap_batch: int, widths: Sequence[int]) -> LossTerm:
        return AlignmentTerm(role, self.kappa, overlap_batch, widths[-1])


class Split(Method):
    """Vertically split logistic regression (Hardy et al. 2017): both parties' features add up to one score.

    It is trained on co-occurring rows alone, and a prediction needs the source's share of the score of the same row.

    Attributes:
        inputs: most inputs of a party, one more at the source; messages are as long as for so many.
    """

    inputs: int = Field(default=128, ge=1)

    @property
    def joint(self) -> bool:
        return True

    @property
    def disclosure(self) -> str:
        return (
            "each party learns sums of the other's shares of the score of co-occurring rows, weighted by its own "
            "inputs; the target can compute these rows' labels from them with effort, and learns the source's share of "
            "each row that is scored"
        )

    def term(self, role: Role, batch: int, overlap_batch: int, widths: Sequence[int]) -> LossTerm:
        return ResidualTerm(role, overlap_batch, self.inputs)


LEAST_SHARE = 0.05  # of a label, for its weight in the translator: a rare one's rows would need more noise


@dataclass(frozen=True, slots=True)
class RowNoise:
    """Noise on the numbers that one party computes from its own rows.

    Attributes:
        noise: standard deviation of the noise of each release, in units of the largest change by one row.
        clip: largest norm of a row's gradient.
        kernel: the kernel whose moments are released.
        balanced: whether the translator gives both labels the same weight.
        secret: the party's secret, from which the noise is drawn.
        ledger: counts releases.
    """

    noise: float
    clip: float
    kernel: Kernel
    balanced: bool
    secret: PartySecret
    ledger: DisclosureLedger

    def release(
        self, kind: DisclosureKind, chunk: int, step: int, parts: Sequence[tuple[Floats, float]]
    ) -> list[Floats]:
        """Count a release, and add its noise.

        Args:
            kind, chunk, step: as of `DisclosureLedger.count`.
            parts: arrays, each with the largest change by one row.

        Returns:
            The arrays with noise.  The same numbers get the same noise, so that a repeated step discloses nothing new.
        """
        exact = [np.ascontiguousarray(part, dtype=np.float64) for part, _ in parts]
        # all that shapes a release is in the key of its noise: one noise on two arrays would give away their difference
        head = f"{kind} {chunk} {step} {[part.shape for part in exact]} {[reach for _, reach in parts]} {self.noise!r}"
        content = head.encode() + b"".join(part.tobytes() for part in exact)
        self.ledger.count(kind, chunk, step, content, self.noise)
        source, noisy = self.secret.noise(content), []
        for part, (_, reach) in zip(exact, parts, strict=True):
            deviation = self.noise * reach * math.sqrt(len(parts))  # so that all parts together are one release
            noisy.append(source.add_to(torch.from_numpy(part), deviation).numpy())
        return noisy

    def hide(self, view: PartyView, labels: Tensor | None, share: float, chunk: int, step: int) -> PartyView:
        """Return a step's data of this party with the moments and the translator released.

        Args:
            view: the exact data.
            labels: of its own batch, -1 or 1 [n]; None at the target.
            share: the released share of positives.
            chunk, step: as of `DisclosureLedger.count`.
        """
        exact = [self.kernel.statistics(rows.detach().numpy()) for rows in view.layers]
        flat = [np.concatenate([part.ravel() for s in layer for part in (s.matrix, s.constant)]) for layer in exact]
        reach = self.kernel.sensitivity(1.0, len(view.layers[0]))
        parts = [(layer, reach) for layer in flat]
        signed = None
        if labels is not None:
            signed, reach = self.translator(view.rows, labels, share)
            parts.append((signed.detach().numpy(), reach))
        released = self.release("own", chunk, step, parts)
        # not strict: at the source the translator is released behind the layers
        moments = [_longest_moments(part, layer, self.kernel) for part, layer in zip(released, exact, strict=False)]
        if signed is None:
            return replace(view, moments=moments)
        phi = torch.from_numpy(_shortened(released[-1], 1.0))
        return replace(view, moments=moments, phi=phi, signed=signed)

    def translator(self, rows: Tensor, labels: Tensor, share: float) -> tuple[Tensor, float]:
        """Return the translator [d] of rows [n, d] of the last layer, and the largest change by one row."""
        positive = min(max(share, LEAST_SHARE), 1 - LEAST_SHARE) if self.balanced else 0.5
        weights = torch.where(labels > 0, 0.5 / positive, 0.5 / (1 - positive)).to(rows.dtype) / len(labels)
        centred = 2 * rows - 1
        # only rows longer than 1 are shortened
        centred = centred / centred.norm(dim=1, keepdim=True).clamp(min=1.0)
        # a replaced row takes one weight away and adds another, each at most 1 / (2 min n), on rows of length up to 1
        return (weights * labels) @ centred, 1 / (min(positive, 1 - positive) * len(labels))

    def final_translator(self, rows: Tensor, labels: Tensor, share: float, step: int) -> Tensor:
        """Return the translator [d] of all own rows [n, d] that were used, released."""
        exact, reach = self.translator(rows, labels, share)
        (released,) = self.release("whole", 0, step, [(exact.numpy(), reach)])
        return torch.from_numpy(_shortened(released, 1.0))

    def share(self, labels: Tensor) -> float:
        """Return the share of positives among labels [n], released."""
        exact = np.array([float((labels > 0).double().mean())])
        (released,) = self.release("whole", 0, 0, [(exact, 1 / len(labels))])
        # what is computed from a release discloses nothing more
        return float(np.clip(released[0], 0.0, 1.0))

    def gradient(
        self, view: PartyView, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], chunk: int, step: int
    ) -> list[Tensor]:
        """Return the gradient of this party's weights: clipped and released for own rows, exact for co-occurring ones.

        Args:
            view: the result of `hide`.
            tensors, gradients: the loss's gradients by these tensors; None for a tensor that is a part of the loss.
            chunk, step: as of `DisclosureLedger.count`.
        """
        own_trace, common = view.traces
        sums = [*(sums for _, sums in own_trace), *(sums for _, sums in common)]
        # by each layer's sums and not by the weights, which would have added the rows up before they are clipped
        slopes = torch.autograd.grad(tensors, sums, gradients, allow_unused=True)
        reach = self.clip / len(view.rows)
        clipped = row_gradients(own_trace, slopes[: len(own_trace)], reach)
        assert clipped is not None, "every loss depends on own rows"
        flat = torch.cat([part.ravel() for part in clipped]).numpy()
        # a row of this norm may be replaced by one of the same norm in the opposite direction
        (released,) = self.release("gradient", chunk, step, [(flat, 2 * reach)])
        pieces = torch.split(torch.from_numpy(released), [part.numel() for part in clipped])
        noisy = [piece.view_as(part) for piece, part in zip(pieces, clipped, strict=True)]
        # co-occurring rows are not protected, so their part has no noise
        exact = row_gradients(common, slopes[len(own_trace) :])
        return noisy if exact is None else [part + addend for part, addend in zip(noisy, exact, strict=True)]


def _longest_moments(released: Floats, layer: list[ProductStatistics], kernel: Kernel) -> list[ProductStatistics]:
    """Return released numbers as statistics, shortened to those of a row of length 1, so that results have bounds."""
    width = layer[0].matrix.shape[1]
    reaches = kernel.statistics(np.eye(1, width))  # the first unit vector: no other row of length 1 has longer ones
    moments, start = [], 0
    for statistics, reach in zip(layer, reaches, strict=True):
        parts = []
        for part, longest in ((statistics.matrix, reach.matrix), (statistics.constant, reach.constant)):
            piece = released[start : start + part.size].reshape(part.shape)
            parts.append(_shortened(piece, float(np.linalg.norm(longest))))
            start += part.size
        moments.append(ProductStatistics(*parts))
    return moments


def _shortened(numbers: Floats, longest: float) -> Floats:
    norm = float(np.linalg.norm(numbers))
    shortened: Floats = numbers * min(1.0, longest / norm) if norm else numbers
    return shortened
