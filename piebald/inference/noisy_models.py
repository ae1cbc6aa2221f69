"""Regressions and survival curves with differential privacy: each client adds noise to its own bounded sums.

A linear model takes one question.  Others take several, each of which spends a part of the budget: Newton's method on
noisy scores and informations (Avella-Medina, Bradshaw and Loh 2023, "Differentially private inference via noisy
optimization").  Standard errors have the noise in them: its covariance is that of the mechanism, and its influence on
the coefficients that of the last step (delta method).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from piebald.core.arguments import checked_class
from piebald.core.errors import SettingError
from piebald.core.moments import Floats
from piebald.inference.columns import noise_multiplier, statistics_request
from piebald.inference.models.clients import ModelClients, ModelColumns
from piebald.inference.models.fitting import inverse
from piebald.inference.models.formula import is_share
from piebald.inference.models.likelihood import log_rank
from piebald.inference.models.noisy_sums import NoisyScore
from piebald.inference.models.rows import ModelPlan, Scale
from piebald.inference.models.sums import at_risk_of
from piebald.inference.pooled_statistics import Estimates
from piebald.inference.queries.columns import NoisyModelSumsQuery
from piebald.privacy.accounting import PrivacyBudget
from piebald.privacy.ledger import budget

ROUNDS = 6  # questions of a model that needs several
_LONGEST = 2.0  # step of Newton's method, for numbers between -1 and 1


@dataclass(frozen=True, slots=True)
class NoiseOptions:
    """What a user says of noise.

    Attributes:
        epsilon, delta: what all questions of the model together spend of each site's budget, where one row takes the
            place of another.
        bounds: low and high of each column of numbers, also of a target that is a number.
        rounds: questions of a model that needs several.
        times: ends of the intervals of a proportional-hazards model, in each of which its baseline is constant.
    """

    epsilon: float
    delta: float | None
    bounds: Mapping[str, Sequence[float]]
    rounds: int = ROUNDS
    times: tuple[float, ...] = ()

    @classmethod
    def of(
        cls, epsilon: float | None, delta: float | None, bounds: Mapping[str, Sequence[float]] | None,
        rounds: int = ROUNDS, times: Sequence[float] = (),
    ) -> NoiseOptions | None:  # fmt: skip
        """Return the options, None without an epsilon.

        Raises:
            SettingError: bounds or a delta came without an epsilon, or wrong ones.
        """
        noise_multiplier(epsilon, delta)
        if epsilon is None:
            if bounds:
                raise SettingError("bounds belong to noise: give epsilon and delta, too, or leave them out")
            return None
        if not 1 <= rounds <= 100:
            raise SettingError(f"rounds must be 1 to 100, got {rounds}")
        return cls(epsilon, delta, statistics_request((), None, bounds or {}).bounds, rounds, tuple(map(float, times)))

    def question(
        self, columns: ModelColumns, plan: ModelPlan, names: Sequence[str], target: str, ends: Sequence[float] = ()
    ) -> NoisyModelSumsQuery:
        """Return the question about a model.

        Args:
            columns: of the clients.
            plan: the columns of the model.
            names: of the regressors; those of categories need no bounds.
            target: the name of the target.
            ends: of the intervals of time.

        Raises:
            SettingError: a column of numbers has no bounds.
        """

        def bounds_of(name: str) -> tuple[float, float]:
            if name not in self.bounds:
                raise SettingError(
                    f"epsilon needs bounds of column {name!r}, which must not be taken from the rows: write "
                    f"bounds={{{name!r}: (low, high)}}"
                )
            low, high = self.bounds[name]
            return float(low), float(high)

        is_number = plan.family in ("gaussian", "poisson")
        try:
            return NoisyModelSumsQuery(
                plan=plan, ends=tuple(map(float, ends)), masked=columns.secure, split=columns.split,
                bounds=tuple((0.0, 1.0) if is_share(column) else bounds_of(name)
                             for name, column in zip(names, plan.columns, strict=False)),
                target=bounds_of(target) if is_number else (0.0, 1.0),
                # equal Gaussian mechanisms compose exactly, like one with noise less by the root of their number
                noise=noise_multiplier(self.epsilon, self.delta) * math.sqrt(self.asked(plan)),
            )  # fmt: skip
        except ValueError as error:
            raise SettingError(f"noise does not go with this model: {error}") from None

    def asked(self, plan: ModelPlan) -> int:
        """Return the number of questions about a model."""
        return 1 if plan.family in ("gaussian", "survival") else self.rounds

    def spent(self, query: NoisyModelSumsQuery) -> PrivacyBudget:
        """Return what the questions spend together."""
        assert self.delta is not None
        return budget([query.noise] * self.asked(query.plan), self.delta, "site")


@checked_class
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NoisyModel(Estimates):
    """A model that was fitted with noise; standard errors are those of the rows and of the noise together.

    Attributes:
        family: the distribution of targets; "cox" for a proportional-hazards model.
        target: the column that is explained.
        event: the class that counts as 1, None where the target has no two classes.
        noise_errors: standard errors by the noise alone [p].
        privacy: what the questions have spent.
    """

    family: str
    target: str
    event: str | None
    noise_errors: Floats
    privacy: PrivacyBudget


def fit_noisy(
    clients: ModelClients, plan: ModelPlan, names: Sequence[str], target: str, options: NoiseOptions, event: str | None
) -> NoisyModel:
    """Fit a generalised linear or a proportional-hazards model with noise.

    Args:
        clients: who is asked.
        plan: the columns.
        names: of the coefficients: an intercept, where there is one, and the regressors.
        target: the name of the target.
        options: the noise.
        event: the class of the target that counts as 1.

    Raises:
        SettingError: an argument is wrong, or the noise leaves nothing of the model.
    """
    query = options.question(clients.columns, plan, names if plan.has_times else names[1:], target, options.times)
    fit = _least_squares(clients, query) if plan.family == "gaussian" else _maximum(clients, query, options.rounds)
    low, high = np.array(query.bounds).reshape(-1, 2).T
    back = plan.from_scores(Scale((low + high) / 2, (high - low) / 2))
    own, noise = back @ fit.own @ back.T, back @ fit.noise @ back.T
    return NoisyModel(
        names=tuple(names), coefficients=back @ fit.point, errors=np.sqrt(np.diag(own + noise)), covariance=own + noise,
        rows=max(round(fit.rows), 0), dropped=0, clients=fit.clients, iterations=options.asked(plan),
        family=plan.family, target=target, noise_errors=np.sqrt(np.diag(noise)), privacy=options.spent(query),
        left_out=clients.left_out, event=event, baselines=len(names) - len(plan.columns),
    )  # fmt: skip


class _Fit(NamedTuple):
    """Coefficients on the scale of the bounds.

    Attributes:
        point: the coefficients [p].
        own, noise: their covariances by the rows and by the noise [p, p].
        rows: how many rows there are.
        clients: how many clients answered.
    """

    point: Floats
    own: Floats
    noise: Floats
    rows: float
    clients: int


def _least_squares(clients: ModelClients, query: NoisyModelSumsQuery) -> _Fit:
    """Fit a linear model by the outer products of its columns and target, which are asked once."""
    total, count = clients.noisy_sums(query, np.zeros(0))
    products, deviation = query.sums.read_products(total, query.deviation * math.sqrt(count))
    rows, center, half = float(products[0, 0]), sum(query.target) / 2, (query.target[1] - query.target[0]) / 2
    outer = products[:-1, -1]
    inverted = inverse(_lifted(products[:-1, :-1], _largest_noise(deviation, len(outer))))
    point = inverted @ outer
    residual = max(float(products[-1, -1] - point @ outer) / max(rows - len(point), 1.0), 1e-12)
    noise = inverted @ (_noise_of_product(point, deviation) + np.eye(len(point)) * deviation**2 / 2) @ inverted
    # on the scale of the target
    coefficients = half * point
    coefficients[0] += center
    return _Fit(coefficients, half**2 * residual * inverted, half**2 * noise, rows, count)


def _maximum(clients: ModelClients, query: NoisyModelSumsQuery, rounds: int) -> _Fit:
    """Fit a model by Newton's method on noisy scores, of which the last rounds count together."""
    sums, points, scores, count = query.sums, list[Floats](), list[NoisyScore](), 0
    point: Floats = np.zeros(sums.parameters)
    if query.plan.has_times:
        # half an event a row in all intervals together
        point[: len(query.ends)] = -math.log(2 * len(query.ends))
    for _ in range(rounds):
        total, count = clients.noisy_sums(query, point)
        points.append(point)
        scores.append(sums.read(total, query.deviation * math.sqrt(count)))
        # early points are far from the maximum, and of few rounds the mean has more noise
        step = min((_step(points[-last:], scores[-last:]) for last in range(1, len(points) + 1)), key=_uncertainty)
        point = step.point
    first = len(query.ends) if query.plan.has_times else 0
    kept = slice(1, None) if query.plan.has_times else slice(None)  # the baseline hazard is no coefficient
    rows = float(np.mean([score.rows for score in scores]))
    return _Fit(point[first:], step.own[kept, kept], step.noise[kept, kept], rows, count)


class _Step(NamedTuple):
    """Where a step of Newton's method leads.

    Attributes:
        point: the parameters [q].
        own: the covariance of an intercept and the coefficients by the rows [1 + p, 1 + p].
        noise: their covariance by the noise, and by what the step leaves.
    """

    point: Floats
    own: Floats
    noise: Floats


def _step(points: Sequence[Floats], scores: Sequence[NoisyScore]) -> _Step:
    """Return the step from the mean of some points that the mean of their scores leads to.

    Args:
        points: parameters [q] each.
        scores: noisy scores at these points.
    """
    start, score = np.mean(points, axis=0), NoisyScore.mean(scores)
    hidden = _largest_noise(score.information_noise, len(score.information))
    information = _lifted(score.information, hidden)
    change = np.clip(np.linalg.solve(information, score.score), -_LONGEST, _LONGEST)
    move, shares = change, np.ones(1)
    if len(score.events):
        # hazards that are right for the new coefficients, if the columns have the same mean in all intervals
        expected = np.maximum(score.expected, score.event_noise)
        ratios = np.log(np.maximum(score.events, score.event_noise) / expected)
        levels = ratios - information[0, 1:] @ change[1:] / information[0, 0]
        move = np.concatenate([np.clip(levels, -_LONGEST, _LONGEST), change[1:]])
        shares = expected / expected.sum()
    point = np.asarray(start + move, dtype=np.float64)
    # where noise hides the information, it may be less than what the step was made with
    own = inverse(_lifted(score.information, hidden / 4))
    noise = np.eye(len(change)) * score.score_noise**2 + _noise_of_product(change, score.information_noise)
    # the score is no straight line: its slope changes by half of what linear predictors do, in squares (Taylor)
    moved = float(np.mean([_mean_square(point - other, shares, information) for other in points]))
    bent = moved / 2 * np.sqrt(information[0, 0] * own.diagonal())
    left = own @ (score.score - score.information @ change)  # of steps that were made shorter
    return _Step(point, own, own @ noise @ own + np.diag(np.square(bent) + np.square(left)))


def _mean_square(move: Floats, shares: Floats, information: Floats) -> float:
    """Return the mean square by which linear predictors change.

    Args:
        move: the change of parameters [k + p].
        shares: of the intervals in what is expected [k], 1 of an intercept.
        information: of an intercept and the columns [1 + p, 1 + p].
    """
    levels, columns = move[: len(shares)], move[len(shares) :]
    mean, inner = information[0, 1:] / information[0, 0], information[1:, 1:] / information[0, 0]
    return float(shares @ np.square(levels + mean @ columns) + columns @ (inner - np.outer(mean, mean)) @ columns)


def _uncertainty(step: _Step) -> float:
    """Return by how much noise makes errors wider."""
    return float(np.sum(step.noise.diagonal() / step.own.diagonal()))


def _lifted(matrix: Floats, least: float) -> Floats:
    """Return a symmetric matrix whose eigenvalues are no less than this."""
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * np.maximum(values, max(least, 1e-9))) @ vectors.T)


def _largest_noise(deviation: float, width: int) -> float:
    """Return the largest eigenvalue of symmetric noise [width, width] (Wigner 1955)."""
    return deviation * math.sqrt(2 * width)


def _noise_of_product(vector: Floats, deviation: float) -> Floats:
    """Return the covariance of symmetric noise times a vector [k, k], without what is beside its diagonal.

    Args:
        vector: [k].
        deviation: of the noise on the diagonal; beside it, it is less by the root of 2.
    """
    return np.diag(deviation**2 / 2 * (vector @ vector + np.square(vector)))


def noisy_counts(
    clients: ModelClients, plan: ModelPlan, groups: Sequence[str], event: str, times: Sequence[float],
    options: NoiseOptions,
) -> tuple[Floats, Floats, Floats, float, int, PrivacyBudget]:  # fmt: skip
    """Return events and other ends of each group in intervals [g, t], rows beyond them [g], and the noise of each.

    Args:
        clients: who is asked.
        plan: the columns.
        groups: their names.
        event: the name of the event.
        times: ends of the intervals.
        options: the noise.
    """
    query = options.question(clients.columns, plan, groups, event, times)
    total, count = clients.noisy_sums(query, np.zeros(0))
    events, others = np.maximum(total.reshape(2, len(groups), len(times) + 1), 0.0)
    beyond = events[:, -1] + others[:, -1]
    return (
        events[:, :-1], others[:, :-1], beyond, query.deviation * math.sqrt(count), count, options.spent(query)
    )  # fmt: skip


def curve_noise(events: Floats, others: Floats, beyond: float, deviation: float) -> Floats:
    """Return the standard errors of a log survival curve [t] by the noise of its counts, by the delta method.

    Args:
        events, others: of one group in each interval [t].
        beyond: rows that are there after the last one.
        deviation: of the noise of each count.
    """
    at_risk = at_risk_of(events[None], others[None])[0] + beyond
    left = np.maximum(at_risk - events, 1.0)
    # one more row that ends later is at risk at all times before; one that dies ends the others' share as well
    later = np.cumsum(events / (np.maximum(at_risk, 1.0) * left))
    place = np.arange(len(events))
    stays = later[np.minimum(place[:, None], place[None])]
    dies = stays - (place[None] <= place[:, None]) / left[None]
    squares = np.square(stays).sum(1) + np.square(dies).sum(1) + 2 * np.square(later)
    return np.asarray(deviation * np.sqrt(squares))


def tested_with_noise(events: Floats, others: Floats, beyond: Floats, deviation: float) -> Any:
    """Return the sums of the log-rank test, whose covariance has the noise of counts in it.

    Args:
        events, others: of each group in each interval [g, t].
        beyond: rows of each that are there after the last one [g].
        deviation: of the noise of each count.
    """

    def tested(events: Floats, others: Floats) -> Any:
        return log_rank(at_risk_of(events, others) + beyond[:, None], events)

    found, jacobian = tested(events, others), []
    for kind in range(2):
        for cell in np.ndindex(events.shape):
            counts = [events.copy(), others.copy()]
            counts[kind][cell] += 1.0
            moved = tested(*counts)
            jacobian.append((moved.events - moved.expected) - (found.events - found.expected))
    moves = np.array(jacobian)
    return found._replace(covariance=found.covariance + deviation**2 * moves.T @ moves)
