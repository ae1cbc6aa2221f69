"""Experiments whose clients are asked questions instead of trained, and statistics of such clients.

The preparation that the sites of a federation agree on before a run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from piebald.contracts import Clients, DismissesSites, Query, Runtime, Split
from piebald.contracts.component import ModelSpec
from piebald.core.errors import RuntimeFault, SettingError
from piebald.data.preparation.agreement import Unanswered, agree
from piebald.data.preparation.answers import CountsQuestion, KindsQuestion, Question
from piebald.data.preparation.preparation import Preparation
from piebald.data.preparation.settings import PrepareSettings
from piebald.experiments.file import ExperimentSettings
from piebald.methods.client_work import ClientWork
from piebald.methods.recipe import Recipe
from piebald.methods.recipes import fedavg
from piebald.privacy import SecureAggregation
from piebald.runs.options import RunOptions
from piebald.runs.prepare import prepare
from piebald.statistics.models.clients import ModelClients, SiteColumns, SiteModelClients
from piebald.statistics.models.rows import ModelPlan
from piebald.statistics.pooled_statistics import FederatedStatistics, noise_multiplier, statistics_request
from piebald.statistics.queries.prepare import PrepareQuery, unpacked
from piebald.statistics.sites import (
    AskedSites,
    hidden_at_sites,
    hidden_question,
    say_left_out,
    stated_questions,
    statistics_at_sites,
)

T = TypeVar("T")
Options = TypeVar("Options", bound="ModelOptions")
_ABOUT = ("kinds", "values", "counts", "powers")  # of the questions
log = logging.getLogger("piebald.statistics")


class ModelOptions(Protocol):
    """What a user says of a model."""

    def plan(self, clients: Any, /) -> tuple[ModelPlan, list[str]]:
        """Return the plan of clients' columns, and the names of its regressors."""


class QuestionExperiment(ExperimentSettings):
    """An experiment file whose clients are asked questions, for which it needs no recipe."""

    needs_recipe = False


@dataclass(frozen=True, slots=True, eq=False)
class OpenSites:
    """The clients of an experiment, whose runtime is open.

    Attributes:
        settings: of the file.
        runtime: the runtime that reaches the clients.
        work: the model that a task carries, and the masks of the run.
        clients: their names, and the form of their rows.
        recipes: those of the file, by which nobody trains here.
    """

    settings: QuestionExperiment
    runtime: Runtime
    work: ClientWork
    clients: Clients
    recipes: tuple[Recipe, ...]


@contextmanager
def open_sites(
    file: Path, flags: Sequence[str], credentials: Path | None, subject: str, masks: Sequence[SecureAggregation],
    questions: Callable[[ExperimentSettings, Clients], Sequence[Query]],
    agreed: Callable[[ExperimentSettings], Preparation] | None = None,
) -> Iterator[OpenSites]:  # fmt: skip
    """Open the federation of an experiment, whose sites take part under its terms and their policies.

    Args:
        file: the experiment file, which needs no recipe.
        flags: settings on top of it.
        credentials: the server's; None starts a federation of processes on this machine.
        subject: the subject of the questions, for errors.
        masks: the secure aggregation under which answers are to leave, if any.
        questions: returns those that the run's terms name, so that who approves the terms approves them.
        agreed: asks sites that prepare their tables what they agree on; without it, rows are as sites have them.

    Raises:
        SettingError: a setting is wrong, or rows are changed by an extractor.
    """
    credentials_setting = "" if credentials is None else f", credentials = {json.dumps(str(credentials.resolve()))}"
    flags = [f'runtime={{ kind = "federation"{credentials_setting} }}', *flags]
    settings = QuestionExperiment.load(file, flags)
    if settings.recipe is None and settings.recipes is None:  # sites check that there is one
        settings = QuestionExperiment.load(file, [*flags, "recipe.name=fedavg"])
    if settings.extractor is not None:
        raise SettingError(f"{subject} are of rows as sites have them, and extractor changes them: leave it out")
    preparation = agreed(settings) if agreed is not None and settings.asks_sites else None

    def as_read(loaded: QuestionExperiment) -> QuestionExperiment:
        return loaded.as_in_the_source() if preparation is None else loaded.with_agreed(preparation)

    settings = as_read(settings)
    plan = settings.plan()
    recipes = tuple(plan.recipes.values())
    # the terms name what is trained, so that sites may compare them with those of a run
    recipe = question_recipe(recipes[0], tuple(masks))
    if recipe is None:
        recipe = fedavg().with_(transforms=tuple(masks))
        settings = as_read(QuestionExperiment.load(file, [*flags, "recipe={ name = 'fedavg' }"]))
        plan = settings.plan()
    ready = prepare(recipe, plan.clients, plan.model, RunOptions(seed=settings.first_seed, runtime=plan.runtime))
    stated = tuple(question.stated() for question in questions(settings, ready.clients))
    runtime = ready.runtime.open(replace(ready.work, questions=stated, trains=False), ready.clients)
    try:
        yield OpenSites(settings, runtime, ready.work, ready.clients, recipes)
        if isinstance(runtime, DismissesSites):
            runtime.dismiss()
    finally:
        runtime.close()


def question_recipe(recipe: Recipe, masks: tuple[SecureAggregation, ...]) -> Recipe | None:
    """Return the recipe under whose name sites are asked, None where the recipe of the file does not go with the masks.

    It trains as the recipe of the file does, so that the run's terms say so, and has these masks.
    """
    with suppress(SettingError):
        return fedavg().with_(training=recipe.training, sharing=recipe.sharing, transforms=masks)
    with suppress(SettingError):
        return recipe.with_(transforms=masks)
    return None


def statistics_of_sites(
    file: Path,
    flags: Sequence[str],
    credentials: Path | None,
    *,
    quantiles: Sequence[float] = (),
    bins: int | None = None,
    bounds: Mapping[str, Sequence[float]] | None = None,
    categories: Mapping[str, Sequence[str]] | None = None,
    tables: Sequence[Sequence[str]] = (),
    by_client: bool = False,
    split: Split = "train",
    secure: bool = False,
    epsilon: float | None = None,
    delta: float | None = None,
) -> FederatedStatistics:
    """Ask the sites of a federation for statistics of their rows.

    Sites take part as they would in a run of the experiment, under its terms and their policies; nothing is trained.

    Args:
        file: the experiment file, which needs no recipe.
        flags: settings on top of it.
        credentials: the server's; None starts a federation of processes on this machine.
        quantiles, bins, bounds, categories, tables, by_client, split, secure, epsilon, delta: as of
            `piebald.statistics`; each site adds noise to its own sums, and its own ledger counts the question.
            Categories and tables need noise or masks.

    Raises:
        SettingError: a setting is wrong, or no site answers.
    """
    request = statistics_request(quantiles, bins, bounds or {}, by_client, categories, tables)
    hidden = secure or epsilon is not None
    noise_multiplier(epsilon, delta)  # refuses half a budget before any site is reached
    if (categories or tables) and not hidden:
        raise SettingError("sites count categories with noise or under masks: give epsilon, or secure")

    def questions(settings: ExperimentSettings, clients: Clients) -> list[Query]:
        features = settings.data.features
        if hidden:
            return [hidden_question(clients, request, features, split, secure, epsilon, delta)[0]]
        return stated_questions(clients, request, features, split)

    masks = (SecureAggregation(bits=64),) if secure else ()
    with open_sites(file, flags, credentials, "statistics", masks, questions) as sites:
        common = sites.runtime, sites.work, sites.clients, request
        features = sites.settings.data.features
        if hidden:
            return hidden_at_sites(*common, epsilon=epsilon, delta=delta, split=split, features=features)
        return statistics_at_sites(*common, split=split, features=features)


def model_of_sites(
    file: Path,
    flags: Sequence[str],
    credentials: Path | None,
    fit: Callable[[ModelClients, Options], T],
    options: Options,
    *,
    split: Split = "train",
    categories: Mapping[str, Sequence[str]] | None = None,
    secure: bool = False,
) -> T:
    """Fit a model to the rows of the sites of a federation, which answer with sums.

    Args:
        file, flags, credentials: as of `statistics_of_sites`.
        fit: `linear_models.fit_glm`, `survival.fit_cox` or `survival.fit_survival`.
        options: of the model.
        split: the split of the rows.
        categories: the categories of columns of codes.
        secure: whether sums leave sites under masks.

    Raises:
        SettingError: a setting is wrong, no site answers, or there is no such model.
    """

    def columns(settings: ExperimentSettings, clients: Clients) -> SiteColumns:
        data = settings.data
        return SiteColumns(clients, data.features, data.target, split, categories or {}, secure)

    def questions(settings: ExperimentSettings, clients: Clients) -> list[Query]:
        asked = columns(settings, clients)
        return [asked.query(options.plan(asked)[0])]

    masks = (SecureAggregation(bits=64),) if secure else ()
    with open_sites(file, flags, credentials, "models", masks, questions) as sites:
        asked = columns(sites.settings, sites.clients)
        return fit(SiteModelClients(asked, sites.runtime, sites.work, sites.clients), options)


def asked_sites(
    runtime: Runtime, spec: ModelSpec, clients: Clients, settings: PrepareSettings, target: str,
    classes: Sequence[str] | None, say: Callable[[str], None] = log.warning,
) -> Preparation:  # fmt: skip
    """Return what the clients of a runtime agree on.

    Args:
        runtime: the runtime that reaches them.
        spec: the model that a task carries, which the questions are not about.
        clients: their names.
        settings: the settings of [prepare].
        target: the column to predict.
        classes: the names of the classes, None to take those that sites have.
        say: called with a sentence about each client that is left out, and with one about what was chosen.

    Raises:
        SettingError: nobody answers, or columns cannot be prepared.
        RuntimeFault: a site answers one question and not the next.
    """
    sites, taking_part = AskedSites(runtime, spec), list(runtime.clients())

    def ask(question: Question) -> list[Any]:
        nonlocal taking_part
        answers = sites.ask(PrepareQuery(question=question.model_dump()), taking_part)
        if isinstance(question, KindsQuestion):
            if not answers:
                raise sites.refusal("no site answers questions about its columns")
            taking_part = list(answers)
            say_left_out(sites, clients, taking_part, say)
        elif lost := [client for client in taking_part if client not in answers]:
            reason = f"{clients.names[lost[0]]} tells no more of its columns ({sites.reasons[lost[0]]})"
            raise Unanswered(reason) if isinstance(question, CountsQuestion) else RuntimeFault(reason)
        return [unpacked(answers[client].vectors["told"]) for client in taking_part]

    agreed = agree(ask, settings, target, classes, lambda: [str(clients.names[client]) for client in taking_part])
    say(agreed.said)
    return agreed


def agreed_at_sites(settings: ExperimentSettings, say: Callable[[str], None] = log.warning) -> Preparation:
    """Ask the sites of an experiment, which take part under its terms and their policies; nothing is trained.

    Args:
        settings: the experiment, with the runtime that reaches the sites.
        say: see `asked_sites`.

    Raises:
        SettingError: a setting is wrong, or no site answers.
    """
    target = settings.data.target
    if target is None:
        raise SettingError(f"{settings.places.at('data')}: name the column to predict, target in [data]")
    # what targets are is one of the questions, so no loss fits before
    plan = settings.with_agreed(None).model_copy(update={"loss": None}).plan()
    recipe = question_recipe(next(iter(plan.recipes.values())), ()) or fedavg()
    ready = prepare(recipe, plan.clients, plan.model, RunOptions(seed=settings.first_seed, runtime=plan.runtime))
    stated = tuple({"kind": PrepareQuery.kind, "question": {"about": about}} for about in _ABOUT)
    runtime = ready.runtime.open(replace(ready.work, questions=stated, trains=False), ready.clients)
    try:
        # the sites are not sent home: the run follows
        return asked_sites(runtime, ready.work, ready.clients, settings.wanted, target, plan.clients.classes, say)
    finally:
        runtime.close()
