"""The preparation that the sites of a federation agree on before a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from piebald.contracts import Clients, Runtime
from piebald.core.errors import RuntimeFault, SettingError
from piebald.core.moments import Floats
from piebald.data.preparation.agreement import Unanswered, agree
from piebald.data.preparation.answers import (
    CategoriesAnswer,
    CountsQuestion,
    KindsQuestion,
    Question,
    ValuesQuestion,
)
from piebald.data.preparation.preparation import Preparation
from piebald.data.preparation.settings import PrepareSettings
from piebald.experiments.file import ExperimentSettings
from piebald.methods.client_work import ClientWork
from piebald.methods.recipe import Recipe
from piebald.methods.recipes import fedavg
from piebald.privacy import SecureAggregation
from piebald.runs.options import RunOptions
from piebald.runs.prepare import prepare
from piebald.statistics.exact_at_sites import say_left_out
from piebald.statistics.queries.models import from_limbs
from piebald.statistics.queries.prepare import (
    MaskedPrepareQuery,
    PrepareNamesQuery,
    PrepareQuery,
    centers,
    pooled_answer,
    unpacked,
)
from piebald.statistics.sites import AskedSites

_ABOUT = ("kinds", "values", "counts", "powers")  # of the questions


log = logging.getLogger("piebald.statistics")


def asked_sites(
    runtime: Runtime, work: ClientWork, clients: Clients, settings: PrepareSettings, target: str,
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
        target: the column to predict.
        classes: the names of the classes, None to take those that sites have.
        say: called with a sentence about each client that is left out, and with one about what was chosen.

    Raises:
        SettingError: nobody answers, or columns cannot be prepared.
        RuntimeFault: a site answers one question and not the next, or masks cannot be taken off.
    """
    sites, taking_part = AskedSites(runtime, work), list(runtime.clients())
    masking = work.masking if isinstance(work.masking, SecureAggregation) else None
    if masking is not None and settings.harmonise is not None:
        raise SettingError(
            "harmonise in [prepare] needs the means of each site, which secure aggregation hides: leave one of them out"
        )

    def check_present(answered: Collection[int], question: Question) -> None:
        if lost := [client for client in taking_part if client not in answered]:
            reason = (
                f"{clients.names[lost[0]]} tells no more of its columns ({sites.reasons.get(lost[0], 'it is away')})"
            )
            raise Unanswered(reason) if isinstance(question, CountsQuestion) else RuntimeFault(reason)

    def ask_openly(question: Question) -> list[Any]:
        nonlocal taking_part
        kind = PrepareQuery if masking is None else PrepareNamesQuery
        answers = sites.ask(kind(question=question.model_dump()), taking_part)
        if isinstance(question, KindsQuestion):
            if not answers:
                raise sites.refusal("no site answers questions about its columns")
            taking_part = list(answers)
            say_left_out(sites, clients, taking_part, say)
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
        about = centers(ask_masked(question), question)
        answer = pooled_answer(question, ask_masked(question, about), about)
        words = {name: kind for name, kind in getattr(question, "kinds", {}).items() if kind == "category"}
        if isinstance(question, ValuesQuestion) and words:
            parts = ask_openly(question.model_copy(update={"kinds": words, "scale": {}, "target": False}))
            # the numbers are those of all clients: each part has the categories of one
            return [answer.model_copy(update={"categories": _union(part.categories for part in parts)})]
        return [answer]

    agreed = agree(ask, settings, target, classes, lambda: [str(clients.names[client]) for client in taking_part])
    say(agreed.said)
    return agreed


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
    target = settings.data.target
    if target is None:
        raise SettingError(f"{settings.places.at('data')}: name the column to predict, target in [data]")
    # what targets are is one of the questions, so no loss fits before
    plan = settings.with_agreed(None).model_copy(update={"loss": None}).plan()
    trained = next(iter(plan.recipes.values()))
    masks = tuple(masks) or _masks_of(trained)
    recipe = question_recipe(trained, masks) or fedavg().with_(transforms=masks)
    ready = prepare(recipe, plan.clients, plan.model, RunOptions(seed=settings.first_seed, runtime=plan.runtime))
    kinds = [PrepareNamesQuery.kind, MaskedPrepareQuery.kind] if masks else [PrepareQuery.kind]
    stated = tuple({"kind": kind, "question": {"about": about}} for kind in kinds for about in _ABOUT)
    runtime = ready.runtime.open(replace(ready.work, questions=stated, trains=False), ready.clients)
    try:
        # the sites are not sent home: the run follows
        return asked_sites(runtime, ready.work, ready.clients, settings.wanted, target, plan.clients.classes, say)
    finally:
        runtime.close()
