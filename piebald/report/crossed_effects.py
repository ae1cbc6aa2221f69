"""Means over seeds and clients, and what they vary by: crossed random effects, see `paired`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Kind = Literal["interval", "range"]
SEEDS_FOR_INTERVAL = 3
ERROR_RATE = 0.05  # of intervals and of telling apart


@dataclass(frozen=True, slots=True)
class CrossedEffects:
    """Means of tables [k, seeds, clients], with NaN for missing cells, and their components of variance.

    Every seed with a value counts the same, and within it every client, or as its vote says.  `by_seed` [k, seeds] and
    `by_client` [k, clients] are what each seed and client adds to the mean, less the mean; `rest` [k, seeds, clients]
    is what each cell adds beyond its seed and client, scaled so that the sum of its squares estimates the variance that
    it causes.
    """

    cells: Floats
    mean: Floats
    seeds: NDArray[np.int64]
    clients: NDArray[np.int64]
    by_seed: Floats
    by_client: Floats
    rest: Floats
    error: Floats  # the standard error, NaN where it is unknown
    freedom: Floats

    @classmethod
    def of(cls, cells: Floats, votes: Floats | None = None) -> CrossedEffects:
        # every seed weighs the same, and within a seed every client: clients that one seed lacks do not tilt the mean
        present = ~np.isnan(cells)
        voting = present * (1.0 if votes is None else votes)
        within = voting.sum(2, keepdims=True)
        # a seed without a vote would divide by 0; its weight stays 0
        within = np.where(within > 0, within, 1)
        seeds, clients = present.any(2).sum(1), present.any(1).sum(1)
        weight = voting / (within * np.maximum(seeds, 1)[:, None, None])
        mean = np.where(present, weight * np.nan_to_num(cells), 0).sum((1, 2))
        deviations = np.where(present, np.nan_to_num(cells) - mean[:, None, None], 0)
        # effects are averages of deviations: unbiased for complete tables, and close to it where few cells are missing
        of_seed = (voting * deviations).sum(2, keepdims=True) / within
        of_client = deviations.sum(1, keepdims=True) / np.maximum(present.sum(1, keepdims=True), 1)
        # degrees of freedom of the interaction of a two-way layout without repetitions
        rest_freedom = np.maximum(present.sum((1, 2)) - seeds - clients + 1, 1)
        rest = np.where(present, deviations - of_seed - of_client, 0) * weight
        # the residuals are shrunk by the effects that were estimated from the same cells
        rest *= np.sqrt(present.sum((1, 2)) / rest_freedom)[:, None, None]
        # the factor is Bessel's correction: deviations are from an estimated mean
        by_seed = (weight * deviations).sum(2) * np.sqrt(seeds / np.maximum(seeds - 1, 1))[:, None]
        # clients with less than a vote are as many as vote alike would be (Kish's effective number)
        shares = weight.sum(1)
        effective = shares.sum(1) ** 2 / np.maximum((shares**2).sum(1), 1e-300)
        effective = np.where(np.abs(effective - clients) < 1e-9, clients, effective)
        by_client = (weight * deviations).sum(1) * np.sqrt(effective / np.maximum(effective - 1, 1))[:, None]
        parts = (by_seed**2).sum(1), (by_client**2).sum(1), (rest**2).sum((1, 2))
        error, freedom = _errors(seeds, clients, *parts, rest_freedom)
        return cls(cells, mean, seeds, clients, by_seed, by_client, rest, error, freedom)

    def quantile(self, comparisons: int = 1) -> Floats:
        """Student's t at 97.5 %, or as far out as so many simultaneous intervals need (Bonferroni)."""
        from scipy.special import stdtrit

        return np.asarray(stdtrit(self.freedom, 1 - ERROR_RATE / 2 / comparisons), dtype=np.float64)

    def stretch(self) -> Floats:
        """Standard errors by which an interval reaches further [k], upwards where positive, downwards where negative.

        Few clients of which some gain much more than the others rarely show those, so that the mean is too small and
        the spread as well.  The first term of the studentized mean's Edgeworth expansion corrects that (Hall 1992); it
        is doubled, since the skewness that few clients show is smaller than theirs.
        """
        # only up to 3: quantiles of very few degrees of freedom are wide enough, and not what the expansion is about
        quantile = np.minimum(self.quantile(), 3)
        counts = np.maximum(self.clients, 1)
        moments = [(self.by_client**power).sum(1) / counts for power in (2, 3)]
        skewness = moments[1] / np.maximum(moments[0], 1e-150) ** 1.5
        # of a sum the skewness is that of its parts, by the cubes of their shares in the deviation
        skewness *= np.minimum(np.sqrt(moments[0] * counts) / np.maximum(self.error, 1e-150), 1) ** 3
        return np.asarray(2 * skewness * (1 + 2 * quantile**2) / (6 * np.sqrt(counts)))

    def p(self) -> Floats:
        """Two-sided p values of a mean of zero."""
        from scipy.special import stdtr

        against = np.maximum(-np.sign(self.mean) * self.stretch(), 0)
        # an error of 0 gives an infinite statistic, whose p value is replaced below
        with np.errstate(divide="ignore", invalid="ignore"):
            p = 2 * stdtr(self.freedom, -np.maximum(np.abs(self.mean) / self.error - against, 0))
        # no spread to judge by: as improbable as that all clients have the same sign
        p = np.where(self.error < 1e-12, np.exp2(1.0 - self.clients), p)
        # two seeds say little about seeds, but if they contradict each other nothing is claimed
        signs = np.array([_signs(table) for table in self.cells])
        disagree = (self.seeds < SEEDS_FOR_INTERVAL) & (signs == 2)
        return np.where(disagree | np.isnan(self.error) | (np.abs(self.mean) < 1e-12), 1.0, np.minimum(p, 1.0))

    def ends(self, k: int, comparisons: int = 1) -> tuple[float, float, float, int, int, Kind]:
        """Mean, low, high, seeds, clients and kind of one table."""
        mean, counts = float(self.mean[k]), (int(self.seeds[k]), int(self.clients[k]))
        # an interval from two seeds would be wider than all accuracies; the range is at least true
        if self.seeds[k] < SEEDS_FOR_INTERVAL:
            means = _seed_means(self.cells[k])
            return mean, float(means.min()), float(means.max()), *counts, "range"
        error, stretch = float(self.error[k]), float(self.stretch()[k])
        half = float(self.quantile(comparisons)[k]) * error
        low, high = mean - half + error * min(stretch, 0), mean + half + error * max(stretch, 0)
        return mean, low, high, *counts, "interval"

    def covariance(self) -> Floats:
        """The covariance [k, k] of the means."""
        of_clients = self.by_client @ self.by_client.T
        # with few seeds the clients alone count, as in `_errors`
        if self.seeds.min() < SEEDS_FOR_INTERVAL:
            return np.asarray(of_clients)
        flat = self.rest.reshape(len(self.rest), -1)
        # the difference of two covariances may have negative eigenvalues, which no covariance has
        values, vectors = np.linalg.eigh(self.by_seed @ self.by_seed.T - flat @ flat.T)
        return np.asarray(of_clients + (vectors * np.clip(values, 0, None)) @ vectors.T)


def _errors(
    seeds: NDArray[np.int64],
    clients: NDArray[np.int64],
    of_seeds: Floats,
    of_clients: Floats,
    of_rest: Floats,
    free: NDArray[np.int64],
) -> tuple[Floats, Floats]:
    """Standard errors [k] and their degrees of freedom [k], from the estimated variances of the mean."""
    # both margins contain the variance of single cells, so it is subtracted once
    sum_of_both = of_seeds + of_clients - of_rest
    variance = np.maximum(np.maximum(of_seeds, of_clients), sum_of_both)  # components are not below zero
    dof_seeds, dof_clients = np.maximum(seeds - 1, 1), np.maximum(clients - 1, 1)
    # Satterthwaite 1946: the variance of a sum of variance components, each with its own degrees of freedom
    uncertainty = of_seeds**2 / dof_seeds + of_clients**2 / dof_clients + of_rest**2 / free
    # the approximation is never allowed below the freedom of the weaker margin
    fewest = np.where(clients > 1, np.minimum(dof_seeds, dof_clients), dof_seeds)
    freedom = np.maximum(variance**2 / np.maximum(uncertainty, 1e-300), fewest)
    few = seeds < SEEDS_FOR_INTERVAL  # the clients alone, for these seeds
    variance = np.where(few, np.where(clients > 1, of_clients, np.nan), variance)
    return np.sqrt(variance), np.where(few, dof_clients, freedom).astype(np.float64)


def _seed_means(cells: Floats) -> Floats:
    """The mean of each seed that has a value."""
    return np.asarray(np.nanmean(cells[~np.isnan(cells).all(axis=1)], axis=1))


def _signs(cells: Floats) -> int:
    """The number of signs, of + and -, that the means of seeds have."""
    return len({float(np.sign(mean)) for mean in _seed_means(cells)} - {0.0})
