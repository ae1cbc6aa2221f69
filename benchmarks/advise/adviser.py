"""The adviser itself, on runs that are looked up in the truth instead of trained.

The race of `piebald.advise` is run as it is: Optuna, its budget, its rule of one standard error, its choice of the
cheapest.  Only what trains and scores a run is replaced.  Learning rates and main settings are those of the grid,
because no others are known, and so are the rungs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from federations import Federation
from grid import GRID, RATES, ROUNDS, RUNGS, TRAINING
from known import Entry

from piebald.advice.adviser import FACTOR, pays, recommended
from piebald.advice.families import Entrant, entrants
from piebald.advice.race import Race
from piebald.recipe import Recipe
from piebald.report.paired import Scores
from piebald.tuning.budget import Budget
from piebald.tuning.space import with_settings
from piebald.tuning.trial_runs import TrialRuns


@dataclass(frozen=True)
class KnownRun:
    """A run that is in the truth, trained for so many rounds."""

    entry: Entry
    seed: int
    rounds: int

    @property
    def final(self) -> dict[str, Any]:
        """Its cost."""
        share = self.rounds / ROUNDS
        return {"rounds": self.rounds, "bytes_down": 0, "bytes_up": round(self.entry.bytes * share), "wall": 0.0,
                "seconds": 0.0}  # fmt: skip

    @property
    def results(self) -> list[dict[str, Any]]:
        """Its steps."""
        return [{"kind": "train", "steps": round(self.entry.steps * self.rounds / ROUNDS)}]

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True, kw_only=True)
class KnownRuns(TrialRuns):
    """Runs that are looked up."""

    entries: dict[str, Entry]

    def train(self, recipe: Recipe, folder: Path, label: str, seed: int, rounds: int) -> Any:
        return KnownRun(self.entries[label_of(recipe)], seed, rounds)

    def scores(self, runs: Sequence[Any], version: int) -> Scores:
        rung = RUNGS.index(version)
        values = np.stack([run.entry.validation[run.seed, rung] for run in runs]) / 100
        return Scores(values, self.names, [run.seed for run in runs])


@dataclass(frozen=True)
class Advised:
    """What the adviser said: the entry, whether federating pays, and the rounds that the race took."""

    entry: Entry
    pays: str
    rounds: int


def label_of(recipe: Recipe) -> str:
    """A recipe's entry in the truth."""
    names = ["lr", *GRID[recipe.name]]
    return " ".join([recipe.name, *(f"{name}={recipe.fields[name]:g}" for name in names)])


def advised(federation: Federation, entries: Sequence[Entry], seeds: Sequence[int], budget: int) -> Advised:
    """Run the race, and choose.

    Args:
        federation: its devices decide which families are raced.
        entries: its truth.
        seeds: the first races, the others repeat.
        budget: rounds of the whole race.
    """
    clients = entries[0].test.shape[1]
    held = SimpleNamespace(names=[str(client) for client in range(clients)])
    runs = KnownRuns(
        clients=held, choosing=held, model=None, rungs=RUNGS, every=RUNGS[0], options={}, metric="accuracy",
        higher_is_better=True, entries={entry.label: entry for entry in entries},
    )  # fmt: skip
    racing = [_on_the_grid(one) for one in entrants(range(clients), federation.fleet(), TRAINING, {}, None)]
    with tempfile.TemporaryDirectory() as folder:
        race = Race(runs, tuple(seeds), Path(folder), Budget(budget), FACTOR, lambda line: None)
        runners, _, spent = race.run(racing)
    finished = [one for one in runners if one.state == "finished"]
    best = max(finished, key=lambda one: one.mean)
    alone = next((one for one in finished if one.entrant.recipe.name == "local"), None)
    chosen = recommended(finished, best, runs)
    return Advised(runs.entries[label_of(chosen.recipe)], pays(finished, alone, True), spent.rounds)


def _on_the_grid(one: Entrant) -> Entrant:
    """A method whose settings are those that are known."""
    main = GRID[one.recipe.name]
    first = tuple(
        {"lr": rate} | {name: values[number % len(values)] for name, values in main.items()}
        for number, rate in enumerate(RATES)
    )
    several = {name: list(values) for name, values in main.items() if len(values) > 1}
    alone = {name: values[0] for name, values in main.items() if len(values) == 1}
    recipe = with_settings(one.recipe, alone) if alone else one.recipe
    kept = tuple({name: value for name, value in point.items() if name not in alone} for point in first)
    return replace(one, recipe=recipe, space={"lr": list(RATES), **several}, first=kept)
