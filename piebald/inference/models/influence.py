"""What each row contributes to the sums of a model, by which a site decides whether it tells them.

Contributions add up to the sums that leave: a sum of rows is divided among its rows, and one over risk sets among the
rows that are in them.  Blocks [n, k] hold the contributions of n rows, or of n clusters, to k sums, so that a matrix of
coefficients is never held for all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from piebald.contracts import Disclosure
from piebald.core.moments import Floats
from piebald.inference.models.likelihood import RowTerms, cluster_sums, row_terms
from piebald.inference.models.likelihood import row_scores as scores_of
from piebald.inference.models.random_intercept import mode_of
from piebald.inference.models.rows import Ask, ModelPlan, ModelRows, Scale
from piebald.inference.models.sums import TRANSFORMS, groups_of, own_model, partial_likelihoods, row_scores

Blocks = Iterator[Floats]


def check_sums(plan: ModelPlan, ask: Ask, rows: ModelRows, numbers: Floats, rules: Disclosure) -> None:
    """Refuse the sums of a client that rules of disclosure do not allow.

    Args:
        plan, ask, rows, numbers: as of `sums.client_sums`, at whose numbers influence is measured.
        rules: of the site.

    Raises:
        Withheld: few rows decide a sum.
    """
    columns = len(plan.columns)
    scale, point = Scale(numbers[:columns], numbers[columns : 2 * columns]), numbers[2 * columns :]
    rules.check_counts(np.array([len(rows.y), rows.dropped, rows.support]))
    # as DataSHIELD's `nfilter.glm`: with as many coefficients as rows, sums are as good as the rows; those of clients
    # are one for the rows of each
    if 3 * (plan.parameters - len(plan.of_clients)) > len(rows.y) > 0:
        rules.check([np.ones((1, 1))])
    units = rows.cluster if plan.cluster else None
    with np.errstate(over="ignore", invalid="ignore"):
        rules.check(_CONTRIBUTIONS[ask](plan, rows, scale, point, rules), units)


def _moments(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats, rules: Disclosure) -> Blocks:
    apart = (rows.x - scale.mean) / scale.spread
    offset = rows.weight * np.exp(rows.offset) if plan.family in ("poisson", "negative_binomial") else rows.weight
    yield np.column_stack([rows.weight, rows.weight * rows.y, rows.weight * rows.offset, offset])
    yield apart
    yield np.square(apart)


def _likelihood(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats, rules: Disclosure) -> Blocks:
    x = rows.design(plan, scale)
    if plan.family == "cox":
        for _, part in partial_likelihoods(plan, rows, x, point):
            yield from part.contributions()
    else:
        assert plan.family != "survival"
        yield from _of_terms(row_terms(plan.family, rows.y, x @ point[: plan.width] + rows.offset, float(point[-1])),
                             x, rows.weight)  # fmt: skip


def _of_terms(terms: RowTerms, x: Floats, weight: Floats) -> Blocks:
    yield np.column_stack([weight * terms.value, weight * terms.deviance])
    yield scores_of(terms, x, weight)
    yield from _products(x, weight * terms.weight)
    if terms.by_dispersion is not None:
        _, second, mixed = terms.by_dispersion
        yield np.column_stack([x * (weight * mixed)[:, None], weight * second])


def _products(x: Floats, weight: Floats) -> Blocks:
    """Yield contributions to the sum of outer products of rows, one line of the matrix at a time."""
    for column in range(x.shape[1]):
        yield x[:, column:] * (weight * x[:, column])[:, None]


def _scores(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats, rules: Disclosure) -> Blocks:
    scores = row_scores(plan, rows, scale, point)
    yield scores
    if plan.family == "cox":
        yield from _expected(plan, rows, rows.design(plan, scale), point)
    # a client that is one cluster sends the product of its score with itself, which tells no more than the score
    if plan.cluster != "":
        clusters = cluster_sums(scores, rows.cluster)
        rules.check(_products(clusters, np.ones(len(clusters))))


def _expected(plan: ModelPlan, rows: ModelRows, x: Floats, point: Floats) -> Blocks:
    """Yield the weights of rows in risk sets: at large coefficients one row is the mean of all that it is in."""
    for _, part in partial_likelihoods(plan, rows, x, point):
        yield part.expected[:, None]


def _random(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats, rules: Disclosure) -> Blocks:
    x = rows.design(plan, scale)
    if plan.family == "gaussian":
        columns = np.column_stack([x, rows.y - rows.offset])
        yield columns * rows.weight[:, None]
        yield from _products(columns, rows.weight)
    else:
        assert plan.family in ("binomial", "poisson")
        eta, deviation = x @ point[:-1] + rows.offset, float(point[-1])
        # the quadrature's nodes lie around the mode, where the integral has most of its value
        mode, _ = mode_of(plan.family, rows.y, eta, rows.weight, deviation)
        yield from _of_terms(row_terms(plan.family, rows.y, eta + deviation * mode), x, rows.weight)


def _two_stage(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats, rules: Disclosure) -> Blocks:
    fit = own_model(plan, rows, scale)
    if fit is not None:
        yield from _likelihood(plan, rows, scale, fit.point, rules)


def _schoenfeld(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats, rules: Disclosure) -> Blocks:
    kind, died = int(point[plan.width]), rows.y > 0
    if kind not in range(len(TRANSFORMS)):
        # a table of the asker's choice could be 1 for one event, so sites take stated functions of time alone
        rules.check([np.ones((1, 1))])
    # rows without an event contribute 0
    weight, times = rows.weight * died, TRANSFORMS[kind](np.where(died, rows.time, 1.0))
    yield np.column_stack([weight, weight * times, weight * times**2])
    yield from _expected(plan, rows, rows.design(plan, scale), point[: plan.width])
    residuals = np.zeros((len(rows.y), plan.width))
    for place, part in partial_likelihoods(plan, rows, rows.design(plan, scale), point[: plan.width]):
        residuals[place] = part.schoenfeld
    yield residuals * (weight * times)[:, None]


def _counts(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats, rules: Disclosure) -> Blocks:
    groups = groups_of(rows)
    # the rows beyond the last time are what is left of the group
    place = np.searchsorted(point, rows.time)
    for ends in (rows.y > 0, rows.y <= 0):
        counts = np.zeros((len(point) + 1, groups.shape[1]))
        np.add.at(counts, place[ends], groups[ends])
        rules.check_counts(counts[:-1])
    rules.check_counts(groups[place == len(point)].sum(0))
    yield groups


def _logrank(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats, rules: Disclosure) -> Blocks:
    groups = groups_of(rows)
    yield groups
    yield groups * (rows.y > 0)[:, None]
    times, place = np.unique(rows.time, return_inverse=True)
    died = np.bincount(place, rows.y > 0, len(times))
    at_risk = np.cumsum(np.bincount(place, minlength=len(times))[::-1])[::-1]
    # events that are expected of a row, from its first day to its last
    yield groups * np.cumsum(died / np.maximum(at_risk, 1))[place][:, None]


_CONTRIBUTIONS: dict[Ask, Callable[[ModelPlan, ModelRows, Scale, Floats, Disclosure], Blocks]] = {
    "moments": _moments, "likelihood": _likelihood, "scores": _scores, "random": _random, "two_stage": _two_stage,
    "schoenfeld": _schoenfeld, "counts": _counts, "logrank": _logrank,
}  # fmt: skip
