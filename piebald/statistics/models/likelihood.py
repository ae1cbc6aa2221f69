"""Sums of one client for generalised linear models: log-likelihood, its derivatives, and scores of clusters.

McCullagh and Nelder 1989, section 2.5, for the families with canonical links; Lawless 1987, "Negative binomial and
mixed Poisson regression", for the negative binomial with a log link and the variance mu + alpha mu^2.

Sums of one client over risk sets: Cox's partial likelihood, its residuals, counts of times, and the log-rank test.

Cox 1972; tied times after Efron 1977 or Breslow 1974; score residuals after Lin and Wei 1989; Grambsch and Therneau
1994 for the test of proportional hazards.

Sums of one client for models with a random intercept of each client: its own share of the marginal likelihood.

Whose intercept is random is the client itself, so its share is an integral over one number.  For normal targets it has
a closed form (Laird and Ware 1982), for others it is computed by adaptive Gauss-Hermite quadrature (Pinheiro and Bates
1995, section 2.4).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from piebald.core.moments import Floats, Ints
from piebald.statistics.models.rows import Family, Ties

_LARGEST = 700.0  # linear predictor, whose exponential is a number
_NODES = 40  # of the quadrature: its error is below 1e-10 for smooth likelihoods


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
        return RowTerms(value, -2 * value, y - mean, small / np.square(1 + small))
    from scipy import special

    eta = np.minimum(eta, _LARGEST)
    mean, log_y = np.exp(eta), np.log(np.maximum(y, 1e-300))
    if family == "poisson":
        deviance = 2 * (np.where(y > 0, y * (log_y - eta), 0.0) - (y - mean))
        return RowTerms(y * eta - mean - special.gammaln(y + 1), deviance, y - mean, mean)
    size = np.exp(-log_alpha)  # 1 / alpha
    total, apart = size + mean, y - mean
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


def cluster_scores(scores: Floats, labels: NDArray[np.object_]) -> Floats:
    """Return the number of clusters and the sum of their scores' outer products, flat [1 + q^2] (Liang, Zeger 1986).

    Args:
        scores: of rows [n, q].
        labels: of the rows' clusters [n].
    """
    clusters, places = np.unique(labels, return_inverse=True) if len(labels) else (labels, np.zeros(0, dtype=int))
    sums = np.zeros((len(clusters), scores.shape[1]))
    np.add.at(sums, places, scores)
    return np.concatenate([[float(len(clusters))], (sums.T @ sums).ravel()])


class PartialLikelihood(NamedTuple):
    """The partial likelihood of some rows, with score residuals of rows [n, p] and Schoenfeld residuals [n, p].

    A score residual is how fast the score changes with the logarithm of the row's weight.  A Schoenfeld residual is
    that of a row with an event, and 0 of others.
    """

    sums: Likelihood
    scores: Floats
    schoenfeld: Floats


def partial_likelihood(
    x: Floats, time: Floats, event: Floats, eta: Floats, weight: Floats, entry: Floats, ties: Ties
) -> PartialLikelihood:
    """Return the partial likelihood of rows that are compared with one another.

    Args:
        x, time, event, eta: regressors [n, p], times, events and linear predictors [n].
        weight: of rows [n], above 0; tied events share their mean weight, as in R's survival.
        entry: rows are at risk after these times [n].
        ties: how tied events are taken.
    """
    if not event.any():
        nothing = np.zeros_like(x)
        return PartialLikelihood(
            Likelihood(0.0, 0.0, np.zeros(x.shape[1]), np.zeros((x.shape[1],) * 2)), nothing, nothing
        )
    shift = float(eta.max())
    hazard = weight * np.exp(eta - shift)
    died = event > 0
    times = np.unique(time[died])
    group = np.searchsorted(times, time, side="right") - 1  # a row is at risk at times after `before` and up to this
    before = np.searchsorted(times, entry, side="right") - 1

    def summed(place: Ints, values: Floats) -> Floats:
        sums = np.zeros((len(times) + 1, *values.shape[1:]))  # the last one is of rows that come before all times
        np.add.at(sums, place, values)
        return sums[:-1]

    weighted = np.column_stack([hazard, hazard[:, None] * x])
    change = summed(group, weighted) - summed(before, weighted)
    at_risk = np.cumsum(change[::-1], axis=0)[::-1]
    deadly = np.where(died, group, -1)
    dying, deaths = summed(deadly, weighted), summed(deadly, event).astype(int)
    mean_weight = summed(deadly, weight) / deaths
    # one term for each event: with Efron's method a tied one leaves a share of the others in its risk set
    place = np.repeat(np.arange(len(times)), deaths)
    order = np.arange(len(place)) - np.repeat(np.cumsum(deaths) - deaths, deaths)
    share = order / deaths[place] if ties == "efron" else np.zeros(len(place))
    each = mean_weight[place]
    terms = at_risk[place] - share[:, None] * dying[place]
    mean = terms[:, 1:] / terms[:, :1]
    # cumulated over times: 1 / S0 and mean / S0, and what rows that die now have less of them
    rate = each[:, None] * np.column_stack([np.ones(len(place)), mean]) / terms[:, :1]
    cumulated = np.vstack([np.cumsum(summed(place, rate), axis=0), np.zeros(rate.shape[1])])
    less = np.vstack([summed(place, share[:, None] * rate), np.zeros(rate.shape[1])])
    exposure = cumulated[group] - cumulated[before] - less[deadly]
    means = summed(place, mean / deaths[place][:, None])
    schoenfeld = np.where(died[:, None], x - means[deadly], 0.0)
    scores = weight[:, None] * schoenfeld - hazard[:, None] * (exposure[:, :1] * x - exposure[:, 1:])
    value = float(weight[died] @ eta[died]) - float(each @ np.log(terms[:, 0])) - shift * float(each.sum())
    information = (x * (hazard * exposure[:, 0])[:, None]).T @ x - (each[:, None] * mean).T @ mean
    sums = Likelihood(value, -2 * value, weight @ schoenfeld, information)
    return PartialLikelihood(sums, scores, schoenfeld)


def counted_times(groups: Floats, time: Floats, event: Floats, times: Floats) -> Floats:
    """Return events and other ends of each group in the intervals up to some times, flat [2 groups times].

    Args:
        groups: membership of rows [n, groups], 0 or 1.
        time, event: of rows [n].
        times: ends of intervals [t], increasing.  Who is there after the last one is counted nowhere.
    """
    place = np.searchsorted(times, time)
    inside = place < len(times)
    counts = np.zeros((2, groups.shape[1], len(times) + 1))
    for kind, ends in enumerate((event > 0, event <= 0)):
        np.add.at(counts[kind].T, place[ends & inside], groups[ends & inside])
    return counts[:, :, :-1].ravel()


class LogRank(NamedTuple):
    """Sums of the log-rank test (Mantel 1966): events [g], those expected [g], and the covariance [g, g]."""

    events: Floats
    expected: Floats
    covariance: Floats

    @property
    def flat(self) -> Floats:
        """All numbers, one after another."""
        return np.concatenate([self.events, self.expected, self.covariance.ravel()])


def log_rank(at_risk: Floats, deaths: Floats) -> LogRank:
    """Return the sums of the log-rank test.

    Args:
        at_risk, deaths: rows at risk, and events, of each group at each time [g, t].
    """
    everybody, died = at_risk.sum(0), deaths.sum(0)
    share = at_risk / np.maximum(everybody, 1)
    factor = died * (everybody - died) / np.maximum(everybody - 1, 1)
    covariance = np.diag((share * factor).sum(1)) - (share * factor) @ share.T
    return LogRank(deaths.sum(1), (share * died).sum(1), covariance)


def normal_sums(x: Floats, y: Floats, weight: Floats, ratio: float) -> Floats:
    """Return a client's sums for a ratio of variances, flat [4 + 3 (p + 1)^2].

    With z = (x, y), weights W, s = z'W1 and m = 1'W1: the rows, log(1 + ratio m) and its first two derivatives, then
    z'Wz - ratio / (1 + ratio m) s s' and its first two derivatives by the ratio.

    Args:
        x, y, weight: the client's rows [n, p], [n] and [n].
        ratio: the variance of intercepts over that of residuals.
    """
    columns = np.column_stack([x, y])
    weighted = columns * weight[:, None]
    total, sums = float(weight.sum()), weighted.sum(0)
    shrunk = 1 + ratio * total
    outer = np.outer(sums, sums)
    heads = [float(len(y)), math.log(shrunk), total / shrunk, -((total / shrunk) ** 2)]
    matrices = columns.T @ weighted - ratio / shrunk * outer, -outer / shrunk**2, 2 * total / shrunk**3 * outer
    return np.concatenate([heads, *(matrix.ravel() for matrix in matrices)])


def marginal_likelihood(
    family: Family, x: Floats, y: Floats, offset: Floats, weight: Floats, point: Floats
) -> Likelihood:
    """Return a client's marginal log-likelihood and its derivatives, exact for the integral.

    Args:
        family: "binomial" or "poisson".
        x, y, offset, weight: the client's rows [n, p], and [n] each.
        point: coefficients and the standard deviation of intercepts [p + 1].
    """
    eta, deviation = x @ point[:-1] + offset, float(point[-1])
    mode, curvature = _mode(family, y, eta, weight, deviation)
    nodes, node_weights = np.polynomial.hermite.hermgauss(_NODES)
    spread = math.sqrt(2 / curvature)
    places = mode + spread * nodes
    shares, scores, informations = np.zeros(_NODES), [], []
    for node, place in enumerate(places):
        sums = likelihood(
            row_terms(family, y, eta + deviation * place), np.column_stack([x, np.full(len(y), place)]), weight
        )
        shares[node] = sums.value - place**2 / 2 + nodes[node] ** 2 + math.log(max(node_weights[node], 1e-300))
        scores.append(sums.score)
        informations.append(sums.information)
    largest = float(shares.max())
    shares = np.exp(shares - largest)
    value = largest + math.log(float(shares.sum())) + math.log(spread) - math.log(2 * math.pi) / 2
    shares /= shares.sum()
    score = shares @ np.array(scores)
    apart = np.array(scores) - score
    information = np.tensordot(shares, np.array(informations), 1) - (apart * shares[:, None]).T @ apart
    return Likelihood(value, -2 * value, score, information)


def _mode(family: Family, y: Floats, eta: Floats, weight: Floats, deviation: float) -> tuple[float, float]:
    """Return the most likely intercept of a client in units of its deviation, and the curvature there."""
    place = 0.0
    for _ in range(100):
        terms = row_terms(family, y, eta + deviation * place)
        slope = deviation * float(weight @ terms.score) - place
        curvature = 1 + deviation**2 * float(weight @ terms.weight)
        step = slope / curvature
        place += min(max(step, -1.0), 1.0)  # a full step may overflow a Poisson mean
        if abs(step) < 1e-10:
            break
    return place, curvature
