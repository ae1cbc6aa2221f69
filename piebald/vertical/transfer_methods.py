"""Methods that align the two parties' hidden layers: `smmd`, and the baseline `ftl`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from piebald.contracts.component import Component
from piebald.core.errors import SettingError
from piebald.privacy.accounting import gaussian_epsilon
from piebald.vertical.disclosure_ledger import DisclosureLedger
from piebald.vertical.kernels import GaussianKernel, Kernel
from piebald.vertical.loss_terms import AlignmentTerm, DiscrepancyTerm, LossTerm
from piebald.vertical.party_secret import PartySecret
from piebald.vertical.protocol import Role
from piebald.vertical.row_noise import RowNoise


class Method(Component):
    """The alignment term of the loss."""

    axis = "method"

    def term(self, role: Role, batch: int, overlap_batch: int, widths: Sequence[int]) -> LossTerm:
        """Return the term at one party, for these batch sizes and widths of aligned layers."""
        raise NotImplementedError

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
        """Return the noise on the numbers that one party computes from its own rows, or None."""
        return None

    @property
    def disclosure(self) -> str:
        """The information that the method gives each party about the other's rows, in words."""
        raise NotImplementedError

    def statement(self, role: Role, releases: int) -> str:
        """Return the statement about differential privacy of a party after some releases about one of its rows."""
        return "no noise is added, and nothing is claimed about differential privacy"


class Smmd(Method):
    """Secure maximum mean discrepancy (Zhang, Chen, Wang): alpha * MMD^2 between both parties' hidden rows.

    Attributes:
        rows: the rows that are compared: "own", a batch of each party's own (eq. 1), or "common", the co-occurring ones
            (eq. 5 to 7).
        kernel: linear, polynomial or gaussian.
        alpha: weight in the loss, at least 0.
        normalize: scale hidden rows to length 1 before they are compared.  The Gaussian's expansion needs it, and it
            keeps the meaning of alpha the same for all kernels.
        noise: standard deviation of Gaussian noise on every number that depends on a party's own rows (`row_noise`), in
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
        return "each party learns moments of the other's batches; the target learns the labels of co-occurring rows"

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
            f"all that the {role} has sent in this run is ({epsilon:.3g}, {self.delta:g})-differentially private for "
            f"one of its own rows replaced{label}, by {releases} releases about one row that were counted when they "
            "were sent. Not covered are co-occurring rows, the preparation of columns unless by given bounds and "
            "values, and other runs on the same rows"
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
