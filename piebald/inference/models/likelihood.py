"""Sums of one client's likelihood and its derivatives: of rows, with a random intercept, and over risk sets.

Rows: McCullagh and Nelder 1989, section 2.5, for the families with canonical links; Lawless 1987, "Negative binomial
and mixed Poisson regression", for the negative binomial with a log link and the variance mu + alpha mu^2.

Random intercepts: whose intercept is random is the client itself, so its share is an integral over one number.  For
normal targets it has a closed form (Laird and Ware 1982), for others it is computed by adaptive Gauss-Hermite
quadrature (Pinheiro and Bates 1995, section 2.4).

Risk sets: Cox 1972; tied times after Efron 1977 or Breslow 1974; score residuals after Lin and Wei 1989; Grambsch and
Therneau 1994 for the test of proportional hazards; Mantel 1966 for the log-rank test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from piebald.core.moments import Floats, Ints
from piebald.inference.models.rows import Family, ModelPlan, Ties

_LARGEST = 700.0  # linear predictor, whose exponential is a number


class RowTerms(NamedTuple):
    """Terms of each row [n]: its log-likelihood, deviance, the square of Pearson's residual, and derivatives of its
    log-likelihood by each of G linear predictors: the first ones, and minus the second ones of each two.
    """

    value: Floats
    deviance: Floats
    squares: Floats
    scores: tuple[Floats, ...]
    weights: tuple[tuple[Floats, ...], ...]


class Likelihood(NamedTuple):
    """A log-likelihood of q parameters: value, deviance, Pearson's chi-square, score [q] and information [q, q]."""

    value: float
    deviance: float
    squares: float
    score: Floats
    information: Floats

    @property
    def flat(self) -> Floats:
        """All numbers, one after another."""
        return np.concatenate([self[:3], self.score, self.information.ravel()])

    @classmethod
    def of_flat(cls, numbers: Floats, width: int) -> Likelihood:
        """Return what `flat` was of."""
        value, deviance, squares = numbers[:3].tolist()
        information = numbers[3 + width :].reshape(width, width)
        return cls(value, deviance, squares, numbers[3 : 3 + width], information)


def row_terms(family: Family, y: Floats, eta: Floats, log_alpha: float = 0.0, power: float = 1.5) -> RowTerms:
    """Return the terms of rows with one linear predictor.

    Args:
        family: the distribution; "gaussian" for a variance of 1, without constants.
        y, eta: targets and linear predictors [n].
        log_alpha: of a negative binomial, whose second predictor it is.
        power: of "tweedie".
    """
    if family == "gaussian":
        squares = np.square(y - eta)
        return RowTerms(-squares / 2, squares, squares, (y - eta,), ((np.ones_like(eta),),))
    if family == "binomial":
        small = np.exp(-np.abs(eta))  # at most 1, so that nothing overflows
        mean = np.where(eta >= 0, 1 / (1 + small), small / (1 + small))
        value = y * eta - np.logaddexp(0.0, eta)
        # mean (1 - mean) as small / (1 + small)^2, which keeps its digits where 1 - mean would round to 0
        return RowTerms(value, -2 * value, 0 * y, (y - mean,), ((small / np.square(1 + small),),))
    from scipy import special

    # Newton's method may try far points; a finite mean there lets it see that they are worse
    eta = np.minimum(eta, _LARGEST)
    mean, log_y = np.exp(eta), np.log(np.maximum(y, 1e-300))
    if family == "poisson":
        deviance = 2 * (np.where(y > 0, y * (log_y - eta), 0.0) - (y - mean))
        return RowTerms(y * eta - mean - special.gammaln(y + 1), deviance, 0 * y, (y - mean,), ((mean,),))
    if family in ("gamma", "tweedie"):
        return _power_terms(y, eta, 2.0 if family == "gamma" else power)
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
    mixed = size * apart * mean / np.square(total)
    weights = (size * mean * (size + y) / np.square(total), mixed), (mixed, -size * (size * curve + slope))
    return RowTerms(value, deviance, 0 * y, (size * apart / total, -size * slope), weights)


def slopes(family: str, eta: Floats) -> tuple[Floats, Floats]:
    """Return the derivatives of the mean, or of the probability of each of L levels, by linear predictors.

    Args:
        family: the distribution.
        eta: linear predictors [n, G], of families without levels one.

    Returns:
        The first derivatives [n, L, G] and the second ones [n, L, G, G]; L is 1 without levels.
    """
    if family == "multinomial":
        from scipy import special

        shares = special.softmax(np.column_stack([np.zeros(len(eta)), eta]), axis=1)
        levels = np.eye(shares.shape[1])[:, 1:]
        apart = levels - shares[:, None, 1:]  # of the logarithm of each level's probability [n, L, G]
        spread = shares[:, 1:, None] * (np.eye(eta.shape[1]) - shares[:, None, 1:])
        both = apart[:, :, :, None] * apart[:, :, None, :] - spread[:, None]
        return shares[:, :, None] * apart, shares[:, :, None, None] * both
    if family == "gaussian":
        first, second = np.ones_like(eta), np.zeros_like(eta)
    elif family in ("binomial", "ordinal"):
        small = np.exp(-np.abs(eta))
        first = small / np.square(1 + small)
        second = -np.tanh(eta / 2) * first  # 1 - 2 mean
    else:
        first = second = np.exp(np.minimum(eta, _LARGEST))
    # a predictor of ordered levels is the logit of being above one, which its own level loses and the next one gains
    count = eta.shape[1]
    gains = np.eye(count + 1)[:, 1:] - np.eye(count + 1)[:, :-1] if family == "ordinal" else np.ones((1, 1))
    return first[:, None] * gains, (second[:, None] * gains)[..., None] * np.eye(count)


def _power_terms(y: Floats, eta: Floats, power: float) -> RowTerms:
    """Return the terms of rows whose variance is the power of the mean, 2 for the gamma distribution.

    The value is the quasi-likelihood for a dispersion of 1 (McCullagh and Nelder 1989, section 9.2.2), and second
    derivatives are the expected ones, as in R and statsmodels.
    """
    eta = np.clip(eta, -_LARGEST / 3, _LARGEST / 3)
    mean, size = np.exp(eta), np.exp((2 - power) * eta)  # the mean to the power of 2 - p
    score = (y - mean) * np.exp((1 - power) * eta)
    if power == 2:
        value, saturated = -y / mean - eta, -1 - np.log(np.maximum(y, 1e-300))
    else:
        value = y * np.exp((1 - power) * eta) / (1 - power) - size / (2 - power)
        saturated = y ** (2 - power) * (1 / (1 - power) - 1 / (2 - power))
    return RowTerms(value, 2 * (saturated - value), np.square(y - mean) * np.exp(-power * eta), (score,), ((size,),))


def level_terms(family: Family, y: Floats, eta: Floats) -> RowTerms:
    """Return the terms of rows whose target is one of G + 1 levels.

    Args:
        family: "ordinal", for proportional odds (McCullagh 1980), or "multinomial".
        y: numbers of levels [n], from 0.
        eta: linear predictors [n, G]: logits of being above a level, in order; or logarithms of odds against the first.
    """
    from scipy import special

    index, level = np.arange(len(y)), y.astype(np.int64)
    scores, weights = np.zeros(eta.shape), np.zeros((*eta.shape, eta.shape[1]))
    if family == "multinomial":
        padded = np.column_stack([np.zeros(len(y)), eta])
        value = padded[index, level] - special.logsumexp(padded, axis=1)
        shares = special.softmax(padded, axis=1)
        scores = (level[:, None] == np.arange(padded.shape[1])) - shares
        weights = shares[:, :, None] * (np.eye(padded.shape[1]) - shares[:, None, :])
        scores, weights = scores[:, 1:], weights[:, 1:, 1:]
    else:
        above = np.column_stack([np.full(len(y), np.inf), eta, np.full(len(y), -np.inf)])
        upper, lower = above[index, level], above[index, level + 1]
        # expit(a) - expit(b) = expit(a) expit(-b) (1 - exp(b - a)), which keeps its digits; where a step has crossed
        # thresholds, a value that is worse than any
        gap = np.maximum(-np.expm1(np.minimum(lower - upper, _LARGEST)), 1e-100)
        value = special.log_expit(upper) + special.log_expit(-lower) + np.log(gap)
        ratios = (
            special.log_expit(-upper) - special.log_expit(-lower),
            special.log_expit(lower) - special.log_expit(upper),
        )
        both = (level > 0) & (level < eta.shape[1])
        first = [sign * np.exp(np.minimum(ratio, 100)) / gap for sign, ratio in zip((1, -1), ratios, strict=True)]
        for rows, column, end, slope in (
            (level > 0, level - 1, upper, first[0]), (level < eta.shape[1], level, lower, first[1])
        ):  # fmt: skip
            scores[index[rows], column[rows]] = slope[rows]
            curve = slope * (slope - special.expit(-end) + special.expit(end))
            weights[index[rows], column[rows], column[rows]] = curve[rows]
        mixed = (first[0] * first[1])[both]
        weights[index[both], level[both] - 1, level[both]] = weights[index[both], level[both], level[both] - 1] = mixed
    return RowTerms(value, -2 * value, 0 * y, tuple(scores.T), tuple(tuple(part.T) for part in weights.swapaxes(0, 1)))


def terms_of(
    plan: ModelPlan, y: Floats, x: Floats, offset: Floats, point: Floats
) -> tuple[RowTerms, list[Floats]]:  # fmt: skip
    """Return the terms of rows at a point, and what each linear predictor is a sum of [n, q], by the parameters.

    Args:
        plan: the model.
        y, x, offset: targets [n], regressors as of `ModelRows.design`, and offsets [n].
        point: the parameters [q].
    """
    assert plan.family != "cox"
    assert plan.family != "survival"
    designs = designs_of(plan, x)
    if plan.levels:
        eta = np.column_stack([design @ point for design in designs]) + offset[:, None]
        return level_terms(plan.family, y, eta), designs
    terms = row_terms(plan.family, y, x @ point[: plan.width] + offset, float(point[-1]), plan.power)
    return terms, designs


def designs_of(plan: ModelPlan, x: Floats) -> list[Floats]:
    """Return what each linear predictor is a sum of [n, q], by the parameters; the dispersion's comes last."""
    units = np.eye(max(1, len(plan.levels) - 1))
    if plan.family == "ordinal":
        return [np.column_stack([np.tile(row, (len(x), 1)), x]) for row in units]
    if plan.family == "negative_binomial":
        return [np.column_stack([x, np.zeros(len(x))]), np.column_stack([np.zeros_like(x), np.ones(len(x))])]
    return [np.asarray(np.kron(row, x), dtype=np.float64) for row in units]


def likelihood(terms: RowTerms, designs: Sequence[Floats], weight: Floats) -> Likelihood:
    """Return the sums of rows with weights [n], whose predictors are sums of these columns [n, q] each."""
    # the observed information; for canonical links it is the expected one as well
    information = reduce(np.add, (
        (first * (weight * second)[:, None]).T @ other
        for first, row in zip(designs, terms.weights, strict=True)
        for other, second in zip(designs, row, strict=True)
    ))  # fmt: skip
    score = reduce(np.add, (x.T @ (weight * part) for x, part in zip(designs, terms.scores, strict=True)))
    value, deviance, squares = (float(weight @ part) for part in terms[:3])
    return Likelihood(value, deviance, squares, score, information)


def row_scores(terms: RowTerms, designs: Sequence[Floats], weight: Floats) -> Floats:
    """Return each row's share of the score [n, q]."""
    return reduce(np.add, (x * (weight * part)[:, None] for x, part in zip(designs, terms.scores, strict=True)))


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


_NODES = 40  # of the quadrature: its error is below 1e-10 for smooth likelihoods


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
    # V^-1 by the Woodbury identity: its determinant and its quadratic forms need only sums of the client's rows
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
    mode, curvature = mode_of(family, y, eta, weight, deviation)
    nodes, node_weights = np.polynomial.hermite.hermgauss(_NODES)
    spread = math.sqrt(2 / curvature)
    # nodes are placed around this client's mode (adaptive): around 0 they would miss a peak of many rows
    places = mode + spread * nodes
    shares, scores, informations = np.zeros(_NODES), [], []
    for node, place in enumerate(places):
        sums = likelihood(
            row_terms(family, y, eta + deviation * place), [np.column_stack([x, np.full(len(y), place)])], weight
        )
        # on the log scale, since the likelihood of thousands of rows underflows, and so may weights of outer nodes
        shares[node] = sums.value - place**2 / 2 + nodes[node] ** 2 + math.log(max(node_weights[node], 1e-300))
        scores.append(sums.score)
        informations.append(sums.information)
    # the largest share is factored out before exp, so that at least one term is 1
    largest = float(shares.max())
    shares = np.exp(shares - largest)
    value = largest + math.log(float(shares.sum())) + math.log(spread) - math.log(2 * math.pi) / 2
    shares /= shares.sum()
    score = shares @ np.array(scores)
    # Louis 1982: information of the rows, less what varies with the intercept that is not seen
    apart = np.array(scores) - score
    information = np.tensordot(shares, np.array(informations), 1) - (apart * shares[:, None]).T @ apart
    return Likelihood(value, -2 * value, 0.0, score, information)


def mode_of(family: Family, y: Floats, eta: Floats, weight: Floats, deviation: float) -> tuple[float, float]:
    """Return the most likely intercept of a client in units of its deviation, and the curvature there."""
    place = 0.0
    for _ in range(100):
        terms = row_terms(family, y, eta + deviation * place)
        slope = deviation * float(weight @ terms.scores[0]) - place
        curvature = 1 + deviation**2 * float(weight @ terms.weights[0][0])
        step = slope / curvature
        place += min(max(step, -1.0), 1.0)  # a full step may overflow a Poisson mean
        # an inexact mode costs accuracy of the quadrature and no correctness: nodes are only placed by it
        if abs(step) < 1e-10:
            break
    return place, curvature


class PartialLikelihood(NamedTuple):
    """The partial likelihood of some rows, with score residuals of rows [n, p] and Schoenfeld residuals [n, p].

    A score residual is how fast the score changes with the logarithm of the row's weight.  A Schoenfeld residual is
    that of a row with an event, and 0 of others.  `expected` are the events that are expected of rows [n], the weight
    that they have in all risk sets; `contributions` yields what rows contribute to the sums [n, k].
    """

    sums: Likelihood
    scores: Floats
    schoenfeld: Floats
    expected: Floats
    contributions: Callable[[], Iterator[Floats]]


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
    # without events there is no risk set, and the arrays below would have no times to be indexed by
    if not event.any():
        nothing = np.zeros_like(x)
        return PartialLikelihood(
            Likelihood(0.0, 0.0, 0.0, np.zeros(x.shape[1]), np.zeros((x.shape[1],) * 2)),
            nothing,
            nothing,
            np.zeros(len(x)),
            lambda: iter(()),
        )
    # a factor common to all hazards cancels in their ratios: with it no exponential overflows
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
    # one pass for all times: rows at risk at a time are those that leave at it or later, less those not yet in
    at_risk = np.cumsum(change[::-1], axis=0)[::-1]
    # -1 is the last place of `summed`, which is cut off: rows without an event are in no sum of the dying
    deadly = np.where(died, group, -1)
    dying, deaths = summed(deadly, weighted), summed(deadly, event).astype(int)
    # tied events of different weights share one factor, as in R's survival
    mean_weight = summed(deadly, weight) / deaths
    # one term for each event: with Efron's method a tied one leaves a share of the others in its risk set
    place = np.repeat(np.arange(len(times)), deaths)
    order = np.arange(len(place)) - np.repeat(np.cumsum(deaths) - deaths, deaths)
    share = order / deaths[place] if ties == "efron" else np.zeros(len(place))
    each = mean_weight[place]
    terms = at_risk[place] - share[:, None] * dying[place]
    mean = terms[:, 1:] / terms[:, :1]

    def cumulated(values: Floats) -> Floats:
        """Return the sums [n, k] of events' values [events, k] over the risk sets of each row."""
        totals = np.vstack([np.cumsum(summed(place, values), axis=0), np.zeros(values.shape[1])])
        # what rows that die have less of them, where ties share a risk set
        less = np.vstack([summed(place, share[:, None] * values), np.zeros(values.shape[1])])
        return np.asarray(totals[group] - totals[before] - less[deadly])

    # 1 / S0 and mean / S0
    rate = each[:, None] * np.column_stack([np.ones(len(place)), mean]) / terms[:, :1]
    exposure = cumulated(rate)
    means = summed(place, mean / deaths[place][:, None])
    schoenfeld = np.where(died[:, None], x - means[deadly], 0.0)
    # Lin and Wei 1989: its event's residual, less what is expected of the row in each risk set that it is in
    scores = weight[:, None] * schoenfeld - hazard[:, None] * (exposure[:, :1] * x - exposure[:, 1:])
    # the shift comes back here, weighted like the terms that it was taken from
    value = float(weight[died] @ eta[died]) - float(each @ np.log(terms[:, 0])) - shift * float(each.sum())
    information = (x * (hazard * exposure[:, 0])[:, None]).T @ x - (each[:, None] * mean).T @ mean
    sums = Likelihood(value, -2 * value, 0.0, weight @ schoenfeld, information)

    expected = hazard * exposure[:, 0]

    def contributions() -> Iterator[Floats]:
        logarithms = np.append(summed(place, each * np.log(terms[:, 0])) / deaths, 0.0)
        values = np.where(died, weight * (eta - shift) - logarithms[deadly], 0.0)
        yield np.column_stack([values, expected])
        yield scores
        for column in range(x.shape[1]):
            # the covariance in a risk set is a mean over its rows, so each has a share of it
            own, squares = x[:, column : column + 1], cumulated(rate[:, 1 + column :] * mean[:, column : column + 1])
            others, means_of_others = x[:, column:], exposure[:, 1 + column :]
            apart = exposure[:, :1] * own * others - own * means_of_others
            yield hazard[:, None] * (apart - exposure[:, 1 + column : 2 + column] * others + squares)

    return PartialLikelihood(sums, scores, schoenfeld, expected, contributions)


def counted_times(groups: Floats, time: Floats, event: Floats, times: Floats) -> Floats:
    """Return events and other ends of each group in the intervals up to some times, flat [2 groups times].

    Args:
        groups: membership of rows [n, groups], 0 or 1.
        time, event: of rows [n].
        times: ends of intervals [t], increasing.  Who is there after the last one is counted nowhere.
    """
    # the first end that is not before the time: intervals are open below and have their upper end
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
    # after the last row nobody is at risk, and nobody dies
    share = at_risk / np.maximum(everybody, 1)
    # the hypergeometric variance; with one row at risk it is 0, which the maximum leaves it
    factor = died * (everybody - died) / np.maximum(everybody - 1, 1)
    covariance = np.diag((share * factor).sum(1)) - (share * factor) @ share.T
    return LogRank(deaths.sum(1), (share * died).sum(1), covariance)
