"""An ensemble distilled into one model: a usual federated run whose targets are what the ensemble answers.

Each client asks the ensemble about its own training rows, and trains on its answers, and by a quarter on the targets
that the rows have; no row leaves a client.  A row of classes becomes one for each class that may be its own, which
counts as much as the class is probable: so the loss is the cross-entropy with these probabilities, and any recipe can
be trained.  Candidates are the settings of the recommendation and of the runs that count most in the ensemble.

Candidates learn from the ensemble as it was before its members were trained on validation rows, which choose between
them.  The choice is trained once more on all rows, towards the whole ensemble.

Source: Hinton, Vinyals and Dean, *Distilling the knowledge in a neural network*, 2015; Bucilă, Caruana and
Niculescu-Mizil, *Model compression*, International Conference on Knowledge Discovery and Data Mining 2006.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from piebald.advice.ensemble import Ensemble, EnsembleMember, answers_of, copy_run, mean_answer, on_all_rows
from piebald.advice.evidence import Checked
from piebald.advice.race import Runner
from piebald.advice.tuning.space import Budget, Cost
from piebald.advice.tuning.trial_runs import TrialRuns, cost_of
from piebald.contracts import Clients, Rows, Split
from piebald.core import pytree
from piebald.core.errors import PiebaldError, SettingError
from piebald.core.objective import Objective
from piebald.core.targets import known
from piebald.data.clients.view import ClientsView
from piebald.methods.recipe import Recipe
from piebald.models.prediction import AnswerKind
from piebald.report.paired import Difference, Scores
from piebald.report.verdict import compared
from piebald.runs.compare import folder_name

RUNS = 3  # whole runs that it takes: candidates, and the choice on all rows
_TAUGHT = 0.75  # of a target, the ensemble's answer; the rest is the row's own target
_LEAST = 0.05  # a class that is less probable gets no row of its own


@dataclass(frozen=True)
class Distilled:
    """One model that an ensemble was distilled into.

    Attributes:
        runner: the method and its settings.
        folder: of its run.
        rows: the rows on which it was scored at the end: "test" where there are some, otherwise "validation".
        score: its mean on these rows.
        gain: its mean minus that of the recommendation on the same rows, under the seed of its run.
        cost: of its run.
    """

    runner: Runner
    folder: Path
    rows: Split
    score: float
    gain: Difference
    cost: Cost

    def plain(self) -> dict[str, Any]:
        """As values, of which JSON has all but `gain` and `cost`."""
        return {"name": self.runner.name, "rows": self.rows, "score": self.score, "gain": self.gain, "cost": self.cost}

    def save(self, folder: Path, settings_of: Callable[[Recipe], Mapping[str, Any] | None]) -> None:
        """Copy the run into a folder, of which `piebald predict` and `piebald export` take the model.

        Args:
            folder: replaced if it is there.
            settings_of: see `Ensemble.save`.
        """
        shutil.rmtree(folder, ignore_errors=True)
        copy_run(self.folder, folder, settings_of(self.runner.recipe))


class OtherRows(ClientsView):
    """All clients, with other rows in one split.

    Args:
        clients: the clients.
        split: the split.
        other: its rows of each client.
    """

    def __init__(self, clients: Clients, split: Split, other: Sequence[Rows]) -> None:
        super().__init__(clients)
        self._split, self._other = split, other

    def in_memory(self) -> bool:
        """See `contracts.InMemory`: a split's rows are in no pool."""
        return False

    def rows(self, client: int, split: Split) -> Rows:
        """See `contracts.Clients`."""
        return self._other[client] if split == self._split else super().rows(client, split)

    def size(self, client: int, split: Split) -> int | None:
        """See `contracts.Clients`."""
        return len(self._other[client]) if split == self._split else super().size(client, split)


@dataclass(frozen=True)
class _Candidate:
    """A method with its settings, trained on taught rows."""

    runner: Runner
    folder: Path
    cost: Cost
    scores: Scores


class Distillation:
    """Distils an ensemble into one model, by one run at least, and by more as far as a budget goes.

    Args:
        runs: the settings by which the ensemble's members were trained.
        folder: of the search.
        budget: what all runs of the search may cost together.
        say: takes a line for each event.

    Attributes:
        cost: of what was trained.
    """

    def __init__(self, runs: TrialRuns, folder: Path, budget: Budget, say: Callable[[str], None]) -> None:
        self._runs, self._folder, self._say = runs, folder / "distilled-runs", say
        self._budget, self._spent, self.cost = budget, Cost(), Cost()

    def __call__(self, found: Ensemble, chosen: Runner, tested: Sequence[Checked], spent: Cost) -> Distilled | None:
        """Return the model; None where none could be trained, or what the ensemble answers is no target.

        Args:
            found: the ensemble.
            chosen: the recommendation.
            tested: scores on test rows, of the recommendation among others; without these it is scored on validation
                rows, and not trained on them.
            spent: by all other runs so far.
        """
        self._spent = spent
        if (clients := self._taught(_before_all_rows(found.members), self._runs.choosing)) is None:
            return None
        runners = candidates(found, chosen)
        if not (trained := [*filter(None, (self._candidate(runner, clients) for runner in runners))]):
            return None
        sign = 1 if self._runs.higher_is_better else -1
        best = max(trained, key=lambda candidate: sign * candidate.scores.mean)
        base = next((checked.scores for checked in tested if checked.label == chosen.label), chosen.last)
        if base is not chosen.last:
            best = self._tested(self._on_all_rows(found.members, best))
        split: Split = "validation" if base is chosen.last else "test"
        gain = compared(best.scores, base.of_seeds(best.scores.seeds)) if best.scores.present else None
        return None if gain is None else Distilled(best.runner, best.folder, split, best.scores.mean, gain, best.cost)

    def _candidate(self, runner: Runner, clients: Clients) -> _Candidate | None:
        """A recipe trained by clients with taught rows; None where it cannot be trained, or has no score."""
        done = self._run(runner, replace(self._runs, choosing=clients), folder_name(runner.name))  # type: ignore[arg-type]
        scores = None if done is None else self._runs.read({runner.last.seeds[0]: done[0]})
        if done is None or scores is None:
            return None
        self._say(f"distilled into {runner.name}: {self._runs.metric} {scores.mean:.4g}")
        return _Candidate(runner, *done, scores)

    def _on_all_rows(self, members: Sequence[EnsembleMember], best: _Candidate) -> _Candidate:
        """A candidate trained on validation rows as well; itself where that cannot be."""
        try:
            runs = self._runs.on_all_rows()
        except SettingError:  # rows are loaded when they are needed: nothing joins their splits
            return best
        clients = self._taught(members, runs.choosing)
        done = self._run(best.runner, replace(runs, choosing=clients), "on-all-rows")  # type: ignore[arg-type]
        if done is None:
            return best
        self._say(f"distilled into {best.runner.name} on all rows, those of validation among them: trained")
        return replace(best, folder=done[0], cost=done[1])

    def _tested(self, best: _Candidate) -> _Candidate:
        """A candidate with its scores on test rows."""
        member = EnsembleMember(
            best.runner.name, np.ones(len(self._runs.names)), runner=best.runner, folder=best.folder
        )
        answers = answers_of([member], self._runs, self._runs.choosing.opened(), "test")
        judged = (mean_answer(answers, np.ones(1), client) for client in range(len(self._runs.names)))
        return replace(best, scores=self._runs.scored(judged, best.runner.last.seeds[0], "test"))

    def _run(self, runner: Runner, runs: TrialRuns, name: str) -> tuple[Path, Cost] | None:
        """The folder of a run and its cost; None where it cannot be trained, or the budget is for no more."""
        folder, rounds = self._folder / name, runner.stopped or runs.rungs[-1]
        # what an interrupted search has begun is finished: its cost was already spent; who asks for one model gets one
        is_wanted = folder.exists() or not self.cost.rounds
        if not (is_wanted or self._budget.has_room(self._spent + self.cost, rounds)):
            return None
        try:
            run = runs.train(runner.recipe, folder, runner.label, runner.last.seeds[0], rounds)
        except PiebaldError as error:  # a recipe that hides single rows takes no weights of rows
            self._say(f"distilled into {runner.name}: {error}")
            return None
        cost = cost_of([run])
        self.cost += cost
        run.close()
        return folder, cost

    def _taught(self, members: Sequence[EnsembleMember], clients: Clients) -> OtherRows | None:
        """Clients whose training rows have the targets that an ensemble teaches; None where it teaches none."""
        numbers = range(len(clients))
        own = [clients.rows(client, "train") for client in numbers]
        # as test rows, since some personal models are made of training rows when they are asked; as if all had targets,
        # since the ensemble answers for those that have none, too
        unlabelled = [Rows(rows.x, pytree.mapped(torch.zeros_like, rows.y)) for rows in own]
        asked = OtherRows(self._runs.choosing.opened(), "test", unlabelled)
        judged = answers_of(members, self._runs, asked, "test")
        shares = np.stack([member.shares for member in members])
        rows = list[Rows]()
        for client in numbers:
            answer = mean_answer(judged, shares[:, client], client)
            taught = own[client] if answer is None else taught_rows(own[client], answer[1], judged[0].kind, answer[0])
            if taught is None:
                self._say(f"distillation needs classes or numbers as targets, and here they are {judged[0].kind}")
                return None
            rows.append(taught)
        return OtherRows(clients, "train", rows)


def candidates(found: Ensemble, chosen: Runner) -> list[Runner]:
    """The settings that are tried: of the recommendation, and of the runs that count most in the ensemble."""
    runners = [chosen, *(x.runner for x in found.members if x.runner is not None and x.shares.any())]
    distinct = [x for n, x in enumerate(runners) if all(x.recipe != other.recipe for other in runners[:n])]
    return distinct[: RUNS - 1]


def _before_all_rows(members: Sequence[EnsembleMember]) -> list[EnsembleMember]:
    """The ensemble as it was selected: members that were trained once more have all of their share."""
    again = {member.name for member in members if member.on_all_rows}
    return [
        replace(member, shares=member.shares * (2 if on_all_rows(member.name) in again else 1))
        for member in members
        if not member.on_all_rows
    ]


def taught_rows(rows: Rows, answer: Tensor, kind: AnswerKind, objective: Objective) -> Rows | None:
    """Return a client's rows with targets that are for the most part what an ensemble answers.

    Args:
        rows: the client's.
        answer: the ensemble's outputs for them [n, ...].
        kind: of the answers.
        objective: of the runs.

    Returns:
        None where answers are neither classes nor numbers, or targets have another form.  Where targets are unknown,
        the answer takes their place.
    """
    y = rows.y if objective.domain is None else objective.domain.prepared(rows.y, answer.shape[1:])
    if not isinstance(y, Tensor) or kind not in ("classes", "values") or (kind == "values") != y.is_floating_point():
        return None
    if kind == "values":
        mean = answer.reshape(y.shape).to(y.dtype)
        return replace(rows, y=torch.where(known(y), _TAUGHT * mean + (1 - _TAUGHT) * y, mean))
    taught, is_known = answer.double().softmax(1), known(y)[:, None]
    own = functional.one_hot(y.clamp(min=0), answer.shape[1])
    shares = torch.where(is_known, _TAUGHT * taught + (1 - _TAUGHT) * own, taught)
    shares = shares * ((shares >= _LEAST) | (shares == shares.amax(1, keepdim=True)))
    row, label = shares.nonzero(as_tuple=True)
    weight = (shares / shares.sum(1, keepdim=True))[row, label].float()
    return Rows(pytree.take(rows.x, row), label, weight if rows.weight is None else weight * rows.weight[row])
