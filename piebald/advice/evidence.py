"""What the answer rests on: whether federating pays these clients, and who of them loses by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from piebald.advice.check import Checked
from piebald.advice.race import Runner
from piebald.advice.tuning.trial_runs import TrialRuns
from piebald.contracts import Split
from piebald.report.crossed_effects import ERROR_RATE
from piebald.report.paired import Scores, difference
from piebald.report.row_noise import COUNTED, row_difference, row_errors

Pays = Literal["yes", "no", "cannot be told"]


@dataclass(frozen=True)
class Loser:
    """A client that loses by joining.

    Attributes:
        client: its name.
        loss: of the recommendation against the client's own model, on validation rows, in units of the metric.
        error: the standard error of that.
        instead: the label of the method that is best for it.
        score: of that method, on its validation rows.
    """

    client: str
    loss: float
    error: float
    instead: str
    score: float


@dataclass(frozen=True)
class Evidence:
    """Whether federating pays, and by what that was decided.

    Attributes:
        pays: "yes", "no" or "cannot be told".
        rows: "test" where the recommendation was compared with Local on test rows, otherwise "validation".
        gain: of training together against Local, in units of the metric; None where they could not be compared.
        error: its standard error; for other rows of these clients ("rows") or for other clients ("clients").
        noise: which of the two.
        p: the two-sided p value of "no difference".
    """

    pays: Pays
    rows: Split
    gain: float | None = None
    error: float | None = None
    noise: Literal["rows", "clients"] = "clients"
    p: float = 1.0


def whether_it_pays(
    finished: Sequence[Runner],
    alone: Runner | None,
    chosen: Runner,
    tested: Sequence[Checked],
    runs: TrialRuns,
) -> Evidence:
    """Whether training together beats every client alone beyond noise (p < 0.05), or loses to it.

    Where the recommendation shares something, its test rows decide: nothing was chosen by them, so one comparison is
    made, and it is fair.  Otherwise validation rows do, by which the best method was chosen, too; that would flatter
    it, so each client's gain is that of the method that is best on all *other* clients (leave-one-out).

    The question is that of the clients at hand: accuracies are compared under the noise of their rows and seeds
    (`report.row_noise`), other metrics under what differs between clients (`report.paired`).

    Args:
        finished: what the race has trained to the end.
        alone: Local among them, None if it failed.
        chosen: the recommendation.
        tested: scores on test rows, of the recommendation and Local among others.
        runs: how they were scored.
    """
    opened = {one.label: one.scores for one in tested}
    others = [one for one in finished if one is not alone]
    if alone is None or not others:
        return Evidence("cannot be told", "validation")
    if chosen is not alone and {chosen.label, alone.label} <= opened.keys():
        return _compared(opened[chosen.label], opened[alone.label], "test", runs)
    return _compared(_left_out(others, runs.higher_is_better), alone.last, "validation", runs)


def _compared(ours: Scores, alone: Scores, rows: Split, runs: TrialRuns) -> Evidence:
    sign = 1 if runs.higher_is_better else -1
    counts = rows_of(runs, rows)
    if runs.metric == COUNTED and counts:
        if (of_rows := row_difference(ours, alone, counts)) is None:
            return Evidence("cannot be told", rows)
        return _said(rows, of_rows.mean, of_rows.error, "rows", of_rows.p)
    if (found := difference(ours, alone)) is None:
        return Evidence("cannot be told", rows)
    return _said(rows, sign * found.mean, found.error, "clients", found.p)


def _said(rows: Split, gain: float, error: float | None, noise: Literal["rows", "clients"], p: float) -> Evidence:
    pays: Pays = "cannot be told" if p >= ERROR_RATE else "yes" if gain > 0 else "no"
    return Evidence(pays, rows, gain, error, noise, p)


def rows_of(runs: TrialRuns, split: Split) -> Mapping[str, int]:
    """How many rows each client has, by name; empty where that is not known."""
    clients = runs.clients if split == "test" else runs.choosing
    sizes = {name: clients.size(number, split) for number, name in enumerate(runs.names)}
    return {} if None in sizes.values() else {name: size or 0 for name, size in sizes.items()}


def _left_out(runners: Sequence[Runner], higher: bool) -> Scores:
    """For each client the scores of the method with the best mean over all other clients, on seeds that all have."""
    seeds = [seed for seed in runners[0].last.seeds if all(seed in one.last.seeds for one in runners)]
    values = np.stack([one.last.values[[list(one.last.seeds).index(seed) for seed in seeds]] for one in runners])
    clients = values.shape[2]
    sums = np.nansum(values, axis=(1, 2))[:, None] - np.nansum(values, axis=1)
    counts = np.isfinite(values).sum((1, 2))[:, None] - np.isfinite(values).sum(1)
    means = sums / np.maximum(counts, 1) * (1 if higher else -1)
    chosen = means.argmax(0)
    return Scores(values[chosen, :, np.arange(clients)].T, runners[0].last.clients, seeds)


def losers(chosen: Runner, alone: Runner | None, finished: Sequence[Runner], runs: TrialRuns) -> list[Loser]:
    """The clients whose own model is better, by more than two standard errors of a difference on their rows."""
    if alone is None or chosen is alone or runs.metric != COUNTED:
        return []
    mine, own = (one.last.client_means() for one in (chosen, alone))
    found = []
    for client, name in enumerate(runs.names):
        rows = runs.choosing.size(client, "validation")
        if not rows or np.isnan(mine[client]) or np.isnan(own[client]):
            continue
        error = float(row_errors(mine[[client]], own[[client]], np.array([float(rows)]))[0])
        loss = float(own[client] - mine[client])
        if loss > 2 * error:
            scores = {one.label: float(one.last.client_means()[client]) for one in finished}
            best = max(scores, key=lambda label: np.nan_to_num(scores[label], nan=-1.0))
            found.append(Loser(name, loss, error, best, scores[best]))
    return sorted(found, key=lambda one: -one.loss)


def worse_off(chosen: Runner, alone: Runner | None, runs: TrialRuns) -> dict[str, float] | None:
    """Of a metric whose noise on one client's rows is not known: who is worse off than alone under every seed."""
    if alone is None or chosen is alone or runs.metric == COUNTED:
        return None
    seeds = [seed for seed in chosen.last.seeds if seed in alone.last.seeds]
    mine, own = (
        np.stack([one.last.values[list(one.last.seeds).index(seed)] for seed in seeds]) for one in (chosen, alone)
    )
    lost = own - mine if runs.higher_is_better else mine - own
    worse = {name: float(column.mean()) for name, column in zip(runs.names, lost.T, strict=True) if (column > 0).all()}
    return dict(sorted(worse.items(), key=lambda item: -item[1]))
