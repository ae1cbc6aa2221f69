"""Statistics of the rows of sites, which answer questions over whatever runtime reaches them."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from piebald.contracts import Clients, Query, Runtime, Split, Task
from piebald.contracts.model_spec import ModelSpec
from piebald.core import pytree
from piebald.core.errors import RuntimeFault, SettingError
from piebald.core.moments import Floats, Moments, keys_of
from piebald.core.plain_text import printable
from piebald.server.client_queries import ClientQueries
from piebald.statistics.columns import MOST_COLUMNS, TARGET
from piebald.statistics.columns_asked import Wanted
from piebald.statistics.describe import of_answers
from piebald.statistics.exact import Answers
from piebald.statistics.pooled_statistics import FederatedStatistics, NumberColumn, TextColumn
from piebald.statistics.queries.statistics import PARTS, StatisticsQuery

log = logging.getLogger("piebald.statistics")


class SiteAnswers:
    """Clients who are asked through a runtime (`exact.Answers`).

    The first question says who takes part: sites that refuse it, or do not answer, are left out, and those who answered
    must answer all further ones.

    Args:
        runtime: where the clients are.
        spec: the model that a task brings, which the questions are not about.
        split: whose rows.
        targets: how many numbers a target has.

    Attributes:
        clients: the numbers of those who take part.
        refused: why others do not, by number.
    """

    def __init__(self, runtime: Runtime, spec: ModelSpec, split: Split, targets: int) -> None:
        self._queries, self._split, self._targets = ClientQueries(runtime, spec), split, targets
        self._model: Tensor = spec.initial[: spec.layout.shared]
        self._ids = itertools.count()
        self._told: list[Moments] = []
        self.clients = list(runtime.clients())
        self.refused: dict[int, str] = {}

    def moments(self) -> list[Moments]:
        """See `exact.Answers`.

        Raises:
            SettingError: nobody answers.
        """
        if not self._told:
            told = self._asked(StatisticsQuery(split=self._split, targets=self._targets), "moments", first=True)
            if not told:
                why = next(iter(self.refused.values()), "none is there")
                raise SettingError(f"no site answers questions about statistics, the first one says: {why}")
            self._told = [_moments(one) for one in told]
        return self._told

    def at_most(self, thresholds: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """See `exact.Answers`."""
        query = _counts(thresholds, self._split, self._targets)
        return np.stack([one.astype(np.int64) for one in self._asked(query, "counts")])

    def _asked(self, query: StatisticsQuery, name: str, first: bool = False) -> list[Floats]:
        tasks = [Task(next(self._ids), client, 0, {"model": self._model}, query) for client in self.clients]
        told = self._queries.ask(tasks, 0)
        reasons = {int(row["client"]): str(row["reason"]) for row in self._queries.take_rows()}
        lost = [client for client, answer in zip(self.clients, told, strict=True) if answer is None]
        if lost and not first:
            raise RuntimeFault(
                f"client {lost[0] + 1} answered the first question and not the next one "
                f"({printable(reasons[lost[0]], 200)}): ask again, or for no more than it answers"
            )
        self.refused |= {client: printable(reasons[client], 200) for client in lost}
        self.clients = [client for client in self.clients if client not in lost]
        return [np.asarray(answer.vectors[name].numpy()) for answer in told if answer is not None]


def statistics_at_sites(
    runtime: Runtime,
    spec: ModelSpec,
    clients: Clients,
    wanted: Wanted,
    *,
    split: Split = "train",
    features: Sequence[str] | None = None,
    say: Callable[[str], None] = log.warning,
) -> FederatedStatistics:
    """Statistics of the columns of sites: the numbers of inputs, and of targets.

    Where `wanted` has bins, and bounds of all columns, quantiles come from the histogram, and each site is asked twice;
    otherwise they are exact, to the bit, and it is asked up to about 70 times.

    Args:
        runtime: where the clients are.
        spec: the model that a task brings.
        clients: their names, and the form of their rows.
        wanted: what is wanted; no categories and tables.
        split: whose rows.
        features: names of the inputs, "x0", "x1", ... by default.
        say: is told which clients are left out.

    Raises:
        SettingError: no site answers.
        RuntimeFault: a site answers one question and not the next.
    """
    names, targets = column_names(clients, features)
    wanted, once = _with_classes(clients, wanted, names)
    answers = SiteAnswers(runtime, spec, split, targets)
    told = answers.moments()
    for client, why in answers.refused.items():
        say(f"{printable(str(clients.names[client]))} is left out: {why}")
    taking_part = [str(clients.names[client]) for client in answers.clients]
    numbers, by_client = of_answers(answers, names, taking_part, wanted, once)
    texts = {}
    if clients.classes is not None and not once:
        texts[TARGET] = _classes(answers, len(names), clients.classes)
        numbers, by_client = _without(numbers), {name: _without(own) for name, own in by_client.items()}
    return FederatedStatistics(taking_part, "exact", [one.rows for one in told], numbers, texts, {}, by_client)


def stated_questions(clients: Clients, wanted: Wanted, features: Sequence[str] | None, split: Split) -> list[Query]:
    """The questions that are known before the first answer: not those of a bisection, whose thresholds follow from
    answers.

    Raises:
        SettingError: there are too many columns, or another number of names.
    """
    names, targets = column_names(clients, features)
    wanted, once = _with_classes(clients, wanted, names)
    asked = _Stated(len(names), split, targets)
    bounded = all(name in wanted.bounds for name in names)
    known = wanted if once and bounded else replace(wanted, bins=None)
    of_answers(asked, names, ["any"], replace(known, quantiles=wanted.quantiles if once else ()), once)
    if clients.classes is not None and not once:
        _classes(asked, len(names), clients.classes)
    return list(asked.questions)


class _Stated:
    """Nobody's answers (`exact.Answers`), which show what would be asked.

    Attributes:
        questions: what was asked.
    """

    def __init__(self, columns: int, split: Split, targets: int) -> None:
        self._columns, self._split, self._targets = columns, split, targets
        self.questions: list[Query] = []

    def moments(self) -> list[Moments]:
        """See `exact.Answers`."""
        self.questions.append(StatisticsQuery(split=self._split, targets=self._targets))
        return [Moments.of(np.zeros((1, self._columns)))]

    def at_most(self, thresholds: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """See `exact.Answers`."""
        self.questions.append(_counts(thresholds, self._split, self._targets))
        return np.ones((1, *thresholds.shape), dtype=np.int64)


def _counts(thresholds: Floats, split: Split, targets: int) -> StatisticsQuery:
    """The question how many numbers are at most some thresholds."""
    return StatisticsQuery(split=split, targets=targets, keys=tuple(map(tuple, keys_of(thresholds).tolist())))


def _with_classes(clients: Clients, wanted: Wanted, names: Sequence[str]) -> tuple[Wanted, bool]:
    """What is wanted, with bounds of the numbers of classes; and whether one question about counts is enough."""
    if clients.classes is not None and wanted.bins is not None:
        wanted = replace(wanted, bounds={TARGET: (-0.5, len(clients.classes) - 0.5), **wanted.bounds})
    return wanted, not wanted.quantiles or (wanted.bins is not None and all(name in wanted.bounds for name in names))


def column_names(clients: Clients, features: Sequence[str] | None) -> tuple[list[str], int]:
    """The names of the numbers of inputs and then of targets, and how many of them targets are.

    Args:
        clients: what shows the form of their rows.
        features: names of the inputs, "x0", "x1", ... by default.

    Raises:
        SettingError: there are too many columns, or another number of names.
    """
    blank = clients.rows(0, "train")
    targets = math.prod(pytree.single(blank.y, "statistics").shape[1:])
    inputs = math.prod(pytree.single(blank.x, "statistics").shape[1:])
    if inputs + targets > MOST_COLUMNS:
        raise SettingError(f"statistics are for at most {MOST_COLUMNS:,} columns, got {inputs + targets:,}")
    if features is not None and len(features) != inputs:
        raise SettingError(f"features must name each of the {inputs} numbers of an input, got {len(features)} names")
    own = [TARGET] if targets == 1 else [f"{TARGET}{place}" for place in range(targets)]
    return [*(features or (f"x{place}" for place in range(inputs))), *own], targets


def _classes(answers: Answers, columns: int, classes: Sequence[str]) -> TextColumn:
    """Rows of each class, from counts of class numbers in the last column."""
    limits = np.tile(np.arange(len(classes), dtype=np.float64), (columns, 1))
    reached = answers.at_most(limits)[:, -1].sum(0)
    counts = np.diff(reached, prepend=0).astype(float).tolist()
    return TextColumn(dict(zip(classes, counts, strict=True)), 0.0, 0.0)


def _without(numbers: Mapping[str, NumberColumn]) -> dict[str, NumberColumn]:
    return {name: one for name, one in numbers.items() if name != TARGET}


def _moments(told: Floats) -> Moments:
    parts = dict(zip(PARTS, told, strict=True))
    counts = {name: parts[name].astype(np.int64) for name in PARTS[:3]}
    rows = int(told[:3, 0].sum()) if told.shape[1] else 0
    return Moments(rows, **counts, mean=parts["mean"], scatter=parts["scatter"])
