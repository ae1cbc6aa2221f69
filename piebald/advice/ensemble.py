"""An ensemble of what the race has trained to the end: the mean of the predictions of several models.

Models that were trained in different ways err on different rows, so that their mean is often better than the best.
Members are selected greedily on validation rows, with replacement: the model whose addition makes the mean best by the
metric, ten times, of which the best beginning is kept; one that is added twice counts twice.  The plain models that
each client fits alone may be members, as well.  Each client also selects by its own validation rows alone, which counts
the more, the more of them it has: n rows against the hundred that the selection of all clients is worth.

When the members are chosen, validation rows have done their work: each member is trained once more, on these rows as
well, as far as the budget goes, and the new model counts as much as the old one.  What it gains cannot be known before
test rows are looked at, which happens once, at the end; a run that had bad luck is one of two.

Source: Caruana, Niculescu-Mizil, Crew and Ksikes, *Ensemble selection from libraries of models*, International
Conference on Machine Learning 2004.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from piebald.advice.evidence import Checked
from piebald.advice.race import Runner
from piebald.advice.tuning.shared_rounds import FOLDER
from piebald.advice.tuning.space import Budget, Cost
from piebald.advice.tuning.trial_runs import Judged, TrialRuns, cost_of
from piebald.contracts import Clients, Split
from piebald.core.errors import PiebaldError, SettingError
from piebald.core.objective import Objective
from piebald.core.private_files import write_private
from piebald.engines.scoring import value_of
from piebald.methods.recipe import Recipe
from piebald.models.prediction import AnswerKind, mean_outputs
from piebald.report.paired import Difference
from piebald.report.verdict import compared
from piebald.runs.averaged import StoredMember, write_members
from piebald.runs.compare import folder_name
from piebald.runs.plain_models import PlainModel, PlainModels
from piebald.runs.run import opened
from piebald.settings.toml_document import dumps
from piebald.storage.store import RunStore

Floats = NDArray[np.float64]
STEPS = 10  # of the selection
WORTH = 100  # validation rows of a client that count as much as the selection of all, see `benchmarks/advise`
_MOST_CLIENTS = 200  # of more, making each one's own models would take minutes


@dataclass(frozen=True)
class EnsembleMember:
    """A run, or a plain model that each client fits alone, in an ensemble.

    Attributes:
        name: its method and its settings in words.
        shares: how much of the mean it is for each client [c].
        on_all_rows: whether it was trained on validation rows as well.
        runner: its method and its settings, None for a plain model.
        folder: of the run, None for a plain model.
        bytes: that the run has sent, both ways.
        plain: the plain model's name, and the models of all clients by which it is one; None for a run.
    """

    name: str
    shares: Floats
    on_all_rows: bool = False
    runner: Runner | None = None
    folder: Path | None = None
    bytes: int = 0
    plain: tuple[str, PlainModels] | None = None

    def values(self) -> dict[str, Any]:
        """As values for JSON."""
        return {"name": self.name, "share": float(self.shares.mean()), "on_all_rows": self.on_all_rows}


@dataclass(frozen=True)
class Ensemble:
    """The mean of the predictions of several models.

    Attributes:
        members: the models, those that count most first.
        clients: the names of the clients, in the order of their shares.
        rows: the rows on which it was scored at the end: "test" where there are some, otherwise "validation".
        score: its mean on these rows.
        gain: its mean minus that of the recommendation on the same rows, under the seed of its runs.
        bytes: that all members send in a run, both ways.
    """

    members: Sequence[EnsembleMember]
    clients: Sequence[str]
    rows: Split
    score: float
    gain: Difference
    bytes: float

    @property
    def most(self) -> int:
        """The largest number of models that a client keeps and asks."""
        return int((np.stack([member.shares for member in self.members]) > 0).sum(0).max())

    def plain(self) -> dict[str, Any]:
        """As values, of which JSON has all but `gain`."""
        members = [member.values() for member in self.members]
        return {"members": members, "rows": self.rows, "score": self.score, "gain": self.gain, "bytes": self.bytes}

    def save(self, folder: Path, settings_of: Callable[[Recipe], Mapping[str, Any] | None]) -> None:
        """Write the members into a folder, of which `piebald predict` and `piebald export` take the mean.

        Beside each run lies its experiment file, so that the members can be trained once more elsewhere, and be joined.

        Args:
            folder: replaced if it is there.
            settings_of: the experiment file of a recipe as plain values, from which a run is opened; None if there is
                none.
        """
        partial = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        stored, plain = list[StoredMember](), dict[int, dict[str, PlainModel]]()
        for number, member in enumerate(self.members):
            if member.runner is None or member.folder is None:
                stored.append(StoredMember(plain=number))
                plain[number] = member_models(member, self.clients)
                continue
            stored.append(StoredMember(run=f"{number}-{folder_name(member.name)}"))
            settings = settings_of(member.runner.recipe)
            copy_run(member.folder, partial / stored[-1].run, settings)
            if settings is not None and not member.on_all_rows:  # to train it again, as in a federation
                write_private(partial / f"{stored[-1].run}.toml", dumps(settings), lasting=False)
        shares = {name: [float(x.shares[c]) for x in self.members] for c, name in enumerate(self.clients)}
        write_members(partial, stored, shares, plain)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def copy_run(folder: Path, copy: Path, settings: Mapping[str, Any] | None) -> None:
    """Copy a run of a search, which becomes one of the experiment file whose settings are given, if they are."""
    shutil.copytree(folder, copy)
    if settings is not None:
        with RunStore.open(copy) as store:
            store.set_meta(settings=dict(settings))


def member_models(member: EnsembleMember, clients: Sequence[str]) -> dict[str, PlainModel]:
    """The plain models of a member, of the clients for which it counts."""
    assert member.plain is not None  # asked of plain members only
    name, models = member.plain
    fitted = {client: models.model(name, c) for c, client in enumerate(clients) if member.shares[c]}
    return {client: model for client, model in fitted.items() if model is not None}


def ensemble(
    finished: Sequence[Runner],
    chosen: Runner,
    tested: Sequence[Checked],
    runs: TrialRuns,
    refit: Callable[[EnsembleMember], EnsembleMember | None] = lambda member: None,
    plain: PlainModels | None = None,
) -> Ensemble | None:
    """Select an ensemble on validation rows, train its members on these as well, and score it on test rows.

    Args:
        finished: all settings that were trained to the end.
        chosen: the recommendation.
        tested: scores on test rows, of the recommendation among others; without these nothing is trained again.
        runs: the settings by which they were trained.
        refit: trains a member on all rows, see `Refit`.
        plain: the plain models of each client, None where there are none.

    Returns:
        None where no mean of two or more models is better than one, there are too many clients, or outputs are no
        predictions, as those of language models.
    """
    seed = chosen.last.seeds[0]
    runners = [runner for runner in finished if seed in runner.folders]
    if not runners or len(runs.names) > _MOST_CLIENTS:
        return None
    nothing = np.zeros(len(runs.names))
    candidates = [
        EnsembleMember(x.name, nothing, runner=x, folder=x.folders[seed], bytes=x.run.bytes if x.run else 0)
        for x in runners
    ]
    # a client without training rows has no plain model to take the mean with
    if plain is not None and all(runs.choosing.size(client, "train") for client in range(len(nothing))):
        candidates += [EnsembleMember(f"{name} alone", nothing, plain=(name, plain)) for name in plain.makers]
    try:
        judged = answers_of(candidates, runs, runs.choosing, "validation")
        shares = _shares(judged, 1 if runs.higher_is_better else -1)
    except SettingError:
        return None
    members = [replace(x.member, shares=row) for x, row in zip(judged, shares, strict=True) if row.any()]
    members.sort(key=lambda member: -member.shares.mean())
    if all(member.runner is None for member in members):
        members.append(judged[0].member)  # a run without a share, which says how rows become inputs
    base = next((checked.scores for checked in tested if checked.label == chosen.label), None)
    split: Split = "validation" if base is None else "test"
    members = members if base is None else _with_all_rows(members, refit)
    if sum(member.shares.any() for member in members) < 2:
        return None
    clients = runs.choosing if base is None else runs.choosing.opened()
    of_members, shares = answers_of(members, runs, clients, split), np.stack([x.shares for x in members])
    answers = (mean_answer(of_members, shares[:, client], client) for client in range(len(runs.names)))
    scores = runs.scored(answers, seed, split)
    gain = compared(scores, (chosen.last if base is None else base).of_seeds([seed])) if scores.present else None
    if gain is None:
        return None
    sent = float(sum(member.bytes for member in members if member.shares.any()))
    return Ensemble(members, runs.names, split, scores.mean, gain, sent)


def on_all_rows(name: str) -> str:
    """The name of a member that was trained once more."""
    return f"{name} on all rows"


def _with_all_rows(
    members: Sequence[EnsembleMember], refit: Callable[[EnsembleMember], EnsembleMember | None]
) -> list[EnsembleMember]:
    """The members beside those that were trained again, each of which takes half of a share."""
    ensemble_members = list[EnsembleMember]()
    for member in members:
        refitted = refit(member) if member.shares.any() else None
        pair = (member, refitted)
        ensemble_members += [member] if refitted is None else [replace(x, shares=member.shares / 2) for x in pair if x]
    return ensemble_members


class Refit:
    """Trains members of an ensemble once more, on validation rows as well, as far as a budget goes.

    Args:
        runs: the settings by which members were trained.
        folder: of the search.
        budget, spent: what all runs of the search may cost together, and have cost.
        say: takes a line for each event.

    Attributes:
        spent: by all other runs so far.
        cost: of what was trained; rounds that members share count for each of them, as in the race.
        shared: what was not trained a second time.
    """

    def __init__(self, runs: TrialRuns, folder: Path, budget: Budget, spent: Cost, say: Callable[[str], None]) -> None:
        self._folder, self._budget, self.spent, self._say = folder / "all-rows", budget, spent, say
        self.cost, self.shared = Cost(), Cost()
        self._trained_once = set[str]()
        try:
            self._runs: TrialRuns | None = runs.on_all_rows()
        except SettingError:  # rows are loaded when they are needed: nothing joins their splits
            self._runs = None

    def __call__(self, member: EnsembleMember) -> EnsembleMember | None:
        """Return the member trained on all rows; None where it cannot be, or the budget was used up."""
        runs, runner, name = self._runs, member.runner, on_all_rows(member.name)
        if runs is None:
            return None
        if runner is None:
            assert member.plain is not None  # what is no run is a plain model
            model, models = member.plain
            return replace(
                member, name=name, on_all_rows=True, plain=(model, PlainModels(runs.choosing, models.objective))
            )
        folder = self._folder / folder_name(runner.name)
        # what an interrupted search has begun is finished: its cost was already spent
        if not (folder.exists() or self._budget.has_room(self.spent + self.cost, runs.rungs[-1])):
            return None
        job = runner.recipe, folder, runner.label, runner.last.seeds[0], runs.rungs[-1]
        try:
            kin = runs.shared_rounds(runner.recipe, runner.label)
            run = runs.train(*job) if kin is None else runs.train_once(*job, self._folder / FOLDER / kin)
        except PiebaldError as error:  # a recipe that asks for validation rows, or steps without bounds
            self._say(f"{name}: {error}")
            return None
        self._say(f"{name}, those of validation among them: trained")
        cost = cost_of([run])
        self.cost += cost
        if kin in self._trained_once:
            self.shared += cost
        self._trained_once |= {kin} if kin else set()
        run.close()
        return replace(member, name=name, on_all_rows=True, folder=folder, bytes=cost.bytes)

    def close(self) -> None:
        """Remove what members have begun with."""
        shutil.rmtree(self._folder / FOLDER, ignore_errors=True)


@dataclass(frozen=True)
class MemberAnswers:
    """A member's outputs for each client's rows of a split, and their targets."""

    member: EnsembleMember
    kind: AnswerKind
    objectives: Sequence[Objective]
    outputs: Sequence[tuple[Tensor, Any]]


def answers_of(
    members: Sequence[EnsembleMember], runs: TrialRuns, clients: Clients, split: Split
) -> list[MemberAnswers]:
    """What members answer on the rows of a split of some clients, in their order."""
    numbers, judged = range(len(runs.names)), list[MemberAnswers]()
    for member in members:
        if member.runner is None or member.folder is None:
            continue
        model, recipe = runs.model_of(member.runner.label), member.runner.recipe
        with opened(member.folder, clients, model, recipe=recipe, **runs.objective) as run:
            outputs = [run.outputs(client, split) for client in numbers]
            objectives = [run.work.of(client).objective for client in numbers]
            judged.append(MemberAnswers(member, run.predictor(0).meaning.kind, objectives, outputs))
    first, order = judged[0], {id(member): number for number, member in enumerate(members)}
    for member in members:
        if member.plain is None:
            continue
        name, models = member.plain
        answers = [models.judged(name, client, clients.rows(client, split)) for client in numbers]
        outputs = [(x if answer is None else answer[1].reshape(x.shape), y)
                   for answer, (x, y) in zip(answers, first.outputs, strict=True)]  # fmt: skip
        judged.append(MemberAnswers(member, first.kind, first.objectives, outputs))
    return sorted(judged, key=lambda x: order[id(x.member)])


def _shares(judged: Sequence[MemberAnswers], sign: int) -> Floats:
    """How much of the mean each member is for each client [members, clients]."""
    clients = range(len(judged[0].outputs))
    of_all, shares = _selected(judged, clients, sign), []
    for client in clients:
        rows = len(judged[0].outputs[client][0])
        of_client = _selected(judged, [client], sign) if rows else of_all
        shares.append((WORTH * of_all + rows * of_client) / (WORTH + rows))
    return np.stack(shares, 1)


def _selected(judged: Sequence[MemberAnswers], clients: Sequence[int], sign: int) -> Floats:
    """The share of each member in the best beginning of a greedy selection on the rows of some clients."""
    single = np.eye(len(judged))
    # the best by itself first: of equal means it is the one that is added
    order = sorted(range(len(judged)), key=lambda number: -_mean(judged, single[number], clients, sign))
    chosen, best = np.zeros(len(judged)), (-np.inf, 0, single[order[0]])
    for step in range(1, STEPS + 1):
        means = {number: _mean(judged, chosen + single[number], clients, sign) for number in order}
        chosen = chosen + single[max(order, key=lambda number: means[number])]
        # of equal means the shorter beginning
        if (value := max(means.values())) > best[0]:
            best = value, step, chosen
    return np.asarray(best[2] / best[2].sum())


def _mean(judged: Sequence[MemberAnswers], weights: Floats, clients: Sequence[int], sign: int) -> float:
    """The mean of the metric of a weighted mean over some clients, larger is better; -inf where none has one."""
    values = []
    for client in clients:
        if (answer := mean_answer(judged, weights, client)) is not None:
            objective, outputs, targets = answer
            metric = objective.metrics.get(objective.metric, objective.loss)
            values.append(float(value_of(metric, outputs, targets)))
    known = [value for value in values if np.isfinite(value)]
    return sign * float(np.mean(known)) if known else -np.inf


def mean_answer(judged: Sequence[MemberAnswers], weights: Floats, client: int) -> Judged | None:
    """What a weighted mean is judged by at a client, None where it has no rows."""
    counted = [(x, weight) for x, weight in zip(judged, weights.tolist(), strict=True) if weight]
    first = judged[0]
    if not len(first.outputs[client][0]):
        return None
    mean = mean_outputs(
        [x.outputs[client][0] for x, _ in counted],
        first.kind,
        torch.tensor([weight for _, weight in counted], dtype=torch.float64),
    )
    return first.objectives[client], mean.float(), first.outputs[client][1]
