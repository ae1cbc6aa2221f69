"""The adviser itself, on runs that are looked up in the truth instead of trained.

The race of `piebald.advise` is run as it is: Optuna, its budget, its rule of one standard error, its choice of the
cheapest.  Only what trains and scores a run is replaced.  Learning rates and main settings are those of the grid,
because no others are known, and so are the rungs.
"""

from __future__ import annotations

# isort: skip_file

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from federations import Federation
from grid import GRID, RATES, ROUNDS, RUNGS, TRAINING
from known import Entry
from piebald.advice.adviser import FACTOR, recommended
from piebald.advice.evidence import Checked
from piebald.advice.evidence import Evidence, whether_it_pays
from piebald.advice.families import RATES as ORDER, Entrant, entrants
from piebald.advice.more_data import SHARE
from piebald.advice.race import Race, Runner
from piebald.advice.tuning.budget import Budget
from piebald.advice.tuning.space import with_settings
from piebald.advice.tuning.trial_runs import TrialRuns

from piebald.methods.recipe import Recipe
from piebald.report.paired import Scores
from piebald.report.verdict import not_clearly_behind


@dataclass(frozen=True)
class KnownClients:
    """Names of clients, and how many rows each has."""

    rows: Mapping[str, Sequence[int]]

    @property
    def names(self) -> list[str]:
        """Their numbers."""
        return [str(client) for client in range(len(self))]

    def size(self, client: int, split: str) -> int:
        """Rows of a client."""
        return self.rows[split][client]

    def __len__(self) -> int:
        return len(self.rows["test"])


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
        return self.table(values, [run.seed for run in runs])


@dataclass(frozen=True, eq=False)
class Raced:
    """A race that was replayed: its methods, its runs, and the rounds that count as spent."""

    runners: Sequence[Runner]
    runs: KnownRuns
    rounds: int

    @property
    def finished(self) -> list[Runner]:
        """The methods that were trained to the end."""
        return [one for one in self.runners if one.state == "finished"]

    @property
    def best(self) -> Runner:
        """The method with the best mean."""
        return max(self.finished, key=lambda one: one.mean)

    def entry(self, one: Runner) -> Entry:
        """A method with its settings, in the truth."""
        return self.runs.entries[label_of(one.recipe)]


@dataclass(frozen=True)
class Advised:
    """What the adviser said: the entry, whether federating pays, the same before the check, and the rounds it took."""

    entry: Entry
    pays: Evidence
    before: Evidence
    rounds: int


def label_of(recipe: Recipe) -> str:
    """A recipe's entry in the truth."""
    names = ["lr", *GRID[recipe.name]]
    return " ".join([recipe.name, *(f"{name}={recipe.fields[name]:g}" for name in names)])


def raced(
    federation: Federation,
    entries: Sequence[Entry],
    rows: Mapping[str, Sequence[int]],
    seeds: Sequence[int],
    budget: int,
    *,
    race: type[Race] = Race,
    runs: type[KnownRuns] = KnownRuns,
    settings: Callable[[Entrant], Entrant] | None = None,
) -> Raced:
    """Run the race.

    Args:
        federation: its devices decide which families are raced.
        entries: its truth.
        rows: of each client, by split.
        seeds: the first races, the others repeat.
        budget: rounds of the whole search; the part that is kept for learning curves, which a truth cannot replay,
            counts as spent.
        race, runs, settings: the race, its runs, and what a method tries first, by default those of the adviser
            (`changes.py` has others).
    """
    limit = Budget(budget)
    racing_limit = limit.part(1 - SHARE)
    held = KnownClients(rows)
    looked_up = runs(
        clients=held, choosing=held, model=None, rungs=RUNGS, every=RUNGS[0], options={}, metric="accuracy",
        higher_is_better=True, entries={entry.label: entry for entry in entries},
    )  # fmt: skip
    racing = [(settings or on_the_grid)(one) for one in entrants(held, federation.fleet(), TRAINING, {}, None)]
    with tempfile.TemporaryDirectory() as folder:
        made = race(looked_up, tuple(seeds), Path(folder), racing_limit, FACTOR, lambda line: None)
        runners, _, spent = made.run(racing)
    return Raced(runners, looked_up, spent.rounds + budget - int(racing_limit.amount))


def advised(
    federation: Federation,
    entries: Sequence[Entry],
    rows: Mapping[str, Sequence[int]],
    seeds: Sequence[int],
    budget: int,
) -> Advised:
    """Run the race, choose, and check once; the arguments are those of `raced`."""
    found = raced(federation, entries, rows, seeds, budget)
    finished, runs = found.finished, found.runs
    alone = next((one for one in finished if one.entrant.recipe.name == "local"), None)
    # as the adviser: only methods that were repeated can win, if any were
    repeated = {one.label: one for one in finished if len(one.last.seeds) > 1} or {one.label: one for one in finished}
    near = [repeated[label] for label in not_clearly_behind({label: one.last for label, one in repeated.items()})]
    chosen = recommended(near, near[0], runs)
    tested = [_tested(one, runs) for one in (chosen, alone) if one is not None]
    evidence = whether_it_pays(finished, alone, chosen, tested, runs)
    before = whether_it_pays(finished, alone, chosen, [], runs)
    return Advised(found.entry(chosen), evidence, before, found.rounds)


def _tested(one: Runner, runs: KnownRuns) -> Checked:
    """What the one look at test rows would have shown: the seeds that the race has trained."""
    entry, seeds = runs.entries[label_of(one.recipe)], list(one.last.seeds)
    return Checked(one.label, runs.table(entry.test[seeds] / 100, seeds, "test"), {})


def on_the_grid(one: Entrant) -> Entrant:
    """A method whose settings are those that are known."""
    main = GRID[one.recipe.name]
    first = tuple(
        {"lr": rate} | {name: values[number % len(values)] for name, values in main.items()}
        for number, rate in enumerate(rate for rate in ORDER if rate in RATES)
    )
    several = {name: list(values) for name, values in main.items() if len(values) > 1}
    alone = {name: values[0] for name, values in main.items() if len(values) == 1}
    recipe = with_settings(one.recipe, alone) if alone else one.recipe
    kept = tuple({name: value for name, value in point.items() if name not in alone} for point in first)
    return replace(one, recipe=recipe, space={"lr": list(RATES), **several}, first=kept)
