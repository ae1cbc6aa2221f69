"""An ensemble of methods: the mean of the predictions of the three best, for whoever may send three times as much.

Models that were trained in different ways err on different rows, so that their mean is often better than the best.

Source: Hansen and Salamon, *Neural network ensembles*, IEEE Transactions on Pattern Analysis and Machine Intelligence
1990.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piebald.advice.race import Runner
from piebald.advice.tuning.trial_runs import TrialRuns
from piebald.core.errors import SettingError
from piebald.engines.scoring import value_of, values_of_rows
from piebald.methods.recipe import Recipe
from piebald.models.prediction import AnswerKind, mean_outputs
from piebald.report.paired import Difference, common_seeds
from piebald.report.verdict import compared
from piebald.runs.finished_run import Run
from piebald.runs.run import opened

Floats = NDArray[np.float64]
MEMBERS = 3
_MOST_CLIENTS = 200  # of more, making each one's own models would take minutes


@dataclass(frozen=True)
class Ensemble:
    """The mean of the predictions of several methods.

    Attributes:
        recipes: of its members by label, the best first.
        score: its mean on validation rows.
        gain: its mean minus that of the recommendation, on the seeds that all have.
        bytes: that all members send in a run, both ways.
    """

    recipes: Mapping[str, Recipe]
    score: float
    gain: Difference
    bytes: float

    def plain(self) -> dict[str, Any]:
        """As values, of which JSON has all but `gain`."""
        return {"members": list(self.recipes), "score": self.score, "gain": self.gain, "bytes": self.bytes}


def ensemble(finished: Sequence[Runner], chosen: Runner, runs: TrialRuns) -> Ensemble | None:
    """Score the mean of the predictions of the three best methods on validation rows.

    Args:
        finished: the methods that were trained to the end.
        chosen: the recommendation.
        runs: the settings by which they were trained.

    Returns:
        None where there are fewer methods, they share no seed and client with the recommendation, or their outputs are
        no predictions, as those of language models.
    """
    sign = -1 if runs.higher_is_better else 1
    members = sorted(finished, key=lambda runner: sign * runner.mean)[:MEMBERS]
    seeds = common_seeds([runner.last for runner in (*members, chosen)])
    if len(members) < MEMBERS or not seeds or len(runs.names) > _MOST_CLIENTS:
        return None
    try:
        cells = [_of_seed(members, seed, runs) for seed in seeds]
    except SettingError:
        return None
    values = np.array([[value if np.isfinite(value) else np.nan for value, _ in of_seed] for of_seed in cells])
    rows = {
        (seed, name): of_rows
        for seed, of_seed in zip(seeds, cells, strict=True)
        for name, (_, of_rows) in zip(runs.names, of_seed, strict=True)
        # single rows count all or not at all: their mean must be the client's value
        if np.isfinite(of_rows).all()
    }
    scores = runs.table(values, seeds, rows=rows)
    # only the seeds of all members, so that both means are of the same rows and starts
    gain = compared(scores, chosen.last.of_seeds(seeds)) if scores.present else None
    if gain is None:
        return None
    sent = sum(runner.run.bytes for runner in members if runner.run)
    return Ensemble({runner.label: runner.recipe for runner in members}, scores.mean, gain, sent)


def _of_seed(members: Sequence[Runner], seed: int, runs: TrialRuns) -> list[tuple[float, Floats]]:
    """The metric of the mean prediction on each client's validation rows, and its values of rows."""
    with ExitStack() as stack:
        trained = [
            stack.enter_context(
                opened(x.folders[seed], runs.choosing, runs.model_of(x.label), recipe=x.recipe, **runs.objective)
            )
            for x in members
        ]
        kind = trained[0].predictor(0).meaning.kind
        return [_of_client(trained, client, kind) for client in range(len(runs.names))]


def _of_client(trained: Sequence[Run], client: int, kind: AnswerKind) -> tuple[float, Floats]:
    objective = trained[0].work.of(client).objective
    metric = objective.metrics.get(objective.metric, objective.loss)
    outputs, targets = zip(*(run.outputs(client, "validation") for run in trained), strict=True)
    if not len(outputs[0]):
        return np.nan, np.full(1, np.nan)
    mean = mean_outputs(outputs, kind).float()
    return float(value_of(metric, mean, targets[0])), values_of_rows(metric, mean, targets[0]).double().numpy()
