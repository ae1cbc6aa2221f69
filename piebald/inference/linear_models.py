"""Generalised linear models of the pooled rows, with what is said of clients that differ.

Clients get coefficients and answer with sums over their rows: the log-likelihood, its score and its information.  The
sums over clients are those of the pooled rows, so Newton's method ends at the model of the pooled rows (McCullagh and
Nelder 1989, section 2.5; as in DataSHIELD's `ds.glm`, Jones et al. 2012).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from piebald.contracts import Query, Split
from piebald.core.arguments import Count, checked, checked_class
from piebald.core.errors import SettingError
from piebald.core.moments import Floats
from piebald.data.preparation.preparation import PrepareSettings
from piebald.inference.columns import TARGET
from piebald.inference.models.clients import ColumnRoles, ModelClients, ModelColumns, asked_tables, planned
from piebald.inference.models.fitting import Maximum, maximised, normal_mixed, quadrature_mixed
from piebald.inference.models.formula import Computed, Formula, with_formula
from piebald.inference.models.likelihood import Likelihood
from piebald.inference.models.rows import DISPERSED, HEADS, Ask, Family, ModelPlan, Scale
from piebald.inference.noisy_models import ROUNDS, NoiseOptions, NoisyModel, fit_noisy
from piebald.inference.pooled_statistics import FEW, Estimates

INTERCEPT = "(intercept)"
RandomIntercept = Literal["one_stage", "two_stage"]
_Pairs = Mapping[str, Any]


@checked_class
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MarginalEffects(Estimates):
    """By how much the mean, or the probability of each level, changes for one more unit of a column, on average over
    the rows; see `Estimates`.

    It is the average slope, as `get_margeff` of statsmodels has it, also for columns of 0 and 1; errors are by the
    delta method.  Rows count by their weights.

    Attributes:
        degrees: degrees of freedom of Student's t, those of the model; infinite for the normal distribution.
    """

    what: ClassVar[str] = "effect"

    degrees: float = math.inf


@checked_class
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Glm(Estimates):
    """A fitted generalised linear model; see `Estimates` for its coefficients.

    Attributes:
        family: the distribution of targets.
        target: the column that is explained.
        error_kind: where standard errors come from: the "model", or scores of rows ("robust") or of clusters
            ("clustered").
        clusters: the number of clusters, None without them.
        event: the class that counts as 1, None where the target has no two classes.
        dispersion: that of Pearson's residuals, of "gaussian" their variance; 1 for families without one.
        alpha, alpha_error: the dispersion of a negative binomial, whose variance is mu + alpha mu^2, and its standard
            error; None for other families.
        log_likelihood: of the model; None for "gaussian" with weights, "gamma" and "tweedie".
        deviance, null_deviance: of the model, and of one with an intercept alone.
        effects: average marginal effects, None where they were not asked for.
    """

    family: Family
    target: str
    error_kind: Literal["model", "robust", "clustered"]
    clusters: int | None
    event: str | None
    dispersion: float
    alpha: float | None
    alpha_error: float | None
    log_likelihood: float | None
    deviance: float
    null_deviance: float
    effects: MarginalEffects | None = None

    def __repr__(self) -> str:
        """Return the model in one line."""
        return (
            f"<Glm {self.target} ({self.family}): {len(self.names)} coefficients of {self.rows:,} rows"
            f"{self._fewer}, deviance {self.deviance:.6g}>"
        )

    @property
    def degrees(self) -> float:
        """Degrees of freedom of Student's t: for "gaussian" as in R (statsmodels takes the normal distribution there);
        with clusters one less than there are, as in Stata; errors of rows have the normal distribution.
        """
        if self.clusters is not None:
            return self.clusters - 1
        by_model = self.family == "gaussian" and self.error_kind == "model"
        return self.rows - len(self.names) if by_model else math.inf

    def plain(self) -> dict[str, Any]:
        """Return the model as JSON values, with the effects that were asked for."""
        plain = super(Glm, replace(self, effects=None)).plain()
        return plain | {"effects": None if self.effects is None else self.effects.plain()["coefficients"]}


@checked_class
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MixedGlm(Estimates):
    """A generalised linear model with a normal random intercept of each client; see `Estimates` for its coefficients.

    Attributes:
        family: the distribution of targets.
        target: the column that is explained.
        event: the class that counts as 1, None where the target has no two classes.
        between: the variance of clients' intercepts, 0 where their likelihood is highest without one.
        residual: the variance within clients of "gaussian", else 1.
        log_likelihood: the restricted one for "gaussian" with REML.
        reml: whether it is restricted.
    """

    family: Family
    target: str
    event: str | None
    between: float
    residual: float
    log_likelihood: float
    reml: bool


@checked_class
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PooledGlm(Estimates):
    """Generalised linear models of single clients, pooled coefficient by coefficient; see `Estimates`.

    Coefficients are those of random effects (DerSimonian and Laird 1986), as in DataSHIELD's `ds.glmSLMA`.  Their
    errors are by how much the clients' own estimates differ, with Student's t of one degree less than there are clients
    (Hartung and Knapp 2001): those of DerSimonian and Laird are too small for few clients.

    Attributes:
        family: the distribution of targets.
        target: the column that is explained.
        event: the class that counts as 1, None where the target has no two classes.
        fitted: clients that have a model of their own; others have too few rows, or no finite estimate.
        effect_errors: standard errors of DerSimonian and Laird [p].
        fixed, fixed_errors: the coefficients with weights of inverse variance, and their standard errors [p].
        between: variances of coefficients between clients [p].
        heterogeneity: Cochran's Q of each coefficient [p], with `fitted - 1` degrees of freedom.
    """

    family: Family
    target: str
    event: str | None
    fitted: int
    effect_errors: Floats
    fixed: Floats
    fixed_errors: Floats
    between: Floats
    heterogeneity: Floats

    @property
    def degrees(self) -> float:
        """Degrees of freedom of Student's t; infinite where a single client has a model."""
        return self.fitted - 1 if self.fitted > 1 else math.inf


@checked
def glm(
    clients: Any,
    *,
    target: str | None = None,
    columns: Sequence[str] | None = None,
    formula: str | None = None,
    family: Family | None = None,
    event: str | None = None,
    power: float = 1.5,
    offset: str | None = None,
    weights: str | None = None,
    robust: bool = False,
    cluster: str | None = None,
    random_intercept: RandomIntercept | None = None,
    reml: bool = True,
    effects: bool = False,
    client: str | None = None,
    split: Split = "train",
    features: Sequence[str] | None = None,
    categories: Mapping[str, Sequence[str]] | None = None,
    max_iterations: Count = 50,
    epsilon: float | None = None,
    delta: float | None = None,
    bounds: Mapping[str, Sequence[float]] | None = None,
    rounds: Count = ROUNDS,
    prepare: PrepareSettings | Mapping[str, Any] | None = None,
) -> Glm | MixedGlm | PooledGlm | NoisyModel:
    """Fit a generalised linear model to the rows of all clients, as if they were pooled.

    Rows with gaps, also in the offset or the weights, are left out.  A column of text has a coefficient for each
    category but the first.

    Args:
        clients, client, split, features, prepare: as of `statistics`.
        target: the column to explain; "target" by default, as `Clients` have it.  Under "binomial" it has two
            classes, or `event` and all others; under "poisson" and "negative_binomial" counts.
        columns: the columns to explain it by, all others by default.  The column `client`, which may also be called
            "client", has a coefficient of each client but the first; "C(name)" takes numbers as categories.
        formula: in place of target and columns, as in R and statsmodels: "died ~ C(site) + age * sex + bs(age, df=4)".
            Knots, means and categories are of the rows of all clients; nothing in it is run as code.
        family: the distribution of targets: "gaussian" (identity link), "binomial" (logit), "poisson" or
            "negative_binomial" (log), whose dispersion is estimated; "gamma" or "tweedie" (log), of amounts above or
            from 0; "ordinal", for proportional odds of levels in the order of their numbers, or of `categories`; or
            "multinomial", of levels against the first.  By default "binomial" for a target that is known to have two
            values, and else "gaussian"; the result says so.
        power: of the mean, between 1 and 2, to which the variance of "tweedie" is proportional.
        event: the class that counts as 1 under "binomial"; by default the second of two: the larger number, or by
            alphabet.
        offset: a column that is added to the linear predictor, such as the logarithm of an exposure.
        weights: a column of weights of rows, as in R and as `var_weights` of statsmodels: they multiply a row's
            log-likelihood, and a row of weight 0 is left out.
        robust: standard errors by each row's own residual (HC1) instead of the model's.
        cluster: a column whose values, of any kind and number, name clusters of rows that may depend on each other, or
            "client" for one of each client: cluster-robust standard errors, times G / (G - 1) (n - 1) / (n - p) as in
            statsmodels and Stata.
        random_intercept: "one_stage" for a mixed model with a random intercept of each client; "two_stage" to fit a
            model at each client and pool the coefficients.
        reml: for "gaussian" in one stage, maximise the restricted likelihood, as lme4.
        effects: also average marginal effects, by one more question; of "ordinal" and "multinomial" on the probability
            of each level.
        categories: the values of columns of codes, of which each but the first has a coefficient.
        max_iterations: questions to the clients, at most, for each likelihood that is maximised.
        epsilon, delta: what all questions of the model together spend of each client's rows, of which one may take the
            place of another: each client adds noise to sums that no row moves by more than its bounds allow.
        bounds: low and high of each column of numbers, which must not be taken from the rows; for noise.
        rounds: questions of a model with noise that needs several.

    Returns:
        A `Glm`; a `MixedGlm` in one stage, a `PooledGlm` in two, a `NoisyModel` with an epsilon.

    Raises:
        SettingError: an argument is wrong, the target does not fit the family, columns depend on each other, or a
            combination of columns separates the classes, so that there is no finite estimate.

    Examples:
        >>> import pandas as pd
        >>> import piebald
        >>> trial = pd.DataFrame({"clinic": list("AABB"), "dose": [0.0, 1, 2, 3], "effect": [1.0, 3.1, 4.9, 7.0]})
        >>> model = piebald.glm(trial, client="clinic", target="effect")
        >>> dict(zip(model.names, model.coefficients.round(2).tolist()))
        {'(intercept)': 1.03, 'dose': 1.98}
    """
    parsed, columns, target = with_formula(formula, columns, target)
    options = GlmOptions(
        target or TARGET, columns, family, offset, weights, robust, cluster, random_intercept, reml, max_iterations,
        NoiseOptions.of(epsilon, delta, bounds, rounds), event, power, parsed, effects,
    )  # fmt: skip
    with asked_tables(clients, client, options, split, features, categories, prepare) as asked:
        return fit_glm(asked, options)


@dataclass(frozen=True, slots=True)
class GlmOptions:
    """The arguments of `glm` that say what is fitted."""

    target: str
    columns: Sequence[str] | None = None
    family: Family | None = None
    offset: str | None = None
    weights: str | None = None
    robust: bool = False
    cluster: str | None = None
    random_intercept: RandomIntercept | None = None
    reml: bool = True
    max_iterations: int = 50
    noise: NoiseOptions | None = None
    event: str | None = None
    power: float = 1.5
    formula: Formula | None = None
    effects: bool = False

    def family_of(self, asked: ModelColumns) -> Family:
        """Return the family, by default what the target is, as far as it is known before the first question."""
        if self.family is None and self.event is None:
            return "binomial" if asked.is_binary(self.target) else "gaussian"
        return self.family or "binomial"

    def roles(self) -> ColumnRoles:
        """Return the parts of columns.

        Raises:
            SettingError: options do not go together.
        """
        if self.random_intercept and (self.robust or self.cluster is not None):
            raise SettingError("robust errors are of a model without random intercepts: leave one of them out")
        if self.random_intercept == "one_stage" and self.family not in (None, "gaussian", "binomial", "poisson"):
            raise SettingError(
                f"the family {self.family!r} has no random intercept in one stage: take 'two_stage', or another family"
            )
        if self.effects and (self.random_intercept or self.noise):
            raise SettingError("marginal effects are of models without random intercepts and noise: leave effects out")
        if not 1 < self.power < 2:
            raise SettingError(f"power must be between 1 and 2, got {self.power:g}: 1 is poisson, and 2 gamma")
        return ColumnRoles(self.target, None, self.offset, self.weights, self.cluster)

    def plan(self, asked: ModelColumns) -> tuple[ModelPlan, list[str]]:
        """Return the plan, and the names of the regressors."""
        family = self.family_of(asked)
        if self.event is not None and family != "binomial":
            raise SettingError(f"event names a class of a binomial target, got the family {family!r}: leave one out")
        plan, names = planned(asked, family, self.roles(), self.columns, self.event, self.formula, power=self.power)
        if self.random_intercept and plan.of_clients:
            raise SettingError("a coefficient of each client stands for its intercept: leave random_intercept out")
        return plan, names

    def questions(self, asked: ModelColumns) -> list[Query]:
        """Return the questions that terms name."""
        plan, names = self.plan(asked)
        return [asked.query(plan) if self.noise is None else self.noise.question(asked, plan, names, self.target)]


def fit_glm(clients: ModelClients, options: GlmOptions) -> Glm | MixedGlm | PooledGlm | NoisyModel:
    """Fit the model that the options say, of clients on this machine or at sites."""
    plan, columns = options.plan(clients.columns)
    family, target = plan.family, options.target
    event = clients.columns.event(target, options.event) if family == "binomial" else None
    if options.noise is not None:
        if options.robust or options.random_intercept:
            raise SettingError("with noise there are no robust errors and no random intercepts: leave them out")
        return fit_noisy(clients, plan, (INTERCEPT, *columns), target, options.noise, event)
    levels = clients.columns.levels(target, ordered=family == "ordinal") if plan.levels else []
    model = ModelOfRows(clients, plan, columns, options.max_iterations, levels)
    common: dict[str, Any] = {"family": family, "target": target, "event": event}
    if options.family is None and options.event is None and family == "binomial":
        model.remarks.append(f"{target} has two values, so the family is binomial: write gaussian for a straight line.")
    if options.random_intercept == "two_stage":
        return _pooled(model, common)
    if options.random_intercept == "one_stage":
        return _mixed(model, common, options.reml)
    fit = model.maximum()
    null = model.null(fit)
    covariance, clusters = fit.covariance, None
    if options.robust or options.cluster is not None:
        covariance, clusters = model.sandwich(fit)
    width = len(model.names)
    alpha = math.exp(fit.point[-1]) if family == "negative_binomial" else None
    log_likelihood: float | None = None if family in DISPERSED else fit.sums.value
    if family == "gaussian":
        # of 0 and 1 squares are the numbers themselves
        spread = model.total - model.total**2 / model.weight
        if options.family is None and plan.offset is None and abs(null.sums.deviance - spread) <= 1e-9 * abs(spread):
            model.remarks.append(f"{target} seems to have no values but 0 and 1: the family binomial is of their odds.")
        log_likelihood = -model.rows / 2 * (math.log(2 * math.pi * fit.sums.deviance / model.rows) + 1)
        log_likelihood = None if options.weights is not None else log_likelihood
    fitted = Glm(
        **model.kind_of_errors(clusters), **model.estimates(fit.point, covariance), **common, dispersion=fit.dispersion,
        alpha=alpha, alpha_error=None if alpha is None else alpha * math.sqrt(covariance[width, width]),
        log_likelihood=log_likelihood, deviance=fit.sums.deviance, null_deviance=null.sums.deviance,
    )  # fmt: skip
    return replace(fitted, effects=model.effects(fit.point, fitted)) if options.effects else fitted


class ModelOfRows:
    """A model of the rows of clients, whose columns' means and deviations have been asked for.

    Args:
        clients: who is asked.
        plan: the columns.
        columns: the names of the regressors.
        most: questions for each likelihood that is maximised, at most.
        levels: the names of the target's levels, where it has any.

    Attributes:
        clients, plan, columns: as given.
        scale: means and deviations of the columns.
        rows, dropped, taking_part, events: rows, rows that are left out, clients with rows and with targets besides 0.
        weight, total, offset, exposure: the sums of weights, and of weighted targets, offsets, and exp of offsets, in
            place of which models of times count events.
        questions: how often clients were asked.
        remarks: sentences about the model.
        left_out: the reasons why clients have no part in the model, by name.

    Raises:
        SettingError: a column is constant, or there are too few rows.
    """

    def __init__(
        self, clients: ModelClients, plan: ModelPlan, columns: Sequence[str], most: int, levels: Sequence[str] = ()
    ) -> None:
        self.clients, self.plan, self.columns, self._most, self._levels = clients, plan, columns, most, levels
        self.questions, width, self.remarks = 0, len(plan.columns), list[str]()
        # nothing is known of the columns yet, so the first question takes them as they are
        self.scale = Scale(np.zeros(width), np.ones(width))
        moments = self.ask("moments")
        empty = {name: "no row without gaps" for name, own in clients.open_sums().items() if not own[0]}
        self.left_out = {**clients.left_out, **empty}
        if absent := self._absent_clients(moments):
            self.plan, self.columns = without(self.plan, self.columns, absent)
            width = len(self.plan.columns)
            self.scale = Scale(np.zeros(width), np.ones(width))
            moments = self.ask("moments")
        self.rows, self.dropped, self.taking_part, self.events = map(int, moments[:4])
        self.weight, self.total, self.offset, self.exposure = map(float, moments[4:HEADS])
        if self.rows <= (count := self.plan.parameters):
            raise SettingError(
                f"{count} coefficients need more than {count} rows without gaps, got {self.rows}: leave out columns, "
                "first those with gaps in most rows"
            )
        # a second question about the means: sums of squares about 0 would lose a small deviation beside a large mean
        self.scale = Scale(moments[HEADS : HEADS + width] / self.rows, np.ones(width))
        if width:
            apart = self.ask("moments")[HEADS:]
            spread = np.sqrt(np.maximum(apart[width:] / self.rows - np.square(apart[:width] / self.rows), 0.0))
            for name, mean, deviation in zip(self.columns, self.scale.mean, spread, strict=True):
                # relative to the mean: rounding leaves a constant column a deviation of some 1e-16 of it
                if deviation <= 1e-14 * abs(mean):
                    part = "a baseline" if plan.has_times else "the intercept"
                    raise SettingError(f"column {name!r} is constant over all clients, like {part}: leave it out")
            self.scale = Scale(self.scale.mean, spread)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the coefficients."""
        if self.plan.family == "multinomial":
            return tuple(f"{level}: {name}" for level in self._levels[1:] for name in (INTERCEPT, *self.columns))
        between = [f"{low}|{high}" for low, high in itertools.pairwise(self._levels)]
        return (*([] if self.plan.has_times else between or [INTERCEPT]), *self.columns)

    def _absent_clients(self, moments: Floats) -> list[int]:
        """Return the indexes of regressors of clients that need no coefficient: those without rows, and then, where
        none of those that have rows is the one that others are compared with, the first of these.
        """
        rows = {index: moments[HEADS + index] for index in self.plan.of_clients}
        absent, present = [index for index in rows if not rows[index]], [index for index in rows if rows[index]]
        compared = moments[0] > sum(rows.values())
        if rows and len(present) + compared == 1:
            raise SettingError("all rows are of one client, so there is none to compare it with: leave its column out")
        return absent if compared else [*absent, *present[:1]]

    def ask(self, ask: Ask, *numbers: Floats | float) -> Floats:
        """Return the sums over all clients."""
        self.questions += 1
        flat = [np.atleast_1d(np.asarray(part, dtype=np.float64)) for part in numbers]
        return self.clients.sums(self.plan, ask, np.concatenate([*self.scale, *flat]))

    def likelihood(self, point: Floats) -> Likelihood:
        """Return the log-likelihood of all rows at parameters of standard scores [q]."""
        return Likelihood.of_flat(self.ask("likelihood", point), self.plan.parameters)

    def maximum(self) -> Maximum:
        """Return the maximum of the likelihood.

        Raises:
            SettingError: there is nothing to explain, or no finite estimate.
        """
        start = np.zeros(self.plan.parameters)
        # a Cox model has no intercept; others start at the null model's, which saves questions to the clients
        start[self.plan.intercepts] = self._null_start()
        return maximised(self.likelihood, self.plan, self.rows, start=start, names=self.names, most=self._most)

    def null(self, fit: Maximum) -> Maximum:
        """Return the maximum with an intercept alone; a negative binomial has the dispersion of `fit`, as in R."""
        whole, free = np.zeros(self.plan.parameters), self.plan.intercepts
        # the dispersion stays at that of the full fit, so that both deviances are on one scale
        whole[self.plan.width :] = fit.point[self.plan.width :]

        def of_intercept(point: Floats) -> Likelihood:
            whole[free] = point
            sums = self.likelihood(whole)
            return sums._replace(score=sums.score[free], information=sums.information[np.ix_(free, free)])

        # with the dispersion held there is one parameter, which the plan of a negative binomial does not have
        family = "poisson" if self.plan.family == "negative_binomial" else self.plan.family  # one parameter
        plan = self.plan.model_copy(update={"columns": (), "family": family})
        names = [self.names[index] for index in free]
        return maximised(of_intercept, plan, self.rows, start=self._null_start(), names=names, most=self._most)

    def _null_start(self) -> Floats:
        """Return about the intercepts of a model with nothing else: those of levels that are equally frequent."""
        count = len(self.plan.levels)
        if self.plan.family == "multinomial" or self.plan.has_times:
            return np.zeros(len(self.plan.intercepts))
        if not count:
            return np.array([self._null_intercept()])
        above = 1 - np.arange(1, count) / count
        return np.asarray(np.log(above / (1 - above)))

    def _null_intercept(self) -> float:
        """Return about the intercept of a model with nothing else; not exactly that of "binomial" with an offset."""
        mean = self.total / self.weight
        if self.plan.family == "gaussian":
            return mean - self.offset / self.weight
        # the logit and the logarithm have no value there, and the likelihood no finite maximum
        if mean <= 0 or (self.plan.family == "binomial" and mean >= 1):
            raise SettingError("the target is the same in all rows without gaps, so there is nothing to explain")
        return math.log(mean / (1 - mean) if self.plan.family == "binomial" else self.total / self.exposure)

    def sandwich(self, fit: Maximum) -> tuple[Floats, int]:
        """Return the robust covariance of the parameters [q, q], and the number of clusters.

        Raises:
            SettingError: there are no two clusters.
        """
        answer = self.ask("scores", fit.point)
        clusters, outer = round(float(answer[0])), answer[1:].reshape(fit.covariance.shape)
        if clusters < 2:
            raise SettingError(f"robust errors need at least 2 clusters, got {clusters}: take another column")
        # scores of "gaussian" are for a variance of 1, so the information between them must be, too
        inverse = fit.covariance / fit.dispersion
        factor = 1.0
        # R's survival does not correct the sandwich of a Cox model for small samples either
        if not self.plan.has_times:
            factor = clusters / (clusters - 1) * (self.rows - 1) / (self.rows - self.plan.width)
        return factor * inverse @ outer @ inverse, clusters

    def effects(self, point: Floats, fitted: Glm) -> MarginalEffects:
        """Return average marginal effects.

        Args:
            point: parameters of standard scores [q], at which slopes are asked for.
            fitted: the model in units of the columns.
        """
        predictors, columns = max(1, len(self.plan.levels) - 1), np.arange(len(self.columns))
        answer = self.ask("slopes", point) / self.weight
        count = len(answer) // (1 + self.plan.parameters)
        # slopes [L, G] of levels by predictors, and how they change with each coefficient [L, G, p]
        slope = answer[:count].reshape(-1, predictors)
        curves = answer[count:].reshape(*slope.shape, -1) @ np.linalg.inv(self.plan.from_scores(self.scale))
        curves = curves[..., : len(fitted.names)]
        # the index of each column's coefficient in each predictor [G, columns]
        apart = 0 if self.plan.family == "ordinal" else 1 + len(columns)
        index = np.arange(predictors)[:, None] * apart + (predictors if self.plan.family == "ordinal" else 1) + columns
        own = fitted.coefficients[index]
        # an effect is the sum over predictors of b_j times the average slope, which depends on all coefficients
        by_coefficient = np.einsum("gj,lgp->ljp", own, curves)
        for predictor, indices in enumerate(index):
            by_coefficient[:, columns, indices] += slope[:, predictor, None]
        by_coefficient = by_coefficient.reshape(-1, len(fitted.names))
        covariance = by_coefficient @ fitted.covariance @ by_coefficient.T
        terms = [name for name, column in zip(self.columns, self.plan.columns, strict=True)
                 if isinstance(column, Computed)]  # fmt: skip
        remark = f"Effects of {', '.join(terms)} are of the term alone, the columns in it held."
        levels = [f"{level}: " for level in self._levels] or [""]
        return MarginalEffects(
            names=tuple(f"{level}{name}" for level in levels for name in self.columns),
            coefficients=(slope @ own).ravel(), errors=np.sqrt(np.diag(covariance)),
            degrees=fitted.degrees, covariance=covariance,
            rows=fitted.rows, dropped=fitted.dropped, clients=fitted.clients, iterations=1,
            remarks=(remark,) if terms else (),
        )  # fmt: skip

    def kind_of_errors(self, clusters: int | None) -> dict[str, Any]:
        """Return the fields of a model that say where its errors come from, and remark that clusters are few.

        Args:
            clusters: how many there are, or rows where these are none; None for errors of the model.
        """
        if clusters is None or self.plan.cluster is None:
            return {"error_kind": "model" if clusters is None else "robust", "clusters": None}
        if clusters < FEW:
            self.remarks.append(
                f"{clusters} clusters are few: below {FEW}, their errors are rough, and intervals may be too narrow."
            )
        return {"error_kind": "clustered", "clusters": clusters}

    def estimates(self, point: Floats, covariance: Floats) -> dict[str, Any]:
        """Return the fields of `Estimates`, in units of the columns."""
        # the likelihood is of standard scores; its last parameter may be a dispersion, which has no name
        width, back = len(self.names), self.plan.from_scores(self.scale)
        covariance = (back @ covariance @ back.T)[:width, :width]
        return {
            "names": self.names, "coefficients": (back @ point)[:width], "errors": np.sqrt(np.diag(covariance)),
            "covariance": covariance, "rows": self.rows, "dropped": self.dropped, "clients": self.taking_part,
            "iterations": self.questions, "left_out": self.left_out, "baselines": len(self.plan.intercepts),
            "remarks": tuple(self.remarks),
        }  # fmt: skip


def without(plan: ModelPlan, names: Sequence[str], columns: Collection[int]) -> tuple[ModelPlan, list[str]]:
    """Return a plan without some of its regressors, by their indexes, and the names of those that stay."""
    stay = [index for index in range(len(names)) if index not in columns]
    return plan.model_copy(update={"columns": tuple(plan.columns[k] for k in stay)}), [names[k] for k in stay]


def _mixed(model: ModelOfRows, common: _Pairs, reml: bool) -> MixedGlm:
    width = model.plan.width
    if model.taking_part < 2:
        raise SettingError(f"random intercepts need at least 2 clients with rows, got {model.taking_part}")
    reml = reml and model.plan.family == "gaussian"
    if model.plan.family == "gaussian":
        fit = normal_mixed(lambda ratio: model.ask("random", ratio), width, reml)
    else:
        # each step is a question to all clients, and these coefficients are a near start
        start = model.maximum().point
        most = 4 * model._most  # it begins farther away than a model without random intercepts
        fit = quadrature_mixed(lambda point: Likelihood.of_flat(model.ask("random", point), width + 1), start, most)
    value = -fit.value / 2
    if reml:  # columns are standard scores in the likelihood
        value -= float(np.log(model.scale.spread).sum())
    return MixedGlm(
        **model.estimates(fit.point, fit.covariance), **common, between=fit.between, residual=fit.residual,
        log_likelihood=value, reml=reml,
    )  # fmt: skip


def _pooled(model: ModelOfRows, common: _Pairs) -> PooledGlm:
    width = model.plan.parameters

    def sums(centre: Floats, between: Floats) -> list[Floats]:
        return list(model.ask("two_stage", centre, between).reshape(5, width))

    nothing = np.zeros(width)
    # about 0 and without variance between clients: the fixed-effects estimate
    count, weight, apart, _, _ = sums(nothing, nothing)
    if count[0] < 1:
        raise SettingError(
            "no client has a finite model of its own: take random_intercept='one_stage', or pool the rows"
        )
    fitted = int(count[0])
    reason = "too few rows, or no finite estimate, for a model of its own"
    alone = {name: reason for name, own in model.clients.open_sums().items() if not own[0]}
    model.left_out = {**alone, **model.left_out}
    if (unnamed := model.taking_part - fitted) and not alone:
        model.remarks.append(f"{unnamed} clients, which masks do not name, have {reason}.")
    if fitted < FEW:
        model.remarks.append(f"Pooled from models of {fitted} clients, which are few: intervals are wide for that.")
    fixed, fixed_variance = apart / weight, 1 / weight
    # Q is a sum about the pooled estimate, which clients learn only now: hence a second question
    _, _, _, heterogeneity, squares = sums(fixed, nothing)
    # Cochran's Q beyond its degrees of freedom is what clients differ by
    # DerSimonian and Laird 1986: tau^2 = (Q - (k - 1)) / (sum w - sum w^2 / sum w), at least 0
    scale = weight - squares / weight
    between = np.where(scale > 0, np.maximum(heterogeneity - (count - 1), 0) / np.where(scale > 0, scale, 1), 0.0)
    # a third question: weights with tau^2 need each client's own variance, which the sums so far do not tell
    _, weight, apart, squares, _ = sums(fixed, between)
    point, part = fixed + apart / weight, slice(0, len(model.names))
    variance = 1 / weight
    if fitted > 1:
        # Hartung and Knapp 2001: the weighted squares about the estimate, which are less than those about `fixed`
        variance = np.maximum(squares - np.square(apart) / weight, 0.0) / ((fitted - 1) * weight)
    fields = model.estimates(np.zeros(width), np.eye(width)) | {
        "coefficients": point[part], "errors": np.sqrt(variance)[part], "covariance": np.diag(variance[part])
    }  # fmt: skip
    return PooledGlm(
        **fields, **common, fitted=fitted, fixed=fixed[part], fixed_errors=np.sqrt(fixed_variance)[part],
        between=between[part], heterogeneity=heterogeneity[part], effect_errors=np.sqrt(1 / weight)[part],
    )  # fmt: skip
