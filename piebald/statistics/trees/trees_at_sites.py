"""Boosted trees of clients who are asked through a runtime: the sites of a federation, or clients of a cluster."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from piebald.contracts import Clients, Query, Runtime, Split, Task, Update
from piebald.contracts.model_spec import ModelSpec
from piebald.core import pytree
from piebald.core.errors import RuntimeFault, SettingError
from piebald.core.plain_text import printable
from piebald.methods.client_work import ClientWork
from piebald.privacy import SecureAggregation
from piebald.server.client_queries import ClientQueries
from piebald.statistics.boosting.forest import MOST_COLUMNS, Forest
from piebald.statistics.boosting.growth import xgboost
from piebald.statistics.boosting.rounds import Boosted, Boosting, Start
from piebald.statistics.boosting.settings import TreeSettings
from piebald.statistics.boosting.summed_rounds import SummedBoosting
from piebald.statistics.boosting.targets import SCORES, Target, TargetSums
from piebald.statistics.columns import TARGET
from piebald.statistics.queries.tree_sums import MaskedTreeSumsQuery
from piebald.statistics.queries.trees import Ask, TreeScoresQuery, TreesQuery
from piebald.statistics.trees.boost import Done, told
from piebald.statistics.trees.boosted_trees import BoostedTrees, Scores
from piebald.statistics.trees.encoding import Encoding
from piebald.statistics.trees.folder import kept_in
from piebald.statistics.trees.summed import SummedAtSites

log = logging.getLogger("piebald.trees")


class AskedClients:
    """Clients who are asked (`rounds.TreeClients`).

    The first question says who takes part.  A client that does not answer a later one is left out of that round.

    Args:
        runtime: where they are.
        spec: the model that a task brings, which the questions are not about.
        target: what is predicted.
        settings: of boosting.
        seed: of subsampling.
        say: is told who is left out, and why.

    Attributes:
        numbers: the client numbers of those who take part.
        refused: why others do not, by number.
    """

    def __init__(
        self, runtime: Runtime, spec: ModelSpec, target: Target, settings: TreeSettings, seed: int,
        say: Callable[[str], None] = log.warning,
    ) -> None:  # fmt: skip
        self._queries, self._target, self._settings, self._seed = ClientQueries(runtime, spec), target, settings, seed
        self._model, self._ids, self._say = spec.initial[: spec.layout.shared], itertools.count(), say
        self.numbers = list(runtime.clients())
        self.refused: dict[int, str] = {}

    def sums(self) -> list[TargetSums]:
        """See `rounds.TreeClients`.

        Raises:
            SettingError: nobody answers.
        """
        query = TreesQuery(ask="sums", boosting=self._settings, **self._objective)
        answers = self._asked(query, self.numbers)
        if not any(answer is not None for answer in answers):
            why = next(iter(self.refused.values()), "none is there")
            raise SettingError(f"no client grows trees, the first one says: {why}")
        self.numbers = [number for number, one in zip(self.numbers, answers, strict=True) if one is not None]
        return [TargetSums(one.examples, tuple(one.vectors["sums"].tolist())) for one in answers if one is not None]

    def grow(self, forest: Forest, start: Start, number: int, who: Sequence[int]) -> list[Forest | None]:
        """See `rounds.TreeClients`."""
        query = self._about(start, "grow", number, "train")
        answers = self._asked(query, [self.numbers[one] for one in who], forest, number)
        for client, answer in zip(who, answers, strict=True):
            if answer is not None and answer.examples > start.rows[client]:
                raise RuntimeFault(f"client {self.numbers[client] + 1} has more rows than it said: ask again")
        return [
            None if one is None else Forest(one.vectors["forest"].numpy(), self._settings.max_depth) for one in answers
        ]

    def losses(self, forest: Forest, start: Start, split: Split) -> list[tuple[float, int] | None]:
        """See `rounds.TreeClients`."""
        answers = self._asked(self._about(start, "loss", 0, split), self.numbers, forest)
        return [None if one is None else (one.metrics.get("loss", 0.0), one.examples) for one in answers]

    def scores(self, boosted: Boosted, split: Split) -> list[Scores]:
        """Each client's scores of a model."""
        return self._scored(self._about(boosted.start, "scores", 0, split), boosted.forest)

    def alone(self, start: Start, split: Split) -> list[Scores]:
        """Each client's scores of the trees that it grows by itself."""
        return self._scored(self._about(start, "alone", 0, split), None)

    def _scored(self, query: TreesQuery, forest: Forest | None) -> list[Scores]:
        none = dict.fromkeys(SCORES[self._target.objective], math.nan)
        answers = self._asked(query, self.numbers, forest)
        return [none if one is None else {**none, **one.metrics} for one in answers]

    @property
    def _objective(self) -> dict[str, Any]:
        return {"objective": self._target.objective, "classes": self._target.classes, "seed": self._seed}

    def _about(self, start: Start, ask: Ask, number: int, split: Split) -> TreesQuery:
        kind = TreeScoresQuery if self._settings.form == "histogram" else TreesQuery
        return kind(
            ask=ask, boosting=self._settings, start=tuple(start.margins.tolist()), class_weights=start.class_weights,
            round=number, split=split, **self._objective,
        )  # fmt: skip

    def _asked(
        self, query: TreesQuery, numbers: Sequence[int], forest: Forest | None = None, version: int = 0
    ) -> list[Update | None]:
        sent = torch.from_numpy((forest or Forest.none(self._settings.max_depth)).sent)
        vectors = {"model": self._model, "forest": sent}
        answers = self._queries.ask([Task(next(self._ids), one, version, vectors, query) for one in numbers], version)
        for row in self._queries.take_rows():
            if row["status"] != "ok":
                why = printable(str(row["reason"]), 200)
                self.refused[int(row["client"])] = why
                self._say(f"client {int(row['client']) + 1} is left out of round {query.round + 1}: {why}")
        return answers


def trees_at_sites(
    runtime: Runtime, spec: ModelSpec, clients: Clients, settings: TreeSettings, *, seed: int = 0,
    split: Split = "test", features: Sequence[str] | None = None, compare: bool = True, out: Path | None = None,
    done: Done | None = None, say: Callable[[str], None] = log.warning,
) -> BoostedTrees:  # fmt: skip
    """Boosted trees of clients who are asked through a runtime.

    Args:
        runtime: where they are.
        spec: the model that a task brings; for trees from sums, the run with its masks.
        clients: their names, and the form of their rows.
        settings: of boosting.
        seed: of subsampling.
        split: the rows that trees are scored on.
        features: names of the inputs, "x0", "x1", ... by default.
        compare: also ask each client for the scores of trees that it grows by itself.
        out, done: as of `trees`.
        say: is told which clients are left out.

    Raises:
        SettingError: nobody grows trees, or rows have a form that trees are not for.
        RunFolderError: `out` has something else, or cannot be written.
    """
    xgboost()
    width = _width(clients)
    if features is not None and len(features) != width:
        raise SettingError(f"features must name each of the {width} numbers of an input, got {len(features)} names")
    classes, target = tuple(clients.classes or ()), _target(clients)
    encoding = Encoding(tuple(features or (f"x{place}" for place in range(width))), {}, settings.missing)
    asked = AskedClients(runtime, spec, target, settings, seed, say)
    about = {"settings": settings.table(), "objective": target.objective, "columns": encoding.columns,
             "classes": list(classes), "seed": seed,
             "clients": [str(clients.names[one]) for one in range(len(clients))]}  # fmt: skip
    with kept_in(out, about) as folder:
        done = told(folder, done)
        summed = _summed(runtime, spec, width, target, settings, seed, say)
        boosting = (
            Boosting(asked, target, settings, done)
            if summed is None
            else SummedBoosting(summed, target, settings, seed, done)
        )
        first = boosting.started()  # which also says who takes part
        if summed is not None:
            asked.numbers = summed.taking_part
        state = None if folder is None else folder.read(width, settings.max_depth, target.groups)
        if state is not None and state.start.rows != first.start.rows:
            raise SettingError(f"{out} has trees of other clients, or of other rows: choose another folder")
        boosted = boosting.run(state or first)
        own = asked.alone(boosted.start, split) if compare else ()
        names = [str(clients.names[one]) for one in asked.numbers]
        rows = boosted.start.rows if summed is None else [None] * len(names)
        found = BoostedTrees(boosted, encoding, target, TARGET, classes, names, rows, asked.scores(boosted, split), own)
        if folder is not None:
            folder.finish(found)
        return found


def stated_questions(clients: Clients, settings: TreeSettings, seed: int) -> list[Query]:
    """The questions that growing trees takes, as far as they are known before the first one."""
    target = _target(clients)
    about: dict[str, Any] = {"boosting": settings, "objective": target.objective, "classes": target.classes}
    if settings.form != "histogram":
        return [TreesQuery(ask="sums", seed=seed, **about)]
    return [MaskedTreeSumsQuery(ask="targets", seed=seed, **about), TreeScoresQuery(ask="scores", seed=seed, **about)]


def _target(clients: Clients) -> Target:
    """What is predicted: a class where clients have any, else a number."""
    classes = len(clients.classes or ())
    return Target("regression" if not classes else "binary" if classes == 2 else "multiclass", classes)


def _width(clients: Clients) -> int:
    """How many inputs clients have.

    Raises:
        SettingError: trees are not for their rows.
    """
    blank = clients.rows(0, "train")
    width = math.prod(pytree.single(blank.x, "trees").shape[1:])
    y = pytree.single(blank.y, "trees")
    if math.prod(y.shape[1:]) != 1 or not 0 < width <= MOST_COLUMNS:
        raise SettingError(
            f"trees are for rows of 1 to {MOST_COLUMNS:,} numbers with one target, got {width:,} numbers and targets "
            f"of the form {list(y.shape[1:])}"
        )
    return width


def _summed(
    runtime: Runtime, spec: ModelSpec, columns: int, target: Target, settings: TreeSettings, seed: int,
    say: Callable[[str], None],
) -> SummedAtSites | None:  # fmt: skip
    """The clients whose sums trees are grown from, None where clients grow trees.

    Raises:
        SettingError: sums would come in the open.
    """
    if settings.form != "histogram":
        return None
    if not settings.secure or not isinstance(spec, ClientWork) or not isinstance(spec.masking, SecureAggregation):
        raise SettingError("sites tell sums to grow trees from under masks alone: write trees.secure = true")
    return SummedAtSites(runtime, spec, columns, target, settings, seed, say)
