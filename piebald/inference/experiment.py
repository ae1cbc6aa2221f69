"""Experiments whose clients are asked questions instead of trained, and what their sites agree on before a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from piebald.contracts import Clients, DismissesSites, Query, Rows, Runtime, Split
from piebald.core.errors import RuntimeFault, SettingError
from piebald.core.moments import Floats
from piebald.data.clients.prepared import SitesPrepared, preparation_of
from piebald.data.clients.sites import SiteClients
from piebald.data.preparation.agreement import Unanswered, agree
from piebald.data.preparation.answers import (
    CategoriesAnswer,
    CountsQuestion,
    KindsQuestion,
    PowersQuestion,
    Question,
    ValuesQuestion,
)
from piebald.data.preparation.preparation import Preparation, PrepareSettings
from piebald.experiments.file import ExperimentSettings, Plan, wants_preparation
from piebald.experiments.run_settings import RunSettings
from piebald.inference.columns import StatisticsRequest, client_names
from piebald.inference.models.clients import ModelClients, ModelColumns, ModelOptions
from piebald.inference.pooled_statistics import FederatedStatistics
from piebald.inference.queries.columns import from_limbs
from piebald.inference.queries.prepare import (
    MaskedPrepareQuery,
    PrepareNamesQuery,
    PrepareQuery,
    centers,
    pooled_answer,
    unpacked,
)
from piebald.inference.simulated import AskedSites
from piebald.inference.statistics_at_sites import stated_questions, statistics_at_sites
from piebald.methods.client_work import ClientWork
from piebald.methods.recipe import Recipe
from piebald.methods.recipes.fedavg import fedavg
from piebald.privacy import SecureAggregation
from piebald.runs.prepare import PreparedRun, prepare

T = TypeVar("T")
Options = TypeVar("Options", bound=ModelOptions)


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
    agreed: Callable[[ExperimentSettings, Sequence[SecureAggregation]], Preparation] | None = None,
    labels: Sequence[str] = (),
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
        labels: columns of which nothing is agreed on, since each site numbers its own values.

    Raises:
        SettingError: a setting is wrong, or rows are changed by an extractor.
    """
    credentials_setting = "" if credentials is None else f", credentials = {json.dumps(str(credentials.resolve()))}"
    # the first flag, so that flags of the caller can still change the runtime
    flags = [f'runtime={{ kind = "federation"{credentials_setting} }}', *flags]
    settings = QuestionExperiment.load(file, flags)
    if settings.recipe is None and settings.recipes is None:  # sites check that there is one
        settings = QuestionExperiment.load(file, [*flags, "recipe.name=fedavg"])
    if settings.extractor is not None:
        raise SettingError(f"{subject} are of rows as sites have them, and extractor changes them: leave it out")
    labels = [name for name in labels if name not in client_names(settings.data.client)]
    preparation, blank = None, None
    if agreed is not None and settings.asks_sites:
        wanted = settings.wanted
        unasked = {**wanted.columns, **dict.fromkeys(labels, "leave out")}
        prepare_settings = wanted.model_copy(update={"columns": unasked})
        preparation = agreed(settings.model_copy(update={"prepare": prepare_settings}), masks).as_values(labels)
    elif agreed is not None and (blank := _blank_values(settings, labels)) is not None:
        preparation = blank.preparation

    def as_read(loaded: QuestionExperiment) -> QuestionExperiment:
        return loaded.as_in_the_source() if preparation is None else loaded.with_agreed(preparation)

    settings = as_read(settings)
    plan = settings.plan(blank)
    recipes = tuple(plan.recipes.values())
    # the terms name what is trained, so that sites may compare them with those of a run
    recipe = question_recipe(recipes[0], tuple(masks))
    if recipe is None:
        recipe = fedavg().with_(transforms=tuple(masks))
        settings = as_read(QuestionExperiment.load(file, [*flags, "recipe={ name = 'fedavg' }"]))
        plan = settings.plan(blank)
    with _without_training(
        settings, plan, recipe, lambda clients: [question.stated() for question in questions(settings, clients)]
    ) as (runtime, ready):
        yield OpenSites(settings, runtime, ready.work, ready.clients, recipes)
        if isinstance(runtime, DismissesSites):
            runtime.dismiss()


@contextmanager
def _without_training(
    settings: ExperimentSettings, plan: Plan, recipe: Recipe, stated: Callable[[Clients], Sequence[Mapping[str, Any]]]
) -> Iterator[tuple[Runtime, PreparedRun]]:
    """Open the runtime of an experiment for questions, which are stated before any is asked.

    So a site approves or refuses all of them.
    """
    loss = settings.chosen_loss if isinstance(settings.data.target, list) else None
    options = RunSettings(seed=settings.first_seed, runtime=plan.runtime, loss=loss)
    ready = prepare(recipe, plan.clients, plan.model, options)
    work = replace(ready.work, questions=tuple(stated(ready.clients)), trains=False)
    with closing(ready.runtime.open(work, ready.clients)) as runtime:
        yield runtime, ready


def _values_at_sites(settings: ExperimentSettings, masks: Sequence[SecureAggregation]) -> Preparation:
    """Return what sites agree on, so that the values of their columns are read alike."""
    if settings.wanted.tokenizer is not None:
        raise SettingError("statistics of sites read no text: leave tokenizer and length out of [prepare]")
    return agreed_at_sites(settings, masks)


def _blank_values(settings: ExperimentSettings, labels: Sequence[str]) -> SitesPrepared | None:
    """Return the clients of a table on this machine, which read its values alike and are asked as sites are.

    None where rows are at sites already, or in no table.
    """
    if settings.rows_at_sites or not wants_preparation(settings):
        return None
    clients = settings.model_copy().clients()  # which keep what they agree on for a training
    if (agreed := preparation_of(clients)) is None:
        return None
    values = agreed.as_values(labels)
    y = torch.zeros(1, dtype=torch.float32 if clients.classes is None else torch.int64)
    blank = Rows(torch.zeros(1, len(values.columns)), y)
    sites = SiteClients(clients.names, blank, clients.classes).divided_by(settings.split)
    sites.elsewhere = False  # each process reads the table
    return SitesPrepared(sites, values)


def statistics_of_sites(
    file: Path, flags: Sequence[str], credentials: Path | None, request: StatisticsRequest
) -> FederatedStatistics:
    """Ask the sites of a federation for statistics of their rows.

    Sites take part as they would in a run of the experiment, under its terms and their policies; nothing is trained.

    Args:
        file: the experiment file, which needs no recipe.
        flags: settings on top of it.
        credentials: the server's; None starts a federation of processes on this machine.
        request: what is asked for; each site adds noise to its own sums, and its own ledger counts the question.
            Categories and tables need noise or masks.

    Raises:
        SettingError: a setting is wrong, or no site answers.
    """
    if (request.categories or request.tables) and not request.hides_rows:
        raise SettingError("sites count categories with noise or under masks: give epsilon, or secure")

    def questions(settings: ExperimentSettings, clients: Clients) -> list[Query]:
        return stated_questions(clients, request, settings.data.features)

    masks = (SecureAggregation(bits=64),) if request.secure else ()
    with open_sites(file, flags, credentials, "statistics", masks, questions, _values_at_sites) as sites:
        features = sites.settings.data.features
        return statistics_at_sites(sites.runtime, sites.work, sites.clients, request, features=features)


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

    def columns(settings: ExperimentSettings, clients: Clients) -> ModelColumns:
        data = settings.data
        return ModelColumns(clients, data.features, data.only_target, split, categories, secure, data.client)

    def questions(settings: ExperimentSettings, clients: Clients) -> list[Query]:
        return options.questions(columns(settings, clients))

    masks = (SecureAggregation(bits=64),) if secure else ()
    cluster = options.roles().cluster
    labels = [] if cluster is None else [cluster]
    with open_sites(file, flags, credentials, "models", masks, questions, _values_at_sites, labels) as sites:
        asked = columns(sites.settings, sites.clients)
        return fit(ModelClients(asked, sites.runtime, sites.work, sites.clients), options)


log = logging.getLogger("piebald.statistics")


def asked_sites(
    runtime: Runtime, work: ClientWork, clients: Clients, settings: PrepareSettings, target: str | Sequence[str],
    classes: Sequence[str] | None, say: Callable[[str], None] = log.warning,
) -> Preparation:  # fmt: skip
    """Return what the clients of a runtime agree on.

    Where the run masks, with 64 bits, moments and counts are known as sums over all clients.  Kinds of columns, names
    of classes, and those of categories that enough rows have come in the open: what is not known by name cannot be
    added up.

    Args:
        runtime: the runtime that reaches them.
        work: the run, whose model a task carries, though the questions are not about it.
        clients: their names.
        settings: the settings of [prepare].
        target: the column to predict, or several.
        classes: the names of the classes, None to take those that sites have.
        say: called with a sentence about each client that is left out, and with one about what was chosen.

    Raises:
        SettingError: nobody answers, or columns cannot be prepared.
        RuntimeFault: a site answers one question and not the next, or masks cannot be taken off.
    """
    sites, taking_part = AskedSites(runtime, work, clients.names, say), list(runtime.clients())
    masking = work.masking if isinstance(work.masking, SecureAggregation) else None
    # refused before the first question, which sites count
    if masking is not None and settings.harmonise is not None:
        raise SettingError(
            "harmonise in [prepare] needs the means of each site, which secure aggregation hides: leave one of them out"
        )

    def check_present(answered: Collection[int], question: Question) -> None:
        if lost := [client for client in taking_part if client not in answered]:
            reason = (
                f"{clients.names[lost[0]]} tells no more of its columns ({sites.reasons.get(lost[0], 'it is away')})"
            )
            # an agreement can go on without counts, and not without other answers
            raise Unanswered(reason) if isinstance(question, CountsQuestion) else RuntimeFault(reason)

    def ask_openly(question: Question) -> list[Any]:
        nonlocal taking_part
        kind = PrepareQuery if masking is None else PrepareNamesQuery
        answers = sites.ask(kind(question=question.model_dump()), taking_part)
        if isinstance(question, KindsQuestion):
            if not answers:
                raise sites.refusal("no site answers questions about its columns")
            taking_part = list(answers)
            sites.leave_out(taking_part)
        # after the first question set who takes part: from then on all of them must answer
        check_present(answers, question)
        return [unpacked(answers[client].vectors["told"]) for client in taking_part]

    def ask_masked(question: Question, about: Sequence[tuple[float, float]] = ()) -> Floats:
        query = MaskedPrepareQuery(question=question.model_dump(), about=tuple(about))
        answered, total = sites.sums(query, masking)
        check_present(answered, question)
        return from_limbs(total)

    def ask(question: Question) -> list[Any]:
        if masking is None or isinstance(question, KindsQuestion):
            return ask_openly(question)
        if isinstance(question, CountsQuestion):
            return [pooled_answer(question, ask_masked(question))]
        # two questions: moments about each column's own centre keep the digits that sums about 0 would lose
        about = centers(ask_masked(question), question)
        answer = pooled_answer(question, ask_masked(question, about), about)
        words = {name: kind for name, kind in getattr(question, "kinds", {}).items() if kind == "category"}
        if isinstance(question, ValuesQuestion) and words:
            parts = ask_openly(question.model_copy(update={"kinds": words, "scale": {}, "targets": 0}))
            # the numbers are those of all clients: each part has the categories of one
            return [answer.model_copy(update={"categories": _union(part.categories for part in parts)})]
        return [answer]

    agreed = agree(ask, settings, target, classes, lambda: [str(clients.names[client]) for client in taking_part])
    say(agreed.said)
    return agreed


def preparation_questions(settings: PrepareSettings, target: bool, masked: bool) -> list[dict[str, Any]]:
    """Return the questions of an agreement as an approval names them.

    Args:
        settings: those of [prepare].
        target: whether classes are asked for.
        masked: whether numbers are told only under masks.
    """
    kinds = KindsQuestion(gaps=settings.gaps, target=target)
    values = ValuesQuestion(kinds={}, gaps=settings.gaps, least_rows=settings.least_rows)
    counts = CountsQuestion(kinds={}, gaps=settings.gaps, thresholds={})
    powers = PowersQuestion(gaps=settings.gaps, exponents={})
    open_kind, sums_kind = (PrepareNamesQuery, MaskedPrepareQuery) if masked else (PrepareQuery, PrepareQuery)
    openly = [open_kind(question=question.model_dump()) for question in (kinds, values)]
    sums = [sums_kind(question=question.model_dump()) for question in (values, counts, powers)]
    return list({json.dumps(query.stated()): query.stated() for query in (*openly, *sums)}.values())


def _union(parts: Iterable[Mapping[str, CategoriesAnswer]]) -> dict[str, CategoriesAnswer]:
    """Return the categories of all clients together."""
    first, *others = parts
    return {
        name: CategoriesAnswer.model_construct(  # unchecked: together there may be too many, which leaves a column out
            names=sorted({word for part in (first, *others) for word in part[name].names}),
            others=any(part[name].others for part in (first, *others)),
            gaps=any(part[name].gaps for part in (first, *others)),
        )
        for name in first
    }


def _masks_of(recipe: Recipe) -> tuple[SecureAggregation, ...]:
    """Return the secure aggregation of a recipe as exact sums need it, none where there is none."""
    return tuple(
        SecureAggregation(bits=64, threshold=one.threshold, neighbours=one.neighbours, least=one.least)
        for one in recipe.transforms
        if isinstance(one, SecureAggregation)
    )


def question_recipe(recipe: Recipe, masks: tuple[SecureAggregation, ...]) -> Recipe | None:
    """Return the recipe under whose name sites are asked, None where the recipe of the file does not go with the masks.

    It trains as the recipe of the file does, so that the run's terms say so, and has these masks.
    """
    # FedAvg with the file's training goes with masks where the file's own aggregation may not
    with suppress(SettingError):
        return fedavg().with_(training=recipe.training, sharing=recipe.sharing, transforms=masks)
    with suppress(SettingError):
        return recipe.with_(transforms=masks)
    return None


def agreed_at_sites(
    settings: ExperimentSettings, masks: Sequence[SecureAggregation] = (), say: Callable[[str], None] = log.warning
) -> Preparation:
    """Ask the sites of an experiment, which take part under its terms and their policies; nothing is trained.

    Args:
        settings: the experiment, with the runtime that reaches the sites.
        masks: the secure aggregation under which sums leave sites; by default that of the recipe, if it has one.
        say: see `asked_sites`.

    Raises:
        SettingError: a setting is wrong, or no site answers.
    """
    target = settings.target_at_sites
    # what a single target is is one of the questions, so no loss fits before
    loss = settings.loss if isinstance(target, list) else None
    plan = settings.with_agreed(None).model_copy(update={"loss": loss}).plan()
    trained = next(iter(plan.recipes.values()))
    masks = tuple(masks) or _masks_of(trained)
    recipe = question_recipe(trained, masks) or fedavg().with_(transforms=masks)
    classes = plan.clients.classes
    stated = preparation_questions(settings.wanted, classes is None, bool(masks))
    # the sites are not sent home: the run follows
    with _without_training(settings, plan, recipe, lambda clients: stated) as (runtime, ready):
        return asked_sites(runtime, ready.work, ready.clients, settings.wanted, target, classes, say)
