"""Choose the settings of one or several recipes by validation rows, each with the same budget."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from piebald.advice.tuning.space import Budget, Cost, SearchSpace, has_setting, rungs_of, with_settings
from piebald.advice.tuning.trial_runs import Record, Sampler, Trial, TrialRuns, best_of, words
from piebald.contracts import Clients
from piebald.core.arguments import Count, PathLike, Seed, Seeds
from piebald.core.errors import RunFolderError, SettingError, about
from piebald.core.files import read_json
from piebald.core.private_files import write_private
from piebald.core.progress import line_writer
from piebald.core.result_table import ResultTable, Tabular
from piebald.data.clients.sources import clients_of
from piebald.experiments.run_settings import SearchKeywords, takes
from piebald.methods.recipe import Recipe
from piebald.methods.recipe_settings import plain
from piebald.privacy.spending import together
from piebald.runs.compare import recipes_by_label
from piebald.runs.prepare import Model
from piebald.storage.schema import DATABASE
from piebald.storage.store import RunStore

RECORD = "search.json"  # the description of a folder's search
LR = {"low": 0.003, "high": 1.0, "log": True}
ROUNDS = 10
_OUTCOME = ("label", "recipe", "settings", "score", "trials", "rounds", "megabytes", "minutes")


@dataclass(frozen=True, eq=False)
class Tuning(Tabular):
    """The settings that were chosen for each recipe, and all trials.

    Attributes:
        recipes: the recipes with the settings that were chosen, by label.
        chosen: the trial that was chosen, by label.
        trials: all trials.
        metric: the metric that they were chosen by, the mean over clients' validation rows.
        folder: of the trials' runs, None where it was removed again.
        privacy: the privacy budgets of all their runs together, see `privacy.spending.together`.
    """

    recipes: Mapping[str, Recipe]
    chosen: Mapping[str, Trial]
    trials: Sequence[Trial]
    metric: str
    folder: Path | None
    privacy: Sequence[Mapping[str, Any]] = ()

    def table(self) -> ResultTable:
        """One row for each recipe: the settings that were chosen, their score, and what the search cost."""
        rows = []
        for label, trial in self.chosen.items():
            tried = [trial for trial in self.trials if trial.label == label]
            cost = sum((trial.cost for trial in tried), Cost())
            row = (label, self.recipes[label].name, words(trial.settings), trial.score, len(tried))
            rows.append((*row, cost.rounds, cost.bytes / 1e6, cost.minutes))
        return ResultTable(rows, _OUTCOME)

    def plain(self) -> dict[str, Any]:
        """The table, and all trials, as JSON values."""
        return {
            "metric": self.metric,
            "chosen": {label: plain(trial.settings) for label, trial in self.chosen.items()},
            "summary": self.table(),
            "trials": [{**trial.row(), "settings": plain(trial.settings)} for trial in self.trials],
            "privacy": [dict(budget) for budget in self.privacy],
        }

    def __repr__(self) -> str:
        outcomes = "; ".join(
            f"{row['label']}: {row['settings']} ({self.metric} {row['score']:.4g})" for row in self.table()
        )
        return f"<Tuning of {len(self.chosen)} recipes, {len(self.trials)} trials: {outcomes}>"


@takes(SearchKeywords)
def tune(
    methods: Mapping[str, Recipe | str] | Sequence[Recipe | str] | Recipe | str,
    clients: Clients | Any,
    model: Model | Mapping[str, Model],
    *,
    space: Mapping[str, Any] | SearchSpace | None = None,
    budget: Budget | int | str | Mapping[str, Any] | None = None,
    rounds: Count = ROUNDS,
    seeds: Seeds = (0,),
    sampler: Sampler = "tpe",
    rungs: Count = 3,
    factor: Count = 3,
    seed: Seed = 0,
    out: PathLike | None = None,
    progress: bool = False,
    settings: Mapping[str, Any] | None = None,
    **keywords: Unpack[SearchKeywords],
) -> Tuning:
    """Choose the settings of recipes by validation rows, each recipe with the same budget.

    Optuna samples settings, stores trials, and drops the worse ones after each rung (successive halving), but none that
    is within one standard error of the best: the paired difference over clients and seeds decides.  A trial goes on
    from rung to rung and is not started over.  Test rows are not passed on, so nothing can be chosen by them.  Where no
    client has validation rows, a fifth of each client's training rows is held out.

    Args: What is tuned
        methods: recipes by label, a list of recipes or names, or one of them.
        clients, model: see `run`.
        space: the values of settings by name, `Range` or `Choices` values, tables {"low": 0.01, "high": 1, "log": True}
            or lists; those that a recipe does not have are left out for it.  The learning rate by default.
        rounds: server steps of a whole run.
        seeds: each trial has a run for each.
        keywords: settings of all runs, see `RunSettings`.

    Args: How
        budget: of each recipe: a number of server steps over all its trials, words such as "10 minutes", or
            {"bytes": 10**9}; ten whole runs by default.  The first trial, the recipe's own settings, is trained to the
            end in any case.
        sampler: "tpe", "random", or "grid" for all combinations of choices and whole numbers.
        rungs, factor: a run is judged at rounds / factor^(rungs - 1), ..., rounds / factor, and rounds.
        seed: of the sampler.
        out: a folder, in which an interrupted search goes on; a temporary one by default.
        progress: print a line to standard error for each event.
        settings: plain values kept with the search, from which the command line rebuilds it to go on.

    Raises:
        SettingError: a setting is wrong, or a recipe cannot be trained.
        RunFolderError: `out` holds something else.

    Examples:
        >>> import piebald
        >>> clients = piebald.partition.Iid(clients=3, validation=0.2, limit=60).split(piebald.data.digits())
        >>> model = piebald.models.build_model("mlp", (1, 8, 8), 10, hidden=(4,))
        >>> tuning = tune("fedavg", clients, model, space={"lr": [0.0001, 1.0]}, rounds=1, sampler="grid")
        >>> [trial.settings["lr"] for trial in tuning.trials][-2:]
        [0.0001, 1.0]
    """
    from piebald.advice.tuning.study import Study  # loads Optuna

    if factor < 2:
        raise SettingError(f"factor must be at least 2, got {factor}")
    recipes = recipes_by_label(methods)
    federation = clients_of(clients(seeds[0]) if callable(clients) else clients)
    steps = rungs_of(rounds, rungs, factor)
    runs = TrialRuns.of(recipes, federation, model, steps, keywords)
    spaces = spaces_of(recipes, space)
    limit = Budget.of(10 * rounds * len(seeds) if budget is None else budget)
    if sampler == "grid":
        for values in spaces.values():
            values.grid()  # refuses what has no end of values before the first run
    describe = {
        "kind": "tune", "recipes": {label: recipe.model_dump() for label, recipe in recipes.items()},
        "space": {label: values.plain() for label, values in spaces.items()}, "rungs": list(steps),
        "seeds": list(seeds), "sampler": sampler, "factor": factor, "seed": seed, "clients": len(federation),
        "budget": str(limit), "settings": settings,
    }  # fmt: skip
    with ExitStack() as stack:
        folder = Path(out if out is not None else stack.enter_context(tempfile.TemporaryDirectory()))
        claim(folder, describe)
        say = line_writer(progress)
        # entered after the temporary folder, so that it is closed before the folder is removed
        record = stack.enter_context(closing(Record(folder)))
        trials: list[Trial] = []
        for label, recipe in recipes.items():
            study = Study(label, recipe, spaces[label], folder, record, runs, seeds, seed, sampler, factor, say)
            trials += study.search(limit)
        kept_folder = None if out is None else folder
        tuning = Tuning(*chosen(recipes, trials, runs), trials, runs.metric, kept_folder, spent_together(folder))
        write_private(folder / "tuning.json", json.dumps(tuning.plain(), indent=1), lasting=False)
    return tuning


def spent_together(folder: Path) -> list[dict[str, Any]]:
    """The privacy budgets of all runs in a folder, which are on the same rows; see `privacy.spending.together`."""
    metas = []
    # also dropped and failed trials: their updates were sent all the same
    for database in sorted(folder.rglob(DATABASE)):
        with RunStore.open_read_only(database.parent) as store:
            metas.append(store.meta)
    return together(metas)


def chosen(
    methods: Mapping[str, Recipe], trials: Sequence[Trial], runs: TrialRuns
) -> tuple[dict[str, Recipe], dict[str, Trial]]:
    """The recipes with the settings of their best trials, and these trials.

    Raises:
        SettingError: all trials of a recipe failed.
    """
    recipes: dict[str, Recipe] = {}
    best: dict[str, Trial] = {}
    for label, recipe in methods.items():
        tried = [trial for trial in trials if trial.label == label]
        winner = best_of(tried, runs.higher_is_better)
        if winner is None:
            reason = tried[0].why if tried else "the budget has no room for one"
            raise SettingError(f"recipe {label!r}: no trial could be scored: {reason}")
        recipes[label], best[label] = with_settings(recipe, winner.settings), winner
    return recipes, best


def spaces_of(methods: Mapping[str, Recipe], space: Mapping[str, Any] | SearchSpace | None) -> dict[str, SearchSpace]:
    """The search space of each recipe.

    Raises:
        SettingError: no recipe has one of the settings, or a recipe does not take a value.
    """
    full_space = space if isinstance(space, SearchSpace) else SearchSpace.of({"lr": LR} if space is None else space)
    for name in full_space.values:
        if not any(has_setting(recipe, name) for recipe in methods.values()):
            with_settings(next(iter(methods.values())), {name: None})  # refuses it, with the nearest name
    spaces = {}
    for label, recipe in methods.items():
        with about(f"space of recipe {label!r}"):
            spaces[label] = full_space.of_recipe(recipe)
    return spaces


def claim(folder: Path, search: Mapping[str, Any]) -> None:
    """Take a folder for a search: an empty one, or one with the same search, which goes on.

    Raises:
        RunFolderError: it holds something else.
    """
    record = folder / RECORD
    # sorted, so that the same search always writes the same text
    text = json.dumps(search, indent=1, sort_keys=True, default=str)
    if record.is_file():
        try:
            recorded = read_json(record)
        except (OSError, ValueError):
            raise RunFolderError(f"{record} cannot be read: choose another folder") from None
        for name, value in json.loads(text).items():
            if name == "settings":  # what they define is compared
                continue
            if not isinstance(recorded, dict) or recorded.get(name) != value:
                raise RunFolderError(f"{folder} holds a search with another {name}: choose another folder")
        return
    partial = folder / f"{RECORD}.part"  # renamed when it is complete: a search that was killed here leaves no more
    if folder.is_file() or (folder.is_dir() and any(path != partial for path in folder.iterdir())):
        raise RunFolderError(f"{folder} is not empty and holds no search: choose another folder")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        write_private(record, text)
    except OSError as error:
        raise RunFolderError(f"a search cannot be kept in {folder}: {(error.strerror or str(error)).lower()}") from None
