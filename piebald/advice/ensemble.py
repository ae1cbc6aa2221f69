"""An ensemble of what the race has trained to the end: the mean of the predictions of several of its runs.

Models that were trained in different ways err on different rows, so that their mean is often better than the best.
Members are selected greedily on validation rows, with replacement: the run whose addition makes the mean best by the
metric, ten times, of which the best beginning is kept.  A run that is added twice counts twice.  Test rows are looked
at once, when the members are chosen.

Source: Caruana, Niculescu-Mizil, Crew and Ksikes, *Ensemble selection from libraries of models*, International
Conference on Machine Learning 2004.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from piebald.advice.evidence import Checked
from piebald.advice.race import Runner
from piebald.advice.tuning.trial_runs import Judged, TrialRuns
from piebald.contracts import Split
from piebald.core.errors import SettingError
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
        name: its method and its settings.
        recipe: with these settings.
        folder: of the run.
        count: how often it counts in the mean.
    """

    name: str
    recipe: Recipe
    folder: Path
    count: int


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
        members = [{"name": member.name, "count": member.count} for member in self.members]
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
                copy = partial / f"{number}-{folder_name(member.recipe.name)}-{repeat}"
                shutil.copytree(member.folder, copy)
                if (settings := settings_of(member.recipe)) is not None:
                    with RunStore.open(copy) as store:
                        store.set_meta(settings=dict(settings))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def ensemble(finished: Sequence[Runner], chosen: Runner, tested: Sequence[Checked], runs: TrialRuns) -> Ensemble | None:
    """Select an ensemble on validation rows, and score it on test rows, if there are some.

    Args:
        finished: all settings that were trained to the end.
        chosen: the recommendation.
        tested: scores on test rows, of the recommendation among others.
        runs: the settings by which they were trained.

    Returns:
        None where no mean of two or more runs is better than one, there are too many clients, or outputs are no
        predictions, as those of language models.
    """
    seed = chosen.last.seeds[0]
    runners = [runner for runner in finished if seed in runner.folders]
    if len(runners) < 2 or len(runs.names) > _MOST_CLIENTS:
        return None
    sign = 1 if runs.higher_is_better else -1
    try:
        with ExitStack() as stack:
            judged = [_Judged(stack.enter_context(_opened(runner, seed, runs)), seed, runs) for runner in runners]
            counts = _selected(judged, sign)
    except SettingError:
        return None
    if len(counts) < 2:
        return None
    members = [
        EnsembleMember(runners[n].name, runners[n].recipe, runners[n].folders[seed], k) for n, k in counts.most_common()
    ]
    base = next((checked.scores for checked in tested if checked.label == chosen.label), None)
    split: Split = "validation" if base is None else "test"
    with ExitStack() as stack:
        last = [_Judged(stack.enter_context(_opened(runners[n], seed, runs, split)), seed, runs, split) for n in counts]
        scores = _scores(last, [counts[n] for n in counts])
    gain = compared(scores, (chosen.last if base is None else base).of_seeds([seed])) if scores.present else None
    if gain is None:
        return None
    sent = float(sum(run.bytes for n in counts if (run := runners[n].run)))
    return Ensemble(members, split, scores.mean, gain, sent)


class _Judged:
    """A run's outputs for each client's rows of a split."""

    def __init__(self, run: Run, seed: int, runs: TrialRuns, split: Split = "validation") -> None:
        self.run, self.seed, self.runs, self.split = run, seed, runs, split
        self.kind: AnswerKind = run.predictor(0).meaning.kind
        self.outputs: list[tuple[Tensor, Any]] = [run.outputs(client, split) for client in range(len(runs.names))]


def _opened(runner: Runner, seed: int, runs: TrialRuns, split: Split = "validation") -> Run:
    clients = runs.choosing if split == "validation" else runs.choosing.opened()
    return opened(runner.folders[seed], clients, runs.model_of(runner.label), recipe=runner.recipe, **runs.objective)


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
