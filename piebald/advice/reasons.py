"""Reasons for a recommendation: sentences, each of which states a difference that is beyond noise (p < 0.05)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from piebald.advice.differences import in_points, nearness
from piebald.advice.more_data import outlook
from piebald.advice.race import Runner
from piebald.advice.tuning.trial_runs import TrialRuns
from piebald.report.crossed_effects import ERROR_RATE
from piebald.report.page.wording import plural
from piebald.report.paired import common_seeds, difference

Floats = NDArray[np.float64]
_FEWEST = 4  # clients of a half
_LEVEL = 0.05 / 4  # of each reason: two properties and two rivals are looked at


def reasons(chosen: Runner, alone: Runner | None, together: Runner | None, runs: TrialRuns) -> list[str]:
    """Return sentences on the clients that gain, and on the effect of more rounds."""
    sentences = []
    for rival, name in ((together, "FedAvg"), (alone, "training alone")):
        if rival is None or rival is chosen:
            continue
        gain = _gain(chosen, rival, runs.higher_is_better)
        sentences += _by_property(gain, _classes(runs), name, "classes", runs)
        sentences += _by_property(gain, _rows(runs), name, "training rows", runs)
    sentences += _of_rounds(chosen, runs)
    return sentences


def _gain(chosen: Runner, rival: Runner, higher: bool) -> Floats:
    """Return the gain of each client [c], the mean over common seeds."""
    seeds = common_seeds([chosen.last, rival.last])
    ours, theirs = (runner.last.of_seeds(seeds) for runner in (chosen, rival))
    # both tables have the same clients and seeds by now, so they are subtracted cell by cell
    gains = replace(ours, values=ours.values - theirs.values).client_means()
    return np.asarray(gains if higher else -gains, dtype=np.float64)


def _rows(runs: TrialRuns) -> Floats | None:
    sizes = [runs.choosing.size(client, "train") for client in range(len(runs.names))]
    return None if any(size is None for size in sizes) else np.array(sizes, dtype=np.float64)


def _classes(runs: TrialRuns) -> Floats | None:
    counts = [runs.choosing.counts(client, "train") for client in range(len(runs.names))]
    if any(row is None for row in counts):
        return None
    return np.array([sum(count > 0 for count in row or ()) for row in counts], dtype=np.float64)


def _by_property(gain: Floats, values: Floats | None, rival: str, prop: str, runs: TrialRuns) -> list[str]:
    """The gains of clients below and above the median of a property, where they differ by Welch's test."""
    from scipy.stats import ttest_ind

    if values is None:
        return []
    scored = ~np.isnan(gain)
    # of the clients that have a gain, so that both halves are of about the same size
    middle = float(np.median(values[scored])) if scored.any() else 0.0
    few, many = gain[scored & (values < middle)], gain[scored & (values >= middle)]
    # Welch's test of equal gains would divide by a variance of 0
    if min(len(few), len(many)) < _FEWEST or np.ptp(gain[scored]) < 1e-9:
        return []
    if not ttest_ind(few, many, equal_var=False).pvalue < _LEVEL:
        return []
    below, above = (in_points(runs.metric, float(half.mean())) for half in (few, many))
    return [f"Against {rival}, clients with fewer than {middle:,.0f} {prop} gain {below}, the others {above}."]


def _of_rounds(chosen: Runner, runs: TrialRuns) -> list[str]:
    """Return what the second half of the rounds has changed, where that is beyond noise."""
    rungs = sorted(chosen.scores)
    if len(rungs) < 2 or rungs[-1] != runs.rungs[-1]:
        return []
    step = difference(chosen.scores[rungs[-1]], chosen.scores[rungs[-2]])
    if step is None or step.p >= ERROR_RATE:
        return []
    gain = in_points(runs.metric, step.mean if runs.higher_is_better else -step.mean)
    verdict = outlook("more rounds", step, runs.higher_is_better, nearness(runs.metric, chosen.mean))
    return [f"From {rungs[-2]} to {plural(rungs[-1], 'round')} it gained {gain}: {verdict}."]
