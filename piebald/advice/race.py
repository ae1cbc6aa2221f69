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
from piebald.advice.tuning.search import study_of
from piebald.advice.tuning.space import Choices, SearchSpace, with_settings
from piebald.advice.tuning.study import Study, folder_name, storage_in
from piebald.advice.tuning.trial import Trial, best_of, lag_beyond_noise, words
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
        run: the cost of a whole run, the mean over seeds; None if it was not finished.
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
        return self.last.mean


@dataclass(frozen=True)
class Race:
    """A race of methods, from tuning to repetitions with other seeds.

    Attributes:
        runs: the settings by which they are trained and scored, with all rungs.
        seeds: the first is raced with, the others repeat the last ones.
        folder: of all runs.
        budget: of the whole race.
        factor: of successive halving.
        say: takes a line for each event.
    """

    runs: TrialRuns
    seeds: Sequence[int]
    folder: Path
    budget: Budget
    factor: int
    say: Callable[[str], None]

    def run(self, entrants: Sequence[Entrant]) -> tuple[list[Runner], dict[str, str], Cost]:
        """Return the methods that were tuned, the reasons why others could not be, and the cost of the race."""
        with storage_in(self.folder) as storage:
            tuned, failed = self._tuned(storage, entrants)
            spent = sum((trial.cost for runner in tuned for trial in runner.trials), Cost())
            runners, raced = self._raced(storage, _RACE, tuned, spent)
            if second := self._smaller_rates(runners):
                again, extra = self._raced(storage, _SECOND, second, spent + raced)
                runners, raced = self._better(runners, again), raced + extra
        again, extra_cost = self._other_settings(runners, [*tuned, *second], spent + raced)
        runners, raced = self._better(runners, again), raced + extra_cost
        runners, repeated = self._repeated(runners, spent + raced)
        return runners, failed, spent + raced + repeated

    def _tuned(self, storage: Any, entrants: Sequence[Entrant]) -> tuple[list[Runner], dict[str, str]]:
        # tuning ends two rungs before the end: what is left of the budget trains the best to the end
        short = replace(self.runs, rungs=self.runs.rungs[: max(1, len(self.runs.rungs) - 2)])
        share = self.budget.part(TUNED / len(entrants))
        tuned: list[Runner] = []
        failed: dict[str, str] = {}
        for entrant in entrants:
            self.say(f"{entrant.label}: {entrant.title}; tuned with {share}")
            space = SearchSpace.of(entrant.space).of_recipe(entrant.recipe)
            study = study_of(
                entrant.label, entrant.recipe, space, short, self.folder, "tpe", entrant.first,
                seeds=self.seeds[:1], seed=self.seeds[0], factor=self.factor, most=8, say=self.say,
            )  # fmt: skip
            trials = study.search(storage, share)
            best = best_of(trials, self.runs.higher_is_better)
            if best is None:
                failed[entrant.label] = trials[0].why
                continue
            recipe = with_settings(entrant.recipe, best.settings)
            folder = study.place(best.number, best.settings) / f"seed-{self.seeds[0]}"
            scores = dict(best.scores)
            tuned.append(
                Runner(entrant, recipe, best, trials, best.rounds, "dropped", "", scores, {self.seeds[0]: folder}, None)
            )
        return tuned, failed

    def _smaller_rates(self, runners: Sequence[Runner]) -> list[Runner]:
        """Return the methods that got worse as they went on, each with the best of the smaller rates that were tried.

        The best rate of a short run may be too large for a long one.
        """
        sign = 1 if self.runs.higher_is_better else -1
        retried = []
        for runner in runners:
            before, rate = runner.best.score or 0.0, runner.best.settings["lr"]
            if runner.state != "failed" and (
                runner.reached == runner.best.rounds or sign * runner.mean >= sign * before
            ):
                continue
            # a rate that diverges late looks best in a short run
            smaller = [trial for trial in runner.trials if trial.settings["lr"] < rate]
            best = best_of(smaller, self.runs.higher_is_better)
            if best is None:
                continue
            self.say(f"{runner.label}: got worse when it went on, tried again with {words(best.settings)}")
            folder = runner.folders[self.seeds[0]].parent.parent / str(best.number) / f"seed-{self.seeds[0]}"
            recipe = with_settings(runner.entrant.recipe, best.settings)
            again = replace(runner, recipe=recipe, best=best, reached=best.rounds, scores=dict(best.scores), run=None)
            retried.append(replace(again, state="dropped", why="", folders={self.seeds[0]: folder}))
        return retried

    def _better(self, runners: Sequence[Runner], again: Sequence[Runner]) -> list[Runner]:
        """Return for each method the try that went further, or else the better one."""
        sign = 1 if self.runs.higher_is_better else -1
        seconds = {runner.label: runner for runner in again}

        def rank(runner: Runner) -> tuple[bool, int, float]:
            return runner.state != "failed", runner.reached, sign * runner.mean

        return [max((runner, seconds.get(runner.label, runner)), key=rank) for runner in runners]

    def _raced(self, storage: Any, name: str, tuned: Sequence[Runner], spent: Cost) -> tuple[list[Runner], Cost]:
        by_label = {runner.label: runner for runner in tuned}
        sign = -1 if self.runs.higher_is_better else 1
        baselines = [runner.label for runner in tuned if runner.entrant.recipe.name in (ALONE, TOGETHER)]
        rest = sorted(
            (runner for runner in tuned if runner.label not in baselines), key=lambda runner: sign * runner.mean
        )
        order = [*baselines, *(runner.label for runner in rest)]
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
        trials = study.search(storage, _rest_of(self.budget, spent))
        raced = []
        for trial in trials:
            runner = by_label[trial.settings.get("method", order[0])]
            scores = {**runner.scores, **trial.scores}
            run = trial.cost + runner.best.cost if trial.state == "finished" else None
            raced.append(replace(runner, reached=max(scores), state=trial.state, why=trial.why, scores=scores, run=run))
        tried = {runner.label for runner in raced}
        untried = [replace(runner, why="the budget was used up") for runner in tuned if runner.label not in tried]
        return [*raced, *untried], sum((trial.cost for trial in trials), Cost())

    def _other_settings(
        self, runners: Sequence[Runner], raced: Sequence[Runner], spent: Cost
    ) -> tuple[list[Runner], Cost]:
        """The second-best settings of each method that was trained to the end, and what they have cost."""
        finished = [runner for runner in runners if runner.state == "finished"]
        room = _rest_of(self.budget, spent)
        # half is kept for other seeds, which say what is chance
        limit = room.part(0.5) if len(self.seeds) > 1 else room
        done = {(runner.label, runner.best.number) for runner in raced}
        sign = -1 if self.runs.higher_is_better else 1
        retried, cost = [], Cost()
        for runner in sorted(finished, key=lambda runner: sign * runner.mean):
            trials = [trial for trial in runner.trials if (runner.label, trial.number) not in done]
            trial = best_of(trials, self.runs.higher_is_better)
            if trial is None or not self._affords(limit, cost, self.runs.rungs[-1] - trial.rounds):
                continue
            best = min(finished, key=lambda runner: sign * runner.mean)
            try:
                again = self._to_the_end(runner, trial, best)
            except DeviceLost:
                raise
            except PiebaldError as error:
                self.say(f"{runner.label} {words(trial.settings)}: not continued: {error}")
                continue
            cost += (again.run or Cost()) - trial.cost
            retried.append(again)
        return retried, cost

    def _to_the_end(self, runner: Runner, trial: Trial, best: Runner) -> Runner:
        """A method with the settings of another trial, trained to the end unless it falls behind the best."""
        seed, scores = self.seeds[0], dict(trial.scores)
        folder = runner.folders[seed].parent.parent / str(trial.number) / f"seed-{seed}"
        recipe = with_settings(runner.entrant.recipe, trial.settings)
        name, cost, reason = f"{runner.label} {words(trial.settings)}", Cost(), ""
        for rung in [rung for rung in self.runs.rungs if rung > trial.rounds]:
            run = self.runs.train(recipe, folder, runner.label, seed, rung)
            scores[rung], cost = self.runs.scores([run], rung), cost_of([run])
            run.close()
            self.say(f"{name}: {self.runs.metric} {scores[rung].mean:.4g} after {rung} rounds")
            of_best = best.scores.get(rung) if rung < self.runs.rungs[-1] else None
            lag = None if of_best is None else lag_beyond_noise(of_best, scores[rung], self.runs.higher_is_better)
            if lag is not None:
                reason = f"{lag:.3g} behind {best.label}"
                self.say(f"{name}: dropped, {reason}")
                break
        reached = max(scores)
        state = "dropped" if reason else "finished"
        trained = replace(runner, recipe=recipe, best=trial, reached=reached, state=state, why=reason, scores=scores)
        return replace(trained, folders={seed: folder}, run=cost)

    def _affords(self, limit: Budget, spent: Cost, rounds: int) -> bool:
        room = limit.unit != "rounds" or spent.rounds + rounds <= limit.amount
        return room and not spent.used_up(limit)

    def _repeated(self, runners: Sequence[Runner], spent: Cost) -> tuple[list[Runner], Cost]:
        """The race with other seeds for what cannot be told apart so far, and for the baselines."""
        extra, cost = list(self.seeds[1:]), Cost()
        finished = [runner for runner in runners if runner.state == "finished"]
        if not extra or not finished:
            return list(runners), cost
        sign = -1 if self.runs.higher_is_better else 1
        best = min(finished, key=lambda runner: sign * runner.mean)
        near = [
            runner
            for runner in finished
            if lag_beyond_noise(best.last, runner.last, self.runs.higher_is_better) is None
        ]
        baselines = [
            runner for runner in finished if runner.entrant.recipe.name in (ALONE, TOGETHER) and runner not in near
        ]
        # Local and FedAvg are always repeated: the answer compares the recommendation with them
        needed = [best, *baselines, *(runner for runner in near if runner.entrant.recipe.name in (ALONE, TOGETHER))]
        queue = list(dict.fromkeys([*needed, *sorted(near, key=lambda runner: sign * runner.mean)]))
        done = {runner.label: runner for runner in queue}
        # every method gets another seed before any gets a third: a mean over more seeds is less lucky
        for seed in extra:
            for label, runner in list(done.items()):
                if not self._affords(self.budget, spent + cost, self.runs.rungs[-1]):
                    self.say(f"{label}: not repeated with seed {seed}, the budget is used up")
                    continue
                try:
                    done[label], run_cost = self._repeat(runner, seed)
                except DeviceLost:
                    raise
                except PiebaldError as error:
                    self.say(f"{label}: not repeated with seed {seed}: {error}")
                    continue
                cost += run_cost
        return [done.get(runner.label, runner) for runner in runners], cost

    def _repeat(self, runner: Runner, seed: int) -> tuple[Runner, Cost]:
        folder = self.folder / "seeds" / folder_name(runner.label) / f"seed-{seed}"
        rounds, count = self.runs.rungs[-1], len(runner.last.seeds)
        run = self.runs.train(runner.recipe, folder, runner.label, seed, rounds)
        repeated, cost = self.runs.scores([run], rounds), cost_of([run])
        run.close()
        values = np.concatenate([runner.last.values, repeated.values])
        scores = self.runs.table(values, [*runner.last.seeds, seed])
        self.say(f"{runner.label}: {self.runs.metric} {repeated.mean:.4g} with seed {seed}")
        # the cost of one run, as the mean over all seeds
        mean = cost if runner.run is None else runner.run.averaged(cost, count)
        return replace(
            runner, scores={**runner.scores, rounds: scores}, folders={**runner.folders, seed: folder}, run=mean
        ), cost


def _rest_of(budget: Budget, spent: Cost) -> Budget:
    """Return the rest of a budget, which is never empty."""
    rest = budget.amount - spent.of(budget.unit)
    # a budget of zero is refused; this one is used up by the first step
    return Budget(max(rest, 1e-9) if budget.unit == "minutes" else max(1, int(rest)), budget.unit)


def lag_behind(best: Runner, other: Runner, higher_is_better: bool) -> tuple[float, float | None]:
    """Return the lag of a method behind another one on the seeds of both, and its standard error."""
    lead = difference(best.last, other.last)
    if lead is None:
        return 0.0, None
    return (lead.mean if higher_is_better else -lead.mean), lead.error
