"""Newton's method for the likelihood of all rows, of which each step asks for sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from piebald.core.errors import SettingError
from piebald.core.moments import Floats
from piebald.inference.models.likelihood import Likelihood
from piebald.inference.models.rows import DISPERSED, ModelPlan

_TOLERANCE = 1e-14  # of what a step still gains, in units of the log-likelihood: a ten-millionth of a standard error
_NOTHING = 1e-22  # a gain that rounding errors make
_LEAST = -16.0  # log alpha of a negative binomial, below which it is a Poisson model to all digits


class Maximum(NamedTuple):
    """A maximum of a likelihood.

    Attributes:
        point: parameters [q].
        sums: the likelihood there.
        covariance: of the parameters [q, q].
        dispersion: that of Pearson's residuals, of "gaussian" their variance; 1 for families without one.
    """

    point: Floats
    sums: Likelihood
    covariance: Floats
    dispersion: float


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
        raise SettingError(
            f"{len(point)} coefficients need more than {len(point)} rows without gaps, got {rows}: leave out columns, "
            "first those with gaps in most rows"
        )
    sums = likelihood(point)
    # a gaussian likelihood is for a variance of 1, so gains are in squared units of the target: this is their unit
    scale = max(sums.squares / rows, 0.0) if plan.family == "gaussian" else 1.0
    questions = 1
    while True:
        step = _step(sums, names, plan, first=questions == 1)
        gain = float(sums.score @ step)
        # before the next question: a fit that begins at its maximum, such as a null model, ends without another
        if abs(gain) <= _NOTHING * scale:
            break
        if plan.family == "negative_binomial" and point[-1] < _LEAST:
            raise SettingError(
                "the target is no more dispersed than a Poisson model says, so the negative binomial has no finite "
                "estimate: take the family 'poisson'"
            )
        after = likelihood(point + step)
        questions += 1
        # "not >=", so that NaN, where exp overflowed, counts as too far; the margins allow for rounding of long sums
        while not after.value >= sums.value - 1e-9 * abs(sums.value) - 1e-9 and questions < most:  # too far
            step = step / 2
            after = likelihood(point + step)
            questions += 1
        point, sums = point + step, after
        # the gain before this step: near the maximum it is squared by each step, so the point is converged by now
        if abs(gain) <= _TOLERANCE * scale:
            break
        if questions >= most:
            reason = "its numbers may be too unlike for this model"
            if plan.family in ("binomial", "cox", "ordinal", "multinomial"):
                reason = "a combination of columns probably separates the outcomes: leave one out"
            raise SettingError(f"the model has no finite estimate after {most} iterations; {reason}")
    _step(sums, names, plan, first=False)  # where outcomes are separated, information has vanished by now
    dispersion = sums.squares / (rows - len(point)) if plan.family in DISPERSED else 1.0
    return Maximum(point, sums, dispersion * inverse(sums.information), dispersion)


def _step(sums: Likelihood, names: Sequence[str], plan: ModelPlan, first: bool) -> Floats:
    """Return the step of Newton's method.

    Raises:
        SettingError: columns depend on each other, or separate the target.
    """
    width = plan.width  # of columns; they are standard scores, so that one threshold fits all of them
    information = sums.information[:width, :width]
    values, vectors = np.linalg.eigh(information)
    # relative to the largest, and absolutely: where outcomes are separated all weights go to 0 together
    if width and values[0] <= max(1e-11 * values[-1], 1e-9):
        # the eigenvector of the smallest eigenvalue is the combination of columns that has no variance
        by_weight = np.argsort(-np.abs(vectors[:, 0]))
        involved = [names[index] for index in by_weight if abs(vectors[index, 0]) > 0.1] if len(names) else ["these"]
        where = "within each client" if plan.has_times and plan.stratified else "over all clients"
        reason = f"are constant or depend on each other {where}" if first else "separate the target"
        raise SettingError(f"the columns {', '.join(involved[:4])} {reason}: leave one of them out")
    # only a negative binomial's information can have a negative eigenvalue here, through its dispersion
    return np.asarray(np.linalg.solve(uphill(sums.information), sums.score))


def inverse(matrix: Floats) -> Floats:
    """Return the inverse of a matrix [q, q]."""
    return np.asarray(np.linalg.inv(matrix), dtype=np.float64)


def uphill(information: Floats) -> Floats:
    """Return an information [q, q] whose eigenvalues are positive, so that its step leads uphill."""
    values, vectors = np.linalg.eigh(information)
    if values[0] > 0:
        return information
    # absolute eigenvalues turn a step to a saddle point uphill; the floor keeps it short where there is no curvature
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
        sums: returns those of `likelihood.normal_sums` over all clients, for a ratio of variances.
        width: p, the number of coefficients.
        reml: whether the restricted likelihood is maximised.
    """
    from scipy import optimize

    # a ratio is one question to all clients, and the root finder asks for its ends again
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
        # the coefficients minimise the squares, so their own derivative by the ratio adds nothing (envelope theorem)
        ends = np.append(-point, 1.0)
        by_ratio = float(ends @ change @ ends) / squares
        slope, curve = (
            slope + degrees * by_ratio,
            curve + degrees * (float(ends @ second @ ends) / squares - by_ratio**2),
        )
        value = degrees * (math.log(2 * math.pi * squares / degrees) + 1) + log_shrunk
        # the restricted likelihood has the term log |X'V^-1 X|; these are its first and second derivatives by the ratio
        if reml:
            inverted = inverse(inner)
            turned = inverted @ change[:-1, :-1]
            slope += float(np.trace(turned))
            curve += float(np.trace(inverted @ second[:-1, :-1]) - np.trace(turned @ turned))
            value += float(np.linalg.slogdet(inner)[1])
        # of the observed information, where the variance of residuals is profiled out
        across = -(change[:-1] @ ends)[:, None] * degrees / squares
        information = np.block([[inner * degrees / squares, across], [across.T, np.array([[curve / 2]])]])
        return slope, point, squares / degrees, value, information

    ratio = 0.0
    # -2 log-likelihood that does not fall at 0 has its minimum at the bound: no variance between clients
    if at(0.0)[0] < 0:
        high = 1.0
        # the root is bracketed by factors of 8, as ratios may be of any order of magnitude
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
    # not at a deviation of 0, where the score by it is 0 by symmetry and no step would leave it
    point = np.append(start, 0.5)
    sums, questions = likelihood(point), 1
    while questions < most:
        step = np.linalg.solve(uphill(sums.information), sums.score)
        gain = float(sums.score @ step)
        # far from the maximum a Newton step may be so long that exp overflows at each client
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
