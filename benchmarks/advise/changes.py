"""Changes of the adviser, replayed on the federations used while building: what would each have done to its regret?

`python benchmarks/advise/run.py changes` writes changes.json, which the part `score` puts into RESULTS.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import optuna
from adviser import KnownRuns, Raced, on_the_grid, raced
from grid import GRID, RATES, ROUNDS, RUNGS
from known import tuned
from score import Known, budget_of, known_federations
from tried import CHANGES, NOW
from truth import known_rows

from piebald.advice import race as advice_race
from piebald.advice.adviser import recommended
from piebald.advice.families import RATES as ORDER
from piebald.advice.families import Entrant
from piebald.advice.race import TUNED, Race, Runner
from piebald.advice.tuning.budget import Cost
from piebald.report.paired import Scores


class TwoLooks(KnownRuns):
    """Runs that are judged by the mean of a look and the one before it."""

    def scores(self, runs: Sequence[Any], version: int) -> Scores:
        rung = RUNGS.index(version)
        return _looks(self, [run.entry for run in runs], [run.seed for run in runs], rung)


class WithoutSecondBest(Race):
    """What is left of the budget is for other seeds; second-best settings do not go on."""

    def _other_settings(self, *_: Any) -> tuple[list[Runner], Cost]:
        return [], Cost()


class BestOfTwo(Race):
    """The best is repeated with a second seed until it is the best of two; second-best settings have what is left."""

    def _raced(self, storage: Any, name: str, tuned: Sequence[Runner], spent: Cost) -> tuple[list[Runner], Cost]:
        runners, cost = super()._raced(storage, name, tuned, spent)
        runners, more = self._best_of_two(runners, spent + cost)
        return runners, cost + more

    def _better(self, runners: Sequence[Runner], again: Sequence[Runner]) -> list[Runner]:
        """One seed is no reason to drop what was judged by two."""
        twice = {one.label for one in runners if len(one.last.seeds) > 1}
        return super()._better(runners, [one for one in again if one.label not in twice])

    def _repeated(self, runners: Sequence[Runner], spent: Cost) -> tuple[list[Runner], Cost]:
        return self._best_of_two(runners, spent)

    def _best_of_two(self, runners: Sequence[Runner], spent: Cost) -> tuple[list[Runner], Cost]:
        found, cost = {one.label: one for one in runners}, Cost()
        while True:
            best = max((one for one in found.values() if one.state == "finished"), key=lambda one: one.mean)
            affordable = self._affords(self.budget, spent + cost, self.runs.rungs[-1])
            if len(best.last.seeds) > 1 or not affordable or len(self.seeds) < 2:
                return list(found.values()), cost
            found[best.label], more = self._repeat(best, self.seeds[1])
            cost += more


def crossed(one: Entrant) -> Entrant:
    """A method that tries every main setting with a rate before the next rate."""
    made = on_the_grid(one)
    several = {name: values for name, values in GRID[one.recipe.name].items() if len(values) > 1}
    points = [
        {"lr": rate} | {name: value}
        for rate in ORDER if rate in RATES
        for name, values in several.items()
        for value in values
    ]  # fmt: skip
    return replace(made, first=tuple(points)) if points else made


def cheap(found: Raced, finished: Sequence[Runner]) -> Runner:
    """What the adviser recommends: the best, or what sends clearly less and is as good."""
    return recommended(finished, max(finished, key=lambda one: one.mean), found.runs)


def last_by_two_looks(found: Raced) -> Runner:
    """The same, by the mean of the last two looks."""
    return cheap(found, [replace(one, scores={**one.scores, ROUNDS: _last_two(found, one)}) for one in found.finished])


def shrunken(found: Raced) -> Runner:
    """The best has the best mean after all means were drawn towards their median: with n seeds, to n / (n + 1)."""
    finished = found.finished
    median = float(np.median([one.mean for one in finished]))

    def mean(one: Runner) -> float:
        seeds = len(one.last.seeds)
        return median + (one.mean - median) * seeds / (seeds + 1)

    return recommended(finished, max(finished, key=mean), found.runs)


@dataclass(frozen=True)
class Change:
    """One change: what it replaces in the race, and how it chooses in the end."""

    race: type[Race] = Race
    runs: type[KnownRuns] = KnownRuns
    settings: Callable[[Entrant], Entrant] = on_the_grid
    tuned: float = TUNED
    choose: Callable[[Raced], Runner] = lambda found: cheap(found, found.finished)

    @property
    def what_is_raced(self) -> tuple[Any, ...]:
        """What the race depends on: changes that share it need one race."""
        return self.race, self.runs, self.settings, self.tuned


TABLE: dict[str, Change] = {
    NOW: Change(),
    "last choice by two looks": Change(choose=last_by_two_looks),
    "means drawn towards the median": Change(choose=shrunken),
    "the best mean, whatever it sends": Change(choose=lambda found: found.best),
    "all comparisons by two looks": Change(runs=TwoLooks),
    "30 % of the budget for tuning": Change(tuned=0.3),
    "40 % of the budget for tuning": Change(tuned=0.4),
    "60 % of the budget for tuning": Change(tuned=0.6),
    "other seeds in place of second-best settings": Change(race=WithoutSecondBest),
    "rates and main settings crossed": Change(settings=crossed),
    "the best repeated until it is the best of two seeds": Change(race=BestOfTwo),
}


def write(folder: Path) -> str:
    """Replay the changes that are not in the file yet, and add what each would have recommended."""
    found = json.loads(CHANGES.read_text("utf-8")) if CHANGES.exists() else {}
    building = [one for one in known_federations(folder) if not one.federation.held_back]
    held = known_rows(folder)
    while missing := [name for name in TABLE if name not in found]:
        raced_alike = TABLE[missing[0]].what_is_raced
        together = [name for name in missing if TABLE[name].what_is_raced == raced_alike]
        found |= {name: {} for name in together}
        for known in building:
            races = _races(known, held[known.federation.name], TABLE[missing[0]])
            for name in together:
                labels = [one.entry(TABLE[name].choose(one)).label for one in races]
                found[name][known.federation.name] = labels
                print(name, known.federation.name, labels, flush=True)
        CHANGES.write_text(_text({name: found[name] for name in TABLE if name in found}), encoding="utf-8")
    return str(CHANGES)


def _races(known: Known, rows: Any, change: Change) -> list[Raced]:
    """The race with each seed first."""
    with (
        mock.patch.object(advice_race, "storage_in", _in_memory),
        mock.patch.object(advice_race, "TUNED", change.tuned),
    ):
        return [
            raced(
                known.federation, tuned(known.entries), rows, [seed, *(one for one in known.seeds if one != seed)],
                budget_of(known), race=change.race, runs=change.runs, settings=change.settings,
            )
            for seed in known.seeds
        ]  # fmt: skip


@contextmanager
def _in_memory(_: Path) -> Iterator[optuna.storages.BaseStorage]:
    """Optuna's storage without a file: the same trials, in less time."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield optuna.storages.InMemoryStorage()


def _last_two(found: Raced, one: Runner) -> Scores:
    seeds = list(one.last.seeds)
    return _looks(found.runs, [found.entry(one)] * len(seeds), seeds, len(RUNGS) - 1)


def _looks(runs: KnownRuns, entries: Sequence[Any], seeds: Sequence[int], rung: int) -> Scores:
    """The means of the look after a rung and the one before it, where there is one."""
    looks = slice(max(0, rung - 1), rung + 1)
    values = [entry.validation[seed, looks].mean(0) for entry, seed in zip(entries, seeds, strict=True)]
    return Scores(np.stack(values) / 100, runs.names, list(seeds))


def _text(found: dict[str, dict[str, list[str]]]) -> str:
    lines = []
    for name, chosen in found.items():
        rows = ",\n".join(f"  {json.dumps(one)}: {json.dumps(labels)}" for one, labels in chosen.items())
        lines.append(f" {json.dumps(name)}: {{\n{rows}\n }}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
