"""An experiment whose clients are asked questions, and not trained: its file, its runtime, its sites."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from piebald.contracts import Clients, DismissesSites, Query, Runtime
from piebald.core.errors import SettingError
from piebald.experiments.file import ExperimentSettings
from piebald.methods.client_work import ClientWork
from piebald.methods.recipe import Recipe
from piebald.methods.recipes import fedavg
from piebald.privacy import SecureAggregation
from piebald.runs.options import RunOptions
from piebald.runs.prepare import prepare


class AskedExperiment(ExperimentSettings):
    """An experiment file whose sites are asked, which needs no recipe."""

    needs_recipe = False


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """An experiment whose runtime is open.

    Attributes:
        settings: of the file.
        runtime: where the clients are.
        spec: the model that a task brings, and the masks of the run.
        clients: their names, and the form of their rows.
        recipes: those of the file, by which nobody trains here.
    """

    settings: AskedExperiment
    runtime: Runtime
    spec: ClientWork
    clients: Clients
    recipes: tuple[Recipe, ...]


@contextmanager
def asked(
    file: Path,
    flags: Sequence[str],
    credentials: Path | None,
    what: str,
    masks: Sequence[SecureAggregation],
    questions: Callable[[ExperimentSettings, Clients], Sequence[Query]],
) -> Iterator[Asked]:
    """Open the federation of an experiment, whose sites take part under its terms and their policies.

    Args:
        file: the experiment file, which needs no recipe.
        flags: settings on top of it.
        credentials: the server's; None starts a federation of processes on this machine.
        what: what is asked about, for errors.
        masks: the secure aggregation under which answers are to leave, if any.
        questions: those that the run's terms name, so that who approves the terms approves them.

    Raises:
        SettingError: a setting is wrong, or rows are changed by an extractor.
    """
    more = "" if credentials is None else f", credentials = {json.dumps(str(credentials.resolve()))}"
    chosen = [f'runtime={{ kind = "federation"{more} }}', *flags]
    settings = AskedExperiment.load(file, chosen)
    if settings.recipe is None and settings.recipes is None:  # sites check that there is one
        settings = AskedExperiment.load(file, [*chosen, "recipe.name=fedavg"])
    if settings.extractor is not None:
        raise SettingError(f"{what} are of rows as sites have them, and extractor changes them: leave it out")
    settings = settings.as_in_the_source()
    plan = settings.plan()
    recipes = tuple(plan.recipes.values())
    recipe = asking_recipe(recipes[0], tuple(masks))
    if recipe is None:
        recipe = fedavg().with_(transforms=tuple(masks))
        settings = AskedExperiment.load(file, [*chosen, "recipe={ name = 'fedavg' }"]).as_in_the_source()
        plan = settings.plan()
    ready = prepare(recipe, plan.clients, plan.model, RunOptions(seed=settings.first_seed, runtime=plan.runtime))
    stated = tuple(one.stated() for one in questions(settings, ready.clients))
    runtime = ready.runtime.open(replace(ready.work, questions=stated, trains=False), ready.clients)
    try:
        yield Asked(settings, runtime, ready.work, ready.clients, recipes)
        if isinstance(runtime, DismissesSites):
            runtime.dismiss()
    finally:
        runtime.close()


def asking_recipe(own: Recipe, masks: tuple[SecureAggregation, ...]) -> Recipe | None:
    """The recipe of a file under whose name sites are asked: it trains as that one, so that its terms say so, and has
    these masks; None where it does not go with them.
    """
    with suppress(SettingError):
        return fedavg().with_(training=own.training, sharing=own.sharing, transforms=masks)
    with suppress(SettingError):
        return own.with_(transforms=masks)
    return None
