"""Newton's method for the likelihood of all rows, of which each step asks for sums.

What a client answers about its own rows for a model: one vector of sums for each question.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from piebald.core.errors import SettingError
from piebald.core.moments import Floats
from piebald.statistics.models.likelihood import (
    Likelihood,
    PartialLikelihood,
    cluster_scores,
    counted_times,
    likelihood,
    log_rank,
    marginal_likelihood,
    normal_sums,
    partial_likelihood,
    row_scores,
    row_terms,
)
from piebald.statistics.models.rows import Ask, ModelPlan, ModelRows, Scale

_TOLERANCE = 1e-14  # of what a step still gains, in units of the log-likelihood: a ten-millionth of a standard error
_NOTHING = 1e-22  # a gain that rounding errors make
_LEAST = -16.0  # log alpha of a negative binomial, below which it is a Poisson model to all digits
TRANSFORMS: tuple[Callable[[Floats], Floats], ...] = (lambda time: time, np.log)
TABLE = 2.0  # the number of a function of time that comes as a table: its times, then its values


class Maximum(NamedTuple):
    """A maximum of a likelihood.

    Attributes:
        point: parameters [q].
        sums: the likelihood there.
        covariance: of the parameters [q, q].
        dispersion: the residual variance of "gaussian", else 1.
        questions: how often the likelihood was asked for.
    """

    point: Floats
    sums: Likelihood
    covariance: Floats
    dispersion: float
    questions: int


def maximised(
    likelihood: Callable[[Floats], Likelihood], plan: ModelPlan, rows: int, *, start: Floats | None = None,
    names: Sequence[str] = (), most: int = 50,
) -> Maximum:  # fmt: skip
    """Return the maximum of a likelihood.

    Args:
        likelihood: returns it at a point [q].
        plan: the model.
        rows: how many rows it has.
        start: where to begin, 0 by default.
        names: of the parameters, for errors.
        most: questions at most.

    Raises:
        SettingError: there is no finite estimate, or not a single one.
    """
    point = np.zeros(plan.parameters) if start is None else start
    if rows <= len(point):
        raise SettingError(f"{len(point)} coefficients need more than {len(point)} rows without gaps, got {rows}")
    sums = likelihood(point)
    scale = max(sums.deviance / rows, 0.0) if plan.family == "gaussian" else 1.0
    questions = 1
    while True:
        step = _step(sums, names, plan, first=questions == 1)
        gain = float(sums.score @ step)
        if abs(gain) <= _NOTHING * scale:
            break
        if plan.family == "negative_binomial" and point[-1] < _LEAST:
            raise SettingError(
                "the target is no more dispersed than a Poisson model says, so the negative binomial has no finite "
                "estimate: take the family 'poisson'"
            )
        after = likelihood(point + step)
        questions += 1
        while not after.value >= sums.value - 1e-9 * abs(sums.value) - 1e-9 and questions < most:  # too far
            step = step / 2
            after = likelihood(point + step)
            questions += 1
        point, sums = point + step, after
        if abs(gain) <= _TOLERANCE * scale:
            break
        if questions >= most:
            reason = "its numbers may be too unlike for this model"
            if plan.family in ("binomial", "cox"):
                reason = "a combination of columns probably separates the outcomes: leave one out"
            raise SettingError(f"the model has no finite estimate after {most} iterations; {reason}")
    _step(sums, names, plan, first=False)  # where outcomes are separated, information has vanished by now
    dispersion = sums.deviance / (rows - len(point)) if plan.family == "gaussian" else 1.0
    return Maximum(point, sums, dispersion * inverse(sums.information), dispersion, questions)


def _step(sums: Likelihood, names: Sequence[str], plan: ModelPlan, first: bool) -> Floats:
    """Return the step of Newton's method.

    Raises:
        SettingError: columns depend on each other, or separate the target.
    """
    width = plan.width  # of columns; they are standard scores, so that one threshold fits all of them
    information = sums.information[:width, :width]
    values, vectors = np.linalg.eigh(information)
    if width and values[0] <= max(1e-11 * values[-1], 1e-9):
        by_weight = np.argsort(-np.abs(vectors[:, 0]))
        involved = [names[place] for place in by_weight if abs(vectors[place, 0]) > 0.1] if len(names) else ["these"]
        where = "within each client" if plan.has_times and plan.stratified else "over all clients"
        reason = f"are constant or depend on each other {where}" if first else "separate the target"
        raise SettingError(f"the columns {', '.join(involved[:4])} {reason}: leave one of them out")
    return np.asarray(np.linalg.solve(uphill(sums.information), sums.score))


def inverse(matrix: Floats) -> Floats:
    """Return the inverse of a matrix [q, q]."""
    return np.asarray(np.linalg.inv(matrix), dtype=np.float64)


def uphill(information: Floats) -> Floats:
    """Return an information [q, q] whose eigenvalues are positive, so that its step leads uphill."""
    values, vectors = np.linalg.eigh(information)
    if values[0] > 0:
        return information
    return np.asarray((vectors * np.maximum(np.abs(values), 1e-3 * max(abs(values[-1]), 1.0))) @ vectors.T)


class Mixed(NamedTuple):
    """A model with a random intercept: coefficients [p], their covariance, variances, and -2 log-likelihood.

    The covariance is that of the observed information about coefficients and the variance of intercepts.
    """

    point: Floats
    covariance: Floats
    residual: float
    between: float
    value: float


def normal_mixed(sums: Callable[[float], Floats], width: int, reml: bool) -> Mixed:
    """Return the linear mixed model, by the root of its profile likelihood's derivative (Bates et al. 2015, section 3).

    Args:
        sums: returns those of `random_intercept.normal_sums` over all clients, for a ratio of variances.
        width: p, the number of coefficients.
        reml: whether the restricted likelihood is maximised.
    """
    from scipy import optimize

    answers: dict[float, Floats] = {}

    def at(ratio: float) -> tuple[float, Floats, float, float, Floats]:
        """Return the slope of -2 log-likelihood, coefficients, the residual variance, the value, and the information
        about coefficients and the ratio [p + 1, p + 1].
        """
        if ratio not in answers:
            answers[ratio] = sums(ratio)
        rows, log_shrunk, slope, curve = answers[ratio][:4].tolist()
        matrix, change, second = answers[ratio][4:].reshape(3, width + 1, width + 1)
        inner = matrix[:-1, :-1]
        if not np.linalg.eigvalsh(inner)[0] > 1e-9:
            raise SettingError("the columns depend on each other over all clients: leave one of them out")
        point: Floats = np.asarray(np.linalg.solve(inner, matrix[:-1, -1]), dtype=np.float64)
        degrees = rows - width if reml else rows
        squares = float(matrix[-1, -1] - point @ matrix[:-1, -1])
        if squares <= 1e-14 * matrix[-1, -1]:
            raise SettingError("the columns explain the target exactly, so there is no variance to divide: see `glm`")
        ends = np.append(-point, 1.0)
        by_ratio = float(ends @ change @ ends) / squares
        slope, curve = (
            slope + degrees * by_ratio,
            curve + degrees * (float(ends @ second @ ends) / squares - by_ratio**2),
        )
        value = degrees * (math.log(2 * math.pi * squares / degrees) + 1) + log_shrunk
        if reml:
            inverted = inverse(inner)
            turned = inverted @ change[:-1, :-1]
            slope += float(np.trace(turned))
            curve += float(np.trace(inverted @ second[:-1, :-1]) - np.trace(turned @ turned))
            value += float(np.linalg.slogdet(inner)[1])
        across = -(change[:-1] @ ends)[:, None] * degrees / squares
        information = np.block([[inner * degrees / squares, across], [across.T, np.array([[curve / 2]])]])
        return slope, point, squares / degrees, value, information

    ratio = 0.0
    if at(0.0)[0] < 0:
        high = 1.0
        while at(high)[0] < 0 and high < 1e12:
            high *= 8
        low = high / 8 if high > 1 else 1e-12
        ratio = float(optimize.brentq(lambda place: at(place)[0], low, high, xtol=1e-15, rtol=1e-14))
    _, point, residual, value, information = at(ratio)
    # the variance of intercepts is estimated too, but where it is at its bound
    covariance = inverse(information if ratio else information[:-1, :-1])[:width, :width]
    return Mixed(point, covariance, residual, ratio * residual, value)


def quadrature_mixed(likelihood: Callable[[Floats], Likelihood], start: Floats, most: int) -> Mixed:
    """Return the mixed model of targets that are not normal, by Newton's method on its marginal likelihood.

    Args:
        likelihood: returns it at coefficients and the deviation of intercepts [p + 1].
        start: coefficients without random intercepts [p].
        most: questions at most.

    Raises:
        SettingError: it has no maximum after so many questions.
    """
    point = np.append(start, 0.5)
    sums, questions = likelihood(point), 1
    while questions < most:
        step = np.linalg.solve(uphill(sums.information), sums.score)
        gain = float(sums.score @ step)
        step *= min(1.0, 2 / max(float(np.abs(step).max()), 1e-300))
        after = likelihood(point + step)
        questions += 1
        while not after.value >= sums.value - 1e-12 * abs(sums.value) and questions < most:
            step = step / 2
            after = likelihood(point + step)
            questions += 1
        point, sums = point + step, after
        flat = abs(point[-1]) < 1e-4 and sums.information[-1, -1] > 0  # the maximum is where intercepts are the same
        if abs(gain) <= _TOLERANCE or flat:
            break
    else:
        raise SettingError(f"the model has no estimate after {most} iterations: leave a column out")
    if abs(point[-1]) < 1e-4:
        return Mixed(point[:-1], inverse(sums.information[:-1, :-1]), 1.0, 0.0, -2 * sums.value)
    return Mixed(point[:-1], inverse(sums.information)[:-1, :-1], 1.0, float(point[-1]) ** 2, -2 * sums.value)


def client_sums(plan: ModelPlan, ask: Ask, rows: ModelRows, numbers: Floats) -> Floats:
    """Return the sums of one client [plan.length].

    Args:
        plan: the columns of the model.
        ask: the question: "moments" of the columns, around a centre; the "likelihood" at a point and its derivatives;
            outer products of clusters' "scores" there; "random" intercepts, at a ratio of variances or a point;
            the client's own model for a "two_stage" estimate, around a centre and with variances between clients;
            "schoenfeld" residuals at a point, with the number of a function of time, or a table of it; "counts" of
            times; the "logrank" test of the client's own rows.
        rows: the client's rows.
        numbers: the means and deviations of the columns, then what the question needs.

    Raises:
        SettingError: the sums are not finite.
    """
    columns = len(plan.columns)
    scale, point = Scale(numbers[:columns], numbers[columns : 2 * columns]), numbers[2 * columns :]
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.asarray(_ANSWERS[ask](plan, rows, scale, point), dtype=np.float64)
    if not np.isfinite(sums).all():
        raise SettingError("the sums at these coefficients are not finite: its numbers may be too unlike for the model")
    return sums


def _moments(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    apart = (rows.x - scale.mean) / scale.spread
    exposure = np.exp(rows.offset) if plan.family in ("poisson", "negative_binomial") else np.ones(len(rows.y))
    exposed = rows.y.sum() if plan.has_times else rows.weight @ exposure
    heads = [len(rows.y), rows.dropped, len(rows.y) > 0, rows.y.any()]
    heads += [rows.weight.sum(), rows.weight @ rows.y, rows.weight @ rows.offset, exposed]
    return np.concatenate([np.array(heads, dtype=np.float64), apart.sum(0), np.square(apart).sum(0)])


def _likelihood(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    x = rows.design(plan, scale)
    if plan.family == "cox":
        parts = [part.sums.flat for _, part in _partial(plan, rows, x, point)]
        return np.asarray(np.sum(parts, axis=0))
    assert plan.family != "survival"
    terms = row_terms(plan.family, rows.y, x @ point[: plan.width] + rows.offset, float(point[-1]))
    return likelihood(terms, x, rows.weight).flat


def _scores(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    x = rows.design(plan, scale)
    if plan.family == "cox":
        scores = np.zeros_like(x)
        for place, part in _partial(plan, rows, x, point):
            scores[place] = part.scores
    else:
        assert plan.family != "survival"
        terms = row_terms(plan.family, rows.y, x @ point[: plan.width] + rows.offset, float(point[-1]))
        scores = row_scores(terms, x, rows.weight)
    return cluster_scores(scores, rows.cluster)


def _random(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    x = rows.design(plan, scale)
    if plan.family == "gaussian":
        return normal_sums(x, rows.y - rows.offset, rows.weight, float(point[0]))
    assert plan.family in ("binomial", "poisson")
    return marginal_likelihood(plan.family, x, rows.y, rows.offset, rows.weight, point).flat


def _two_stage(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    """Return 5 sums of each parameter: the client, its weight, its distance from the centre, its square, weight^2."""
    width = plan.parameters
    centre, between = point[:width], point[width:]
    try:
        fit = maximised(
            lambda place: Likelihood.of_flat(_likelihood(plan, rows, scale, place), width), plan, len(rows.y)
        )
    except SettingError:  # no model of its own: too few rows, or an estimate that is not finite
        return np.zeros(5 * width)
    back = scale.from_scores(width)
    apart = back @ fit.point - centre
    weight = 1 / (np.diag(back @ fit.covariance @ back.T) + between)
    return np.concatenate([np.ones(width), weight, weight * apart, weight * np.square(apart), np.square(weight)])


def _schoenfeld(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    x, died, width = rows.design(plan, scale), rows.y > 0, plan.width
    kind, table = point[width], point[width + 1 :].reshape(2, -1)
    times, weight = rows.time[died], rows.weight[died]
    times = table[1][np.searchsorted(table[0], times)] if kind == TABLE else TRANSFORMS[int(kind)](times)
    residuals = np.zeros_like(x)
    for place, part in _partial(plan, rows, x, point[:width]):
        residuals[place] = part.schoenfeld
    return np.concatenate([[weight.sum(), weight @ times, weight @ times**2], (weight * times) @ residuals[died]])


def _counts(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    return counted_times(_groups(rows), rows.time, rows.y, point)


def _logrank(plan: ModelPlan, rows: ModelRows, scale: Scale, point: Floats) -> Floats:
    groups = _groups(rows)
    times = np.unique(rows.time)
    events, others = counted_times(groups, rows.time, rows.y, times).reshape(2, groups.shape[1], len(times))
    return log_rank(at_risk_of(events, others), events).flat


def at_risk_of(events: Floats, others: Floats) -> Floats:
    """Return the rows at risk at each time [g, t], from the events and other ends of each."""
    return np.cumsum((events + others)[:, ::-1], axis=1)[:, ::-1]


def _groups(rows: ModelRows) -> Floats:
    return rows.x if rows.x.shape[1] else np.ones((len(rows.y), 1))


def _partial(
    plan: ModelPlan, rows: ModelRows, x: Floats, point: Floats
) -> list[tuple[np.ndarray[tuple[int], np.dtype[np.bool_]], PartialLikelihood]]:
    """Return the rows of each stratum and their partial likelihood; one stratum of no rows where there are none."""
    eta = x @ point + rows.offset
    parts = []
    for stratum in np.unique(rows.stratum) if plan.stratified and len(rows.y) else [None]:
        place = np.ones(len(rows.y), dtype=bool) if stratum is None else rows.stratum == stratum
        part = partial_likelihood(
            x[place], rows.time[place], rows.y[place], eta[place], rows.weight[place], rows.entry[place], plan.ties
        )
        parts.append((place, part))
    return parts


_ANSWERS: dict[Ask, Callable[[ModelPlan, ModelRows, Scale, Floats], Floats]] = {
    "moments": _moments, "likelihood": _likelihood, "scores": _scores, "random": _random, "two_stage": _two_stage,
    "schoenfeld": _schoenfeld, "counts": _counts, "logrank": _logrank,
}  # fmt: skip
