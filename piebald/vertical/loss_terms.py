"""Terms of the two parties' common loss, computed from products, from one party's side.

A `LossTerm` declares which products it needs, this party's statistics for the other party's products, this party's
coefficients for its own products, and the gradients that follow.  Both parties have the same terms; the loss is their
sum.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from piebald.vertical.kernels import Floats, GaussianKernel, Kernel, ProductSize, ProductStatistics, nodes
from piebald.vertical.party_network import Trace
from piebald.vertical.protocol import Role

TensorGradient = tuple[Tensor, Floats]  # a tensor, and the gradient of the loss with respect to it
MOST_SCORE = 8.0  # of a party's share of a score, and of an input of it, in absolute value


@dataclass(frozen=True, eq=False)
class PartyView:
    """One party's data of a step; tensors are differentiable with respect to its weights.

    Attributes:
        layers: outputs of the aligned layers for the rows that are aligned, [n, d] each.
        common: outputs of the last layer for the co-occurring batch [m, d].
        labels: labels of the co-occurring batch, -1 or 1 [m]; only the source has them.
        phi: the translator [d]; only the source has it.
        own_loss: a loss of the source that stays there.
        traces: of its network, for its own batch and for the co-occurring one.
        moments: statistics of each layer with noise, in place of the exact ones (`RowNoise`).
        signed: the translator without noise, through which gradients by it go on; `phi` itself without noise.
        inputs, weight: of a split model, for the co-occurring batch [m, f] and [f], whose shares [m] are `common`; the
            inputs of a row whose share is clipped are 0.
    """

    layers: list[Tensor]
    common: Tensor
    labels: Tensor | None = None
    phi: Tensor | None = None
    own_loss: Tensor | None = None
    traces: tuple[Trace, Trace] = ([], [])
    moments: list[list[ProductStatistics]] | None = None
    signed: Tensor | None = None
    inputs: Tensor | None = None
    weight: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """Outputs of the last layer for its own batch [n, d], not scaled."""
        return torch.sigmoid(self.traces[0][-1][1])


class LossTerm(ABC):
    """One term of the loss, at the party `role`.

    Attributes:
        name: name of its value in the records.
        owned: products of this party's statistics.
        requested: products of the other party's statistics.
        probes: products that the source requests once more to compute the value of the loss.
        disclosed_own: numbers about this party's own batch that one step discloses to the other party.
        disclosed_common: numbers about its hidden rows of the co-occurring batch.
        disclosed_watched: further numbers about those rows at steps that compute the losses.
    """

    name: str
    owned: list[ProductSize]
    requested: list[ProductSize]
    probes: list[int]
    disclosed_own = disclosed_common = disclosed_watched = 0

    def statistics(self, view: PartyView) -> list[ProductStatistics]:
        """Return this party's statistics, one for each of `owned`."""
        raise NotImplementedError

    def coefficients(self, view: PartyView) -> list[Floats]:
        """Return this party's coefficients, one for each of `requested`."""
        raise NotImplementedError

    @abstractmethod
    def gradients(self, view: PartyView, results: list[Floats]) -> list[TensorGradient]:
        """Return the gradients that depend on the other party's data."""

    def local(self, view: PartyView) -> Tensor | None:
        """Return the part of the loss that this party can compute alone."""
        return None

    def probe(self, view: PartyView) -> list[Floats]:
        """Return the source's coefficients for `probes`."""
        return []

    def target_value(self, view: PartyView) -> float:
        """Return the target's own part of the term's value, which it sends to the source."""
        return 0.0

    @abstractmethod
    def value(self, view: PartyView, results: list[Floats], probed: list[Floats], target_value: float) -> float:
        """Return the term's value, at the source."""


class LabelTerm(LossTerm):
    """The Taylor logistic loss of the target's co-occurring rows, scored by the source's translator.

        L = mean over i of log 2 - y_i phi_i / 2 + phi_i^2 / 8,    phi_i = Phi.u_i
        n dL/du_i = -y_i Phi / 2 + (Phi Phi') u_i / 4                       (requested by the target)
        dL/dPhi   = -mean of y_i u_i / 2 + mean of (u_i u_i') Phi / 4       (requested by the source: one vector)

    The target's gradients are multiples of Phi whose sign is the label's: it learns the labels of these rows.
    """

    name = "loss"

    def __init__(self, role: Role, rows: int, width: int) -> None:
        self.role = role
        bound = width / 4 + 0.5  # units lie in (0, 1), so those of Phi in (-1, 1)
        to_target = ProductSize(rows, width, width, bound)
        to_source = ProductSize(1, width + rows, width, bound)
        self.owned, self.requested = ([to_target], [to_source]) if role == "source" else ([to_source], [to_target])
        self.probes = [0]
        if role == "source":
            self.disclosed_own = width  # Phi
        else:
            self.disclosed_common = self.disclosed_watched = width

    def statistics(self, view: PartyView) -> list[ProductStatistics]:
        if self.role == "target":
            u = _numpy(view.common)
            matrix = np.concatenate([u.T @ u / (4 * len(u)), -u / (2 * len(u))])
            return [ProductStatistics(matrix, np.zeros(u.shape[1]))]
        phi, labels = _numpy(_of_source(view.phi)), _numpy(_of_source(view.labels))
        return [ProductStatistics(np.outer(phi, phi) / 4, -np.outer(labels, phi) / 2)]

    def coefficients(self, view: PartyView) -> list[Floats]:
        if self.role == "target":
            return [_numpy(view.common)]
        return [self._coefficients(view, 1.0)]

    def _coefficients(self, view: PartyView, part: float) -> Floats:
        return np.concatenate([part * _numpy(_of_source(view.phi)), _numpy(_of_source(view.labels))])[None]

    def gradients(self, view: PartyView, results: list[Floats]) -> list[TensorGradient]:
        if self.role == "target":
            return [(view.common, results[0] / len(view.common))]
        return [(_of_source(view.phi if view.signed is None else view.signed), results[0][0])]

    def probe(self, view: PartyView) -> list[Floats]:
        # the loss is quadratic in Phi, so its change from Phi = 0 is Phi times the gradient half way
        return [self._coefficients(view, 0.5)]

    def value(self, view: PartyView, results: list[Floats], probed: list[Floats], target_value: float) -> float:
        return math.log(2) + float(_numpy(_of_source(view.phi)) @ probed[0][0])


class DiscrepancyTerm(LossTerm):
    """MMD^2 between the parties' aligned layers, summed over layers, times alpha.

    Args:
        role: role of this party.
        kernel: a kernel with a moment form.
        alpha: weight in the loss.
        rows: rows in a batch of own rows, at both parties.
        widths: units of the aligned layers.
        unit: whether rows of the aligned layers have length 1.
        hidden: whether its statistics carry noise, and gradients are computed from them for each row alone.
        common: rows in a co-occurring batch if those are aligned, else None.
    """

    name = "mmd2"

    def __init__(
        self, role: Role, kernel: Kernel, alpha: float, rows: int, widths: Sequence[int], unit: bool = True,
        hidden: bool = False, common: int | None = None,
    ) -> None:  # fmt: skip
        self.role, self.kernel, self.alpha, rows = role, kernel, alpha, rows if common is None else common
        room = 2.0 if hidden else 1.0  # statistics with noise are no moments of rows, but no longer than those
        longest = [1.0 if unit else width**0.5 for width in widths]  # units lie in (0, 1)
        self._sizes = [kernel.sizes(rows, width, most) for width, most in zip(widths, longest, strict=True)]
        self._sizes = [[ProductSize(s.rows, s.inner, s.width, s.bound * room) for s in sizes] for sizes in self._sizes]
        self.owned = self.requested = [size for sizes in self._sizes for size in sizes]
        # every product once more at each node of the quadrature
        self.probes = list(range(len(self.requested))) * len(nodes(kernel)[0])
        # moments of few rows tell no more numbers than these rows have
        numbers = sum(min(kernel.moments(width, unit), rows * width) for width in widths)
        numbers += 1  # the party's own part of the losses
        self.disclosed_own, self.disclosed_common = (numbers, 0) if common is None else (0, numbers)
        self._warned = False

    def statistics(self, view: PartyView) -> list[ProductStatistics]:
        self._warn(view)
        moments = view.moments or [self.kernel.statistics(_numpy(rows)) for rows in view.layers]
        return [statistics for layer in moments for statistics in layer]

    def coefficients(self, view: PartyView) -> list[Floats]:
        return [matrix for rows in view.layers for matrix in self.kernel.coefficients(_numpy(rows))]

    def gradients(self, view: PartyView, results: list[Floats]) -> list[TensorGradient]:
        weight, cross = -2 * self.alpha, self._layers(results)
        gradients = [
            (rows, weight * self.kernel.gradient(_numpy(rows), part))
            for rows, part in zip(view.layers, cross, strict=True)
        ]
        for rows, layer in zip(view.layers, view.moments or (), strict=False):
            # the local part by the released moments: then a row's gradient depends on no other row
            x = _numpy(rows)
            products = [c @ s.matrix + s.constant for c, s in zip(self.kernel.coefficients(x), layer, strict=True)]
            gradients.append((rows, -weight * self.kernel.gradient(x, products)))
        return gradients

    def local(self, view: PartyView) -> Tensor | None:
        if view.moments is not None:
            return None
        return self.alpha * torch.stack([self.kernel.expand(rows, rows).mean() for rows in view.layers]).sum()

    def probe(self, view: PartyView) -> list[Floats]:
        return [
            matrix
            for place in nodes(self.kernel)[0]
            for rows in view.layers
            for matrix in self.kernel.coefficients(place * _numpy(rows))
        ]

    def target_value(self, view: PartyView) -> float:
        # the source's quadrature gives K_st less its value at x = 0, which only the target can compute
        return sum(self._mean_kernel(rows) - 2 * self.kernel.at_zero(_numpy(rows)) for rows in view.layers)

    def value(self, view: PartyView, results: list[Floats], probed: list[Floats], target_value: float) -> float:
        cross = 0.0
        for number, (place, weight) in enumerate(zip(*nodes(self.kernel), strict=True)):
            part = probed[number * len(self.requested) : (number + 1) * len(self.requested)]
            for rows, layer in zip(view.layers, self._layers(part), strict=True):
                x = _numpy(rows)
                cross += weight * float((x * self.kernel.gradient(place * x, layer)).sum())
        return sum(self._mean_kernel(rows) for rows in view.layers) + target_value - 2 * cross

    def _mean_kernel(self, rows: Tensor) -> float:
        with torch.no_grad():
            return float(self.kernel.expand(rows, rows).mean())

    def _layers(self, results: list[Floats]) -> list[list[Floats]]:
        """Return the results by layer."""
        layers, start = [], 0
        for sizes in self._sizes:
            layers.append(results[start : start + len(sizes)])
            start += len(sizes)
        return layers

    def _warn(self, view: PartyView) -> None:
        if self._warned or not isinstance(self.kernel, GaussianKernel):
            return
        share = max(self.kernel.outside(rows.detach()) for rows in view.layers)
        if share > 0:
            self._warned = True
            warnings.warn(
                f"the {self.role}'s hidden rows leave the range of the Gaussian's expansion: {share:.0%} of its pairs "
                "have u > 1, where the expansion makes rows less alike; use a larger sigma, or rows of length 1 "
                "(normalize = true)",
                RuntimeWarning,
                stacklevel=2,
            )


class AlignmentTerm(LossTerm):
    """The alignment loss of FTL (Liu, Chen, Yang 2018, eq. 4), a baseline that makes co-occurring rows similar.

        L = -kappa * mean over i of u_i^source . u_i^target

    Its gradient with respect to one party's row is the other party's row.  Whatever the encryption, each party learns
    the hidden rows of the other's co-occurring samples, so these are sent as they are.

    Args:
        role: role of this party.
        kappa: weight of the term.
        rows: number of rows in a co-occurring batch.
        width: number of units of the last aligned layer.
    """

    name = "alignment"

    def __init__(self, role: Role, kappa: float, rows: int, width: int) -> None:
        self.role, self.kappa = role, kappa
        self.owned = self.requested = [ProductSize(rows, 0, width, 1.0)]
        self.probes = []
        self.disclosed_common = rows * width

    def statistics(self, view: PartyView) -> list[ProductStatistics]:
        rows = view.common.detach().numpy()
        return [ProductStatistics(np.zeros((0, rows.shape[1])), -rows)]

    def coefficients(self, view: PartyView) -> list[Floats]:
        return [np.zeros((len(view.common), 0))]

    def gradients(self, view: PartyView, results: list[Floats]) -> list[TensorGradient]:
        return [(view.common, self.kappa * results[0] / len(view.common))]

    def value(self, view: PartyView, results: list[Floats], probed: list[Floats], target_value: float) -> float:
        return float((results[0] * view.common.detach().numpy()).sum() / len(view.common))


class ResidualTerm(LossTerm):
    """The Taylor logistic loss of co-occurring rows that both parties score, z = z_source + z_target (`split_model`).

        L = mean over i of log 2 - y_i z_i / 2 + z_i^2 / 8
        dL/dw = mean of x_i (z_i / 4 - y_i / 2), of which the other party's part is X' S, under encryption

    with S = z / 4 of the other party, at the source less y / 2.  No party sees the residual of a row.  Shares z are
    clipped to -MOST_SCORE to MOST_SCORE, and rows whose share a party has clipped have coefficients X of 0 there.

    Args:
        role: role of this party.
        rows: number of rows in a co-occurring batch.
        inputs: rows of a product, whatever the number of features, which stays secret.
    """

    name = "loss"

    def __init__(self, role: Role, rows: int, inputs: int) -> None:
        self.role, self.rows, self.inputs = role, rows, inputs
        # each row's S is at most MOST_SCORE / 4 + 1/2, each coefficient at most MOST_SCORE + 2, that of a probe
        self.owned = self.requested = [ProductSize(inputs, rows, 1, (MOST_SCORE / 4 + 0.5) * (MOST_SCORE + 2))]
        self.probes = [0]
        self.disclosed_common, self.disclosed_watched = inputs, 2 if role == "target" else 1

    def statistics(self, view: PartyView) -> list[ProductStatistics]:
        part = _numpy(view.common) / 4 - (0.0 if view.labels is None else _numpy(view.labels) / 2)
        return [ProductStatistics(part[:, None] / self.rows, np.zeros(1))]

    def coefficients(self, view: PartyView) -> list[Floats]:
        assert view.inputs is not None, "of a split model"
        return [self._padded(_numpy(view.inputs).T)]

    def _padded(self, matrix: Floats) -> Floats:
        return np.pad(matrix, ((0, self.inputs - len(matrix)), (0, 0)))

    def gradients(self, view: PartyView, results: list[Floats]) -> list[TensorGradient]:
        assert view.weight is not None, "of a split model"
        return [(view.weight, results[0][: len(view.weight), 0])]

    def local(self, view: PartyView) -> Tensor:
        z = view.common
        own = (z**2).mean() / 8
        return own if view.labels is None else own - (view.labels * z).mean() / 2

    def probe(self, view: PartyView) -> list[Floats]:
        # the mean of z_target (z_source / 4 - y / 2)
        return [self._padded((_numpy(view.common) - 2 * _numpy(_of_source(view.labels)))[None])]

    def target_value(self, view: PartyView) -> float:
        return float(self.local(view).detach())

    def value(self, view: PartyView, results: list[Floats], probed: list[Floats], target_value: float) -> float:
        return math.log(2) + float(self.local(view).detach()) + float(probed[0][0, 0]) + target_value


def _numpy(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().numpy()
    return array


def _of_source(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "only the source has labels and a translator"
    return tensor
