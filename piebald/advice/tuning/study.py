"""One recipe's search: Optuna samples, stores and prunes; each trial is a run folder for each seed.

    <folder>/trials/<label>/<number>/seed-<seed>/     the runs of a trial, continued from rung to rung
    <folder>/study.db                                  Optuna's storage, an SQLite file

Trials are tried one after the other.  Whenever the process dies, the same call goes on: a trial that was not finished
is continued, and the sampler of a trial is made from the seed and the trial's number, so that the search is the same as
one that was not interrupted.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from piebald.advice.tuning.budget import Budget, Cost
from piebald.advice.tuning.space import Choices, Point, Range, SearchSpace, Values
from piebald.advice.tuning.trial import State, Trial, lag_beyond_noise, outside_one_standard_error, words
from piebald.advice.tuning.trial_runs import TrialRuns, cost_of
from piebald.core.errors import DeviceLost, PiebaldError, RunFolderError, SettingError
from piebald.core.plain_text import printable
from piebald.core.randomness import generator
from piebald.core.reading.files import UnfitFile, regular
from piebald.methods.recipe import Recipe
from piebald.methods.recipe_settings import plain
from piebald.report.paired import Scores, difference
from piebald.storage.schema import RunLock

if TYPE_CHECKING:
    import optuna

Sampler = Literal["tpe", "random", "grid"]
FIRST = 5  # trials before TPE learns from them
_PROGRAMS = "SELECT 1 FROM sqlite_master WHERE type IN ('view', 'trigger') OR sql LIKE 'CREATE VIRTUAL%'"


@dataclass(frozen=True)
class Study:
    """A search for settings.

    Attributes:
        label: of what is searched for, the study's name in the storage.
        space: the values that settings may have.
        make: the recipe with some settings.
        place: the folder of the runs of a trial, by its number and its settings.
        runs: the settings by which trials are trained and scored.
        seeds: each trial has a run for each.
        first: settings to try before the sampler is asked.
        seed, sampler, factor: of the sampler, and of successive halving.
        say: takes a line for each event.
    """

    label: str
    space: SearchSpace
    make: Callable[[Point], Recipe]
    place: Callable[[int, Point], Path]
    runs: TrialRuns
    seeds: Sequence[int]
    first: Sequence[Point] = ()
    seed: int = 0
    sampler: Sampler = "tpe"
    factor: int = 3
    say: Callable[[str], None] = lambda line: None

    def name(self, point: Point) -> str:
        """A trial as lines of progress call it."""
        return f"{self.label} {words(point)}"

    def search(self, storage: optuna.storages.BaseStorage, budget: Budget) -> list[Trial]:
        """Try settings until the budget is used up."""
        study = self._opened(storage)
        while (trial := self._next(study, budget)) is not None:
            self._try(study, trial, budget)
        return self._tried(study)

    # -- Optuna

    def _opened(self, storage: optuna.storages.BaseStorage) -> optuna.Study:
        import optuna

        halving = optuna.pruners.SuccessiveHalvingPruner(min_resource=self.runs.rungs[0], reduction_factor=self.factor)
        higher = self.runs.higher_is_better
        study = optuna.create_study(
            storage=storage,
            study_name=self.label,
            load_if_exists=True,
            direction="maximize" if higher else "minimize",
            pruner=outside_one_standard_error(halving, self._scores_of, higher),
            sampler=optuna.samplers.RandomSampler(seed=0),  # each trial has its own, see `_next`
        )
        for point in self.first:
            coded = {name: _coded(self.space.values[name], value) for name, value in point.items()}
            study.enqueue_trial(coded, skip_if_exists=True)
        return study

    def _next(self, study: optuna.Study, budget: Budget) -> optuna.Trial | None:
        """The trial that was interrupted, or else a new one while the budget lasts."""
        import optuna

        trials = study.get_trials(deepcopy=False)
        running = [earlier for earlier in trials if earlier.state == optuna.trial.TrialState.RUNNING]
        # its runs are on the disk, so it goes on where it stopped
        if running:
            trial = optuna.trial.Trial(study, running[0]._trial_id)
        else:
            ended = [earlier for earlier in trials if earlier.state.is_finished()]
            waiting = len(trials) > len(ended)
            if ended and not self._affords(study, budget, self.runs.rungs[0]):
                return None
            if self.sampler == "grid" and not waiting:
                return None
            # a sampler of its own for each trial makes a resumed search draw as one that was never stopped
            study.sampler = self._sampler(len(ended))
            trial = study.ask()
        for name, values in self.space.values.items():
            _suggest(trial, name, values)
        return trial

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        import optuna

        seed = int(generator("tune", self.seed, self.label, number).integers(2**31))
        if self.sampler == "tpe":
            return optuna.samplers.TPESampler(seed=seed, n_startup_trials=FIRST)
        return optuna.samplers.RandomSampler(seed=seed)

    def _affords(self, study: optuna.Study, budget: Budget, rounds: int) -> bool:
        """Return whether the budget has room for a number of further rounds of each seed.

        What an interrupted rung has cost counts when it is done, so that a search that goes on decides as one that was
        not interrupted.
        """
        spent = sum((self._cost(trial) for trial in study.get_trials(deepcopy=False)), Cost())
        return not spent.used_up(budget) and (
            budget.unit != "rounds" or spent.rounds + rounds * len(self.seeds) <= budget.amount
        )

    # -- one trial

    def _try(self, study: optuna.Study, trial: optuna.Trial, budget: Budget) -> None:
        """Train a trial from rung to rung until it is dropped or finished."""
        from optuna.trial import TrialState

        point = self._point(trial.params)
        name = self.name(point)
        # the first trial has the recipe's own settings, and is the measure of the others
        is_kept = trial.number == 0
        reached = 0
        for rung in self.runs.rungs:
            if not is_kept and not self._affords(study, budget, rung - reached):
                return self._drop(
                    study, trial, f"{name}: not continued, the budget is used up", "the budget was used up"
                )
            try:
                scores = self._scores(study, trial, point, rung)
            except DeviceLost:
                raise  # the next trial would fail as well
            except PiebaldError as error:
                trial.set_user_attr("why", str(error))
                study.tell(trial, state=TrialState.FAIL)
                return self.say(f"{name}: failed: {error}")
            mean = scores.mean
            reached = rung
            self.say(f"{name}: {self.runs.metric} {mean:.4g} after {rung} of {self.runs.rungs[-1]} rounds")
            if rung == self.runs.rungs[-1]:
                study.tell(trial, mean)
            elif trial.should_prune() and not is_kept:
                reason = self._drop_reason(study, trial.number, rung)
                return self._drop(study, trial, f"{name}: dropped, {reason}", reason)
        return None

    def _scores(self, study: optuna.Study, trial: optuna.Trial, point: Point, rung: int) -> Scores:
        """The scores of a trial after a rung, from its runs, or as they were recorded before an interruption."""
        scores = self._scores_of(trial, rung)
        if scores is None:
            recipe, folder = self.make(point), self.place(trial.number, point)
            runs = [self.runs.train(recipe, folder / f"seed-{seed}", self.label, seed, rung) for seed in self.seeds]
            scores, cost = self.runs.scores(runs, rung), cost_of(runs)
            for run in runs:
                run.close()
            if np.isnan(scores.values).all():
                raise SettingError("no client has a finite score on its validation rows")
            # the cost before the scores: scores mark the rung as done
            trial.set_user_attr(f"cost/{rung}", asdict(cost))
            trial.set_user_attr(f"scores/{rung}", scores_to_json(scores))
        recorded = next(entry for entry in study.get_trials(deepcopy=False) if entry.number == trial.number)
        if rung not in recorded.intermediate_values:
            trial.report(scores.mean, rung)
        return scores

    def _drop(self, study: optuna.Study, trial: optuna.Trial, line: str, reason: str) -> None:
        from optuna.trial import TrialState

        trial.set_user_attr("why", reason)
        study.tell(trial, state=TrialState.PRUNED)
        self.say(line)

    def _drop_reason(self, study: optuna.Study, number: int, rung: int) -> str:
        """Return the reason why a trial was dropped: its lag behind the trial that shows it most clearly."""
        trials = {entry.number: entry for entry in study.get_trials(deepcopy=False)}
        scores_by_number = {place: self._scores_of(entry, rung) for place, entry in trials.items()}
        dropped = scores_by_number.pop(number)
        assert dropped is not None
        lags = {
            rival: lag
            for rival, scores in scores_by_number.items()
            if scores is not None and (lag := lag_beyond_noise(scores, dropped, self.runs.higher_is_better)) is not None
        }
        if not lags:
            return "another trial is better"
        best = max(lags, key=lambda rival: lags[rival])
        scores = scores_by_number[best]
        assert scores is not None
        error = gap.error if (gap := difference(scores, dropped)) else None
        winner = self.name(self._point(trials[best].params))
        return f"{lags[best]:.3g} behind {winner}, with a standard error of {error or 0:.2g}"

    # -- reading

    def _tried(self, study: optuna.Study) -> list[Trial]:
        from optuna.trial import TrialState

        states: dict[Any, State] = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "dropped"}
        tried = []
        for entry in study.get_trials(deepcopy=False):
            if not entry.state.is_finished():
                continue
            scores = {rung: table for rung in self.runs.rungs if (table := self._scores_of(entry, rung)) is not None}
            rounds = max(scores, default=0)
            mean = scores[rounds].mean if scores else None
            reason = str(entry.user_attrs.get("why", ""))
            state = states.get(entry.state, "failed")
            tried.append(
                Trial(
                    self.label,
                    entry.number,
                    self._point(entry.params),
                    rounds,
                    mean,
                    state,
                    reason,
                    scores,
                    self._cost(entry),
                )
            )
        return tried

    def _cost(self, trial: Any) -> Cost:
        """Return the cost of a trial, as it was recorded after its last rung."""
        recorded = {int(name[5:]): cost for name, cost in trial.user_attrs.items() if name.startswith("cost/")}
        return Cost(**recorded[max(recorded)]) if recorded else Cost()

    def _scores_of(self, trial: Any, rung: int) -> Scores | None:
        recorded = trial.user_attrs.get(f"scores/{rung}")
        return None if recorded is None else scores_from_json(recorded, self.runs, self.seeds)

    def _point(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _value(self.space.values[name], value) for name, value in params.items()}


def first_points(space: SearchSpace, recipe: Recipe, sampler: Sampler) -> list[dict[str, Any]]:
    """The settings that are tried before the sampler is asked: the recipe's own, and with "grid" all combinations."""
    defaults = space.point_of(recipe)
    points = ([] if defaults is None else [defaults]) + (grid(space) if sampler == "grid" else [])
    return list({json.dumps(plain(point), sort_keys=True): point for point in points}.values())


def grid(space: SearchSpace) -> list[dict[str, Any]]:
    """All combinations of a space's values.

    Raises:
        SettingError: a range of numbers that are not whole has no end of values.
    """
    lists = []
    for name, values in space.values.items():
        if isinstance(values, Range):
            if not values.whole:
                raise SettingError(
                    f"sampler 'grid' tries all combinations, so {name} needs a list of values: give one, or choose "
                    "sampler 'tpe'"
                )
            lists.append(list(range(int(values.low), int(values.high) + 1)))
        else:
            lists.append(list(values.values))
    return [dict(zip(space.values, point, strict=True)) for point in itertools.product(*lists)]


@contextmanager
def storage_in(folder: Path) -> Iterator[optuna.storages.BaseStorage]:
    """Optuna's storage in a folder, which no other process may use meanwhile, with Optuna's log for warnings only.

    Raises:
        RunFolderError: another process uses it, the file is a link, or it is no storage of Optuna.
    """
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    lock, file = RunLock(folder), (folder / "study.db").resolve()

    def connect() -> sqlite3.Connection:
        if file.exists():
            regular(file)  # a pipe would wait for its writer
        # a write-ahead log survives a kill at any moment, and does not wait for the disk at each of many small steps
        connection = sqlite3.connect(file, check_same_thread=False)
        # the file may come from elsewhere, and a schema can call functions
        connection.execute("PRAGMA trusted_schema = OFF")
        if connection.execute(_PROGRAMS).fetchone() is not None:
            connection.close()
            raise RunFolderError(f"{file} has a view, a trigger or a virtual table, which no study has: remove it")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        storage = optuna.storages.RDBStorage(f"sqlite:///{file}", engine_kwargs={"creator": connect})
        try:
            yield storage
        finally:
            storage.remove_session()
            storage.engine.dispose()
    except (SQLAlchemyError, UnfitFile, optuna.exceptions.StorageInternalError) as error:
        problem = printable(str(error).splitlines()[0], 150)
        raise RunFolderError(f"{file} cannot be used ({problem}): remove it, or choose another folder") from None
    finally:
        optuna.logging.set_verbosity(before)
        lock.release()


def scores_to_json(scores: Scores) -> list[list[float | None]]:
    """Scores as JSON, None where a client has none."""
    return [[None if value != value else value for value in row] for row in scores.values.tolist()]


def scores_from_json(table: Sequence[Sequence[float | None]], runs: TrialRuns, seeds: Sequence[int]) -> Scores:
    """Scores that `scores_to_json` wrote."""
    values = np.array([[np.nan if value is None else value for value in row] for row in table], dtype=np.float64)
    return runs.table(values, list(seeds))


def folder_name(label: str) -> str:
    """A label as the name of a folder."""
    return "".join(letter if letter.isalnum() or letter in "-_.=" else "-" for letter in label).strip(".-") or "recipe"


def _suggest(trial: optuna.Trial, name: str, values: Values) -> None:
    if isinstance(values, Choices):
        trial.suggest_categorical(name, [_coded(values, value) for value in values.values])
    elif values.whole:
        trial.suggest_int(name, int(values.low), int(values.high), log=values.log)
    else:
        trial.suggest_float(name, values.low, values.high, log=values.log)


def _coded(values: Values, value: Any) -> Any:
    """A value as Optuna keeps it: choices as JSON, since it takes no lists."""
    if isinstance(values, Range):
        return value
    return json.dumps(plain(value), sort_keys=True)


def _value(values: Values, stored: Any) -> Any:
    return stored if isinstance(values, Range) else json.loads(stored)
