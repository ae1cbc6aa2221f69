"""Evidence of the answer: whether federating pays these clients, and the clients that lose by it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from piebald.advice.race import Runner
from piebald.advice.tuning.study import folder_name
from piebald.advice.tuning.trial_runs import TrialRuns
from piebald.contracts import Split
from piebald.report.crossed_effects import ERROR_RATE
from piebald.report.paired import Scores, difference
from piebald.report.row_noise import COUNTED, row_difference, row_errors
from piebald.report.tables import History
from piebald.runs.run import resume
from piebald.storage.store import RunStore

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
    """The verdict on whether federating pays, and the comparison that decided it.

    Attributes:
        pays: "yes", "no" or "cannot be told".
        rows: "test" where the recommendation was compared with Local on test rows, otherwise "validation".
        gain: of training together against Local, in units of the metric; None where they could not be compared.
        error: its standard error; for other rows of these clients ("rows") or for other clients ("clients").
        noise: which of the two the error is for.
        p: the two-sided p value of "no difference".
    """

    pays: Pays
    rows: Split
    gain: float | None = None
    error: float | None = None
    noise: Literal["rows", "clients"] = "clients"
    p: float = 1.0


def whether_it_pays(
    finished: Sequence[Runner], alone: Runner | None, chosen: Runner, tested: Sequence[Checked], runs: TrialRuns
) -> Evidence:
    """Return whether training together beats every client alone beyond noise (p < 0.05), or loses to it.

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
        runs: the settings by which they were scored.
    """
    opened = {checked.label: checked.scores for checked in tested}
    rivals = [runner for runner in finished if runner is not alone]
    if alone is None or not rivals:
        return Evidence("cannot be told", "validation")
    # test rows had no part in the choice, so one comparison on them is not flattered
    if chosen is not alone and {chosen.label, alone.label} <= opened.keys():
        return _compared(opened[chosen.label], opened[alone.label], "test", runs)
    return _compared(_left_out(rivals, runs.higher_is_better), alone.last, "validation", runs)


def _compared(ours: Scores, alone: Scores, rows: Split, runs: TrialRuns) -> Evidence:
    sign = 1 if runs.higher_is_better else -1
    counts = rows_of(runs, rows)
    if runs.metric == COUNTED and counts:
        if (of_rows := row_difference(ours, alone, counts)) is None:
            return Evidence("cannot be told", rows)
        return _verdict(rows, of_rows.mean, of_rows.error, "rows", of_rows.p)
    if (of_clients := difference(ours, alone)) is None:
        return Evidence("cannot be told", rows)
    return _verdict(rows, sign * of_clients.mean, of_clients.error, "clients", of_clients.p)


def _verdict(rows: Split, gain: float, error: float | None, noise: Literal["rows", "clients"], p: float) -> Evidence:
    pays: Pays = "cannot be told" if p >= ERROR_RATE else "yes" if gain > 0 else "no"
    return Evidence(pays, rows, gain, error, noise, p)


def rows_of(runs: TrialRuns, split: Split) -> Mapping[str, int]:
    """Return the number of rows of each client, by name; empty where that is not known."""
    clients = runs.clients if split == "test" else runs.choosing
    sizes = {name: clients.size(number, split) for number, name in enumerate(runs.names)}
    return {} if None in sizes.values() else {name: size or 0 for name, size in sizes.items()}


def _left_out(runners: Sequence[Runner], higher: bool) -> Scores:
    """For each client the scores of the method with the best mean over all other clients, on seeds that all have."""
    seeds = [seed for seed in runners[0].last.seeds if all(seed in runner.last.seeds for runner in runners)]
    values = np.stack(
        [runner.last.values[[list(runner.last.seeds).index(seed) for seed in seeds]] for runner in runners]
    )
    clients = values.shape[2]
    # leave one out: the sum over all clients less each client's own
    sums = np.nansum(values, axis=(1, 2))[:, None] - np.nansum(values, axis=1)
    counts = np.isfinite(values).sum((1, 2))[:, None] - np.isfinite(values).sum(1)
    means = sums / np.maximum(counts, 1) * (1 if higher else -1)
    chosen = means.argmax(0)
    return Scores(values[chosen, :, np.arange(clients)].T, runners[0].last.clients, seeds)


def losers(chosen: Runner, alone: Runner | None, finished: Sequence[Runner], runs: TrialRuns) -> list[Loser]:
    """The clients whose own model is better, by more than two standard errors of a difference on their rows."""
    if alone is None or chosen is alone or runs.metric != COUNTED:
        return []
    together, by_itself = (runner.last.client_means() for runner in (chosen, alone))
    losing = []
    for client, name in enumerate(runs.names):
        rows = runs.choosing.size(client, "validation")
        if not rows or np.isnan(together[client]) or np.isnan(by_itself[client]):
            continue
        error = float(row_errors(together[[client]], by_itself[[client]], np.array([float(rows)]))[0])
        loss = float(by_itself[client] - together[client])
        # by chance alone about one client in forty lies beyond two standard errors on this side
        if loss > 2 * error:
            scores = {runner.label: float(runner.last.client_means()[client]) for runner in finished}
            best = max(scores, key=lambda label: np.nan_to_num(scores[label], nan=-1.0))
            losing.append(Loser(name, loss, error, best, scores[best]))
    return sorted(losing, key=lambda loser: -loser.loss)


def worse_off(chosen: Runner, alone: Runner | None, runs: TrialRuns) -> dict[str, float] | None:
    """Return the clients that are worse off than alone under every seed; None for accuracies, see `losers`."""
    if alone is None or chosen is alone or runs.metric == COUNTED:
        return None
    seeds = [seed for seed in chosen.last.seeds if seed in alone.last.seeds]
    together, by_itself = (
        np.stack([runner.last.values[list(runner.last.seeds).index(seed)] for seed in seeds])
        for runner in (chosen, alone)
    )
    lost = by_itself - together if runs.higher_is_better else together - by_itself
    worse = {name: float(column.mean()) for name, column in zip(runs.names, lost.T, strict=True) if (column > 0).all()}
    return dict(sorted(worse.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, eq=False)
class Checked:
    """A method's scores on test rows.

    Attributes:
        label: of the method.
        scores: of each seed and client.
        folders: of its runs, by seed, as tables and `Run.model` read them.
    """

    label: str
    scores: Scores
    folders: Mapping[int, Path]


def check(runners: Sequence[Runner], runs: TrialRuns, folder: Path) -> list[Checked]:
    """Score finished methods on test rows; nothing is trained, and the runs of the race stay as they are.

    Each run is copied and evaluated once more at its last version, now on the rows that the race has not seen.

    Args:
        runners: the recommendation, Local and FedAvg.
        runs: the settings by which they were trained.
        folder: for the copies.
    """
    if not any(runs.clients.size(client, "test") != 0 for client in range(len(runs.clients))):
        return []
    checked = []
    for runner in runners:
        folders = {seed: folder / folder_name(runner.label) / f"seed-{seed}" for seed in runner.folders}
        rows = [_tested(runner, seed, folders[seed], runs) for seed in folders]
        checked.append(Checked(runner.label, Scores(np.array(rows), runs.names, list(folders)), folders))
    return checked


def _tested(runner: Runner, seed: int, copy: Path, runs: TrialRuns) -> list[float]:
    """The metric of each client on its test rows, NaN where it has none."""
    if not copy.exists():
        # renamed when it is complete, so that an interrupted copy is not taken for a run
        partial = copy.with_name(f"{copy.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(runner.folders[seed], partial)
        with RunStore.open(partial) as store:
            interval, count, _ = store.meta["evaluate"]
            store.set_meta(evaluate=[interval, count, "test"], status="running")
        partial.rename(copy)
    judged: dict[str, Any] = {name: runs.options[name] for name in ("loss", "metrics") if name in runs.options}
    # nothing is left to train, so resuming only evaluates, now on test rows
    resume(copy, runs.choosing.opened(), runs.model_of(runner.label), recipe=runner.recipe, **judged).close()
    with History(copy) as history:
        return [history.per_client.get(client, float("nan")) for client in range(len(runs.clients))]
