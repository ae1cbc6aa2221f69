"""The race: every method is tuned with the same budget, the best settings of each go on, the last ones are repeated.

1. Each method tries learning rates, and values of its main setting, in short runs; Optuna samples and prunes.
2. The best of each goes on, in the same run, and those beyond one standard error of the best are dropped halfway.
   Local and FedAvg are the measure of the others, and always go to the end.
3. The second-best settings of what was trained to the end go on as well, the best method first: short runs may have
   misled.  They get half of what is left, and all of it if there is one seed.
4. What cannot be told apart by then is repeated with other seeds, and so are Local and FedAvg.

All runs of a seed have the same clients, cohorts and first model, so that scores can be paired.  Only validation rows
are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from piebald.advice.families import ALONE, TOGETHER, Entrant
from piebald.advice.tuning.budget import Budget, Cost
from piebald.advice.tuning.pruning import lag_beyond_noise
from piebald.advice.tuning.search import study_of
from piebald.advice.tuning.space import Choices, SearchSpace, with_settings
from piebald.advice.tuning.study import Study, folder_name, storage_in
from piebald.advice.tuning.trial import Trial, best_of, words
from piebald.advice.tuning.trial_runs import TrialRuns, cost_of
from piebald.core.errors import DeviceLost, PiebaldError
from piebald.methods.recipe import Recipe
from piebald.report.paired import Scores, difference

TUNED = 0.5  # share of the budget that tuning takes; the rest is for going on and for other seeds
_RACE, _SECOND = "race", "race with smaller steps"


@dataclass(frozen=True, eq=False)
class Runner:
    """A method that was tuned.

    Attributes:
        entrant: the method.
        recipe: with the settings that were chosen.
        best: the trial in which they were.
        trials: all that were tried.
        reached: server steps that it was trained for.
        state: "finished", or "dropped" before, or "failed".
        why: it was dropped or failed.
        scores: of each seed and client after each rung, by server steps.
        folders: of its runs, by seed.
        run: what a whole run costs, the mean over seeds; None if it was not finished.
    """

    entrant: Entrant
    recipe: Recipe
    best: Trial
    trials: Sequence[Trial]
    reached: int
    state: str
    why: str
    scores: Mapping[int, Scores]
    folders: Mapping[int, Path]
    run: Cost | None

    @property
    def label(self) -> str:
        """Its name in the race."""
        return self.entrant.label

    @property
    def last(self) -> Scores:
        """Its scores at the end."""
        return self.scores[self.reached]

    @property
    def mean(self) -> float:
        """The mean of the metric over clients and seeds at the end."""
        return float(np.nanmean(self.last.values))


@dataclass(frozen=True)
class Race:
    """How methods are raced.

    Attributes:
        runs: how they are trained and scored, with all rungs.
        seeds: the first is raced with, the others repeat the last ones.
        folder: of all runs.
        budget: of the whole race.
        factor: of successive halving.
        say: takes a line for each thing that happens.
    """

    runs: TrialRuns
    seeds: Sequence[int]
    folder: Path
    budget: Budget
    factor: int
    say: Callable[[str], None]

    def run(self, entrants: Sequence[Entrant]) -> tuple[list[Runner], dict[str, str], Cost]:
        """The methods that were tuned, why others could not be, and what the race has cost."""
        with storage_in(self.folder) as storage:
            tuned, failed = self._tuned(storage, entrants)
            spent = sum((trial.cost for one in tuned for trial in one.trials), Cost())
            runners, raced = self._raced(storage, _RACE, tuned, spent)
            if second := self._second(runners):
                again, more = self._raced(storage, _SECOND, second, spent + raced)
                runners, raced = self._better(runners, again), raced + more
        again, other = self._other_settings(runners, [*tuned, *second], spent + raced)
        runners, raced = self._better(runners, again), raced + other
        runners, repeated = self._repeated(runners, spent + raced)
        return runners, failed, spent + raced + repeated

    def _tuned(self, storage: Any, entrants: Sequence[Entrant]) -> tuple[list[Runner], dict[str, str]]:
        short = replace(self.runs, rungs=self.runs.rungs[: max(1, len(self.runs.rungs) - 2)])
        share = self.budget.part(TUNED / len(entrants))
        found: list[Runner] = []
        failed: dict[str, str] = {}
        for one in entrants:
            self.say(f"{one.label}: {one.title}; tuned with {share}")
            space = SearchSpace.of(one.space).of_recipe(one.recipe)
            study = study_of(
                one.label, one.recipe, space, short, self.folder, "tpe", one.first,
                seeds=self.seeds[:1], seed=self.seeds[0], factor=self.factor, most=8, say=self.say,
            )  # fmt: skip
            trials = study.search(storage, share)
            best = best_of(trials, self.runs.higher_is_better)
            if best is None:
                failed[one.label] = trials[0].why
                continue
            recipe = with_settings(one.recipe, best.settings)
            folder = study.place(best.number, best.settings) / f"seed-{self.seeds[0]}"
            scores = dict(best.scores)
            found.append(
                Runner(one, recipe, best, trials, best.rounds, "dropped", "", scores, {self.seeds[0]: folder}, None)
            )
        return found, failed

    def _second(self, runners: Sequence[Runner]) -> list[Runner]:
        """What got worse when it went on, with the best of the smaller learning rates that it was tuned with.

        The best rate of a short run may be too large for a long one.
        """
        sign = 1 if self.runs.higher_is_better else -1
        found = []
        for one in runners:
            before, rate = one.best.score or 0.0, one.best.settings["lr"]
            if one.state != "failed" and (one.reached == one.best.rounds or sign * one.mean >= sign * before):
                continue
            smaller = [trial for trial in one.trials if trial.settings["lr"] < rate]
            best = best_of(smaller, self.runs.higher_is_better)
            if best is None:
                continue
            self.say(f"{one.label}: got worse when it went on, tried again with {words(best.settings)}")
            folder = one.folders[self.seeds[0]].parent.parent / str(best.number) / f"seed-{self.seeds[0]}"
            recipe = with_settings(one.entrant.recipe, best.settings)
            again = replace(one, recipe=recipe, best=best, reached=best.rounds, scores=dict(best.scores), run=None)
            found.append(replace(again, state="dropped", why="", folders={self.seeds[0]: folder}))
        return found

    def _better(self, runners: Sequence[Runner], again: Sequence[Runner]) -> list[Runner]:
        """Of two tries of a method the one that went further, or else the better one."""
        sign = 1 if self.runs.higher_is_better else -1
        seconds = {one.label: one for one in again}

        def rank(one: Runner) -> tuple[bool, int, float]:
            return one.state != "failed", one.reached, sign * one.mean

        return [max((one, seconds.get(one.label, one)), key=rank) for one in runners]

    def _raced(self, storage: Any, name: str, tuned: Sequence[Runner], spent: Cost) -> tuple[list[Runner], Cost]:
        by_label = {one.label: one for one in tuned}
        sign = -1 if self.runs.higher_is_better else 1
        baselines = [one.label for one in tuned if one.entrant.recipe.name in (ALONE, TOGETHER)]
        others = sorted((one for one in tuned if one.label not in baselines), key=lambda one: sign * one.mean)
        order = [*baselines, *(one.label for one in others)]
        rungs = self.runs.rungs[max(1, len(self.runs.rungs) - 2) :] or self.runs.rungs[-1:]
        study = Study(
            name,
            SearchSpace({"method": Choices(tuple(by_label))} if len(by_label) > 1 else {}),
            lambda point: by_label[point.get("method", order[0])].recipe,
            lambda number, point: by_label[point.get("method", order[0])].folders[self.seeds[0]].parent,
            replace(self.runs, rungs=rungs),
            self.seeds[:1],
            first=[{"method": label} for label in order] if len(by_label) > 1 else [{}],
            sampler="grid",
            factor=self.factor,
            least=len(baselines) or int(name == _RACE),
            paid=lambda point: by_label[point.get("method", order[0])].best.cost,
            say=self.say,
        )
        trials = study.search(storage, _left(self.budget, spent))
        found = []
        for trial in trials:
            one = by_label[trial.settings.get("method", order[0])]
            scores = {**one.scores, **trial.scores}
            run = trial.cost + one.best.cost if trial.state == "finished" else None
            found.append(replace(one, reached=max(scores), state=trial.state, why=trial.why, scores=scores, run=run))
        tried = {one.label for one in found}
        left = [replace(one, why="the budget was used up") for one in tuned if one.label not in tried]
        return [*found, *left], sum((trial.cost for trial in trials), Cost())

    def _other_settings(
        self, runners: Sequence[Runner], raced: Sequence[Runner], spent: Cost
    ) -> tuple[list[Runner], Cost]:
        """The second-best settings of each method that was trained to the end, and what they have cost."""
        finished = [one for one in runners if one.state == "finished"]
        room = _left(self.budget, spent)
        limit = room.part(0.5) if len(self.seeds) > 1 else room
        done = {(one.label, one.best.number) for one in raced}
        sign = -1 if self.runs.higher_is_better else 1
        found, cost = [], Cost()
        for one in sorted(finished, key=lambda one: sign * one.mean):
            others = [trial for trial in one.trials if (one.label, trial.number) not in done]
            trial = best_of(others, self.runs.higher_is_better)
            if trial is None or not self._affords(limit, cost, self.runs.rungs[-1] - trial.rounds):
                continue
            best = min(finished, key=lambda other: sign * other.mean)
            try:
                again = self._to_the_end(one, trial, best)
            except DeviceLost:
                raise
            except PiebaldError as error:
                self.say(f"{one.label} {words(trial.settings)}: not continued: {error}")
                continue
            cost += (again.run or Cost()) - trial.cost
            found.append(again)
        return found, cost

    def _to_the_end(self, one: Runner, trial: Trial, best: Runner) -> Runner:
        """A method with the settings of another trial, trained to the end unless it falls behind the best."""
        seed, scores = self.seeds[0], dict(trial.scores)
        folder = one.folders[seed].parent.parent / str(trial.number) / f"seed-{seed}"
        recipe = with_settings(one.entrant.recipe, trial.settings)
        name, cost, why = f"{one.label} {words(trial.settings)}", Cost(), ""
        for rung in [rung for rung in self.runs.rungs if rung > trial.rounds]:
            run = self.runs.train(recipe, folder, one.label, seed, rung)
            scores[rung], cost = self.runs.scores([run], rung), cost_of([run])
            run.close()
            self.say(f"{name}: {self.runs.metric} {np.nanmean(scores[rung].values):.4g} after {rung} rounds")
            known = best.scores.get(rung) if rung < self.runs.rungs[-1] else None
            lag = None if known is None else lag_beyond_noise(known, scores[rung], self.runs.higher_is_better)
            if lag is not None:
                why = f"{lag:.3g} behind {best.label}"
                self.say(f"{name}: dropped, {why}")
                break
        reached = max(scores)
        state = "dropped" if why else "finished"
        found = replace(one, recipe=recipe, best=trial, reached=reached, state=state, why=why, scores=scores)
        return replace(found, folders={seed: folder}, run=cost)

    def _affords(self, limit: Budget, spent: Cost, rounds: int) -> bool:
        room = limit.unit != "rounds" or spent.rounds + rounds <= limit.amount
        return room and not spent.used_up(limit)

    def _repeated(self, runners: Sequence[Runner], spent: Cost) -> tuple[list[Runner], Cost]:
        """The race with other seeds for what cannot be told apart so far, and for the baselines."""
        extra, cost = list(self.seeds[1:]), Cost()
        finished = [one for one in runners if one.state == "finished"]
        if not extra or not finished:
            return list(runners), cost
        sign = -1 if self.runs.higher_is_better else 1
        best = min(finished, key=lambda one: sign * one.mean)
        near = [one for one in finished if lag_beyond_noise(best.last, one.last, self.runs.higher_is_better) is None]
        baselines = [one for one in finished if one.entrant.recipe.name in (ALONE, TOGETHER) and one not in near]
        needed = [best, *baselines, *(one for one in near if one.entrant.recipe.name in (ALONE, TOGETHER))]
        queue = list(dict.fromkeys([*needed, *sorted(near, key=lambda one: sign * one.mean)]))
        done: dict[str, Runner] = {}
        for one in queue:
            fit = self._seeds_that_fit(extra, spent + cost)
            if not fit:
                self.say(f"{one.label}: not repeated with other seeds, the budget is used up")
                continue
            try:
                done[one.label], own = self._again(one, fit)
            except DeviceLost:
                raise
            except PiebaldError as error:
                self.say(f"{one.label}: not repeated with other seeds: {error}")
                continue
            cost += own
        return [done.get(one.label, one) for one in runners], cost

    def _seeds_that_fit(self, seeds: Sequence[int], spent: Cost) -> Sequence[int]:
        """As many of the seeds as the budget has room for: one more shows what diverges by chance."""
        if spent.used_up(self.budget):
            return []
        if self.budget.unit != "rounds":
            return seeds
        room = (self.budget.amount - spent.rounds) // self.runs.rungs[-1]
        return seeds[: int(room)]

    def _again(self, one: Runner, seeds: Sequence[int]) -> tuple[Runner, Cost]:
        folders = {seed: self.folder / "seeds" / folder_name(one.label) / f"seed-{seed}" for seed in seeds}
        rounds = self.runs.rungs[-1]
        made = [self.runs.train(one.recipe, folders[seed], one.label, seed, rounds) for seed in seeds]
        more, cost = self.runs.scores(made, rounds), cost_of(made)
        for run in made:
            run.close()
        values = np.concatenate([one.last.values, more.values])
        scores = Scores(values, one.last.clients, [*one.last.seeds, *more.seeds])
        others = "1 other seed" if len(seeds) == 1 else f"{len(seeds)} other seeds"
        self.say(f"{one.label}: {self.runs.metric} {np.nanmean(more.values):.4g} with {others}")
        whole = cost if one.run is None else cost + one.run
        share = 1 / (len(seeds) + 1)
        mean = Cost(
            round(whole.rounds * share), round(whole.bytes * share), whole.minutes * share,
            round(whole.steps * share), whole.seconds * share,
        )  # fmt: skip
        return replace(one, scores={**one.scores, rounds: scores}, folders={**one.folders, **folders}, run=mean), cost


def _left(budget: Budget, spent: Cost) -> Budget:
    """What is left of a budget, at least something."""
    left = budget.amount - spent.of(budget.unit)
    return Budget(max(left, 1e-9) if budget.unit == "minutes" else max(1, int(left)), budget.unit)


def behind(best: Runner, other: Runner, higher_is_better: bool) -> tuple[float, float | None]:
    """How far a method lies behind another one on the seeds of both, and the standard error of that."""
    found = difference(best.last, other.last)
    if found is None:
        return 0.0, None
    return (found.mean if higher_is_better else -found.mean), found.error
