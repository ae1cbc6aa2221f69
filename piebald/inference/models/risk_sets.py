"""Sums of one client over risk sets: Cox's partial likelihood, its residuals, counts of times, and the log-rank test.

Cox 1972; tied times after Efron 1977 or Breslow 1974; score residuals after Lin and Wei 1989; Grambsch and Therneau
1994 for the test of proportional hazards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from piebald.core.moments import Floats, Ints
from piebald.inference.models.likelihood import Likelihood
from piebald.inference.models.rows import Ties


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
            Likelihood(0.0, 0.0, np.zeros(x.shape[1]), np.zeros((x.shape[1],) * 2)),
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
    sums = Likelihood(value, -2 * value, weight @ schoenfeld, information)

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
