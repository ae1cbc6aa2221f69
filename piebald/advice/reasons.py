"""Why a method is recommended: sentences of which each states a measurement of this search."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from piebald.advice.more_data import outlook
from piebald.advice.nearness import SHARES, nearness
from piebald.advice.race import Runner
from piebald.advice.tuning.trial_runs import TrialRuns
from piebald.report.page.wording import plural
from piebald.report.paired import Scores, difference

Floats = NDArray[np.float64]
_HALVES = 4  # clients from which halves of them are compared


def reasons(chosen: Runner, alone: Runner | None, together: Runner | None, runs: TrialRuns) -> list[str]:
    """Sentences about where the recommendation gains, what its settings matter, and what more rounds would change."""
    found = []
    for other, name in ((together, "FedAvg"), (alone, "training alone")):
        if other is None or other is chosen:
            continue
        gain = _gain(chosen, other, runs.higher_is_better)
        found += _by_property(gain, _classes(runs), name, "classes", runs)
        found += _by_property(gain, _rows(runs), name, "training rows", runs)
    found += _of_rate(chosen, runs)
    found += _of_rounds(chosen, runs)
    return found


def _gain(chosen: Runner, other: Runner, higher: bool) -> Floats:
    """What each client gains, the mean over common seeds."""
    seeds = [seed for seed in chosen.last.seeds if seed in other.last.seeds]
    rows = [
        chosen.last.values[list(chosen.last.seeds).index(seed)] - other.last.values[list(other.last.seeds).index(seed)]
        for seed in seeds
    ]
    found = Scores(np.array(rows), chosen.last.clients, seeds).client_means()
    return np.asarray(found if higher else -found, dtype=np.float64)


def _rows(runs: TrialRuns) -> Floats | None:
    sizes = [runs.choosing.size(client, "train") for client in range(len(runs.names))]
    return None if any(size is None for size in sizes) else np.array(sizes, dtype=np.float64)


def _classes(runs: TrialRuns) -> Floats | None:
    counts = [runs.choosing.counts(client, "train") for client in range(len(runs.names))]
    if any(one is None for one in counts):
        return None
    return np.array([sum(count > 0 for count in one or ()) for one in counts], dtype=np.float64)


def _by_property(gain: Floats, values: Floats | None, other: str, what: str, runs: TrialRuns) -> list[str]:
    """The gains of clients below and above the median of a property, where they differ by two standard errors."""
    if values is None or len(values) < _HALVES:
        return []
    known = ~np.isnan(gain)
    middle = float(np.median(values[known])) if known.any() else 0.0
    few, many = gain[known & (values < middle)], gain[known & (values >= middle)]
    if len(few) < 2 or len(many) < 2:
        return []
    error = float(np.sqrt(few.var(ddof=1) / len(few) + many.var(ddof=1) / len(many)))
    if abs(few.mean() - many.mean()) <= 2 * error:
        return []
    return [
        f"Against {other}, clients with fewer than {middle:,.0f} {what} gain {_points(few.mean(), runs)}, the others "
        f"{_points(many.mean(), runs)}."
    ]


def _of_rate(chosen: Runner, runs: TrialRuns) -> list[str]:
    """How much the learning rate matters, among the trials of the recommendation that were judged at the first rung."""
    first = runs.rungs[0]
    means = {
        float(one.settings["lr"]): float(np.nanmean(one.scores[first].values))
        for one in chosen.trials
        if first in one.scores and "lr" in one.settings
    }
    if len(means) < 2:
        return []
    sign = 1 if runs.higher_is_better else -1
    best, worst = (pick(means, key=lambda rate: sign * means[rate]) for pick in (max, min))
    return [
        f"Its learning rate matters by {_points(abs(means[best] - means[worst]), runs, False)} after "
        f"{plural(first, 'round')}: {means[best]:.3g} with {best:.3g}, {means[worst]:.3g} with {worst:.3g}."
    ]


def _of_rounds(chosen: Runner, runs: TrialRuns) -> list[str]:
    """The learning curve over rungs, and what the second half of the rounds has changed."""
    rungs = sorted(chosen.scores)
    if len(rungs) < 2 or rungs[-1] != runs.rungs[-1]:
        return []
    last, before = chosen.scores[rungs[-1]], chosen.scores[rungs[-2]]
    found = difference(last, before)
    if found is None:
        return []
    gain = found.mean if runs.higher_is_better else -found.mean
    more = outlook("more rounds", found, runs.higher_is_better, nearness(runs.metric, chosen.mean))
    error = "" if found.error is None else f" (standard error {_points(found.error, runs, False)})"
    each = ", ".join(f"{float(np.nanmean(chosen.scores[rung].values[:1])):.3g} after {rung}" for rung in rungs)
    return [
        f"Over rounds it reached {each}; from {rungs[-2]} to {rungs[-1]} it gained {_points(gain, runs)}{error}: "
        f"{more}."
    ]


def _points(value: float, runs: TrialRuns, signed: bool = True) -> str:
    scale, unit = (100, " points") if runs.metric in SHARES else (1, "")
    return f"{scale * value:{'+' if signed else ''}.3g}{unit}"
