"""Sums of one client for generalised linear models: log-likelihood, its derivatives, and scores of clusters.

McCullagh and Nelder 1989, section 2.5, for the families with canonical links; Lawless 1987, "Negative binomial and
mixed Poisson regression", for the negative binomial with a log link and the variance mu + alpha mu^2.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piebald.core.moments import Floats
from piebald.inference.models.rows import Family

_LARGEST = 700.0  # linear predictor, whose exponential is a number


class RowTerms(NamedTuple):
    """Terms of each row [n]: its log-likelihood, deviance, and derivatives by its linear predictor.

    `by_dispersion` are the first and second derivatives by log alpha of a negative binomial, and the mixed one.
    """

    value: Floats
    deviance: Floats
    score: Floats
    weight: Floats
    by_dispersion: tuple[Floats, Floats, Floats] | None = None


class Likelihood(NamedTuple):
    """A log-likelihood of q parameters: value, deviance, score [q] and information [q, q]."""

    value: float
    deviance: float
    score: Floats
    information: Floats

    @property
    def flat(self) -> Floats:
        """All numbers, one after another."""
        return np.concatenate([[self.value, self.deviance], self.score, self.information.ravel()])

    @classmethod
    def of_flat(cls, numbers: Floats, width: int) -> Likelihood:
        """Return what `flat` was of."""
        return cls(
            float(numbers[0]), float(numbers[1]), numbers[2 : 2 + width], numbers[2 + width :].reshape(width, width)
        )


def row_terms(family: Family, y: Floats, eta: Floats, log_alpha: float = 0.0) -> RowTerms:
    """Return the terms of rows at linear predictors [n]; of "gaussian" for a variance of 1, without constants."""
    if family == "gaussian":
        return RowTerms(-np.square(y - eta) / 2, np.square(y - eta), y - eta, np.ones_like(eta))
    if family == "binomial":
        small = np.exp(-np.abs(eta))  # at most 1, so that nothing overflows
        mean = np.where(eta >= 0, 1 / (1 + small), small / (1 + small))
        value = y * eta - np.logaddexp(0.0, eta)
        # mean (1 - mean) as small / (1 + small)^2, which keeps its digits where 1 - mean would round to 0
        return RowTerms(value, -2 * value, y - mean, small / np.square(1 + small))
    from scipy import special

    # Newton's method may try far points; a finite mean there lets it see that they are worse
    eta = np.minimum(eta, _LARGEST)
    mean, log_y = np.exp(eta), np.log(np.maximum(y, 1e-300))
    if family == "poisson":
        deviance = 2 * (np.where(y > 0, y * (log_y - eta), 0.0) - (y - mean))
        return RowTerms(y * eta - mean - special.gammaln(y + 1), deviance, y - mean, mean)
    size = np.exp(-log_alpha)  # 1 / alpha
    total, apart = size + mean, y - mean
    # log(1 / alpha + mean) from logarithms, since 1 / alpha may be huge where alpha goes to 0
    log_size, log_total = -log_alpha, np.logaddexp(-log_alpha, eta)
    value = special.gammaln(y + size) - special.gammaln(size) - special.gammaln(y + 1)
    value = value + size * (log_size - log_total) + y * (eta - log_total)
    deviance = 2 * (np.where(y > 0, y * (log_y - eta), 0.0) - (y + size) * (np.log(y + size) - log_total))
    slope = special.digamma(y + size) - special.digamma(size) + log_size - log_total - apart / total
    curve = special.polygamma(1, y + size) - special.polygamma(1, size) + mean / (size * total)
    curve = curve + apart / np.square(total)
    by_dispersion = (-size * slope, size * (size * curve + slope), -size * apart * mean / np.square(total))
    weight = size * mean * (size + y) / np.square(total)
    return RowTerms(value, deviance, size * apart / total, weight, by_dispersion)


def likelihood(terms: RowTerms, x: Floats, weight: Floats) -> Likelihood:
    """Return the sums of rows with regressors [n, p] and weights [n]."""
    # the observed information; for canonical links it is the expected one as well
    information = (x * (weight * terms.weight)[:, None]).T @ x
    score = x.T @ (weight * terms.score)
    if terms.by_dispersion is not None:
        first, second, mixed = (weight * part for part in terms.by_dispersion)
        across = -(x.T @ mixed)[:, None]
        information = np.block([[information, across], [across.T, np.array([[-second.sum()]])]])
        score = np.append(score, first.sum())
    return Likelihood(float(weight @ terms.value), float(weight @ terms.deviance), score, information)


def row_scores(terms: RowTerms, x: Floats, weight: Floats) -> Floats:
    """Return each row's share of the score [n, q]."""
    parts = [x * terms.score[:, None]]
    if terms.by_dispersion is not None:
        parts.append(terms.by_dispersion[0][:, None])
    return np.concatenate(parts, axis=1) * weight[:, None]


def cluster_sums(scores: Floats, labels: Floats) -> Floats:
    """Return the sums of scores over clusters [clusters, q] (Liang, Zeger 1986).

    Args:
        scores: of rows [n, q].
        labels: numbers of the rows' clusters [n].
    """
    clusters, places = np.unique(labels, return_inverse=True) if len(labels) else (labels, np.zeros(0, dtype=int))
    sums = np.zeros((len(clusters), scores.shape[1]))
    np.add.at(sums, places, scores)
    return sums
