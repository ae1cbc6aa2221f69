"""Regressions and survival curves with differential privacy: each client adds noise to its own bounded sums.

A linear model takes one question.  Others take several, each of which spends a part of the budget: Newton's method on
noisy scores and informations, whose standard errors have the noise in them (Avella-Medina, Bradshaw and Loh 2023).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from piebald.core.arguments import checked_class
from piebald.core.errors import SettingError
from piebald.core.moments import Floats
from piebald.privacy.accounting import PrivacyBudget
from piebald.privacy.ledger import budget
from piebald.statistics.models.clients import ModelClients, ModelColumns
from piebald.statistics.models.noisy_sums import matrix_of
from piebald.statistics.models.risk_sets import log_rank
from piebald.statistics.models.rows import ModelPlan, Scale
from piebald.statistics.models.sums import at_risk_of
from piebald.statistics.pooled_statistics import Estimates
from piebald.statistics.queries.models import NoisyModelSumsQuery
from piebald.statistics.request import noise_multiplier, statistics_request

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
        rounds = 1 if plan.family in ("gaussian", "survival") else self.rounds
        try:
            return NoisyModelSumsQuery(
                plan=plan, ends=tuple(map(float, ends)), masked=columns.secure, split=columns.split,
                bounds=tuple((0.0, 1.0) if value is not None else bounds_of(name)
                             for name, (_, value) in zip(names, plan.columns, strict=False)),
                target=bounds_of(target) if is_number else (0.0, 1.0),
                # equal Gaussian mechanisms compose exactly, like one with noise less by the root of their number
                noise=noise_multiplier(self.epsilon, self.delta) * math.sqrt(rounds),
            )  # fmt: skip
        except ValueError as error:
            raise SettingError(f"noise does not go with this model: {error}") from None

    def spent(self, query: NoisyModelSumsQuery) -> PrivacyBudget:
        """Return what the questions spend together."""
        rounds = 1 if query.plan.family in ("gaussian", "survival") else self.rounds
        assert self.delta is not None
        return budget([query.noise] * rounds, self.delta, "site")


@checked_class
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NoisyModel(Estimates):
    """A model that was fitted with noise; standard errors are those of the rows and of the noise together.

    Attributes:
        family: the distribution of targets; "cox" for a proportional-hazards model.
        target: the column that is explained.
        noise_errors: standard errors by the noise alone [p].
        privacy: what the questions have spent.
    """

    family: str
    target: str
    noise_errors: Floats
    privacy: PrivacyBudget


def fit_noisy(
    clients: ModelClients, plan: ModelPlan, names: Sequence[str], target: str, options: NoiseOptions
) -> NoisyModel:
    """Fit a generalised linear or a proportional-hazards model with noise.

    Args:
        clients: who is asked.
        plan: the columns.
        names: of the coefficients: an intercept, where there is one, and the regressors.
        target: the name of the target.
        options: the noise.

    Raises:
        SettingError: an argument is wrong, or the noise leaves nothing of the model.
    """
    regressors = names if plan.has_times else names[1:]
    query = options.question(clients.columns, plan, regressors, target, options.times)
    sums, asked = query.sums, 0
    low, high = np.array(query.bounds).reshape(-1, 2).T
    point: Floats = np.zeros(sums.parameters)
    if plan.family == "gaussian":
        total, count = clients.noisy_sums(query, np.zeros(0))
        deviation, unit, asked = query.deviation * math.sqrt(count), sums.product_unit(), 1
        products = matrix_of(total * unit, sums.parameters + 1)
        rows, center, half = float(products[0, 0]), sum(query.target) / 2, (query.target[1] - query.target[0]) / 2
        inner, outer = _lifted(products[:-1, :-1], deviation * unit), products[:-1, -1]
        point = np.asarray(np.linalg.solve(inner, outer), dtype=np.float64)
        residual = max(float(products[-1, -1] - point @ outer) / max(rows - len(point), 1.0), 1e-12)
        # an entry beside the diagonal has half the variance of one on it
        spread = (deviation * unit) ** 2 / 2 * (1 + point @ point + np.square(point))
        own = residual * np.linalg.inv(inner)
        noise = np.linalg.solve(inner, np.linalg.solve(inner, np.diag(spread)).T)
        # on the scale of the target
        point, own, noise = half * point, half**2 * own, half**2 * noise
        point[0] += center
    else:
        of_count, of_score, of_information = sums.score_units()
        width = sums.parameters
        if plan.has_times:
            point[: len(query.ends)] = -2.0  # few events in an interval
        points, scores, information, counts = list[Floats](), list[Floats](), list[Floats](), list[float]()
        for asked in range(1, options.rounds + 1):
            total, count = clients.noisy_sums(query, point)
            deviation = query.deviation * math.sqrt(count)
            points.append(point)
            counts.append(float(total[0]) * of_count)
            scores.append(total[1 : 1 + width] * of_score)
            information.append(matrix_of(total[1 + width :] * of_information, width))
            # the information changes little between two rounds, and the mean of several has less noise
            recent = information[-max(asked // 2, min(asked, 3)) :]
            spread_of_mean = deviation * of_information / math.sqrt(len(recent))
            inner = _lifted(np.mean(recent, axis=0), spread_of_mean)
            step = np.linalg.solve(inner, scores[-1])
            # far from the maximum, or under much noise, a whole step may lead anywhere
            length = min(1.0, _LONGEST / max(float(np.abs(step).max()), 1e-300))
            point = np.asarray(point + step * length, dtype=np.float64)
        last = max(options.rounds // 2, 1)
        # each of the last rounds leads to the maximum in one step, so their mean has less noise than the last one
        steps = np.linalg.solve(inner, np.array(scores[-last:]).T).T
        ends = np.array(points[-last:]) + np.clip(steps, -_LONGEST, _LONGEST)
        rows, point = float(np.mean(counts)), ends.mean(axis=0)
        # where noise hides the information, it may be less than what steps are made with
        own = np.linalg.inv(_lifted(np.mean(recent, axis=0), spread_of_mean / 4))
        noise = (deviation * of_score) ** 2 / last * own @ own
        # what is not converged shows in the last step
        noise += np.diag(np.square(point - points[-1]))
    first = len(query.ends) if plan.has_times else 1
    back = Scale((low + high) / 2, (high - low) / 2).from_scores(len(low) + (not plan.has_times))
    if plan.has_times:
        point, own, noise = point[first:], own[first:, first:], noise[first:, first:]
    own, noise = back @ own @ back.T, back @ noise @ back.T
    return NoisyModel(
        names=tuple(names), coefficients=back @ point, errors=np.sqrt(np.diag(own + noise)), covariance=own + noise,
        rows=max(round(rows), 0), dropped=0, clients=count, iterations=asked, family=plan.family, target=target,
        noise_errors=np.sqrt(np.diag(noise)), privacy=options.spent(query), left_out=clients.left_out,
    )  # fmt: skip


def _lifted(matrix: Floats, deviation: float) -> Floats:
    """Return a noisy information whose eigenvalues are no less than the noise would make of none."""
    values, vectors = np.linalg.eigh(matrix)
    # the largest eigenvalue of symmetric noise (Wigner 1955)
    least = max(deviation * math.sqrt(2 * len(matrix)), 1e-9)
    return np.asarray((vectors * np.maximum(values, least)) @ vectors.T)


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
