"""Trials of a search, and their runs: without test rows, or with a part of the training rows.

Runs are trained to a rung, continued to the next one, and scored on validation rows.  A trial is dropped by successive
halving, but not within one standard error of the best.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from piebald.advice.tuning import shared_rounds
from piebald.advice.tuning.space import Cost, Point
from piebald.contracts import Clients, Rows, RowsAtSites, Split
from piebald.core.errors import RunFolderError, SettingError, about
from piebald.core.files import json_value, read_bytes
from piebald.core.objective import Objective
from piebald.core.private_files import write_private
from piebald.core.randomness import generator, key
from piebald.data.clients.convert import class_numbers, count_classes
from piebald.data.clients.prepared import rows_of_recipe
from piebald.data.clients.view import ClientsView
from piebald.data.partition.split import Ints, hold_out
from piebald.engines.scoring import value_of, values_of_rows
from piebald.experiments.run_settings import RunSettings, SearchKeywords, marked
from piebald.methods.recipe import Recipe
from piebald.report.paired import Scores, difference
from piebald.report.row_noise import COUNTED, answer_names
from piebald.report.tables import History
from piebald.runs.compare import model_of
from piebald.runs.finished_run import Run
from piebald.runs.prepare import Model, check_repeats, prepare
from piebald.runs.run import resume, run
from piebald.runtimes import Simulator
from piebald.storage.lock import RunLock
from piebald.storage.schema import DATABASE

TRIALS = "trials.json"  # in the folder of a search: what each rung of each run has scored and cost
VALIDATION = 0.2  # share of the training rows that is held out where clients have no validation rows
_FEWEST_ROWS = 2  # of a client in a part of the rows


class ChosenRows(ClientsView):
    """All clients, each with some of its rows."""

    def chosen(self, client: int, split: Split) -> tuple[Split, Ints | None]:
        """Return the split that the rows of a split are taken from, and their positions in it, None for all."""
        raise NotImplementedError

    def rows(self, client: int, split: Split) -> Rows:
        """See `contracts.Clients`."""
        source, positions = self.chosen(client, split)
        rows = super().rows(client, source)
        return rows if positions is None else rows[positions]

    def size(self, client: int, split: Split) -> int | None:
        """See `contracts.Clients`."""
        source, positions = self.chosen(client, split)
        return super().size(client, source) if positions is None else len(positions)

    def counts(self, client: int, split: Split) -> list[int] | None:
        """See `contracts.Clients`."""
        if self.classes is None:
            return None
        label = class_numbers(self.rows(client, split).y)
        return None if label is None else count_classes(label, len(self.classes)).tolist()

    def indices(self, client: int, split: Split) -> NDArray[np.int64]:
        """See `contracts.InMemory`."""
        source, positions = self.chosen(client, split)
        indices = super().indices(client, source)
        return indices if positions is None else indices[positions]


class WithoutTestRows(ChosenRows):
    """All clients, none with test rows, so that nothing can be chosen by them.

    Where no client has validation rows, a share of each one's training rows is held out for validation.

    Attributes:
        held_out: whether rows are held out.
        test: whether test rows are there after all, for the one check after the choice.
    """

    def __init__(self, clients: Clients, held_out: bool, test: bool = False) -> None:
        super().__init__(clients)
        self.held_out, self.test = held_out, test
        self._parts: dict[int, tuple[Ints, Ints]] = {}

    @property
    def common(self) -> Rows | None:
        """See `contracts.Clients`: the common test set is test rows as well."""
        return super().common if self.test else None

    def chosen(self, client: int, split: Split) -> tuple[Split, Ints | None]:
        """See `ChosenRows`."""
        if split == "test" and not self.test:
            # no positions of the training rows: reading the test split of the clients underneath would fetch it
            return "train", np.zeros(0, dtype=np.int64)
        if split == "test" or not self.held_out:
            return split, None
        if client not in self._parts:
            rows = ClientsView.rows(self, client, "train")
            # the key has no seed: all runs of a search are judged by the same rows
            out = hold_out(np.full(len(rows), client), VALIDATION, key("choosing"), class_numbers(rows.y))
            self._parts[client] = (np.flatnonzero(~out), np.flatnonzero(out))
        return "train", self._parts[client][split == "validation"]

    def opened(self) -> WithoutTestRows:
        """Return the same clients with their test rows."""
        return type(self)(self._clients, self.held_out, test=True)

    def on_all_rows(self) -> WithoutTestRows:
        """Return the same clients, which train on the rows that they were judged by as well and have none left.

        Raises:
            SettingError: clients have validation rows of their own, which are not in memory.
        """
        return type(self)(self._clients if self.held_out else rows_of_recipe(self._clients, True, False), False)


class PartOfRows(ChosenRows):
    """All clients, each with a share of its training rows; a smaller share is part of a larger one."""

    def __init__(self, clients: Clients, share: float) -> None:
        super().__init__(clients)
        self.share = share
        self._parts: dict[int, Ints] = {}

    def chosen(self, client: int, split: Split) -> tuple[Split, Ints | None]:
        """See `ChosenRows`."""
        if split != "train":
            return split, None
        if client not in self._parts:
            rows = ClientsView.size(self, client, "train") or 0
            # a prefix of one order: a smaller share is part of a larger one, and its curve grows by rows alone
            order = generator("half of the rows", client).permutation(rows)
            # sorted, so that rows keep the order of their client, as those of other runs do
            self._parts[client] = np.sort(order[: max(_FEWEST_ROWS, int(rows * self.share))])
        return split, self._parts[client]


def without_test_rows(clients: Clients) -> WithoutTestRows:
    """Return clients whose test rows cannot be reached.

    Raises:
        SettingError: rows are at their sites, or no client has enough rows to validate on.
    """
    if isinstance(clients, RowsAtSites) and clients.elsewhere:
        raise SettingError(
            "rows are at their sites, and choosing needs runs on this machine: choose on a simulated federation"
        )
    numbers = range(len(clients))
    held_out = not any(clients.size(client, "validation") != 0 for client in numbers)
    choosing = WithoutTestRows(clients, held_out)
    if held_out and not any(choosing.size(client, "validation") for client in numbers):
        raise SettingError("no client has enough rows to hold some out for validation: at least two are needed")
    return choosing


Floats = NDArray[np.float64]
Judged = tuple[Objective, Tensor, Any]  # an objective, outputs and targets


@dataclass(frozen=True)
class TrialRuns:
    """The settings that all runs of a search share.

    Attributes:
        clients: all clients with all their rows; runs see `choosing`, which has no test rows.
        model: the model, or a function of the seed that makes it; or one for each recipe, by its label.
        rungs: the server steps after which runs are judged, the last one at the end.
        every: server steps between evaluations.
        options: keywords of `piebald.run`.
        metric, higher_is_better: the metric by which runs are judged, and whether a larger value is better.
    """

    clients: Clients
    choosing: WithoutTestRows
    model: Model | Mapping[str, Model]
    rungs: tuple[int, ...]
    every: int
    options: Mapping[str, Any]
    metric: str
    higher_is_better: bool

    @classmethod
    def of(
        cls,
        methods: Mapping[str, Recipe],
        clients: Clients,
        model: Model | Mapping[str, Model],
        rungs: tuple[int, ...],
        keywords: SearchKeywords,
    ) -> TrialRuns:
        """Check that each recipe can be trained by these clients, before the first one is.

        Raises:
            SettingError: a setting is wrong, or a recipe cannot be trained by these clients; it is named.
        """
        if isinstance(model, Mapping) and (missing := [label for label in methods if label not in model]):
            raise SettingError(f"model has none for recipe {missing[0]!r}: give one for each, or one for all")
        # test rows cannot be reached by any run of the search, so that nothing can be chosen by them even by mistake
        choosing = without_test_rows(clients)
        options = marked(keywords)
        shared = {**options, "runtime": _repeating(options.get("runtime", "simulator"))}
        # the metric is a placeholder until the first recipe was judged
        runs = cls(clients, choosing, model, rungs, rungs[0], shared, "", True)
        for label, recipe in methods.items():
            with about(f"recipe {label!r}"):
                runs = runs.judged_as(recipe, label)
        return runs

    def judged_as(self, recipe: Recipe, label: str) -> TrialRuns:
        """The same, with the metric by which the runs of a recipe are judged.

        Raises:
            SettingError: the recipe cannot be trained by these clients.
        """
        meta = prepare(recipe, self.choosing, self.model_of(label), self._settings(self.rungs[-1], 0)).meta
        return replace(self, metric=meta["metric"], higher_is_better=meta["higher_is_better"])

    @property
    def objective(self) -> dict[str, Any]:
        """The loss and the metrics, which a run may need again since they may be functions."""
        return {name: self.options[name] for name in ("loss", "metrics") if name in self.options}

    def model_of(self, label: str) -> Model:
        """The model of a recipe."""
        return model_of(label, self.model)

    def train(self, recipe: Recipe, folder: Path, label: str, seed: int, rounds: int) -> Run:
        """A run that is trained to a rung: a new one, or one that is continued."""
        if (folder / DATABASE).exists():
            with History(folder) as history:
                # a folder of other options would go on under settings that its record does not state
                check_repeats(folder, {**history.meta, "rounds": rounds}, recipe, self._settings(rounds, seed))
                # a run may be ahead of its record, where the search was stopped between the two: it is only read then
                reached = max(rounds, history.meta["rounds"])
            return resume(folder, self.choosing, self.model_of(label), recipe=recipe, rounds=reached, **self.objective)
        return run(recipe, self.choosing, self.model_of(label), out=folder, label=label, **self._options(rounds, seed))

    def shared_rounds(self, recipe: Recipe, label: str) -> str | None:
        """A name for the rounds that a recipe shares with others, whose global models are equal to the bit after each.

        None where it is known to share none.
        """
        # a tracker is told of the rounds of each run
        if not shared_rounds.is_like_fedavg(recipe) or self.options.get("trackers") or isinstance(self.model, Mapping):
            return None
        settings = self._settings(self.rungs[-1], 0)
        return shared_rounds.digest(recipe, prepare(recipe, self.choosing, self.model_of(label), settings).meta)

    def train_once(self, recipe: Recipe, folder: Path, label: str, seed: int, rounds: int, kept: Path) -> Run:
        """A run that is trained to a rung, as `train` does, but for rounds that another recipe has trained already.

        Args:
            recipe, folder, label, seed, rounds: of the run.
            kept: a folder of what recipes that share their rounds have trained with this seed; what is trained is kept
                there after each evaluation, since its model is scored by the others as well.
        """
        reached, ran = shared_rounds.reached(folder), None
        for step in [*range(self.every, rounds, self.every), rounds] if self.every else [rounds]:
            if step <= reached:
                continue
            if ran is not None:
                ran.close()
            if (copy := kept / str(step)).exists():
                shared_rounds.begin_with(copy, folder, recipe, label)
            ran = self.train(recipe, folder, label, seed, step)
            if not copy.exists():
                shared_rounds.keep(folder, copy)
        return self.train(recipe, folder, label, seed, rounds) if ran is None else ran

    def on_all_rows(self) -> TrialRuns:
        """The settings of runs that nothing is chosen by any more: validation rows are trained on, and none scored.

        Raises:
            SettingError: see `WithoutTestRows.on_all_rows`.
        """
        return replace(self, choosing=self.choosing.on_all_rows(), every=0)

    def at_rung(
        self, recipe: Recipe, folders: Mapping[int, Path], label: str, rung: int, kept: Path | None = None
    ) -> tuple[Scores, Cost]:
        """Train a run in a folder for each seed to a rung, and return their scores and what they have cost.

        Args:
            recipe, folders, label, rung: of the runs.
            kept: a folder of rounds that other recipes share, see `train_once`; None where they are trained anew.

        Raises:
            SettingError: no client has a score, as where runs have diverged.
        """
        with ExitStack() as stack:
            runs = [
                stack.enter_context(
                    self.train(recipe, folder, label, seed, rung)
                    if kept is None
                    else self.train_once(recipe, folder, label, seed, rung, kept / f"seed-{seed}")
                )
                for seed, folder in folders.items()
            ]
            scores, cost = self.scores(runs, rung), cost_of(runs)
        # a diverged run has a folder and no score; as a failure it does not stand in rankings
        if not scores.present:
            raise SettingError("no client has a finite score on its validation rows")
        return scores, cost

    def scores(self, runs: Sequence[History], version: int) -> Scores:
        """The main metric of each client's validation rows after so many server steps, under the seeds of runs."""
        rows = [self._row(history.values_at(version)) for history in runs]
        return self.table(np.array(rows), [history.seed or 0 for history in runs])

    def table(
        self,
        values: Floats,
        seeds: Sequence[int],
        split: Split = "validation",
        rows: Mapping[Any, Floats] | None = None,
    ) -> Scores:
        """Values [seeds, clients] with the number of rows behind them, and, where they are known, those of each row."""
        clients = self.clients if split == "test" else self.choosing
        sizes = [clients.size(client, split) for client in range(len(self.choosing))]
        known = () if None in sizes else [size or 0 for size in sizes]
        return Scores(values, self.names, seeds, sizes=known, rows=rows or {}, counted=self.metric == COUNTED)

    def scored(self, judged: Iterable[Judged | None], seed: int, split: Split, single: bool = True) -> Scores:
        """Return scores of outputs.

        Args:
            judged: of each client its objective, outputs and targets, None where it has none.
            seed: of the runs.
            split: of the rows.
            single: whether also single rows are scored.
        """
        values, rows = list[float](), dict[Any, Floats]()
        for name, of_client in zip(self.names, judged, strict=True):
            values.append(math.nan)
            if of_client is None:
                continue
            objective, outputs, targets = of_client
            metric = objective.metrics.get(objective.metric, objective.loss)
            if math.isfinite(value := float(value_of(metric, outputs, targets))):
                values[-1] = value
            # single rows count all or not at all: their mean must be the client's value
            of_rows = values_of_rows(metric, outputs, targets).double().numpy() if single else np.full(1, np.nan)
            if np.isfinite(of_rows).all():
                rows[seed, name] = of_rows
        return self.table(np.array([values]), [seed], split, rows)

    def read(self, folders: Mapping[int, Path], version: int | None = None, model: str = "rows") -> Scores | None:
        """The scores of runs by seed, with those of single rows; of an answer that needs no model if that is named.

        Args:
            folders: of runs on which nothing will be trained any more.
            version: server steps, None for the last.
            model: "rows" for the clients' models, "naive" or "naive_of_all", see `History.values_of_rows`.
        """
        values, rows = [], dict[Any, Floats]()
        split: Split = "validation"
        for seed, folder in folders.items():
            with History(folder) as history:
                single = history.values_of_rows(model, version)
                rows |= {(seed, self.names[client]): numbers for client, numbers in single.items()}
                split = cast(Split, history.split)
                is_model = model == "rows"
                values.append(
                    self._row(history.values_at(version) if is_model else history.naive(model, version=version))
                )
        table = np.array(values)
        return self.table(table, list(folders), split, rows) if np.isfinite(table).any() else None

    def naive(self, folders: Mapping[int, Path], version: int | None = None) -> dict[str, Scores]:
        """The scores of answers that need no model on the same rows, by name, see `report.naive`."""
        with History(next(iter(folders.values()))) as history:
            models = answer_names(history)
        scores = {name: self.read(folders, version, model) for name, model in models.items()}
        return {name: table for name, table in scores.items() if table is not None}

    @property
    def names(self) -> list[str]:
        """A name for each client, each once: with its number where names repeat."""
        # scores are matched by name, and two clients of one name would share theirs
        names = [str(name) for name in self.choosing.names]
        repeat = len(set(names)) < len(names)
        return [f"{name} ({number})" for number, name in enumerate(names)] if repeat else names

    def _row(self, values: Mapping[int, float]) -> list[float]:
        row = [values.get(client, math.nan) for client in range(len(self.choosing))]
        # a diverged client counts as not scored: one infinite loss would be the mean of all
        return [value if math.isfinite(value) else math.nan for value in row]

    def _options(self, rounds: int, seed: int) -> dict[str, Any]:
        of_run = {"rounds": rounds, "seed": seed, "evaluate_every": self.every, "evaluate_split": "validation"}
        # all runs of a search have the same rows, so measuring their heterogeneity in each would only repeat it
        return {**self.options, **of_run, "per_class": False, "measure": "none"}

    def _settings(self, rounds: int, seed: int) -> RunSettings:
        return RunSettings.of_keywords(self._options(rounds, seed))


def _repeating(runtime: Any) -> Any:
    """The runtime, a simulator without choices that are made by measuring times: the same choice is made again."""
    # a search that goes on must reach the same numbers, so nothing is chosen by measuring times
    if runtime == "simulator":
        return Simulator(deterministic=True)
    if not isinstance(runtime, Simulator) or runtime.deterministic:
        return runtime
    return Simulator(**{**{name: getattr(runtime, name) for name in runtime.model_fields_set}, "deterministic": True})


def cost_of(runs: Sequence[History]) -> Cost:
    """Return the cost of runs."""
    spent = Cost()
    for history in runs:
        final = history.final
        spent += Cost(
            final["rounds"],
            final["bytes_down"] + final["bytes_up"],
            final["wall"] / 60,
            sum(row["steps"] or 0 for row in history.results if row["kind"] == "train"),
            final["seconds"],
        )
    return spent


def scores_to_json(scores: Scores) -> list[list[float | None]]:
    """Scores as JSON, None where a client has none."""
    return [[None if value != value else value for value in row] for row in scores.values.tolist()]


def scores_from_json(table: Sequence[Sequence[float | None]], runs: TrialRuns, seeds: Sequence[int]) -> Scores:
    """Scores that `scores_to_json` wrote."""
    return runs.table(np.array(table, dtype=np.float64), list(seeds))


Sampler = Literal["tpe", "random", "grid"]
State = Literal["finished", "dropped", "failed"]


@dataclass(frozen=True, eq=False)
class Trial:
    """Settings that were tried.

    Attributes:
        label: of the recipe.
        number: of the trial, from 0.
        settings: the values that were tried, by name.
        rounds: server steps that each of its runs was trained for.
        score: the mean of the metric over clients' validation rows and seeds, None if it failed.
        state: "finished", "dropped" before the last rung, or "failed".
        why: in words, if it was dropped or failed.
        scores: of each seed and client after each rung that it reached.
        cost: what its runs cost.
    """

    label: str
    number: int
    settings: Point
    rounds: int
    score: float | None
    state: State
    why: str
    scores: Mapping[int, Scores]
    cost: Cost

    def row(self) -> dict[str, Any]:
        """As a row of a table, with plain values."""
        return {
            "label": self.label,
            "trial": self.number,
            **self.settings,
            "rounds": self.rounds,
            "score": self.score,
            "state": self.state,
            "why": self.why,
        }


def best_of(trials: Sequence[Trial], higher_is_better: bool) -> Trial | None:
    """The trial with the best mean among those that were trained longest, None if all failed."""
    scored = [trial for trial in trials if trial.score is not None and trial.state != "failed"]
    longest = max((trial.rounds for trial in scored), default=0)
    sign = 1 if higher_is_better else -1
    # scores after fewer rounds are lower for all settings alike
    complete = [trial for trial in scored if trial.rounds == longest]
    return max(complete, key=lambda trial: sign * (trial.score or 0.0), default=None)


def words(point: Point) -> str:
    """Return settings on one line.

    Examples:
        >>> words({"lr": 0.123456, "cohort": 10})
        'lr 0.1235, cohort 10'
    """
    shown = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in point.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items()) or "as it is"


def lag_beyond_noise(best: Scores, other: Scores, higher_is_better: bool) -> tuple[float, float] | None:
    """Return the lag of a method behind another one and its standard error, None where it is within one of them.

    Methods are compared on the same validation rows of the same clients and seeds, so what makes a client hard for both
    drops out; what is left is the noise that a choice would be made under (Kuo et al. 2023, On noisy evaluation in
    federated hyperparameter tuning).  Where the standard error is unknown, with a single client, everything is within
    it.
    """
    lead = difference(best, other)
    if lead is None or lead.error is None:
        return None
    lag = lead.mean if higher_is_better else -lead.mean
    return (lag, lead.error) if lag > lead.error else None


class Record:
    """What each rung of each run of a search has scored and cost, in a file, so that it goes on as if uninterrupted.

    Attributes:
        entries: of a race by the number of the setting, the seed and the rung; of a search for settings by recipe.
    """

    def __init__(self, folder: Path) -> None:
        # two searches in one folder would train the same runs and overwrite each other's record
        self._lock, self._file = RunLock(folder), folder / TRIALS
        self.entries: dict[str, Any] = {}
        try:
            if self._file.exists():
                self.entries = dict(json_value(read_bytes(self._file, links=False), self._file))
        except (OSError, ValueError, TypeError):
            # whoever mends the file finds the folder free
            self.close()
            raise self.unreadable() from None

    def add(self, name: str, entry: Any) -> None:
        """Keep an entry; the file is renamed when it is complete, so that a kill leaves what was there."""
        self.entries[name] = entry
        write_private(self._file, json.dumps(self.entries), lasting=False)

    def close(self) -> None:
        """Let others use the folder."""
        self._lock.release()

    def unreadable(self) -> RunFolderError:
        """Return the error that says that the file holds something else."""
        return RunFolderError(f"{self._file} cannot be read: remove it, or choose another folder")
