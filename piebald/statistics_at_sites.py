"""Statistics of the sites of a federation, which an experiment file describes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from piebald.contracts import DismissesSites, Split
from piebald.errors import SettingError
from piebald.experiment_file import ExperimentSettings
from piebald.federated_statistics.at_sites import statistics_at_sites
from piebald.federated_statistics.result import FederatedStatistics
from piebald.federated_statistics.wanted import wanted_of_numbers
from piebald.prepare import Options, prepare
from piebald.recipes import fedavg


class AskedExperiment(ExperimentSettings):
    """An experiment file whose sites are asked, which needs no recipe."""

    needs_recipe = False


def ask(
    file: Path,
    flags: Sequence[str],
    credentials: Path | None,
    *,
    quantiles: Sequence[float] = (),
    bins: int | None = None,
    bounds: Mapping[str, Sequence[float]] | None = None,
    by_client: bool = False,
    split: Split = "train",
) -> FederatedStatistics:
    """Ask the sites of a federation for statistics of their rows.

    Sites take part as they would in a run of the experiment, under its terms and their policies; nothing is trained.

    Args:
        file: the experiment file, which needs no recipe.
        flags: settings on top of it.
        credentials: the server's; None starts a federation of processes on this machine.
        quantiles, bins, bounds, by_client, split: as of `piebald.statistics`.

    Raises:
        SettingError: a setting is wrong, or no site answers.
    """
    more = "" if credentials is None else f", credentials = {json.dumps(str(credentials.resolve()))}"
    chosen = [f'runtime={{ kind = "federation"{more} }}', *flags]
    settings = AskedExperiment.load(file, chosen)
    recipe = fedavg()
    if settings.recipe is None and settings.recipes is None:  # sites check that there is one
        settings = AskedExperiment.load(file, [*chosen, "recipe.name=fedavg"])
    if settings.extractor is not None:
        raise SettingError("statistics are of rows as sites have them, and extractor changes them: leave it out")
    settings = settings.as_in_the_source()
    plan = settings.plan()
    ready = prepare(recipe, plan.clients, plan.model, Options(seed=settings.first_seed, runtime=plan.runtime))
    wanted = wanted_of_numbers(quantiles, bins, bounds or {}, by_client)
    runtime = ready.runtime.open(ready.work, ready.clients)
    try:
        found = statistics_at_sites(
            runtime, ready.work, ready.clients, wanted, split=split, features=settings.data.features
        )
        if isinstance(runtime, DismissesSites):
            runtime.dismiss()
    finally:
        runtime.close()
    return found
