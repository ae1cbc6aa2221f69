"""What the two parties' losses are made of: terms that need products, from one party's side.

A `Term` says which products it needs, what this party puts into the other's, what it asks, and what gradients come out.
Both parties hold the same terms; a run adds them up.
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

from piebald.vertical.kernels import Floats, GaussianKernel, Kernel, MatrixShare, Size, nodes
from piebald.vertical.protocol import Role

Pull = tuple[Tensor, Floats]  # a tensor and the gradient of the loss by it


@dataclass(frozen=True, eq=False)
class PartyView:
    """What one party sees of a step; tensors are differentiable by its weights.

    Attributes:
        layers: the aligned layers' rows of its own batch, [n, d] each.
        common: the last layer's rows of the co-occurring batch [m, d].
        labels: of those rows, -1 or 1 [m]; only the source has them.
        phi: the translator [d]; only the source has it.
        own: a loss of the source that stays there.
    """

    layers: list[Tensor]
    common: Tensor
    labels: Tensor | None = None
    phi: Tensor | None = None
    own: Tensor | None = None


class Term(ABC):
    """One term of the loss, at the party `role`.

    Attributes:
        name: what its value is called in the records.
        owned: products of this party's statistics.
        asked: products of the other's.
        probes: products asked once more when the loss is watched, which only the source does.
    """

    name: str
    owned: list[Size]
    asked: list[Size]
    probes: list[int]

    def shares(self, view: PartyView) -> list[MatrixShare]:
        """This party's statistics, one for each of `owned`."""
        raise NotImplementedError

    def questions(self, view: PartyView) -> list[Floats]:
        """This party's coefficients, one for each of `asked`."""
        raise NotImplementedError

    @abstractmethod
    def pulls(self, view: PartyView, answers: list[Floats]) -> list[Pull]:
        """Gradients from the other party's side of the loss."""

    def local(self, view: PartyView) -> Tensor | None:
        """What this party can compute of the loss alone."""
        return None

    def probe(self, view: PartyView) -> list[Floats]:
        """The source's coefficients for `probes`."""
        return []

    def aside(self, view: PartyView) -> float:
        """The target's own part of the term's value, which it tells the source when the loss is watched."""
        return 0.0

    @abstractmethod
    def value(self, view: PartyView, answers: list[Floats], probed: list[Floats], aside: float) -> float:
        """The term's value, at the source."""


class LabelTerm(Term):
    """The Taylor logistic loss of the target's co-occurring rows, scored by the source's translator.

        L = mean over i of log 2 - y_i phi_i / 2 + phi_i^2 / 8,    phi_i = Phi.u_i
        n dL/du_i = -y_i Phi / 2 + (Phi Phi') u_i / 4                       (asked by the target)
        dL/dPhi   = -mean of y_i u_i / 2 + mean of (u_i u_i') Phi / 4       (asked by the source: one vector)

    The target's gradients are multiples of Phi whose sign is the label's: it learns the labels of these rows.
    """

    name = "loss"

    def __init__(self, role: Role, rows: int, width: int) -> None:
        self.role = role
        bound = width / 4 + 0.5  # units lie in (0, 1), so those of Phi in (-1, 1)
        to_target = Size(rows, width, width, bound)
        to_source = Size(1, width + rows, width, bound)
        self.owned, self.asked = ([to_target], [to_source]) if role == "source" else ([to_source], [to_target])
        self.probes = [0]

    def shares(self, view: PartyView) -> list[MatrixShare]:
        if self.role == "target":
            u = _numpy(view.common)
            matrix = np.concatenate([u.T @ u / (4 * len(u)), -u / (2 * len(u))])
            return [MatrixShare(matrix, np.zeros(u.shape[1]))]
        phi, labels = _numpy(_given(view.phi)), _numpy(_given(view.labels))
        return [MatrixShare(np.outer(phi, phi) / 4, -np.outer(labels, phi) / 2)]

    def questions(self, view: PartyView) -> list[Floats]:
        if self.role == "target":
            return [_numpy(view.common)]
        return [self._coefficients(view, 1.0)]

    def _coefficients(self, view: PartyView, part: float) -> Floats:
        return np.concatenate([part * _numpy(_given(view.phi)), _numpy(_given(view.labels))])[None]

    def pulls(self, view: PartyView, answers: list[Floats]) -> list[Pull]:
        if self.role == "target":
            return [(view.common, answers[0] / len(view.common))]
        return [(_given(view.phi), answers[0][0])]

    def probe(self, view: PartyView) -> list[Floats]:
        # The loss is quadratic in Phi, so its change from Phi = 0 is Phi times the gradient half way.
        return [self._coefficients(view, 0.5)]

    def value(self, view: PartyView, answers: list[Floats], probed: list[Floats], aside: float) -> float:
        return math.log(2) + float(_numpy(_given(view.phi)) @ probed[0][0])


class DiscrepancyTerm(Term):
    """MMD^2 between the parties' aligned layers, summed over layers, times alpha.

    Args:
        role: of this party.
        kernel: in moment form.
        alpha: its weight in the loss.
        rows: of a batch, at both parties.
        widths: of the aligned layers.
        unit: whether their rows come in length 1.
        noise: standard deviation of the noise on the moments in units of how far one row moves them; 0 for none.
    """

    name = "mmd2"

    def __init__(
        self,
        role: Role,
        kernel: Kernel,
        alpha: float,
        rows: int,
        widths: Sequence[int],
        unit: bool = True,
        noise: float = 0.0,
    ) -> None:
        self.role, self.kernel, self.alpha = role, kernel, alpha
        # Noise takes results beyond what hidden units alone could reach.
        room = 1.0 if noise == 0 else 1.0 + 16 * noise
        longest = [1.0 if unit else width**0.5 for width in widths]  # units lie in (0, 1)
        self._sizes = [kernel.sizes(rows, width, most) for width, most in zip(widths, longest, strict=True)]
        self._sizes = [[Size(s.rows, s.inner, s.width, s.bound * room) for s in sizes] for sizes in self._sizes]
        self.owned = self.asked = [size for sizes in self._sizes for size in sizes]
        self.probes = list(range(len(self.asked))) * len(nodes(kernel)[0])
        self._deviations = [noise * kernel.spread(most, rows) for most in longest]
        self._warned = False

    def shares(self, view: PartyView) -> list[MatrixShare]:
        self._warn(view)
        dice = np.random.default_rng()  # the noise must not be known to the other party: no seed
        found = []
        for rows, deviation in zip(view.layers, self._deviations, strict=True):
            for share in self.kernel.shares(_numpy(rows)):
                noise = [
                    dice.normal(0, deviation, part.shape) if deviation else 0.0
                    for part in (share.matrix, share.constant)
                ]
                found.append(MatrixShare(share.matrix + noise[0], share.constant + noise[1]))
        return found

    def questions(self, view: PartyView) -> list[Floats]:
        return [question for rows in view.layers for question in self.kernel.questions(_numpy(rows))]

    def pulls(self, view: PartyView, answers: list[Floats]) -> list[Pull]:
        weight = -2 * self.alpha
        return [
            (rows, weight * self.kernel.gradient(_numpy(rows), part))
            for rows, part in zip(view.layers, self._layers(answers), strict=True)
        ]

    def local(self, view: PartyView) -> Tensor:
        return self.alpha * torch.stack([self.kernel.expand(rows, rows).mean() for rows in view.layers]).sum()

    def probe(self, view: PartyView) -> list[Floats]:
        return [
            question
            for place in nodes(self.kernel)[0]
            for rows in view.layers
            for question in self.kernel.questions(place * _numpy(rows))
        ]

    def aside(self, view: PartyView) -> float:
        return sum(self._own(rows) - 2 * self.kernel.at_zero(_numpy(rows)) for rows in view.layers)

    def value(self, view: PartyView, answers: list[Floats], probed: list[Floats], aside: float) -> float:
        cross = 0.0
        for number, (place, weight) in enumerate(zip(*nodes(self.kernel), strict=True)):
            part = probed[number * len(self.asked) : (number + 1) * len(self.asked)]
            for rows, own in zip(view.layers, self._layers(part), strict=True):
                x = _numpy(rows)
                cross += weight * float((x * self.kernel.gradient(place * x, own)).sum())
        return sum(self._own(rows) for rows in view.layers) + aside - 2 * cross

    def _own(self, rows: Tensor) -> float:
        with torch.no_grad():
            return float(self.kernel.expand(rows, rows).mean())

    def _layers(self, answers: list[Floats]) -> list[list[Floats]]:
        """Answers by layer."""
        found, start = [], 0
        for sizes in self._sizes:
            found.append(answers[start : start + len(sizes)])
            start += len(sizes)
        return found

    def _warn(self, view: PartyView) -> None:
        if self._warned or not isinstance(self.kernel, GaussianKernel):
            return
        share = max(self.kernel.outside(rows.detach()) for rows in view.layers)
        if share > 0:
            self._warned = True
            warnings.warn(
                f"the {self.role}'s hidden rows leave the range of the Gaussian's expansion: {share:.0%} of its pairs "
                "have u > 1, where the expansion pushes rows apart; use a larger sigma, or rows of length 1 "
                "(normalise = true)",
                RuntimeWarning,
                stacklevel=2,
            )


def _numpy(tensor: Tensor) -> Floats:
    found: Floats = tensor.detach().numpy()
    return found


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "only the source has labels and a translator"
    return tensor
