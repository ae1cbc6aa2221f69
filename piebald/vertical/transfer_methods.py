"""Methods that align the two parties' hidden layers: `smmd`, and the baseline `ftl`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import Field, field_serializer, field_validator

from piebald.component import Component, build
from piebald.errors import SettingError
from piebald.vertical.ftl import Alignment
from piebald.vertical.kernels import GaussianKernel, Kernel, MultiGaussianKernel
from piebald.vertical.loss_terms import DiscrepancyTerm, LossTerm
from piebald.vertical.protocol import Role


class Method(Component):
    """The alignment term of the loss."""

    axis = "method"

    def term(self, role: Role, batch: int, overlap_batch: int, widths: Sequence[int]) -> LossTerm:
        """The term at one party, for these batch sizes and widths of aligned layers."""
        raise NotImplementedError

    @property
    def unit(self) -> bool:
        """Whether rows are scaled to length 1 before they are aligned."""
        return False

    @property
    def told(self) -> str:
        """What the method tells each party about the other's rows, in words."""
        raise NotImplementedError

    def statement(self, widths: Sequence[int], batch: int, steps: int) -> str:
        """The statement about differential privacy."""
        return "no noise is added, and nothing is claimed about differential privacy"


class Smmd(Method):
    """Secure maximum mean discrepancy (Zhang, Chen, Wang): alpha * MMD^2 between batches of both parties' own rows.

    Attributes:
        kernel: linear, polynomial or gaussian.
        alpha: weight in the loss, at least 0.
        normalize: scale hidden rows to length 1 before they are compared.  The Gaussian's expansion needs it, and it
            keeps the meaning of alpha the same for all kernels.
        noise: standard deviation of Gaussian noise on the moments before they are encrypted, in units of their
            sensitivity to one row of the batch; 0 for none.
        delta: delta of the statement about differential privacy.
    """

    kernel: Kernel = GaussianKernel()
    alpha: float = Field(default=1.0, ge=0)
    normalize: bool = True
    noise: float = Field(default=0.0, ge=0)
    delta: float = Field(default=1e-5, gt=0, lt=1)

    @field_validator("kernel", mode="before")
    @classmethod
    def _kernel(cls, value: Any) -> Any:
        kernel = build("kernel", value)
        if isinstance(kernel, MultiGaussianKernel):
            raise SettingError(
                "kernel multi_gaussian has no moment form that could be encrypted: use gaussian, or train both parties "
                "in one place with piebald.vertical.baselines"
            )
        return kernel

    @field_serializer("kernel")
    def _plain(self, kernel: Kernel) -> dict[str, Any]:
        return kernel.table()

    @property
    def unit(self) -> bool:
        return self.normalize

    @property
    def told(self) -> str:
        return "each party learns moments of the other's batches; the target learns the labels of co-occurring rows"

    def term(self, role: Role, batch: int, overlap_batch: int, widths: Sequence[int]) -> LossTerm:
        return DiscrepancyTerm(role, self.kernel, self.alpha, batch, widths, self.unit, self.noise)

    def statement(self, widths: Sequence[int], batch: int, steps: int) -> str:
        if self.noise == 0:
            return super().statement(widths, batch, steps)
        rho = steps * len(widths) / (2 * self.noise**2)
        epsilon = rho + 2 * math.sqrt(rho * math.log(1 / self.delta))
        return (
            f"the moments of {steps} steps together are ({epsilon:.3g}, {self.delta:g})-differentially private for "
            f"one row of a party's batch replaced (zero-concentrated with rho = {rho:.3g}; no gain from sampling "
            "counted). This covers what is sent for MMD only: labels, translator, losses and what is sent for "
            "co-occurring rows are not protected"
        )


class Ftl(Method):
    """Federated transfer learning (Liu, Chen, Yang 2018): co-occurring rows are made similar, row by row.

    Attributes:
        kappa: weight in the loss, at least 0.
    """

    kappa: float = Field(default=0.01, ge=0)

    @property
    def told(self) -> str:
        return "each party learns the other's hidden rows of all co-occurring samples, and the target their labels"

    def term(self, role: Role, batch: int, overlap_batch: int, widths: Sequence[int]) -> LossTerm:
        return Alignment(role, self.kappa, overlap_batch, widths[-1])
