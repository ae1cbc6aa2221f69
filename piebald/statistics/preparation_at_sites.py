"""The preparation that the sites of a federation agree on before a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from piebald.contracts import Clients, Runtime
from piebald.contracts.model_spec import ModelSpec
from piebald.core.errors import RuntimeFault, SettingError
from piebald.data.preparation.agreement import Unanswered, agree
from piebald.data.preparation.answers import CountsQuestion, KindsQuestion, Question
from piebald.data.preparation.preparation import Preparation
from piebald.data.preparation.settings import PrepareSettings
from piebald.experiments.file import ExperimentSettings
from piebald.methods.recipes import fedavg
from piebald.runs.options import RunOptions
from piebald.runs.prepare import prepare
from piebald.statistics.exact_at_sites import say_left_out
from piebald.statistics.experiment import question_recipe
from piebald.statistics.queries.prepare import PrepareQuery, unpacked
from piebald.statistics.sites import AskedSites

_ABOUT = ("kinds", "values", "counts", "powers")  # of the questions


log = logging.getLogger("piebald.statistics")


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
