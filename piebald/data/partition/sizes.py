"""Numbers of rows per client: the setting `sizes` of partitions that deal rows one by one.  Client 0 gets most."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from piebald.contracts.component import Component
from piebald.core.errors import SettingError
from piebald.data.partition.split import Ints

if TYPE_CHECKING:
    from numpy.random import Generator


class Sizes(Component):
    """Rows of each client."""

    axis = "sizes"

    def counts(self, clients: int, rows: int, rng: Generator) -> Ints:
        """Number of rows of each client [clients], at least 1 each and `rows` in all, or fewer if sizes are explicit.

        Raises:
            SettingError: there are too few rows.
        """
        raise NotImplementedError

    def _refuse(self, reason: str) -> SettingError:
        return SettingError(f"sizes {self.kind!r}: {reason}")


class Uniform(Sizes):
    """Equal sizes, within one row."""

    def counts(self, clients: int, rows: int, rng: Generator) -> Ints:
        return apportion(np.ones(clients), rows)


class Skewed(Sizes):
    """Right-skewed sizes, all different: sizes decrease geometrically from client to client (Metis' "skewed").

    Attributes:
        ratio: rows of the first client divided by those of the last, if there are many rows; above 1.
    """

    ratio: float = Field(default=8.0, gt=1, le=1e6)

    def counts(self, clients: int, rows: int, rng: Generator) -> Ints:
        stairs = np.arange(clients, 0, -1)  # strictly decreasing, so that the sum of both is, too
        rest = rows - int(stairs.sum())
        if rest < 0:
            raise self._refuse(
                f"{clients} clients of different sizes need {stairs.sum()} rows, got {rows}: lower clients"
            )
        weight = self.ratio ** -(np.arange(clients) / max(clients - 1, 1))
        added = np.floor(rest * weight / weight.sum()).astype(np.int64)
        # the odd rows go to the first clients, so that sizes still decrease
        added[: rest - int(added.sum())] += 1
        return np.asarray(stairs + added, dtype=np.int64)


class PowerLaw(Sizes):
    """Client k gets rows in proportion to (k + 1) ** -exponent, so few clients hold most rows (Metis: exponent 1.5).

    Attributes:
        exponent: exponent of the power law, above 0.
    """

    exponent: float = Field(default=1.5, gt=0, le=20)

    def counts(self, clients: int, rows: int, rng: Generator) -> Ints:
        return apportion(np.arange(1, clients + 1, dtype=np.float64) ** -self.exponent, rows)


class Quantity(Sizes):
    """Shares drawn from a Dirichlet distribution, the largest first (quantity skew of Li, Diao, Chen, He 2022).

    Attributes:
        alpha: concentration, above 0; 0.1 gives most rows to few clients, 100 nearly equal sizes.
    """

    alpha: float = Field(gt=0, le=1e6)

    def counts(self, clients: int, rows: int, rng: Generator) -> Ints:
        # Logarithms of gamma variates (Marsaglia, Tsang 2000, section 6), which do not underflow where alpha is tiny.
        # 1 - u is never 0, as u may be, so its logarithm is finite
        log = np.log(rng.standard_gamma(self.alpha + 1, clients)) + np.log1p(-rng.random(clients)) / self.alpha
        # a common factor cancels in `apportion`, and the largest weight becomes 1
        return apportion(np.sort(np.exp(log - log.max()))[::-1], rows)


class Explicit(Sizes):
    """Sizes as listed; rows that are left over get no client.

    Attributes:
        rows: number of rows of each client, at least 1 each.
    """

    rows: tuple[int, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Explicit:
        if min(self.rows) < 1:
            raise ValueError(f"rows must be at least 1 for each client, got {min(self.rows)}")
        return self

    def counts(self, clients: int, rows: int, rng: Generator) -> Ints:
        if len(self.rows) != clients:
            raise self._refuse(f"rows must have a number for each of the {clients} clients, got {len(self.rows)}")
        if sum(self.rows) > rows:
            raise self._refuse(f"rows add up to {sum(self.rows)}, and there are {rows} rows to train on: lower them")
        return np.array(self.rows, dtype=np.int64)


def apportion(weight: NDArray[np.float64], rows: int) -> Ints:
    """Whole numbers [n] of at least 1 that add up to `rows`, in proportion to weights (largest remainders).

    Raises:
        SettingError: fewer rows than there are weights.
    """
    n = len(weight)
    if rows < n:
        raise SettingError(f"{n} clients of at least one row need more than the {rows} rows: lower clients")
    least = np.zeros(n, dtype=bool)
    while True:  # clients that would get less than one row get one, and the others share the rest
        # no weight is left where all clients get the least, and tiny ones may have underflowed to 0
        scale = (rows - least.sum()) / max(float(weight[~least].sum()), np.finfo(float).tiny)
        share = np.where(least, 1.0, weight * scale)
        below = (share < 1) & ~least
        if not below.any():
            break
        least |= below
    # a share that rounding left just below a whole number counts as it
    counts = np.floor(share + 1e-9).astype(np.int64)
    # ties go to the first clients, so equal weights give the same counts on every machine
    counts[np.argsort(-(share - counts), kind="stable")[: rows - int(counts.sum())]] += 1
    return counts
