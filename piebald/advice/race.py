"""The race: a portfolio of settings is halved on shared rungs, and what is left is repeated with other seeds.

1. All settings are trained for a quarter of the rounds, the best six go on to half of them, the best three to the end.
   The best setting of Local goes to the end in any case: it is the measure of the others.
2. Local and the two best get a second seed before anybody gets a third: the luck of seeds is as large as what settings
   differ by, and the best of many has had luck.  Only what was repeated may win.
3. FedAvg, as a measure that everybody knows, is trained if the budget lasts.

All runs of a seed have the same clients, cohorts and first model, so that scores can be paired.  Only validation rows
are looked at.  The same function is replayed on known results in `benchmarks/advise`.

Source: Jamieson and Talwalkar, *Non-stochastic best arm identification and hyperparameter optimization*, AISTATS 2016.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from piebald.advice.families import ALONE, Entrant
from piebald.advice.tuning.budget import Budget, Cost
from piebald.advice.tuning.space import with_settings
from piebald.advice.tuning.trial import words
from piebald.advice.tuning.trial_runs import TrialRuns, cost_of, scores_from_json, scores_to_json
from piebald.core.errors import DeviceLost, PiebaldError, RunFolderError
from piebald.core.private_files import write_private
from piebald.core.reading.files import json_value, read_bytes
from piebald.methods.recipe import Recipe
from piebald.report.paired import Scores, difference
from piebald.runs.compare import folder_name
from piebald.storage.lock import RunLock

KEPT = (6, 3)  # settings that go on after each rung but the last
SHARES = (0.45, 0.6, 0.75)  # of the budget that may be spent by the end of each rung; the rest is for other seeds
REPEATED = 2  # of the best settings, and Local
RECORD = "race.json"  # in the folder of a search: what each rung of each run has scored and cost


@dataclass(frozen=True, eq=False)
class Runner:
    """A recipe with settings, as far as it was trained.

    Attributes:
        entrant: the recipe with its settings.
        scores: of each seed and client after each rung, by server steps.
        folders: of its runs, by seed.
        state: "finished", or "dropped" before, or "failed".
        why: it was dropped or failed.
        run: the cost of a run, the mean over seeds; None if it was not finished.
        tried: the number of settings of the same method that were tried.
    """

    entrant: Entrant
    scores: Mapping[int, Scores] = field(default_factory=dict)
    folders: Mapping[int, Path] = field(default_factory=dict)
    state: str = "dropped"
    why: str = ""
    run: Cost | None = None
    tried: int = 1

    @property
    def label(self) -> str:
        """The name of its method."""
        return self.entrant.label

    @property
    def name(self) -> str:
        """Its method and its settings."""
        return f"{self.label} {words(self.entrant.settings)}"

    @property
    def recipe(self) -> Recipe:
        """The recipe with its settings."""
        return self.entrant.recipe

    @property
    def reached(self) -> int:
        """Server steps that it was trained for."""
        return max(self.scores, default=0)

    @property
    def last(self) -> Scores:
        """Its scores at the end."""
        return self.scores[self.reached]

    @property
    def mean(self) -> float:
        """The mean of the metric over clients and seeds at the end."""
        return self.last.mean

    def with_run(self, scores: Scores, rung: int, seed: int, folder: Path, cost: Cost, is_last: bool) -> Runner:
        """The same with a run of one more seed, or with one more rung of its run."""
        # a rung that is there already has another seed's scores, which these join; a new rung begins with these
        count = len(self.folders) if rung in self.scores else 0
        if count:
            values, seeds = np.concatenate([self.last.values, scores.values]), [*self.last.seeds, seed]
            scores = replace(self.last, values=values, seeds=seeds, trained=None)
        mean = cost if not count or self.run is None else self.run.averaged(cost, count)
        grown = replace(self, scores={**self.scores, rung: scores}, folders={**self.folders, seed: folder})
        return replace(grown, state="finished", why="", run=mean) if is_last else grown


class Race:
    """A race of recipes with settings.

    Args:
        runs: the settings by which they are trained and scored, with all rungs.
        seeds: the first is raced with, the others repeat the best.
        folder: of all runs, in which an interrupted race goes on.
        budget: of the whole race.  Local and one other are trained to the end whatever they cost.
        say: takes a line for each event.
    """

    def __init__(
        self, runs: TrialRuns, seeds: Sequence[int], folder: Path, budget: Budget, say: Callable[[str], None]
    ) -> None:
        self.runs, self.seeds, self.folder, self.budget, self.say = runs, seeds, folder, budget, say
        self.runners: list[Runner] = []
        self.spent = Cost()
        self._paid: dict[tuple[int, int], Cost] = {}
        self._not_repeated: set[int] = set()

    def run(self, field: Sequence[Entrant]) -> tuple[list[Runner], dict[str, str], Cost]:
        """Return what was trained, the reasons why other methods were not, and the cost of the race."""
        self.runners = [Runner(entrant) for entrant in field]
        with closing(Record(self.folder)) as self._record:
            # the order of stages is that of their worth: halving finds the best, two seeds show that it was not luck,
            # measures come next, and further seeds have what is left of the budget
            self._halve([number for number, entrant in enumerate(field) if not entrant.late])
            self._repeat(2)
            self._train_late()
            self._repeat(len(self.seeds))
        trained = [runner for runner in self.runners if runner.scores]
        tried = {runner.label for runner in trained}
        left_out = {
            runner.label: runner.why or "the budget was used up" for runner in self.runners if runner.label not in tried
        }
        return trained, left_out, self.spent

    # -- the stages

    def _halve(self, numbers: Sequence[int]) -> None:
        """Train settings from rung to rung, and keep the best of them."""
        rungs = self.runs.rungs
        measures = self._measures(numbers)
        for place, rung in enumerate(rungs):
            later = len(rungs) - 1 - place
            # without other seeds, nothing is kept back for them
            limit = self.budget.part(SHARES[-1 - later] if len(self.seeds) > 1 else SHARES[-1 - later] / SHARES[-1])
            for number in numbers:
                # measures are trained without regard to the budget: without Local and one rival there is no answer
                if number not in measures and not limit.has_room(self.spent, rung - self.runners[number].reached):
                    self._drop(number, "the budget was used up")
                else:
                    self._train(number, self.seeds[0], rung)
            # only those that reached this rung: others failed, or the budget ended before them
            numbers = self._best_first(number for number in numbers if self.runners[number].reached == rung)
            measures = self._measures(numbers)
            if later:
                # a dict keeps the order and drops a measure that is among the best already
                kept = [*dict.fromkeys([*numbers[: KEPT[-later]], *measures])]
                for number in numbers:
                    if number not in kept:
                        lag, _ = lag_behind(self.runners[numbers[0]], self.runners[number], self.runs.higher_is_better)
                        self._drop(number, f"{lag:.3g} behind {self.runners[numbers[0]].name}")
                numbers = kept

    def _repeat(self, most: int) -> None:
        """Repeat the best and Local with other seeds, each once before any twice, until all have so many."""
        while self.budget.has_room(self.spent, self.runs.rungs[-1]):
            order = self._best_first(n for n, runner in enumerate(self.runners) if runner.state == "finished")
            candidates = dict.fromkeys([*order[:REPEATED], *self._alone(order)[:1]])
            counts = {number: len(self.runners[number].folders) for number in candidates}
            needed = min(most, len(self.seeds))
            waiting = [n for n, count in counts.items() if count < needed and n not in self._not_repeated]
            if not waiting:
                return
            # the fewest seeds first, so that those that are compared have seeds in common when the budget ends
            number = min(waiting, key=lambda number: counts[number])
            self._train(number, self.seeds[counts[number]], self.runs.rungs[-1])

    def _train_late(self) -> None:
        """Train what is only a measure with the learning rate of the best, if the budget lasts."""
        order = self._best_first(n for n, runner in enumerate(self.runners) if runner.state == "finished")
        # a grid of learning rates for what only is a measure would cost as much as for a candidate
        for number, runner in enumerate(self.runners):
            if runner.entrant.late and order and self.budget.has_room(self.spent, self.runs.rungs[-1]):
                rate = {k: v for k, v in self.runners[order[0]].entrant.settings.items() if k == "lr"}
                recipe = with_settings(runner.recipe, rate) if rate else runner.recipe
                entrant = replace(runner.entrant, recipe=recipe, settings=rate or runner.entrant.settings)
                self.runners[number] = replace(runner, entrant=entrant)
                self._train(number, self.seeds[0], self.runs.rungs[-1])

    # -- one run

    def _train(self, number: int, seed: int, rung: int) -> None:
        """Train a run to a rung, or read what it has scored before an interruption."""
        runner = self.runners[number]
        folder = self.folder / "runs" / folder_name(runner.label) / str(number) / f"seed-{seed}"
        place = f"{number}/{seed}/{rung}"
        # a recorded rung is not trained again, nor is a recorded failure, so that a resumed race decides alike
        if place not in self._record.entries:
            self._record.add(place, self._trained(runner, folder, seed, rung))
        table, cost, reason = self._record.read(place, self.runs, seed)
        if table is None:
            self.say(f"{runner.name}: failed with seed {seed}: {reason}")
            self._not_repeated.add(number)
            if seed == self.seeds[0]:
                self.runners[number] = replace(runner, state="failed", why=reason)
            return
        # costs are of a whole run up to its rung: what earlier rungs of it have cost was counted then
        self.spent += cost - self._paid.get((number, seed), Cost())
        self._paid[number, seed] = cost
        self.say(f"{runner.name}: {self.runs.metric} {table.mean:.4g} after {rung} rounds, seed {seed}")
        self.runners[number] = runner.with_run(table, rung, seed, folder, cost, rung == self.runs.rungs[-1])

    def _trained(self, runner: Runner, folder: Path, seed: int, rung: int) -> dict[str, Any]:
        try:
            run = self.runs.train(runner.recipe, folder, runner.label, seed, rung)
            scores, cost = self.runs.scores([run], rung), cost_of([run])
            run.close()
        except DeviceLost:
            raise  # the next run would fail as well
        except PiebaldError as error:
            return {"why": str(error)}
        # a diverged run has a folder and no score; as a failure it does not stand in rankings
        if np.isnan(scores.values).all():
            return {"why": "no client has a finite score on its validation rows"}
        return {"scores": scores_to_json(scores), "cost": asdict(cost)}

    def _drop(self, number: int, reason: str) -> None:
        self.runners[number] = replace(self.runners[number], why=reason)
        self.say(f"{self.runners[number].name}: dropped, {reason}")

    def _best_first(self, numbers: Iterable[int]) -> list[int]:
        sign = -1 if self.runs.higher_is_better else 1
        # stable, so that of equal means the earlier entrant stays ahead
        return sorted(numbers, key=lambda number: sign * self.runners[number].mean)

    def _measures(self, numbers: Sequence[int]) -> list[int]:
        """Return what goes to the end whatever it costs: the first Local, and the first of the others."""
        alone = self._alone(numbers)
        return [*alone[:1], *[number for number in numbers if number not in alone][:1]]

    def _alone(self, numbers: Sequence[int]) -> list[int]:
        return [number for number in numbers if self.runners[number].recipe.name == ALONE]


class Record:
    """What each rung of each run has scored and cost, in a file, so that an interrupted race decides as before.

    Attributes:
        entries: by the number of the setting, the seed and the rung.
    """

    def __init__(self, folder: Path) -> None:
        # two searches in one folder would train the same runs and overwrite each other's record
        self._lock, self._file = RunLock(folder), folder / RECORD
        self.entries: dict[str, Any] = {}
        try:
            if self._file.exists() or self._file.is_symlink():
                self.entries = dict(json_value(read_bytes(self._file, links=False), self._file))
        except (OSError, ValueError, TypeError):
            # whoever mends the file finds the folder free
            self.close()
            raise self._unreadable() from None

    def add(self, place: str, entry: Mapping[str, Any]) -> None:
        """Keep what a rung has scored; renamed when it is complete, so that a kill leaves what was there."""
        self.entries[place] = entry
        write_private(self._file, json.dumps(self.entries), lasting=False)

    def read(self, place: str, runs: TrialRuns, seed: int) -> tuple[Scores | None, Cost, str]:
        """The scores of a rung, what its run has cost so far, and the reason where there are none.

        Raises:
            RunFolderError: the file holds something else.
        """
        entry = self.entries[place]
        try:
            if "why" in entry:
                return None, Cost(), str(entry["why"])
            return scores_from_json(entry["scores"], runs, [seed]), Cost(**entry["cost"]), ""
        except (KeyError, TypeError, ValueError, PiebaldError):
            raise self._unreadable() from None

    def close(self) -> None:
        """Let others use the folder."""
        self._lock.release()

    def _unreadable(self) -> RunFolderError:
        return RunFolderError(f"{self._file} cannot be read: remove it, or choose another folder")


def methods_of(runners: Sequence[Runner], higher_is_better: bool) -> list[Runner]:
    """The best setting of each method, the simplest method first: those that went furthest, and were repeated, win."""
    sign = 1 if higher_is_better else -1
    by_label: dict[str, list[Runner]] = {}
    for runner in sorted(runners, key=lambda runner: runner.entrant.rank):
        by_label.setdefault(runner.label, []).append(runner)
    return [
        # scores of one seed are flattered by choice, so a repeated setting wins over a lucky one
        replace(max(same_method, key=lambda x: (x.reached, len(x.folders) > 1, sign * x.mean)), tried=len(same_method))
        for same_method in by_label.values()
    ]


def lag_behind(best: Runner, other: Runner, higher_is_better: bool) -> tuple[float, float | None]:
    """Return the lag of a method behind another one on the seeds of both, and its standard error."""
    lead = difference(best.last, other.last)
    if lead is None:
        return 0.0, None
    return (lead.mean if higher_is_better else -lead.mean), lead.error
