"""One recipe's search: Optuna samples and prunes; each trial is a run folder for each seed.

    <folder>/trials/<label>/<number>/seed-<seed>/     the runs of a trial, continued from rung to rung
    <folder>/trials.json                               what each rung of each trial has scored and cost

Trials are tried one after the other.  Whenever the process dies, the same call goes on: a trial that was not finished
is continued, and the sampler of a trial is made from the seed and the trial's number, so that the search is the same as
one that was not interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from piebald.advice.tuning import trial_runs
from piebald.advice.tuning.space import Budget, Choices, Cost, Range, SearchSpace, Values, with_settings
from piebald.core.errors import DeviceLost, PiebaldError
from piebald.core.plain_text import errors_alone
from piebald.core.randomness import generator
from piebald.methods.recipe import Recipe
from piebald.methods.recipe_settings import plain
from piebald.report.paired import Scores
from piebald.runs.compare import folder_name

FIRST = 5  # trials before TPE learns from them
_RECORDED = ("value", "params", "user_attrs", "system_attrs", "intermediate_values")  # of a trial
_STATES: Mapping[TrialState, trial_runs.State] = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "dropped"}


@dataclass(frozen=True)
class Study:
    """A search for one recipe's settings; its own are tried first, and with "grid" all combinations.

    Attributes:
        label: of the recipe.
        recipe, space: the recipe, and the values that its settings may have.
        folder: of the search.
        record: of its trials, by recipe.
        runs: the settings by which trials are trained and scored.
        seeds: each trial has a run for each.
        seed, sampler, factor: of the sampler, and of successive halving.
        say: takes a line for each event.
    """

    label: str
    recipe: Recipe
    space: SearchSpace
    folder: Path
    record: trial_runs.Record
    runs: trial_runs.TrialRuns
    seeds: Sequence[int]
    seed: int
    sampler: trial_runs.Sampler
    factor: int
    say: Callable[[str], None]

    def search(self, budget: Budget) -> list[trial_runs.Trial]:
        """Try settings until the budget is used up."""
        with errors_alone("optuna"):
            study = self._opened()
            while (trial := self._next(study, budget)) is not None:
                self._try(study, trial, budget)
        return [self._tried(entry) for entry in study.get_trials(deepcopy=False) if entry.state.is_finished()]

    # -- Optuna

    def _opened(self) -> optuna.Study:
        study = optuna.create_study(
            study_name=self.label,
            direction="maximize" if self.runs.higher_is_better else "minimize",
            pruner=optuna.pruners.SuccessiveHalvingPruner(
                min_resource=self.runs.rungs[0], reduction_factor=self.factor
            ),
            sampler=optuna.samplers.RandomSampler(seed=0),  # each trial has its own, see `_next`
        )
        try:
            for entry in self.record.entries.get(self.label, ()):
                reported = {int(rung): float(mean) for rung, mean in entry["intermediate_values"].items()}
                read = {"state": TrialState[entry["state"]], "intermediate_values": reported}
                study.add_trial(optuna.create_trial(**{**entry, **read}, distributions=self._distributions))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise self.record.unreadable() from None
        # first in the queue, so that each search contains the recipe as it is
        own = self.space.point_of(self.recipe)
        for point in [*([] if own is None else [own]), *(self.space.grid() if self.sampler == "grid" else [])]:
            coded = {name: _coded(self.space.values[name], value) for name, value in point.items()}
            # a resumed search opens the study again, and would queue all points a second time
            study.enqueue_trial(coded, skip_if_exists=True)
        return study

    def _next(self, study: optuna.Study, budget: Budget) -> optuna.Trial | None:
        """The trial that was interrupted, or else a new one while the budget lasts."""
        trials = study.get_trials(deepcopy=False)
        running = [earlier for earlier in trials if earlier.state == TrialState.RUNNING]
        # its runs are on the disk, so it goes on where it stopped
        if running:
            return optuna.trial.Trial(study, running[0]._trial_id)
        ended = sum(earlier.state.is_finished() for earlier in trials)
        if ended and not self._affords(study, budget, self.runs.rungs[0]):
            return None
        # trials that wait are of the grid: without them all combinations were tried
        if self.sampler == "grid" and ended == len(trials):
            return None
        # a sampler of its own for each trial makes a resumed search draw as one that was never stopped
        # the key counts ended trials, which are the same whether or not the search was interrupted
        draw = int(generator("tune", self.seed, self.label, ended).integers(2**31))
        study.sampler = (
            optuna.samplers.TPESampler(seed=draw, n_startup_trials=FIRST)
            if self.sampler == "tpe"
            else optuna.samplers.RandomSampler(seed=draw)
        )
        trial = study.ask(self._distributions)
        self._keep(study)
        return trial

    @property
    def _distributions(self) -> dict[str, optuna.distributions.BaseDistribution]:
        return {name: _distribution(values) for name, values in self.space.values.items()}

    def _keep(self, study: optuna.Study) -> None:
        """Record all trials but those that wait, which are queued again."""
        begun = [entry for entry in study.get_trials(deepcopy=False) if entry.state != TrialState.WAITING]
        entries = [{name: getattr(entry, name) for name in _RECORDED} | {"state": entry.state.name} for entry in begun]
        self.record.add(self.label, entries)

    def _affords(self, study: optuna.Study, budget: Budget, rounds: int) -> bool:
        """Return whether the budget has room for a number of further rounds of each seed.

        What an interrupted rung has cost counts when it is done, so that a search that goes on decides as one that was
        not interrupted.
        """
        spent = sum((_cost(trial) for trial in study.get_trials(deepcopy=False)), Cost())
        return budget.has_room(spent, rounds * len(self.seeds))

    # -- one trial

    def _try(self, study: optuna.Study, trial: optuna.Trial, budget: Budget) -> None:
        """Train a trial from rung to rung until it is dropped or finished."""
        name = self._name(trial.params)

        def end(state: TrialState, reason: str, line: str) -> None:
            trial.set_user_attr("why", reason)
            study.tell(trial, state=state)
            self._keep(study)
            self.say(f"{name}: {line}")

        # the first trial has the recipe's own settings, and is the measure of the others
        is_kept = trial.number == 0
        reached = 0
        for rung in self.runs.rungs:
            if not is_kept and not self._affords(study, budget, rung - reached):
                return end(TrialState.PRUNED, "the budget was used up", "not continued, the budget is used up")
            try:
                mean = self._scores(study, trial, rung).mean
            except DeviceLost:
                raise  # the next trial would fail as well
            except PiebaldError as error:
                return end(TrialState.FAIL, str(error), f"failed: {error}")
            reached = rung
            self.say(f"{name}: {self.runs.metric} {mean:.4g} after {rung} of {self.runs.rungs[-1]} rounds")
            if rung == self.runs.rungs[-1]:
                study.tell(trial, mean)
            elif not is_kept and trial.should_prune() and (reason := self._lag(study, trial.number, rung)):
                return end(TrialState.PRUNED, reason, f"dropped, {reason}")
            self._keep(study)
        return None

    def _scores(self, study: optuna.Study, trial: optuna.Trial, rung: int) -> Scores:
        """The scores of a trial after a rung, from its runs, or as they were recorded before an interruption."""
        scores = self._scores_of(trial, rung)
        if scores is None:
            recipe = with_settings(self.recipe, self._point(trial.params))
            folder = self.folder / "trials" / folder_name(self.label) / str(trial.number)
            folders = {seed: folder / f"seed-{seed}" for seed in self.seeds}
            scores, cost = self.runs.at_rung(recipe, folders, self.label, rung)
            trial.set_user_attr(f"cost/{rung}", asdict(cost))
            trial.set_user_attr(f"scores/{rung}", trial_runs.scores_to_json(scores))
        # a resumed trial may have reported this rung, and Optuna warns of a second report
        if rung not in study.get_trials(deepcopy=False)[trial.number].intermediate_values:
            trial.report(scores.mean, rung)
        return scores

    def _lag(self, study: optuna.Study, number: int, rung: int) -> str | None:
        """The lag of a trial behind the one that shows it most clearly, None within one standard error of all."""
        trials = study.get_trials(deepcopy=False)
        tables = {entry.number: table for entry in trials if (table := self._scores_of(entry, rung)) is not None}
        own = tables.pop(number)
        lags = [
            (*lag, rival)
            for rival, table in tables.items()
            if (lag := trial_runs.lag_beyond_noise(table, own, self.runs.higher_is_better)) is not None
        ]
        if not lags:
            return None
        most, error, best = max(lags)
        return f"{most:.3g} behind {self._name(trials[best].params)}, with a standard error of {error:.2g}"

    # -- reading

    def _tried(self, entry: optuna.trial.FrozenTrial) -> trial_runs.Trial:
        scores = {rung: table for rung in self.runs.rungs if (table := self._scores_of(entry, rung)) is not None}
        rounds = max(scores, default=0)
        mean, why = scores[rounds].mean if scores else None, str(entry.user_attrs.get("why", ""))
        state = _STATES.get(entry.state, "failed")
        return trial_runs.Trial(
            self.label, entry.number, self._point(entry.params), rounds, mean, state, why, scores, _cost(entry)
        )

    def _scores_of(self, trial: Any, rung: int) -> Scores | None:
        recorded = trial.user_attrs.get(f"scores/{rung}")
        return None if recorded is None else trial_runs.scores_from_json(recorded, self.runs, self.seeds)

    def _point(self, params: Mapping[str, Any]) -> dict[str, Any]:
        values = self.space.values
        return {name: v if isinstance(values[name], Range) else json.loads(v) for name, v in params.items()}

    def _name(self, params: Mapping[str, Any]) -> str:
        """A trial as lines of progress call it."""
        return f"{self.label} {trial_runs.words(self._point(params))}"


def _cost(trial: optuna.trial.FrozenTrial) -> Cost:
    """Return the cost of a trial, as it was recorded after its last rung."""
    recorded = {int(name[5:]): cost for name, cost in trial.user_attrs.items() if name.startswith("cost/")}
    # each entry is the cost of the runs up to its rung, so the last one has all
    return Cost(**recorded[max(recorded)]) if recorded else Cost()


def _distribution(values: Values) -> optuna.distributions.BaseDistribution:
    if isinstance(values, Choices):
        return optuna.distributions.CategoricalDistribution([_coded(values, value) for value in values.values])
    if values.whole:
        return optuna.distributions.IntDistribution(int(values.low), int(values.high), log=values.log)
    return optuna.distributions.FloatDistribution(values.low, values.high, log=values.log)


def _coded(values: Values, value: Any) -> Any:
    """A value as Optuna keeps it: choices as JSON, since it takes no lists."""
    if isinstance(values, Range):
        return value
    # sorted, so that equal values have one text by which Optuna compares choices
    return json.dumps(plain(value), sort_keys=True)
