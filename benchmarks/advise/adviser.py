"""The adviser itself, on runs that are looked up in the truth instead of trained.

The race of `piebald.advise` is run as it is: its budget, its halving, its second seeds, its choice of the cheapest.
Only what trains and scores a run is replaced.  Its portfolio is learned from the federations of other data sets.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from grid import GRID, LEADERS, ROUNDS, RUNGS, TRAINING
from known import Entry, Known, tuned
from single_rows import Right

from piebald.advice.adviser import choose
from piebald.advice.evidence import Checked, Evidence, own_methods, whether_it_pays
from piebald.advice.more_data import SHARE
from piebald.advice.race import Race, Runner, entrants, methods_of
from piebald.advice.tuning.space import Budget
from piebald.advice.tuning.trial_runs import TrialRuns
from piebald.contracts import Split
from piebald.methods.recipe import Recipe
from piebald.report.paired import Scores


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
class KnownRun(AbstractContextManager["KnownRun"]):
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

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class KnownRuns(TrialRuns):
    """Runs that are looked up.

    Attributes:
        entries: what is known of each, by label.
        right: the single rows that are right, of those that were asked for them.
    """

    entries: dict[str, Entry]
    right: Right

    def train(self, recipe: Recipe, folder: Path, label: str, seed: int, rounds: int) -> Any:
        return KnownRun(self.entries[label_of(recipe)], seed, rounds)

    def shared_rounds(self, recipe: Recipe, label: str) -> None:
        """None: what is looked up is not trained."""

    def scores(self, runs: Sequence[Any], version: int) -> Scores:
        rung = RUNGS.index(version)
        values = np.stack([run.entry.validation[run.seed, rung] for run in runs]) / 100
        return self.table(values, [run.seed for run in runs])

    def tested(self, runner: Runner) -> Checked:
        """What the one look at test rows would have shown: the seeds that the race has trained."""
        return Checked(runner.label, self._table_of_rows(runner, "test"), {})

    def with_rows(self, runner: Runner) -> Runner:
        """A method whose last scores know those of single rows."""
        return replace(runner, scores={**runner.scores, RUNGS[-1]: self._table_of_rows(runner, "validation")})

    def _table_of_rows(self, runner: Runner, split: Split) -> Scores:
        entry, seeds = self.entries[label_of(runner.recipe)], list(runner.last.seeds)
        values = (entry.test[seeds] if split == "test" else entry.validation[seeds, -1]) / 100
        rows = {
            (seed, self.names[client]): right
            for seed in seeds
            for client, right in enumerate(self.right.get((entry.label, seed), {}).get(split, ()))
        }
        return self.table(values, seeds, split, rows)


@dataclass(frozen=True)
class Advised:
    """What the adviser said.

    Attributes:
        entry: the recommendation.
        pays, before: whether federating pays, after the check by test rows and before it.
        rounds: that it took, with those that are kept for learning curves.
        each: points on test rows where each client takes the method that is recommended to it.
        finished: the entries and seeds that were trained to the end.
    """

    entry: Entry
    pays: Evidence
    before: Evidence
    rounds: int
    each: float
    finished: list[tuple[str, int]]


def label_of(recipe: Recipe) -> str:
    """A recipe's entry in the truth."""
    names = ["lr", *(GRID | LEADERS)[recipe.name]]
    return " ".join([recipe.name, *(f"{name}={recipe.fields[name]:g}" for name in names)])


def advised(known: Known, seed: int, budget: int, settings: Sequence[Mapping[str, Any]]) -> Advised:
    """Run the race, choose, and check once.

    Args:
        known: the federation with its truth.
        seed: the one that is raced with; the others repeat.
        budget: rounds of the whole search; the part that is kept for learning curves, which a truth cannot replay,
            counts as spent.
        settings: the portfolio.
    """
    held = KnownClients(known.rows)
    runs = KnownRuns(
        clients=held, choosing=held, model=None, rungs=RUNGS, every=RUNGS[0], options={}, metric="accuracy",
        higher_is_better=True, entries={entry.label: entry for entry in tuned(known.entries)}, right=known.right,
    )  # fmt: skip
    field, _ = entrants(held, known.federation.fleet(), TRAINING, {}, settings=settings)
    # the truth has no run of some settings of Local
    field = [entrant for entrant in field if label_of(entrant.recipe) in runs.entries]
    limit = Budget(budget)
    racing = limit.part(1 - SHARE)
    seeds = (seed, *(other for other in known.seeds if other != seed))
    with tempfile.TemporaryDirectory() as folder:
        raced, _, spent = Race(runs, seeds, Path(folder), racing, lambda line: None).run(field)
    finished = [runs.with_rows(runner) for runner in methods_of(raced, True) if runner.state == "finished"]
    alone = next((runner for runner in finished if runner.entrant.recipe.name == "local"), None)
    chosen, verdict = choose(finished, None if alone is None else alone.label, {}, runs)
    best = next(runner for runner in finished if runner.label == verdict.leader)
    tested = [runs.tested(runner) for runner in dict.fromkeys((chosen, alone)) if runner is not None]
    after, before = (whether_it_pays(finished, alone, best, opened, runs) for opened in (tested, []))
    rivals = {runner.label: runs.entries[label_of(runner.recipe)] for runner in finished}
    own = own_methods({runner.label: runner.last for runner in finished if len(runner.last.seeds) > 1}, chosen.label)
    each = np.mean([rivals[label].test[:, client].mean() for client, label in enumerate(own.values())])
    entry = runs.entries[label_of(chosen.recipe)]
    trained = [(label_of(runner.recipe), one) for runner in finished for one in runner.last.seeds]
    return Advised(entry, after, before, spent.rounds + budget - int(racing.amount), float(each), trained)
