"""What a client answers about its own rows for a model, and what each row contributes to it.

An answer is one vector of sums for each question.  Contributions add up to the sums that leave, and by them a site
decides whether it tells these: a sum of rows is divided among its rows, and one over risk sets among the rows that are
in them.  Blocks [n, k] hold the contributions of n rows, or of n clusters, to k sums, so that a matrix of coefficients
is never held for all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce

import numpy as np

from piebald.contracts import Disclosure
from piebald.core.errors import SettingError
from piebald.core.moments import Floats
from piebald.inference.models import likelihood as likelihoods
from piebald.inference.models.fitting import Maximum, maximised
from piebald.inference.models.likelihood import (
    Likelihood,
    PartialLikelihood,
    RowTerms,
    cluster_sums,
    counted_times,
    designs_of,
    likelihood,
    log_rank,
    marginal_likelihood,
    mode_of,
    normal_sums,
    partial_likelihood,
    row_terms,
    terms_of,
)
from piebald.inference.models.likelihood import row_scores as scores_of
from piebald.inference.models.rows import LOG_LINKS, Ask, ModelPlan, ModelRows, Scale

TRANSFORMS: tuple[Callable[[Floats], Floats], ...] = (lambda time: time, np.log)


TABLE = 2.0  # the number of a function of time that comes as a table: its times, then its values


def client_sums(plan: ModelPlan, ask: Ask, rows: ModelRows, numbers: Floats) -> Floats:
    """Return the sums of one client [plan.length].

    Args:
        plan: the columns of the model.
        ask: the question: "moments" of the columns, around a centre; the "likelihood" at a point and its derivatives;
            outer products of clusters' "scores" there; "random" intercepts, at a ratio of variances or a point;
            the client's own model for a "two_stage" estimate, around a centre and with variances between clients;
            "slopes" of the mean at a point, and how these change with the parameters;
            "schoenfeld" residuals at a point, with the number of a function of time, or a table of it; "counts" of
            times; the "logrank" test of the client's own rows.
        rows: the client's rows.
        numbers: the means and deviations of the columns, then what the question needs.

    Raises:
        SettingError: the sums are not finite.
    """
    columns = len(plan.columns)
    scale, point = Scale(numbers[:columns], numbers[columns : 2 * columns]), numbers[2 * columns :]
    # a step too far may overflow: what is not finite is refused below, with a sentence in place of a warning
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.asarray(_ANSWERS[ask](plan, rows, scale, point), dtype=np.float64)
    if not np.isfinite(sums).all():
        raise SettingError("the sums at these coefficients are not finite: its numbers may be too unlike for the model")
    return sums


def _moments(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    apart = (rows.x - scale.mean) / scale.spread
    exposure = np.exp(rows.offset) if plan.family in LOG_LINKS else np.ones(len(rows.y))
    exposed = rows.y.sum() if plan.has_times else rows.weight @ exposure
    heads = [len(rows.y), rows.dropped, len(rows.y) > 0, rows.y.any()]
    heads += [rows.weight.sum(), rows.weight @ rows.y, rows.weight @ rows.offset, exposed]
    return np.concatenate([np.array(heads, dtype=np.float64), apart.sum(0), np.square(apart).sum(0)])


def _likelihood(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    x = rows.design(plan, scale)
    if plan.family == "cox":
        # strata are compared within themselves, so their log partial likelihoods add up
        parts = [part.sums.flat for _, part in partial_likelihoods(plan, rows, x, point)]
        return np.asarray(np.sum(parts, axis=0))
    terms, designs = terms_of(plan, rows.y, x, rows.offset, point)
    return likelihood(terms, designs, rows.weight).flat


def row_scores(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    """Return each row's share of the score at a point [n, parameters]."""
    x = rows.design(plan, scale)
    if plan.family != "cox":
        terms, designs = terms_of(plan, rows.y, x, rows.offset, point)
        return likelihoods.row_scores(terms, designs, rows.weight)
    scores = np.zeros_like(x)
    for index, part in partial_likelihoods(plan, rows, x, point):
        scores[index] = part.scores
    return scores


def _scores(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    # only sums of outer products leave the client; where clusters cross clients, rows were joined before
    clusters = cluster_sums(row_scores(plan, rows, scale, point), rows.cluster)
    return np.concatenate([[float(len(clusters))], (clusters.T @ clusters).ravel()])


def _random(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    x = rows.design(plan, scale)
    if plan.family == "gaussian":
        # the identity link lets an offset be taken from the target
        return normal_sums(x, rows.y - rows.offset, rows.weight, float(point[0]))
    assert plan.family in ("binomial", "poisson")
    return marginal_likelihood(plan.family, x, rows.y, rows.offset, rows.weight, point).flat


def own_model(plan: ModelPlan, rows: ModelRows, scale: Scale) -> Maximum | None:
    """Return the model of the client's rows alone, None where they are too few or have no finite estimate."""
    try:
        return maximised(
            lambda point: Likelihood.of_flat(_likelihood(plan, rows, scale, point), plan.parameters), plan, len(rows.y)
        )
    except SettingError:
        return None


def _two_stage(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    """Return 5 sums of each parameter: the client, its weight, its distance from the centre, its square, weight^2."""
    width = plan.parameters
    centre, between = point[:width], point[width:]
    fit = own_model(plan, rows, scale)
    if fit is None:
        # in a sum zeros leave the client out, and under masks it must send something
        return np.zeros(5 * width)
    # coefficients are pooled in units of the columns, as clients would report them by themselves
    back = plan.from_scores(scale)
    apart = back @ fit.point - centre
    weight = 1 / (np.diag(back @ fit.covariance @ back.T) + between)
    return np.concatenate([np.ones(width), weight, weight * apart, weight * np.square(apart), np.square(weight)])


def _slopes(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    return np.asarray(_slopes_of_rows(plan, rows, scale, point).sum(0))


def _slopes_of_rows(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    """Return slopes of the mean or of levels' probabilities by linear predictors, and how they change with each
    parameter [n, L G (1 + q)].
    """
    if plan.has_times:
        raise SettingError(f"a model of the family {plan.family!r} has no mean: take another family")
    # a dispersion has a predictor of its own, on which no mean depends
    designs = np.stack(designs_of(plan, rows.design(plan, scale))[: max(1, len(plan.levels) - 1)], axis=1)
    first, second = likelihoods.slopes(plan.family, designs @ point + rows.offset[:, None])
    changes = np.einsum("nlgh,nhq->nlgq", second, designs)
    flat = [table.reshape(len(rows.y), -1) for table in (first, changes)]
    return np.concatenate(flat, axis=1) * rows.weight[:, None]


def _schoenfeld(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    x, died, width = rows.design(plan, scale), rows.y > 0, plan.width
    kind, table = point[width], point[width + 1 :].reshape(2, -1)
    times, weight = rows.time[died], rows.weight[died]
    times = table[1][np.searchsorted(table[0], times)] if kind == TABLE else TRANSFORMS[int(kind)](times)
    residuals = np.zeros_like(x)
    for index, part in partial_likelihoods(plan, rows, x, point[:width]):
        residuals[index] = part.schoenfeld
    return np.concatenate([[weight.sum(), weight @ times, weight @ times**2], (weight * times) @ residuals[died]])


def _counts(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    return counted_times(groups_of(rows), rows.time, rows.y, point)


def _logrank(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    groups = groups_of(rows)
    times = np.unique(rows.time)
    events, others = counted_times(groups, rows.time, rows.y, times).reshape(2, groups.shape[1], len(times))
    return log_rank(at_risk_of(events, others), events).flat


def at_risk_of(events: Floats, others: Floats) -> Floats:
    """Return the rows at risk at each time [g, t], from the events and other ends of each."""
    # rows at risk at a time are those that leave then or later
    return np.cumsum((events + others)[:, ::-1], axis=1)[:, ::-1]


def groups_of(rows: ModelRows) -> Floats:
    """Return the membership of rows in groups [n, groups]."""
    # without groups all rows are in one
    return rows.x if rows.x.shape[1] else np.ones((len(rows.y), 1))


def partial_likelihoods(
    plan: ModelPlan, rows: ModelRows, x: Floats, point: Floats
) -> list[tuple[np.ndarray[tuple[int], np.dtype[np.bool_]], PartialLikelihood]]:
    """Return the rows of each stratum and their partial likelihood; one stratum of no rows where there are none."""
    eta = x @ point + rows.offset
    parts = []
    # joined rows of several clients keep one stratum each; a client without rows still sends a vector of zeros
    for stratum in np.unique(rows.stratum) if plan.stratified and len(rows.y) else [None]:
        place = np.ones(len(rows.y), dtype=bool) if stratum is None else rows.stratum == stratum
        part = partial_likelihood(
            x[place], rows.time[place], rows.y[place], eta[place], rows.weight[place], rows.entry[place], plan.ties
        )
        parts.append((place, part))
    return parts


_ANSWERS: dict[Ask, Callable[[ModelPlan, ModelRows, Scale, Floats], Floats]] = {
    "moments": _moments, "likelihood": _likelihood, "scores": _scores, "random": _random, "two_stage": _two_stage,
    "slopes": _slopes, "schoenfeld": _schoenfeld, "counts": _counts, "logrank": _logrank,
}  # fmt: skip


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
    if plan.levels:
        rules.check_counts(np.bincount(rows.y.astype(np.int64), minlength=len(plan.levels)))
    # as DataSHIELD's `nfilter.glm`: with as many coefficients as rows, sums are as good as the rows; those of clients
    # are one for the rows of each
    if 3 * plan.parameters_in_clients > len(rows.y) > 0:
        rules.check([np.ones((1, 1))])
    units = rows.cluster if plan.cluster else None
    # what is computed on the way to a regressor, as if its own sum left: a step may single out one row that the
    # regressor hides among others, and subtract it in the next question
    rules.check([rows.steps], units)
    with np.errstate(over="ignore", invalid="ignore"):
        rules.check(_CONTRIBUTIONS[ask](plan, rows, scale, point, rules), units)


def _moments_by_row(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats, rules: Disclosure) -> Blocks:
    apart = (rows.x - scale.mean) / scale.spread
    offset = rows.weight * np.exp(rows.offset) if plan.family in LOG_LINKS else rows.weight
    yield np.column_stack([rows.weight, rows.weight * rows.y, rows.weight * rows.offset, offset])
    yield apart
    yield np.square(apart)


def _likelihood_by_row(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats, rules: Disclosure) -> Blocks:
    x = rows.design(plan, scale)
    if plan.family == "cox":
        for _, part in partial_likelihoods(plan, rows, x, point):
            yield from part.contributions()
    else:
        yield from _of_terms(*terms_of(plan, rows.y, x, rows.offset, point), rows.weight)


def _of_terms(terms: RowTerms, designs: Sequence[Floats], weight: Floats) -> Blocks:
    yield np.column_stack([weight * part for part in (terms.value, terms.deviance, terms.squares)])
    yield scores_of(terms, designs, weight)
    for column in range(designs[0].shape[1]):  # one line of the information at a time
        yield reduce(np.add, (
            first[:, column:] * (weight * second * other[:, column])[:, None]
            for first, row in zip(designs, terms.weights, strict=True)
            for other, second in zip(designs, row, strict=True)
        ))  # fmt: skip


def _products(x: Floats, weight: Floats) -> Blocks:
    """Yield contributions to the sum of outer products of rows, one line of the matrix at a time."""
    for column in range(x.shape[1]):
        yield x[:, column:] * (weight * x[:, column])[:, None]


def _scores_by_row(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats, rules: Disclosure) -> Blocks:
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


def _random_by_row(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats, rules: Disclosure) -> Blocks:
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
        yield from _of_terms(row_terms(plan.family, rows.y, eta + deviation * mode), [x], rows.weight)


def _two_stage_by_row(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats, rules: Disclosure) -> Blocks:
    fit = own_model(plan, rows, scale)
    if fit is not None:
        yield from _likelihood_by_row(plan, rows, scale, fit.point, rules)


def _slopes_by_row(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats, rules: Disclosure) -> Blocks:
    yield _slopes_of_rows(plan, rows, scale, point)


def _schoenfeld_by_row(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats, rules: Disclosure) -> Blocks:
    kind, died = int(point[plan.width]), rows.y > 0
    if kind not in range(len(TRANSFORMS)):
        # a table of the asker's choice could be 1 for one event, so sites take stated functions of time alone
        rules.check([np.ones((1, 1))])
    # rows without an event contribute 0
    weight, times = rows.weight * died, TRANSFORMS[kind](np.where(died, rows.time, 1.0))
    yield np.column_stack([weight, weight * times, weight * times**2])
    yield from _expected(plan, rows, rows.design(plan, scale), point[: plan.width])
    residuals = np.zeros((len(rows.y), plan.width))
    for index, part in partial_likelihoods(plan, rows, rows.design(plan, scale), point[: plan.width]):
        residuals[index] = part.schoenfeld
    yield residuals * (weight * times)[:, None]


def _counts_by_row(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats, rules: Disclosure) -> Blocks:
    groups = groups_of(rows)
    # the rows beyond the last time are what is left of the group
    place = np.searchsorted(point, rows.time)
    for ends in (rows.y > 0, rows.y <= 0):
        counts = np.zeros((len(point) + 1, groups.shape[1]))
        np.add.at(counts, place[ends], groups[ends])
        rules.check_counts(counts[:-1])
    rules.check_counts(groups[place == len(point)].sum(0))
    yield groups


def _logrank_by_row(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats, rules: Disclosure) -> Blocks:
    groups = groups_of(rows)
    yield groups
    yield groups * (rows.y > 0)[:, None]
    times, place = np.unique(rows.time, return_inverse=True)
    died = np.bincount(place, rows.y > 0, len(times))
    at_risk = np.cumsum(np.bincount(place, minlength=len(times))[::-1])[::-1]
    # events that are expected of a row, from its first day to its last
    yield groups * np.cumsum(died / np.maximum(at_risk, 1))[place][:, None]


_CONTRIBUTIONS: dict[Ask, Callable[[ModelPlan, ModelRows, Scale, Floats, Disclosure], Blocks]] = {
    "moments": _moments_by_row, "likelihood": _likelihood_by_row, "scores": _scores_by_row, "random": _random_by_row,
    "two_stage": _two_stage_by_row, "slopes": _slopes_by_row, "schoenfeld": _schoenfeld_by_row,
    "counts": _counts_by_row, "logrank": _logrank_by_row,
}  # fmt: skip
