"""An ensemble of what the race has trained to the end: the mean of the predictions of several of its runs.

Models that were trained in different ways err on different rows, so that their mean is often better than the best.
Members are selected greedily on validation rows, with replacement: the run whose addition makes the mean best by the
metric, ten times, of which the best beginning is kept.  A run that is added twice counts twice.

When the members are chosen, validation rows have done their work: each member is trained once more, on these rows as
well, as far as the budget goes, and the new run counts as much as the old one.  What it gains cannot be known before
test rows are looked at, which happens once, at the end; a run that had bad luck is one of two.

Source: Caruana, Niculescu-Mizil, Crew and Ksikes, *Ensemble selection from libraries of models*, International
Conference on Machine Learning 2004.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from piebald.advice.evidence import Checked
from piebald.advice.race import Runner
from piebald.advice.tuning.space import Budget, Cost
from piebald.advice.tuning.trial_runs import Judged, TrialRuns, cost_of
from piebald.contracts import Split
from piebald.core.errors import PiebaldError, SettingError
from piebald.methods.recipe import Recipe
from piebald.models.prediction import AnswerKind, mean_outputs
from piebald.report.paired import Difference, Scores
from piebald.report.verdict import compared
from piebald.runs.compare import folder_name
from piebald.runs.finished_run import Run
from piebald.runs.run import opened
from piebald.storage.store import RunStore

Floats = NDArray[np.float64]
STEPS = 10  # of the selection
_MOST_CLIENTS = 200  # of more, making each one's own models would take minutes


@dataclass(frozen=True)
class EnsembleMember:
    """A run in an ensemble.

    Attributes:
        runner: its method and its settings.
        folder: of the run.
        count: how often it counts in the mean.
        bytes: that it has sent, both ways.
        on_all_rows: whether it was trained on validation rows as well.
    """

    runner: Runner
    folder: Path
    count: int
    bytes: int
    on_all_rows: bool = False

    @property
    def name(self) -> str:
        """Its method and its settings in words."""
        return f"{self.runner.name} on all rows" if self.on_all_rows else self.runner.name

    def plain(self) -> dict[str, Any]:
        """As values for JSON."""
        return {"name": self.name, "count": self.count, "on_all_rows": self.on_all_rows}


@dataclass(frozen=True)
class Ensemble:
    """The mean of the predictions of several runs.

    Attributes:
        members: the runs, those that count most first.
        rows: the rows on which it was scored at the end: "test" where there are some, otherwise "validation".
        score: its mean on these rows.
        gain: its mean minus that of the recommendation on the same rows, under the seed of its runs.
        bytes: that all members send in a run, both ways.
    """

    members: Sequence[EnsembleMember]
    rows: Split
    score: float
    gain: Difference
    bytes: float

    def plain(self) -> dict[str, Any]:
        """As values, of which JSON has all but `gain`."""
        members = [member.plain() for member in self.members]
        return {"members": members, "rows": self.rows, "score": self.score, "gain": self.gain, "bytes": self.bytes}

    def save(self, folder: Path, settings_of: Callable[[Recipe], Mapping[str, Any] | None]) -> None:
        """Copy the members' runs into a folder, each as often as it counts: `piebald predict` takes their mean.

        Args:
            folder: replaced if it is there.
            settings_of: the experiment file of a recipe as plain values, from which a run is opened; None if there is
                none.
        """
        partial = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        for number, member in enumerate(self.members):
            for repeat in range(member.count):
                copy = partial / f"{number}-{folder_name(member.runner.label)}-{repeat}"
                shutil.copytree(member.folder, copy)
                if (settings := settings_of(member.runner.recipe)) is not None:
                    with RunStore.open(copy) as store:
                        store.set_meta(settings=dict(settings))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def ensemble(
    finished: Sequence[Runner],
    chosen: Runner,
    tested: Sequence[Checked],
    runs: TrialRuns,
    refit: Callable[[EnsembleMember], EnsembleMember | None] = lambda member: None,
) -> Ensemble | None:
    """Select an ensemble on validation rows, train its members on these as well, and score it on test rows.

    Args:
        finished: all settings that were trained to the end.
        chosen: the recommendation.
        tested: scores on test rows, of the recommendation among others; without these nothing is trained again.
        runs: the settings by which they were trained.
        refit: trains a member on all rows, see `Refit`.

    Returns:
        None where no mean of two or more runs is better than one, there are too many clients, or outputs are no
        predictions, as those of language models.
    """
    seed = chosen.last.seeds[0]
    runners = [runner for runner in finished if seed in runner.folders]
    if not runners or len(runs.names) > _MOST_CLIENTS:
        return None
    candidates = [EnsembleMember(x, x.folders[seed], 1, x.run.bytes if x.run else 0) for x in runners]
    try:
        with ExitStack() as stack:
            judged = [_Judged(stack.enter_context(_opened(member, runs)), seed, runs) for member in candidates]
            counts = _selected(judged, 1 if runs.higher_is_better else -1)
    except SettingError:
        return None
    members = [replace(candidates[number], count=count) for number, count in counts.most_common()]
    base = next((checked.scores for checked in tested if checked.label == chosen.label), None)
    split: Split = "validation" if base is None else "test"
    members = members if base is None else _with_all_rows(members, refit)
    if len(members) < 2:
        return None
    with ExitStack() as stack:
        last = [_Judged(stack.enter_context(_opened(x, runs, split)), seed, runs, split) for x in members]
        scores = _scores(last, [member.count for member in members])
    gain = compared(scores, (chosen.last if base is None else base).of_seeds([seed])) if scores.present else None
    if gain is None:
        return None
    return Ensemble(members, split, scores.mean, gain, float(sum(member.bytes for member in members)))


def _with_all_rows(
    members: Sequence[EnsembleMember], refit: Callable[[EnsembleMember], EnsembleMember | None]
) -> list[EnsembleMember]:
    """The members beside those that were trained again; one that was not counts twice, so that shares stay."""
    again = [refit(member) for member in members]
    if not any(again):
        return [*members]
    pairs = zip(members, again, strict=True)
    return [x for old, new in pairs for x in ([old, new] if new else [replace(old, count=2 * old.count)])]


class Refit:
    """Trains members of an ensemble once more, on validation rows as well, as far as a budget goes.

    Args:
        runs: the settings by which members were trained.
        folder: of the search.
        budget, spent: what all runs of the search may cost together, and have cost.
        say: takes a line for each event.

    Attributes:
        spent: by all other runs so far.
        cost: of what was trained.
    """

    def __init__(self, runs: TrialRuns, folder: Path, budget: Budget, spent: Cost, say: Callable[[str], None]) -> None:
        self._folder, self._budget, self.spent, self._say = folder / "all-rows", budget, spent, say
        self.cost = Cost()
        try:
            self._runs: TrialRuns | None = runs.on_all_rows()
        except SettingError:  # rows are loaded when they are needed: nothing joins their splits
            self._runs = None

    def __call__(self, member: EnsembleMember) -> EnsembleMember | None:
        """Return the member trained on all rows; None where it cannot be, or the budget was used up."""
        runner, runs = member.runner, self._runs
        folder = self._folder / folder_name(runner.name)
        # what an interrupted search has begun is finished: its cost was already spent
        if runs is None or not (folder.exists() or self._budget.has_room(self.spent + self.cost, runs.rungs[-1])):
            return None
        try:
            run = runs.train(runner.recipe, folder, runner.label, runner.last.seeds[0], runs.rungs[-1])
        except (
            PiebaldError
        ) as error:  # a recipe that weights clients by validation rows, or steps that grow without end
            self._say(f"{runner.name} on all rows: {error}")
            return None
        self._say(f"{runner.name} on all rows, those of validation among them: trained")
        cost = cost_of([run])
        self.cost += cost
        run.close()
        return replace(member, folder=folder, bytes=cost.bytes, on_all_rows=True)


class _Judged:
    """A run's outputs for each client's rows of a split."""

    def __init__(self, run: Run, seed: int, runs: TrialRuns, split: Split = "validation") -> None:
        self.run, self.seed, self.runs, self.split = run, seed, runs, split
        self.kind: AnswerKind = run.predictor(0).meaning.kind
        self.outputs: list[tuple[Tensor, Any]] = [run.outputs(client, split) for client in range(len(runs.names))]


def _opened(member: EnsembleMember, runs: TrialRuns, split: Split = "validation") -> Run:
    clients, runner = (runs.choosing if split == "validation" else runs.choosing.opened()), member.runner
    return opened(member.folder, clients, runs.model_of(runner.label), recipe=runner.recipe, **runs.objective)


def _selected(judged: Sequence[_Judged], sign: int) -> Counter[int]:
    """How often each run counts in the best beginning of a greedy selection."""
    # the best run by itself first: of equal means it is the one that is added
    order = sorted(range(len(judged)), key=lambda number: -sign * _scores([judged[number]], [1]).mean)
    chosen, best = list[int](), (-np.inf, 0)
    for step in range(1, STEPS + 1):
        means = {number: _mean_with(judged, [*chosen, number], sign) for number in order}
        chosen.append(max(order, key=lambda number: means[number]))
        best = max(best, (means[chosen[-1]], -step))  # of equal means the shorter beginning
    return Counter(chosen[: -best[1]])


def _mean_with(judged: Sequence[_Judged], numbers: Sequence[int], sign: int) -> float:
    """The mean of the metric of an ensemble, larger is better; the least of all where no client has one."""
    counts = Counter(numbers)
    mean = sign * _scores([judged[number] for number in counts], list(counts.values()), single=False).mean
    return mean if np.isfinite(mean) else -np.inf


def _scores(members: Sequence[_Judged], counts: Sequence[int], single: bool = True) -> Scores:
    """The scores of the mean prediction at each client, with those of single rows where they are wanted."""
    first = members[0]

    def judged(client: int) -> Judged | None:
        repeated = [x.outputs[client][0] for x, count in zip(members, counts, strict=True) for _ in range(count)]
        if not len(repeated[0]):
            return None
        outputs = mean_outputs(repeated, first.kind).float()
        return first.run.work.of(client).objective, outputs, first.outputs[client][1]

    return first.runs.scored(map(judged, range(len(first.runs.names))), first.seed, first.split, single)
