"""Cox regression, Kaplan-Meier curves and log-rank tests over clients, whose rows stay where they are.

A partial likelihood that is stratified by client is a sum over clients, each of which compares its own rows (Lu et al.
2015, WebDISCO).  Curves and the test between groups need how many rows of a group are at risk at each time, which adds
up as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from piebald.contracts import Query, Split
from piebald.core.arguments import Count, checked, checked_class
from piebald.core.errors import SettingError
from piebald.core.moments import Floats
from piebald.core.result_table import ResultTable
from piebald.data.preparation.preparation import PrepareSettings
from piebald.inference.linear_models import ModelOfRows, without
from piebald.inference.models.clients import ColumnRoles, ModelClients, ModelColumns, asked_tables, planned
from piebald.inference.models.fitting import Maximum
from piebald.inference.models.formula import CLIENT, Formula, with_formula
from piebald.inference.models.likelihood import LogRank, log_rank
from piebald.inference.models.rows import HEADS, ModelPlan, Ties
from piebald.inference.models.sums import TABLE, at_risk_of
from piebald.inference.noisy_models import (
    ROUNDS,
    NoiseOptions,
    NoisyModel,
    curve_noise,
    fit_noisy,
    noisy_counts,
    tested_with_noise,
)
from piebald.inference.pooled_statistics import ChiSquare, Estimates, PooledResult, plain_value
from piebald.privacy.accounting import PrivacyBudget

Transform = Literal["identity", "log", "km", "rank"]
_Z = 1.959963984540054  # of intervals that cover with a probability of 0.95


@checked_class
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Cox(Estimates):
    """A fitted proportional-hazards model; see `Estimates` for its coefficients, which are log hazard ratios.

    Attributes:
        events: rows that end with an event.
        informative: clients with an event; others have no say where risk sets are of single clients.
        stratified: whether rows are compared with rows of their own client only.
        ties: how tied events are taken.
        error_kind: where standard errors come from: the "model", or score residuals of rows ("robust") or clusters
            ("clustered").
        clusters: the number of clusters, None without them.
        event: the value of the column of events that is an event.
        log_likelihood, null_log_likelihood: partial ones, of the model and of no columns.
        transform: the function of time of the tests of proportional hazards.
        proportional: the test of each coefficient, by its name, that its hazards are proportional.
        proportional_overall: that of all together.
    """

    events: int
    informative: int
    stratified: bool
    ties: Ties
    error_kind: Literal["model", "robust", "clustered"]
    clusters: int | None
    event: str
    log_likelihood: float
    null_log_likelihood: float
    transform: Transform
    proportional: Mapping[str, ChiSquare]
    proportional_overall: ChiSquare

    @property
    def ratio(self) -> str:
        """What exp of a coefficient is."""
        return "hazard ratio"

    @property
    def degrees(self) -> float:
        """Degrees of freedom of Student's t: with clusters one less than there are."""
        return math.inf if self.clusters is None else self.clusters - 1

    @property
    def hazard_ratios(self) -> Floats:
        """The ratios of hazards, exp of the coefficients [p]."""
        return np.exp(self.coefficients)

    @property
    def likelihood_ratio(self) -> ChiSquare:
        """The likelihood-ratio test of all columns together."""
        return ChiSquare(2 * (self.log_likelihood - self.null_log_likelihood), len(self.names))

    def table(self) -> ResultTable:
        """Return a table of the coefficients, with hazard ratios and the p-value of proportional hazards."""
        table = Estimates.table(self)
        for row, name in zip(table, self.names, strict=True):
            row["p (proportional)"] = self.proportional[name].p_value
        return table.only(*table.columns, "p (proportional)")

    def plain(self) -> dict[str, Any]:
        """Return the model as JSON values."""
        tests = {name: test.plain() for name, test in self.proportional.items()}
        overall = {
            "proportional_overall": self.proportional_overall.plain(),
            "likelihood_ratio": self.likelihood_ratio.plain(),
        }
        return {**Estimates.plain(self), "proportional": tests, **overall}


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class SurvivalCurve:
    """A Kaplan-Meier curve: values at times [t] at which an event occurs.

    Attributes:
        times, at_risk, events: times, rows at risk just before, and events [t].
        survival: the estimated probability to live longer than each time [t].
        errors: its standard errors by Greenwood's formula [t].
        interval: 95 % intervals by the log-log transform, as in lifelines [t, 2]; NaN where none lives longer.
        rows: how many rows the curve is of.
    """

    times: Floats
    at_risk: Floats
    events: Floats
    survival: Floats
    errors: Floats
    interval: Floats
    rows: int

    @property
    def median(self) -> float:
        """The first time that at most half survive, infinite where more do."""
        below = np.flatnonzero(self.survival <= 0.5 + 1e-12)
        return float(self.times[below[0]]) if len(below) else math.inf

    @property
    def median_interval(self) -> tuple[float, float]:
        """The 95 % interval of the median (Brookmeyer and Crowley 1982): the times whose interval holds a half."""
        ends = []
        for limit in self.interval.T:
            below = np.flatnonzero(np.nan_to_num(limit, nan=0.0) <= 0.5)
            ends.append(float(self.times[below[0]]) if len(below) else math.inf)
        return ends[0], ends[1]

    @classmethod
    def of(cls, times: Floats, at_risk: Floats, events: Floats, noise: Floats | None = None) -> SurvivalCurve:
        """Return the curve of counts at some times [t], with standard errors of its logarithm by noise [t]."""
        noise = np.zeros(len(times)) if noise is None else noise
        # before times without events are left out, since the first of them may come after rows have left
        rows = int(at_risk[0]) if len(at_risk) else 0
        # the curve falls at events only, and its pointwise variance changes there only
        times, at_risk, events, noise = (part[events > 0] for part in (times, at_risk, events, noise))
        survival: Floats = np.asarray(np.cumprod(1 - events / at_risk), dtype=np.float64)
        # where the last row at risk has an event, Greenwood's term divides by 0 and log(survival) is infinite
        with np.errstate(divide="ignore", invalid="ignore"):
            spread: Floats = np.asarray(np.sqrt(np.cumsum(events / (at_risk * (at_risk - events))) + np.square(noise)))
            # on the scale log(-log S), from which ends come back between 0 and 1
            half = _Z * spread / np.log(survival)
            interval: Floats = np.asarray(survival[:, None] ** np.exp(np.stack([-half, half], axis=1)))
        errors = np.where(survival > 0, survival * np.where(survival > 0, spread, 0.0), 0.0)
        # at 0 the transformation has no value
        interval[survival <= 0] = np.nan
        return cls(times, at_risk, events, survival, errors, interval, rows)

    def plain(self) -> dict[str, Any]:
        """Return the curve as JSON values."""
        names = ("times", "at_risk", "events", "survival", "errors", "interval", "rows", "median", "median_interval")
        values: dict[str, Any] = plain_value({name: getattr(self, name) for name in names})
        return values


@checked_class
@dataclass(frozen=True, slots=True, eq=False)
class Survival(PooledResult):
    """Kaplan-Meier curves of groups of rows, and the log-rank test of whether they differ.

    Attributes:
        curves: by group; "all" where there are none.
        test: the log-rank test, None with a single group.
        expected: events of each group where none differs [g].
        stratified: whether the test compares rows with rows of their own client only.
        rows, dropped: rows, and rows with gaps that are left out.
        clients: how many clients have rows.
        privacy: what a question with noise has spent, None without noise.
        left_out: the reasons why clients have no part in them, by name.
    """

    curves: Mapping[str, SurvivalCurve]
    test: ChiSquare | None
    expected: Floats
    stratified: bool
    rows: int
    dropped: int
    clients: int
    privacy: PrivacyBudget | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)

    def table(self) -> ResultTable:
        """Return a table of the groups."""
        rows = []
        for (name, curve), expected in zip(self.curves.items(), self.expected.tolist(), strict=True):
            ends = [plain_value(end) for end in (curve.median, *curve.median_interval)]
            rows.append([name, curve.rows, int(curve.events.sum()), expected, *ends])
        heading = ("", "rows", "events", "expected", "median", "2.5 %", "97.5 %")
        return ResultTable(rows, heading, notes=self.notes)

    def plain(self) -> dict[str, Any]:
        """Return the curves and the test as JSON values."""
        names = ("expected", "stratified", "rows", "dropped", "clients", "left_out")
        return {
            "curves": {name: curve.plain() for name, curve in self.curves.items()},
            "log_rank": None if self.test is None else self.test.plain(),
            **plain_value({name: getattr(self, name) for name in names}),
        }


@checked
def cox(
    clients: Any,
    *,
    time: str,
    event: str,
    event_value: str | None = None,
    columns: Sequence[str] | None = None,
    formula: str | None = None,
    entry: str | None = None,
    offset: str | None = None,
    weights: str | None = None,
    stratified: bool = True,
    ties: Ties = "efron",
    robust: bool = False,
    cluster: str | None = None,
    transform: Transform = "identity",
    client: str | None = None,
    split: Split = "train",
    features: Sequence[str] | None = None,
    categories: Mapping[str, Sequence[str]] | None = None,
    max_iterations: Count = 50,
    epsilon: float | None = None,
    delta: float | None = None,
    bounds: Mapping[str, Sequence[float]] | None = None,
    rounds: Count = ROUNDS,
    times: Sequence[float] | None = None,
    prepare: PrepareSettings | Mapping[str, Any] | None = None,
) -> Cox | NoisyModel:
    """Fit Cox's proportional-hazards model to the rows of all clients.

    By default each client has a baseline hazard of its own, so that no row is compared with rows of others.

    Args:
        clients, client, split, features, prepare: as of `statistics`.
        time, event: columns of the time to an event or to the end of observation, and of whether it was an event: 1 or
            0, or classes.
        event_value: the class that is an event, by default the second of two: the larger number, or by alphabet.
        columns: the columns that hazards depend on, all others by default.  The column `client`, or "client", has a
            coefficient of each client but the first, where these have no baselines of their own.
        formula: in place of columns, without a left side, see `glm`: "arm * age + bs(dose, df=4)".
        entry: a column of the times after which rows are observed (left truncation): they are in no risk set before.
        offset: a column that is added to the log hazard.
        weights: a column of weights of rows, as in R's survival: tied events share their mean weight.
        stratified: False for one baseline of all clients, whose risk sets are of the pooled rows; sites are not asked
            for that.
        ties: tied events after "efron" (1977) or "breslow" (1974).
        robust: standard errors by score residuals of rows (Lin and Wei 1989) instead of the model's.
        cluster: a column whose values, of any kind and number, name clusters of rows that may depend on each other, or
            "client".
        transform: the function of time against which Schoenfeld residuals are tested (Grambsch and Therneau 1994): the
            time, its "log", the share of lives that have ended before it ("km", of Kaplan and Meier), or its "rank"
            among events.  The last two are of the pooled rows, and sites are not asked for them.
        categories: the values of columns of codes, of which each but the first has a coefficient.
        max_iterations: questions to the clients, at most.
        epsilon, delta: what all questions of the model together spend of each client's rows, of which one may take the
            place of another: each client adds noise to sums that no row moves by more than its bounds allow.
        bounds: low and high of each column of numbers, which must not be taken from the rows; for noise.
        rounds: questions of a model with noise that needs several.
        times: ends of intervals, with noise: the baseline hazard is constant in each, and the same for all clients.

    Returns:
        A `Cox`, or a `NoisyModel` with an epsilon.

    Raises:
        SettingError: an argument is wrong, there are no events, columns depend on each other within each client, or a
            combination of them separates rows with events, so that there is no finite estimate.

    Examples:
        >>> import pandas as pd
        >>> import piebald
        >>> trial = pd.DataFrame({"clinic": list("AAAABBBB"), "arm": [0, 1, 0, 1, 1, 0, 1, 0]})
        >>> trial["months"], trial["died"] = [2.0, 5, 4, 3, 9, 3, 2, 6], [1, 1, 0, 1, 0, 1, 1, 1]
        >>> model = piebald.cox(trial, client="clinic", time="months", event="died", columns=["arm"])
        >>> model.events, model.stratified
        (6, True)
    """
    parsed, columns, _ = with_formula(formula, columns)
    options = CoxOptions(
        time, event, columns, offset, stratified, ties, robust, cluster, transform, max_iterations, entry, weights,
        NoiseOptions.of(epsilon, delta, bounds, rounds, times or ()), event_value, parsed,
    )  # fmt: skip
    with asked_tables(clients, client, options, split, features, categories, prepare) as asked:
        return fit_cox(asked, options)


@dataclass(frozen=True, slots=True)
class CoxOptions:
    """The arguments of `cox` that say what is fitted."""

    time: str
    event: str
    columns: Sequence[str] | None = None
    offset: str | None = None
    stratified: bool = True
    ties: Ties = "efron"
    robust: bool = False
    cluster: str | None = None
    transform: Transform = "identity"
    max_iterations: int = 50
    entry: str | None = None
    weights: str | None = None
    noise: NoiseOptions | None = None
    event_value: str | None = None
    formula: Formula | None = None

    def roles(self) -> ColumnRoles:
        """Return the other columns."""
        return ColumnRoles(self.event, self.time, self.offset, self.weights, self.cluster, self.entry)

    def plan(self, asked: ModelColumns) -> tuple[ModelPlan, list[str]]:
        """Return the plan, and the names of the regressors.

        Raises:
            SettingError: there are none.
        """
        if self.formula is not None and self.formula.target is not None:
            raise SettingError("time and event name what is explained: leave out the left side of the formula")
        fields: dict[str, Any] = {"ties": self.ties, "stratified": self.stratified}
        plan, names = planned(asked, "cox", self.roles(), self.columns, self.event_value, self.formula, **fields)
        if self.stratified:  # where each client has a baseline of its own, and a coefficient would say nothing
            plan, names = without(plan, names, plan.of_clients)
        if not names:
            raise SettingError("a Cox model needs at least one column that hazards depend on")
        return plan, names

    def questions(self, asked: ModelColumns) -> list[Query]:
        """Return the questions that terms name."""
        plan, names = self.plan(asked)
        noise = self.noise
        return [asked.query(plan) if noise is None else noise.question(asked, plan, names, self.event, noise.times)]


def fit_cox(clients: ModelClients, options: CoxOptions) -> Cox | NoisyModel:
    """Fit the model that the options say, of clients on this machine or at sites."""
    plan, names = options.plan(clients.columns)
    event = clients.columns.event(options.event, options.event_value)
    if options.noise is not None:
        if options.robust or not options.noise.times:
            raise SettingError("with noise give times, the ends of intervals of one hazard, and leave robust out")
        return fit_noisy(clients, plan, names, options.event, options.noise, event)
    # before the fit, so that a transform that sites do not take is refused without a question
    function = time_function(clients, plan, options.transform)
    model = ModelOfRows(clients, plan, names, options.max_iterations)
    # models of times send the count of events in place of the exposure
    events = round(model.exposure)
    if not events:
        raise SettingError(f"no row has an event: {options.event!r} is 0 in all rows without gaps")
    # a Cox model without columns has no parameter to maximise: its likelihood at 0 is the null model's
    null = model.likelihood(np.zeros(len(names))).value
    fit = model.maximum()
    covariance, clusters = fit.covariance, None
    if options.robust or options.cluster is not None:
        covariance, clusters = model.sandwich(fit)
    proportional, overall = _proportional(model, fit, covariance, function)
    kind = model.kind_of_errors(clusters)
    wanted = {clients.columns.place(clients.columns.regressor(name)) for name in options.columns or ()}
    if options.stratified and CLIENT in wanted:
        model.remarks.append("Each client has a baseline of its own, which adjusts for clients without coefficients.")
    return Cox(
        **model.estimates(fit.point, covariance), **kind, events=events, informative=model.events, event=event,
        stratified=options.stratified, ties=options.ties, log_likelihood=fit.sums.value, null_log_likelihood=null,
        transform=options.transform, proportional=proportional, proportional_overall=overall,
    )  # fmt: skip


def time_function(clients: ModelClients, plan: ModelPlan, transform: Transform) -> Floats:
    """Return a function of time as `sums.client_sums` takes it: its number, and its table where it is of pooled rows.

    Raises:
        SettingError: it is of pooled rows, which are at sites.
    """
    if transform in ("identity", "log"):
        return np.array([float(transform == "log")])
    rows = clients.pooled(plan)
    if rows is None:
        raise SettingError(f"transform {transform!r} needs the times of all rows: sites take 'identity' or 'log'")
    # only times of events: residuals are of events, and each of them finds its own time in the table
    times, place = np.unique(rows.time[rows.y > 0], return_inverse=True)
    deaths = np.bincount(place, rows.weight[rows.y > 0], len(times))
    if transform == "rank":  # tied events share their mean rank
        return np.concatenate([[TABLE], times, np.cumsum(deaths) - (deaths - 1) / 2])
    # a time of events by one of rows, each at risk from after its entry up to its time
    at_risk = np.array([rows.weight[(rows.time >= time) & (rows.entry < time)].sum() for time in times])
    alive = np.cumprod(1 - deaths / at_risk)
    # the curve just before each time, as R's cox.zph takes it: the event itself does not count
    return np.concatenate([[TABLE], times, 1 - np.concatenate([[1.0], alive[:-1]])])


def _proportional(
    model: ModelOfRows, fit: Maximum, covariance: Floats, function: Floats
) -> tuple[dict[str, ChiSquare], ChiSquare]:
    """Return the tests of proportional hazards of each coefficient and of all (Grambsch and Therneau 1994, eq. 6)."""
    answer = model.ask("schoenfeld", fit.point, function)
    events, total, squares = answer[:3].tolist()
    spread = squares - total**2 / events
    if spread <= 1e-12 * abs(squares):  # events of one time say nothing of how hazards change
        nothing = ChiSquare(0.0, 1)
        return dict.fromkeys(model.names, nothing), ChiSquare(0.0, len(model.names))
    apart = answer[3:] - total / events * fit.sums.score  # the score is 0 but for rounding
    turned = covariance @ apart
    sizes = events * np.square(turned) / (np.diag(covariance) * spread)
    tests = {name: ChiSquare(size, 1) for name, size in zip(model.names, sizes.tolist(), strict=True)}
    return tests, ChiSquare(events * float(apart @ turned) / spread, len(model.names))


@checked
def survival(
    clients: Any,
    *,
    time: str,
    event: str,
    event_value: str | None = None,
    group: str | None = None,
    times: Sequence[float] | None = None,
    stratified: bool = False,
    client: str | None = None,
    split: Split = "train",
    features: Sequence[str] | None = None,
    categories: Mapping[str, Sequence[str]] | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    prepare: PrepareSettings | Mapping[str, Any] | None = None,
) -> Survival:
    """Estimate survival curves of the pooled rows by Kaplan and Meier (1958), and test whether groups differ.

    Args:
        clients, client, split, features, prepare: as of `statistics`.
        time, event, event_value: as of `cox`.
        group: a column whose values are the groups: the clients, text, true and false (1 and 0), or codes, of which
            more than these two need `categories`.
        times: increasing times at which rows are counted: a time between two of them counts as the later one, and rows
            beyond the last one as seen up to it.  All times that occur by default.
        stratified: whether the log-rank test compares rows with rows of their own client only, at their own times.
        categories: the values of columns of codes, such as {"arm": ["0", "1"]}.
        epsilon, delta: what the question spends of each client's rows, for counts with noise, which need times; the
            standard errors have the noise in them.

    Raises:
        SettingError: an argument is wrong, or there are no rows.
    """
    noise = NoiseOptions.of(epsilon, delta, None)
    options = SurvivalOptions(time, event, group, times, stratified, noise, event_value)
    with asked_tables(clients, client, options, split, features, categories, prepare) as asked:
        # true and false are numbers by this point, and their two values need no names from the caller
        if group is not None:
            asked.columns.name_truths(group)
        return fit_survival(asked, options)


@dataclass(frozen=True, slots=True)
class SurvivalOptions:
    """The arguments of `survival` that say what is estimated."""

    time: str
    event: str
    group: str | None = None
    times: Sequence[float] | None = None
    stratified: bool = False
    noise: NoiseOptions | None = None
    event_value: str | None = None

    @property
    def columns(self) -> list[str]:
        """The column of groups."""
        return [] if self.group is None else [self.group]

    def roles(self) -> ColumnRoles:
        """Return the other columns."""
        return ColumnRoles(self.event, self.time)

    def plan(self, asked: ModelColumns) -> tuple[ModelPlan, list[str]]:
        """Return the plan, and the names of the groups.

        Raises:
            SettingError: times do not increase, or groups are numbers without names.
        """
        if self.group is not None and self.group not in asked.categories:
            raise SettingError(
                f"group {self.group!r} holds numbers: name its values, categories={{{self.group!r}: ['0', '1']}}"
            )
        times = self.times
        # the sum is finite only if each of them is, and one that occurs twice is not in its sorted set
        if times is not None and (not len(times) or not math.isfinite(sum(times)) or list(times) != sorted({*times})):
            raise SettingError("times must be increasing numbers, at least one")
        plan, names = planned(
            asked, "survival", self.roles(), self.columns, self.event_value, stratified=self.stratified
        )
        return plan, [name.partition("=")[2] for name in names] or ["all"]

    def questions(self, asked: ModelColumns) -> list[Query]:
        """Return the questions that terms name."""
        plan, names = self.plan(asked)
        noise = self.noise
        times = self.times or ()
        return [asked.query(plan) if noise is None else noise.question(asked, plan, names, self.event, times)]


def fit_survival(clients: ModelClients, options: SurvivalOptions) -> Survival:
    """Estimate the curves that the options say, of clients on this machine or at sites."""
    plan, groups = options.plan(clients.columns)
    if options.noise is not None:
        return _noisy_survival(clients, plan, groups, options)
    columns = len(plan.columns)
    scale = np.concatenate([np.zeros(columns), np.ones(columns)])
    moments = clients.sums(plan, "moments", scale)
    rows, dropped, taking_part = map(int, moments[:3])
    if not rows:
        raise SettingError("there are no rows without gaps to estimate survival from")
    pooled = clients.pooled(plan) if options.times is None else None
    if options.times is None and pooled is None:
        raise SettingError("sites count rows at times that they are asked about: give times, such as one a month")
    times = np.asarray(options.times, dtype=np.float64) if pooled is None else np.unique(pooled.time)
    answer = clients.sums(plan, "counts", np.concatenate([scale, times]))
    events, others = answer.reshape(2, len(groups), len(times))
    # rows that no interval counted are there to the end, and those of no group are in none
    sizes = moments[HEADS : HEADS + columns] if columns else np.array([float(rows)])
    beyond = sizes - events.sum(1) - others.sum(1)
    at_risk = at_risk_of(events, others) + beyond[:, None]
    tested = log_rank(at_risk, events)
    # tests of strata add up; the curves stay those of all rows
    if options.stratified:
        sums = clients.sums(plan, "logrank", scale)
        size = len(groups)
        tested = LogRank(sums[:size], sums[size : 2 * size], sums[2 * size :].reshape(size, size))
    curves = {name: SurvivalCurve.of(times, at_risk[index], events[index]) for index, name in enumerate(groups)}
    return Survival(curves, _log_rank_test(tested), tested.expected, options.stratified, rows, dropped, taking_part,
                    left_out=clients.left_out)  # fmt: skip


def _noisy_survival(
    clients: ModelClients, plan: ModelPlan, groups: Sequence[str], options: SurvivalOptions
) -> Survival:
    """Estimate curves from counts with noise."""
    assert options.noise is not None
    if options.times is None or options.stratified:
        raise SettingError("with noise rows are counted at stated times of all clients: give times, and no stratified")
    times = np.asarray(options.times, dtype=np.float64)
    events, others, beyond, deviation, count, spent = noisy_counts(
        clients, plan, groups, options.event, options.times, options.noise
    )
    at_risk = at_risk_of(events, others) + beyond[:, None]
    curves = {}
    for group, name in enumerate(groups):
        own = curve_noise(events[group], others[group], float(beyond[group]), deviation)
        curves[name] = SurvivalCurve.of(times, at_risk[group], events[group], own)
    tested = tested_with_noise(events, others, beyond, deviation)
    rows = max(round(float(at_risk[:, 0].sum())), 0)
    return Survival(curves, _log_rank_test(tested), tested.expected, False, rows, 0, count, spent, clients.left_out)


def _log_rank_test(sums: LogRank) -> ChiSquare | None:
    """Return the log-rank test, None where fewer than two groups are compared."""
    # events and their expectations add up to the same, so the covariance of g groups has rank g - 1 at most
    degrees = int(np.linalg.matrix_rank(sums.covariance, hermitian=True)) if len(sums.events) > 1 else 0
    if not degrees:
        return None
    # a pseudo-inverse, since the covariance is singular; any generalised inverse gives the same statistic
    apart = sums.events - sums.expected
    return ChiSquare(float(apart @ np.linalg.pinv(sums.covariance, hermitian=True) @ apart), degrees)
