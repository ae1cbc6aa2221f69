"""Evidence of the answer: whether federating pays these clients, who loses by it, and the gain of each client.

Gains are on the test rows that are opened once, after the choice.  The largest of many gains is large by luck, too, so
each is shrunk towards the mean of all, the more the noisier it is and the less clients differ (empirical Bayes).  Its
interval counts that the mean and the spread of clients are estimated as well, so with fewer than four clients nothing
is shrunk.

Source: Morris, *Parametric empirical Bayes inference: theory and applications*, JASA 1983.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from piebald.advice.odd_sites import nearness
from piebald.advice.race import Runner
from piebald.advice.tuning.trial_runs import TrialRuns
from piebald.contracts import Clients, Split
from piebald.core.result_table import ResultTable
from piebald.report.crossed_effects import ERROR_RATE
from piebald.report.paired import Scores, difference
from piebald.report.row_noise import row_differences
from piebald.report.verdict import compared
from piebald.runs.compare import folder_name
from piebald.runs.plain_models import PlainModels
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
        low, high: its 95 % interval, None where it has none.
        error: its standard error; for other rows of these clients ("rows") or for other clients ("clients").
        noise: which of the two the error is for.
        p: the two-sided p value of "no difference".
        label: the method that was compared.
        against: what it was compared with: Local, or a plain model that each client fits alone.
    """

    pays: Pays
    rows: Split
    gain: float | None = None
    error: float | None = None
    noise: Literal["rows", "clients"] = "clients"
    p: float = 1.0
    low: float | None = None
    high: float | None = None
    label: str = ""
    against: str = ""


@dataclass(frozen=True)
class PlainAlone:
    """The plain model that is best where each client fits it alone, see `plain_models`.

    Attributes:
        name: of the model.
        validation: the scores of all plain models on validation rows, of one seed, as nothing in them is drawn.
        test: those of this one on test rows, None where there are none.
    """

    name: str
    validation: Mapping[str, Scores]
    test: Scores | None

    @property
    def best(self) -> Scores:
        """The scores of this one on validation rows."""
        return self.validation[self.name]


def under_seeds(scores: Scores, seeds: Sequence[int]) -> Scores:
    """The scores of a plain model, the same under every seed of others."""
    rows = {(seed, name): values for seed in seeds for (_, name), values in scores.rows.items()}
    return replace(scores, values=np.repeat(scores.values, len(seeds), axis=0), seeds=seeds, trained=None, rows=rows)


def whether_it_pays(
    finished: Sequence[Runner],
    alone: Runner | None,
    best: Runner,
    tested: Sequence[Checked],
    runs: TrialRuns,
    plain: PlainAlone | None = None,
) -> Evidence:
    """Return whether training together beats every client alone beyond noise (p < 0.05), or loses to it.

    Where the leader shares something, its test rows decide: nothing was chosen by them, so one comparison is made, and
    it is fair.  Otherwise validation rows do, by which the best method was chosen, too; that would flatter it, so each
    client has the method that is best on all *other* clients (leave-one-out), and so it has Local or a plain model, of
    which several were tried as well.  What was chosen within a method, its settings and the round at which Local stops,
    was chosen by the same rows, which flatters all methods, and Local a little more.  Where the leader is training
    alone, or a plain model is better than Local, it does not pay either if the 95 % interval of the gain ends below
    what counts as little (one point).

    The question is that of the clients at hand, see `report.verdict.compared`.

    Args:
        finished: what the race has trained to the end.
        alone: Local among them, None if it failed.
        best: the leader by validation rows.
        tested: scores on test rows, of the leader and Local among others.
        runs: the settings by which they were scored.
        plain: the plain model that is better than Local by validation rows, None where Local is the best of them.
    """
    opened = {checked.label: checked.scores for checked in tested}
    rivals = [runner for runner in finished if runner is not alone]
    if alone is None or not rivals:
        return Evidence("cannot be told", "validation")
    against = alone.label if plain is None else plain.name
    # test rows had no part in the choice, so one comparison on them is not flattered
    if best is not alone and best.label in opened:
        measure = opened.get(alone.label) if plain is None else plain.test
        if measure is not None:
            measure = measure if plain is None else under_seeds(measure, opened[best.label].seeds)
            return replace(_compared(opened[best.label], measure, "test", runs), label=best.label, against=against)
    # all are judged on the seeds of all, and one seed may have been luck
    rivals = [runner for runner in rivals if len(runner.last.seeds) > 1] or rivals
    ours = _left_out([runner.last for runner in rivals], runs.higher_is_better)
    plain_scores = () if plain is None else plain.validation.values()
    by_itself = [alone.last, *(under_seeds(scores, alone.last.seeds) for scores in plain_scores)]
    measure = _left_out(by_itself, runs.higher_is_better)
    evidence = replace(_compared(ours, measure, "validation", runs), label=best.label, against=against)
    is_little = evidence.high is not None and evidence.high < nearness(runs.metric, measure.mean)
    unclear = (best is alone or plain is not None) and evidence.pays == "cannot be told"
    return replace(evidence, pays="no") if unclear and is_little else evidence


def strongest_plain(alone: Runner | None, models: PlainModels | None, runs: TrialRuns) -> PlainAlone | None:
    """Return the best of the plain models by validation rows where it is better than Local, None where it is not."""
    if models is None or alone is None:
        return None
    sign = 1 if runs.higher_is_better else -1
    tables = {name: _plain_scores(models, name, runs.choosing, "validation", runs) for name in models.makers}
    tables = {name: table for name, table in tables.items() if table.present}
    name = max(tables, key=lambda name: sign * tables[name].mean, default=None)
    if name is None or sign * tables[name].mean <= sign * alone.last.mean:
        return None
    test = _plain_scores(models, name, runs.choosing.opened(), "test", runs)
    return PlainAlone(name, tables, test if test.present else None)


def _plain_scores(models: PlainModels, name: str, clients: Clients, split: Split, runs: TrialRuns) -> Scores:
    judged = (models.judged(name, client, clients.rows(client, split)) for client in range(len(clients)))
    return runs.scored(judged, 0, split)


def _compared(ours: Scores, alone: Scores, rows: Split, runs: TrialRuns) -> Evidence:
    # no Bonferroni: on test rows one comparison is made, and on validation rows leave-one-out keeps it fair
    gain = compared(ours, alone)
    if gain is None:
        return Evidence("cannot be told", rows)
    sign = 1 if runs.higher_is_better else -1
    pays: Pays = "cannot be told" if gain.p >= ERROR_RATE else "yes" if sign * gain.mean > 0 else "no"
    ends = sorted((sign * gain.low, sign * gain.high)) if gain.kind == "interval" else (None, None)
    return Evidence(pays, rows, sign * gain.mean, gain.error, gain.noise, gain.p, *ends)


def _left_out(methods: Sequence[Scores], higher: bool) -> Scores:
    """For each client the scores of the method with the best mean over all other clients, on seeds that all have."""
    seeds = [seed for seed in methods[0].seeds if all(seed in scores.seeds for scores in methods)]
    values = np.stack([scores.values[[list(scores.seeds).index(seed) for seed in seeds]] for scores in methods])
    tables = [scores.of_seeds(seeds) for scores in methods]
    votes = tables[0].votes
    present = np.isfinite(values) * votes
    # leave one out: the sum over all clients less each client's own, by their votes
    sums = np.nansum(values * votes, axis=(1, 2))[:, None] - np.nansum(values * votes, axis=1)
    # a method that only this client has scored has nothing left out to be chosen by, hence the floor
    means = sums / np.maximum(present.sum((1, 2))[:, None] - present.sum(1), 1e-12) * (1 if higher else -1)
    chosen = means.argmax(0)
    names = list(tables[0].clients)
    rows = {
        (seed, name): tables[method].rows[seed, name]
        for name, method in zip(names, chosen.tolist(), strict=True)
        for seed in seeds
        if (seed, name) in tables[method].rows
    }
    return replace(tables[0], values=values[chosen, :, np.arange(len(names))].T, rows=rows)


def losers(chosen: Runner, alone: Runner | None, finished: Sequence[Runner], higher: bool) -> list[Loser]:
    """The clients whose own model is better by more than two standard errors of the difference on their rows.

    Nobody is one where that noise is not known.
    """
    if alone is None or chosen is alone:
        return []
    losing, gaps = [], row_differences(chosen.last, alone.last)
    for index, name in enumerate(alone.last.clients):
        gap = gaps.get(name)
        # by chance alone about one client in forty lies beyond two standard errors on this side
        if gap is not None and gap.error is not None and (lost := -gap.mean if higher else gap.mean) > 2 * gap.error:
            scores = {runner.label: float(runner.last.client_means()[index]) for runner in finished}
            known = {label: score for label, score in scores.items() if not np.isnan(score)}
            best = (max if higher else min)(known, key=lambda label: known[label])
            losing.append(Loser(name, lost, gap.error, best, known[best]))
    return sorted(losing, key=lambda loser: -loser.loss)


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


def check(runners: Sequence[Runner], runs: TrialRuns, folder: Path, split: Split = "test") -> list[Checked]:
    """Score methods on rows that the race has not seen; nothing is trained, and the runs of the race stay as they are.

    Each run is copied and evaluated once more at its last version.

    Args:
        runners: the recommendation, Local and FedAvg.
        runs: the settings by which they were trained.
        folder: for the copies.
        split: of the rows.
    """
    clients = runs.clients if split == "test" else runs.choosing
    # "!= 0" and not truth: None is a number that is not known, so there may be rows
    if not any(clients.size(client, split) != 0 for client in range(len(clients))):
        return []
    checked = []
    for runner in runners:
        folders = {seed: folder / folder_name(runner.label) / f"seed-{seed}" for seed in runner.folders}
        for seed, copy in folders.items():
            _scored(runner, seed, copy, runs, split)
        if (scores := runs.read(folders)) is not None:
            checked.append(Checked(runner.label, scores, folders))
    return checked


def _scored(runner: Runner, seed: int, copy: Path, runs: TrialRuns, split: Split) -> None:
    """Evaluate the last version of a run on other rows, in a copy."""
    # the run of the race keeps its validation scores, since an interrupted search reads them again
    if not copy.exists():
        # renamed when it is complete, so that an interrupted copy is not taken for a run
        partial = copy.with_name(f"{copy.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(runner.folders[seed], partial)
        with RunStore.open(partial) as store:
            interval, count, _ = store.meta["evaluate"]
            store.set_meta(evaluate=[interval, count, split], per_class=None, status="running")
        partial.rename(copy)
    # nothing is left to train, so resuming only evaluates
    resume(copy, runs.choosing.opened(), runs.model_of(runner.label), recipe=runner.recipe, **runs.objective).close()


Floats = NDArray[np.float64]
_QUANTILE = 1.96  # of the normal distribution, for intervals of 95 %
FEWEST = 5  # clients that say how much clients differ
_ROUNDS = 20  # of the iteration for the variance between clients, which settles within a few


@dataclass(frozen=True)
class ClientGain:
    """The gain of one client by the recommendation.

    Attributes:
        client: its name.
        rows: its test rows, None where that is not known.
        scores: of each method that was checked, by label, the mean over seeds; None where it has none.
        gain: of the recommendation against the client alone, positive where it is better off; None where the
            recommendation is to train alone, or one of the two has no score.
        error: the standard error of the gain, for other rows of this client; None where it is not known.
        shrunk: the gain, shrunk towards that of all clients.
        low, high: the 95 % interval of the true gain around `shrunk`, None where the error is not known.
        train: its training rows, None where that is not known.
    """

    client: str
    rows: int | None
    scores: Mapping[str, float | None]
    gain: float | None
    error: float | None
    shrunk: float | None = None
    low: float | None = None
    high: float | None = None
    train: int | None = None

    @property
    def sign(self) -> int:
        """1 if the client gains beyond chance, -1 if it loses, 0 if neither can be said."""
        return 0 if self.low is None or self.high is None else int(self.low > 0) - int(self.high < 0)


def client_gains(tested: Sequence[Checked], chosen: str, alone: str | None, runs: TrialRuns) -> list[ClientGain]:
    """Return the gain of each client, in the order of the clients.

    Args:
        tested: scores on test rows, of the recommendation and Local among others; empty where there are no such rows.
        chosen: the label of the recommendation.
        alone: the label of Local, None if it was not checked.
        runs: the settings by which they were scored.
    """
    sign = 1 if runs.higher_is_better else -1
    by_label = {checked.label: checked.scores for checked in tested}
    together, by_itself = by_label.get(chosen), None if alone in (None, chosen) else by_label.get(alone or "")
    noises = {} if together is None or by_itself is None else row_differences(together, by_itself)
    gains = []
    for index, name in enumerate(runs.names):
        means = {label: float(scores.client_means()[index]) for label, scores in by_label.items()}
        known = {label: None if np.isnan(mean) else mean for label, mean in means.items()}
        pair = None if together is None or by_itself is None else (together.of_client(name), by_itself.of_client(name))
        gap = None if pair is None else difference(*pair)
        gain, error = None if gap is None else sign * gap.mean, noises[name].error if name in noises else None
        sizes = runs.clients.size(index, "test"), runs.choosing.size(index, "train")
        gains.append(ClientGain(name, sizes[0], known, gain, error, train=sizes[1]))
    return with_shrunk(gains)


def with_shrunk(gains: Sequence[ClientGain]) -> list[ClientGain]:
    """Return gains with their shrunk values and intervals, where the errors are known."""
    # a gain of error 0 or without error cannot be weighed against the spread between clients
    known = [gain for gain in gains if gain.gain is not None and gain.error]
    values, errors = shrunken(*(np.array([getattr(gain, name) for gain in known]) for name in ("gain", "error")))
    halves = _QUANTILE * errors
    ends = {
        gain.client: {"shrunk": float(value), "low": float(value - half), "high": float(value + half)}
        for gain, value, half in zip(known, values, halves, strict=True)
    }
    return [replace(gain, **ends.get(gain.client, {"shrunk": gain.gain})) for gain in gains]


def shrunken(gains: Floats, errors: Floats) -> tuple[Floats, Floats]:
    """Shrink measured gains towards their mean.

    Args:
        gains: measured gains of clients [c].
        errors: their standard errors [c], above 0.

    Returns:
        The shrunk gains [c], and their standard errors [c].

    Examples:
        Clients that differ no more than their noise says are taken for nearly alike.

        >>> values, errors = shrunken(np.array([0.1, 0.0, 0.05, 0.08, 0.02, 0.05]), np.full(6, 0.1))
        >>> values.round(3).tolist()
        [0.07, 0.03, 0.05, 0.062, 0.038, 0.05]
    """
    count, variances = len(gains), np.square(errors)
    # the factor (count - 3) / (count - 1) would be 0 or negative: nothing can be shrunk
    if count < 4:
        return gains, errors
    # starts from the raw variance, which contains the noise and is too large; the iteration takes it out
    between = float(np.var(gains, ddof=1))
    for _ in range(_ROUNDS):
        weights = 1 / (variances + between)
        mean = float(np.average(gains, weights=weights))
        # what a squared distance from the mean exceeds the client's own noise by, with Bessel's correction
        spread = count / (count - 1) * np.square(gains - mean) - variances
        between = max(0.0, float(np.average(spread, weights=weights)))
    weights = 1 / (variances + between)
    mean = float(np.average(gains, weights=weights))
    # the factor: a ratio of estimated variances is too large in the mean, as in the estimator of James and Stein
    factors = (count - 3) / (count - 1) * variances * weights
    typical = float(np.average(variances, weights=weights))
    # the spread between clients is estimated, too: what was shrunk far may have been shrunk too far
    doubt = 2 / (count - 3) * factors**2 * (typical + between) * weights * np.square(gains - mean)
    # the mean is estimated as well: a client with a large weight in it is shrunk towards itself
    squares = variances * (1 - (1 - weights / weights.sum()) * factors) + doubt
    return gains - factors * (gains - mean), np.sqrt(squares)


def table(clients: Sequence[ClientGain]) -> ResultTable:
    """Return the scores of each client; gains only where there are any."""
    labels = list(clients[0].scores) if clients else []
    gained = any(client.gain is not None for client in clients)
    rows = [
        [client.client, client.rows, *client.scores.values()]
        + ([client.gain, client.low, client.high] if gained else [])
        for client in clients
    ]
    return ResultTable(rows, ["client", "test rows", *labels, *(["gain", "from", "to"] if gained else [])])


def own_methods(
    scores: Mapping[str, Scores], usual: str, higher_is_better: bool = True, errors: float = 0.0
) -> dict[str, str]:
    """Choose a method for each client: another than the usual one where its gain is above 0 after shrinkage.

    Where clients are alike, nobody leaves the others by luck.

    Args:
        scores: on validation rows, by label.
        usual: the label of the recommendation.
        higher_is_better: whether a larger value of the metric is better.
        errors: standard errors that the gain must be above 0.

    Returns:
        The label for each client: the usual one where clients are few, or the noise of single clients is not known.
    """
    sign = 1 if higher_is_better else -1
    clients = list(scores[usual].clients)
    best = {name: (0.0, usual) for name in clients}
    for label, table in scores.items():
        # without an error a gain cannot be shrunk, and the largest of many noisy gains is one by chance
        known = {name: gap for name, gap in row_differences(table, scores[usual]).items() if gap.error}
        if label == usual or len(known) < FEWEST:
            continue
        measured, noise = (np.array([getattr(gap, of) for gap in known.values()]) for of in ("mean", "error"))
        gains, deviations = shrunken(sign * measured, noise)
        for name, gain, deviation in zip(known, gains.tolist(), deviations.tolist(), strict=True):
            if gain > max(best[name][0], errors * deviation):
                best[name] = gain, label
    return {name: label for name, (_, label) in best.items()}
