"""Commands that fit models of all clients' rows without training: glm, cox, survival."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from piebald.cli import statistics
from piebald.cli.app import ROWS, SharedOptions, command, print_table
from piebald.core.errors import SettingError
from piebald.core.plain_text import WIDTH
from piebald.core.result_table import ResultTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from piebald.inference.linear_models import Glm, MixedGlm, PooledGlm
    from piebald.inference.noisy_models import NoisyModel
    from piebald.inference.survival import Cox, Survival
    from piebald.privacy.accounting import PrivacyBudget

Offset = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="A column added to the predictor, as the log of an exposure.")
]
Robust = Annotated[bool, typer.Option("--robust", help="Standard errors by rows' own residuals.")]
Cluster = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="Standard errors by clusters: a column, or 'client'.")
]
TimeColumn = Annotated[str, typer.Option(metavar="COLUMN", help="The time to an event, or to the end of observation.")]
EventColumn = Annotated[str, typer.Option(metavar="COLUMN", help="Whether it was an event: 1 or 0.")]
EventValue = Annotated[str | None, typer.Option(metavar="VALUE", help="The value that is one, the second by default.")]
FormulaText = Annotated[
    str | None, typer.Option("--formula", metavar="TEXT", help="Of columns, as 'ill ~ C(site) + age * sex'.")
]
Epsilon = Annotated[float | None, typer.Option(help="Hide single rows by noise: the budget of this call.")]
Delta = Annotated[float | None, typer.Option(help="The delta of that budget.")]
Bounds = Annotated[
    list[str] | None, typer.Option(metavar="COLUMN=LOW:HIGH", help="The range of a column of numbers, for noise.")
]


@command(*ROWS, "sets", "runtime", "as_json")
def glm(
    options: SharedOptions,
    file: statistics.Source,
    target: Annotated[str | None, typer.Option(help="The column to explain; the target by default.")] = None,
    formula: FormulaText = None,
    family: Annotated[
        Literal["gaussian", "binomial", "poisson", "negative_binomial", "gamma", "tweedie", "ordinal", "multinomial"]
        | None,
        typer.Option(help="The distribution of the target; by default by its values."),
    ] = None,
    event: Annotated[
        str | None, typer.Option(metavar="VALUE", help="The class that counts as 1, the second by default.")
    ] = None,
    power: Annotated[float, typer.Option(help="Of the mean, for the variance of tweedie.")] = 1.5,
    offset: Offset = None,
    weights: statistics.Weights = None,
    robust: Robust = False,
    cluster: Cluster = None,
    random_intercept: Annotated[
        Literal["one_stage", "two_stage"] | None,
        typer.Option(help="An intercept of each client: a mixed model, or models of clients that are pooled."),
    ] = None,
    max_likelihood: Annotated[
        bool, typer.Option("--ml", help="In one stage, maximise the likelihood and not the restricted one.")
    ] = False,
    effects: Annotated[
        bool, typer.Option("--effects", help="Print average marginal effects as well, with delta-method errors.")
    ] = False,
    epsilon: Epsilon = None,
    delta: Delta = None,
    bounds: Bounds = None,
) -> None:
    """Fit a generalised linear model to the rows of all clients, as if they were pooled."""
    from piebald.inference.linear_models import GlmOptions, fit_glm
    from piebald.inference.models.formula import with_formula

    parsed, columns, target = with_formula(formula, options.column, target)
    settings: dict[str, Any] = {
        "target": target, "family": family, "offset": offset, "weights": weights, "robust": robust, "cluster": cluster,
        "random_intercept": random_intercept, "reml": not max_likelihood, "event": event, "power": power,
        "noise": _noise(epsilon, delta, bounds), "formula": parsed, "effects": effects,
    }  # fmt: skip
    statistics.print_model(
        options, statistics.fitted(options, file, fit_glm, GlmOptions, settings, columns), _about_glm
    )


@command(*ROWS, "sets", "runtime", "as_json")
def cox(
    options: SharedOptions,
    file: statistics.Source,
    time: TimeColumn,
    event: EventColumn,
    event_value: EventValue = None,
    formula: FormulaText = None,
    entry: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The times after which rows are observed.")
    ] = None,
    offset: Offset = None,
    weights: statistics.Weights = None,
    pooled: Annotated[
        bool, typer.Option("--pooled", help="One baseline of all clients, on this machine, and not one of each.")
    ] = False,
    ties: Annotated[Literal["efron", "breslow"], typer.Option(help="How tied events are taken.")] = "efron",
    robust: Robust = False,
    cluster: Cluster = None,
    transform: Annotated[
        Literal["identity", "log", "km", "rank"], typer.Option(help="Of time, in the test of proportional hazards.")
    ] = "identity",
    epsilon: Epsilon = None,
    delta: Delta = None,
    bounds: Bounds = None,
    times: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST:STEP", help="Ends of intervals of one hazard, for noise.")
    ] = None,
) -> None:
    """Fit Cox's proportional-hazards model to the rows of all clients, stratified by client."""
    from piebald.inference.models.formula import with_formula
    from piebald.inference.survival import CoxOptions, fit_cox

    parsed, columns, _ = with_formula(formula, options.column)
    settings: dict[str, Any] = {
        "time": time, "event": event, "offset": offset, "stratified": not pooled, "ties": ties, "robust": robust,
        "cluster": cluster, "transform": transform, "entry": entry, "weights": weights, "event_value": event_value,
        "noise": _noise(epsilon, delta, bounds, () if times is None else _times(times)), "formula": parsed,
    }  # fmt: skip
    statistics.print_model(
        options, statistics.fitted(options, file, fit_cox, CoxOptions, settings, columns), _about_cox
    )


@command(*(name for name in ROWS if name != "column"), "sets", "runtime", "as_json")
def survival(
    options: SharedOptions,
    file: statistics.Source,
    time: TimeColumn,
    event: EventColumn,
    event_value: EventValue = None,
    group: Annotated[str | None, typer.Option(metavar="COLUMN", help="The column whose values are groups.")] = None,
    times: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST:STEP", help="Times at which rows are counted, as 30:3600:30.")
    ] = None,
    stratified: Annotated[
        bool, typer.Option("--stratified", help="Compare rows with rows of their own client only, in the test.")
    ] = False,
    epsilon: Epsilon = None,
    delta: Delta = None,
) -> None:
    """Estimate Kaplan-Meier curves of all clients' rows, and test by log-rank whether groups differ."""
    from piebald.inference.survival import SurvivalOptions, fit_survival

    settings: dict[str, Any] = {
        "time": time, "event": event, "group": group, "times": None if times is None else _times(times),
        "stratified": stratified, "noise": _noise(epsilon, delta, None), "event_value": event_value,
    }  # fmt: skip
    model = statistics.fitted(options, file, fit_survival, SurvivalOptions, settings, None)
    for name, curve in ({} if options.as_json else model.curves).items():
        print(name)
        columns = (curve.times, curve.at_risk, curve.events, curve.survival, curve.errors, *curve.interval.T)
        heading = ["time", "at risk", "events", "survival", "std. error", "2.5 %", "97.5 %"]
        # about a dozen lines of each curve
        shown = range(0, len(curve.times), max(len(curve.times) // 12, 1))
        print_table(ResultTable([[f"{column[k]:.6g}" for column in columns] for k in shown], heading), width=WIDTH)
        print()
    statistics.print_model(options, model, _about_survival)


def _noise(epsilon: float | None, delta: float | None, bounds: list[str] | None, times: Sequence[float] = ()) -> Any:
    """Return the noise that is asked for, None where there is none."""
    from piebald.inference.noisy_models import ROUNDS, NoiseOptions

    return NoiseOptions.of(epsilon, delta, dict(map(statistics.bounds_of, bounds or ())), ROUNDS, times)


def _times(text: str) -> list[float]:
    """Return the times FIRST, FIRST + STEP, ... up to LAST."""
    try:
        first, last, step = map(float, text.split(":"))
        # rounding may leave the quotient just below a whole number, and LAST would be lost
        count = math.floor((last - first) / step + 1e-9) + 1
        if not 1 <= count <= 10_000:
            raise ValueError
    except (ValueError, ZeroDivisionError, OverflowError):
        raise SettingError(
            f"--times must be FIRST:LAST:STEP, such as 30:3600:30, with at most 10,000 times, got {text!r}"
        ) from None
    return [first + step * index for index in range(count)]


def _about_noisy(model: NoisyModel) -> str:
    """Return sentences about a model with noise."""
    return (
        f"{model.target}, {model.family}{_event(model)}, with noise: about {model.rows:,} rows of {model.clients} "
        f"clients, in {model.iterations} questions.\nStandard errors have the noise in them.  {_spent(model.privacy)}"
    )


def _spent(privacy: PrivacyBudget) -> str:
    return f"Spent at each client: epsilon {privacy.epsilon_pld:.4g}, delta {privacy.delta:g} ({privacy.unit}-level)."


def _about_glm(model: Glm | MixedGlm | PooledGlm | NoisyModel) -> str:
    """Return sentences about a model."""
    from piebald.inference.linear_models import Glm, MixedGlm
    from piebald.inference.noisy_models import NoisyModel

    if isinstance(model, NoisyModel):
        return _about_noisy(model)
    start = f"{model.target}, {model.family}{_event(model)}: {_rows(model)}"
    if isinstance(model, MixedGlm):
        estimated = "Restricted log-likelihood" if model.reml else "Log-likelihood"
        return (
            f"{start}.\n{estimated} {model.log_likelihood:.6g}.\nVariance of clients' intercepts {model.between:.4g}, "
            f"within clients {model.residual:.4g}."
        )
    if not isinstance(model, Glm):
        return (
            f"{start}.\nPooled from models of {model.fitted} clients, which have one each: random effects,\n"
            "errors after Hartung and Knapp."
        )
    errors = {"model": "", "robust": "\nRobust standard errors (HC1)."}
    clustered = f"\nStandard errors by {model.clusters} clusters, Student's t of {model.degrees:g} degrees of freedom."
    alpha = "" if model.alpha is None else f"\nDispersion alpha {model.alpha:.4g}, std. error {model.alpha_error:.4g}."
    return (
        f"{start}.\nDeviance {model.deviance:.6g} of {model.null_deviance:.6g} without columns, in {model.iterations} "
        f"questions.{alpha}{errors.get(model.error_kind, clustered)}"
    )


def _about_cox(model: Cox | NoisyModel) -> str:
    """Return sentences about a model."""
    from piebald.inference.noisy_models import NoisyModel

    if isinstance(model, NoisyModel):
        return _about_noisy(model)
    strata = "One baseline of all clients"
    if model.stratified:
        strata = f"Stratified by client, {model.informative} of {model.clients} with events"
    test, ratio = model.proportional_overall, model.likelihood_ratio
    errors = {"model": "", "robust": "Robust standard errors.\n"}
    clustered = f"Standard errors by {model.clusters} clusters, Student's t of {model.degrees:g} degrees of freedom.\n"
    return (
        f"{_rows(model)}, {model.events:,} events ({model.event}).\n{strata}; ties after {model.ties.capitalize()}.\n"
        f"{errors.get(model.error_kind, clustered)}Likelihood ratio {ratio.statistic:.4g} on {ratio.degrees} degrees "
        f"of freedom, p {ratio.p_value:.3g}.\nProportional hazards: chi-square {test.statistic:.4g} on {test.degrees}, "
        f"p {test.p_value:.3g}."
    )


def _about_survival(found: Survival) -> str:
    """Return sentences about curves and their test."""
    lines = [f"{_rows(found)}.", "Medians and survival have 95 % intervals (log-log)."]
    if found.test is not None:
        kind = "stratified by client" if found.stratified else "of the pooled rows"
        lines.append(
            f"Log-rank test {kind}: chi-square {found.test.statistic:.4g} on {found.test.degrees}, p "
            f"{found.test.p_value:.3g}."
        )
    if found.privacy is not None:
        lines.append(f"Counts have noise, and standard errors have it in them.  {_spent(found.privacy)}")
    return "\n".join(lines)


def _event(model: Any) -> str:
    return "" if model.event is None else f", {model.event} counts as 1"


def _rows(model: Any) -> str:
    return f"{model.rows:,} rows ({model.dropped:,} with gaps left out) of {model.clients} clients"
