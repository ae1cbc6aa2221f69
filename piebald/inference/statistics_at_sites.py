"""Statistics of the columns of clients that are asked: exact ones, or from sums with noise or under masks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from piebald.contracts import Clients, Query, Runtime
from piebald.core import pytree
from piebald.core.errors import unknown
from piebald.core.moments import Floats, merged
from piebald.core.noise import NoiseSource
from piebald.data.clients.prepared import preparation_of
from piebald.data.preparation.preparation import OTHER
from piebald.inference.bounded_sums import STEP, SumPlan
from piebald.inference.columns import TARGET, input_names, target_columns
from piebald.inference.exact_statistics import ExactAnswers, bin_limits, counts_queries, edges_of
from piebald.inference.pooled_statistics import FederatedStatistics, Mode, NumberColumn, Table, TextColumn
from piebald.inference.queries.columns import MaskedSumsQuery, NoisySumsQuery, StatisticsQuery
from piebald.inference.request import StatisticsRequest
from piebald.inference.simulated import TableClients
from piebald.inference.sites import AskedSites
from piebald.methods.client_work import ClientWork
from piebald.privacy import SecureAggregation
from piebald.privacy.ledger import Ledger, budget

log = logging.getLogger("piebald.statistics")


@dataclass(frozen=True, slots=True)
class AskedColumns:
    """The columns of clients, which questions name by their places: the numbers of inputs, and then of targets.

    Attributes:
        names: of the columns.
        targets: how many of them, the last ones, are targets.
        categories: those of columns whose values are their numbers 0, 1, ..., and the classes of the target.
        classes: how many classes the target has, 0 where it is numbers.
    """

    names: Sequence[str]
    targets: int
    categories: Mapping[str, tuple[str, ...]]
    classes: int

    @classmethod
    def of(cls, clients: Clients, features: Sequence[str] | None = None) -> Self:
        """Return the columns of clients.

        Args:
            clients: clients whose rows have this form.
            features: names of the inputs, "x0", "x1", ... by default.

        Raises:
            SettingError: there are too many columns, or another number of names.
        """
        if isinstance(clients, TableClients):
            return cls(clients.features, 0, {name: tuple(words) for name, words in clients.coded.items()}, 0)
        coded: Mapping[str, Sequence[str]] = {}
        if (agreed := preparation_of(clients)) is not None:
            features, coded = agreed.feature_names_out, agreed.coded if agreed.form == "values" else {}
        blank = clients.rows(0, "train")
        inputs, targets = math.prod(pytree.single(blank.x, "statistics").shape[1:]), list(target_columns(blank.y))
        classes = {} if clients.classes is None else {TARGET: clients.classes}
        return cls(
            [*input_names(inputs, features, len(targets)), *targets], len(targets),
            {name: tuple(words) for name, words in {**coded, **classes}.items()}, len(clients.classes or ()),
        )  # fmt: skip

    @property
    def coded(self) -> dict[str, tuple[str, ...]]:
        """The categories of columns besides a class."""
        return {name: words for name, words in self.categories.items() if name in self.unclassed}

    @property
    def unclassed(self) -> Sequence[str]:
        """The columns besides a class."""
        return self.names[:-1] if self.classes else self.names

    def codes(self, name: str, values: Sequence[str]) -> tuple[str, ...]:
        """Return categories of a column as clients have them: by their numbers where it is coded, else as they are.

        Raises:
            SettingError: the column has no such category.
        """
        if (words := self.coded.get(name)) is None:
            return tuple(values)
        if strange := next((value for value in values if value not in words), None):
            raise unknown("category", strange, words)
        return tuple(str(words.index(value)) for value in values)


def statistics_at_sites(
    runtime: Runtime, work: ClientWork, clients: Clients, request: StatisticsRequest, *,
    features: Sequence[str] | None = None, ledger: Ledger | None = None, say: Callable[[str], None] = log.warning,
) -> FederatedStatistics:  # fmt: skip
    """Return statistics of the columns of clients: the numbers of inputs, the categories of tables, and targets.

    Where neither noise nor masks hide rows, each site is asked up to about 20 times; but where the request has bins,
    and bounds of all columns, it is asked twice, and quantiles come from the histogram.  Statistics of tables on this
    machine are always exact, to the bit.

    With noise each client adds it to its own sums, and the ledger of a site counts the question.  A class is counted,
    and so are columns with categories; columns of numbers need bounds, and quantiles a histogram.

    Args:
        runtime: the runtime that reaches the clients.
        work: the run; its masks have 64 bits.
        clients: their names, and the form of their rows.
        request: what is asked for.
        features: names of the inputs, "x0", "x1", ... by default.
        ledger: the budget of all questions of the caller, besides those of sites.
        say: called with a sentence about each client that is left out.

    Raises:
        SettingError: an argument is wrong, or no site answers.
        RuntimeFault: a site answers one question and not the next, or the masks cannot be taken off.
    """
    columns = AskedColumns.of(clients, features)
    sites = AskedSites(runtime, work, clients.names, say)
    if request.hides_rows:
        return _hidden(sites, work, columns, request, ledger)
    return _exact(sites, clients, columns, request, say)


def stated_questions(
    clients: Clients, request: StatisticsRequest, features: Sequence[str] | None = None
) -> list[Query]:  # fmt: skip
    """Return the questions that are known before the first answer.

    The thresholds of a bisection follow from answers, so its questions are not among them.

    Raises:
        SettingError: an argument is wrong.
    """
    columns = AskedColumns.of(clients, features)
    if request.hides_rows:
        return [_hidden_question(columns, request)[0]]
    request, few = _few_questions(clients, columns, request)
    thresholds = _category_limits(columns, _counted(columns, request, few))
    if few and request.bins is not None and all(name in request.bounds for name in columns.names):
        low, high = np.array([request.bounds[name] for name in columns.names], dtype=np.float64).reshape(-1, 2).T
        thresholds = bin_limits(edges_of(low, high, request.bins))
    moments = StatisticsQuery(split=request.split, targets=columns.targets)
    return [moments, *counts_queries(thresholds, request.split, columns.targets)]


def _exact(
    sites: AskedSites, clients: Clients, columns: AskedColumns, request: StatisticsRequest, say: Callable[[str], None]
) -> FederatedStatistics:  # fmt: skip
    """Return exact statistics."""
    # a class may have bounds as well, of its numbers
    request.check_columns([name for name in columns.names if name not in columns.coded], [*columns.categories])
    request, few = _few_questions(clients, columns, request)
    answers = ExactAnswers(sites, request.split, columns.targets)
    taking_part, tables = [sites.names[client] for client in answers.clients], dict[tuple[str, str], Table]()
    numbers, by_client = answers.columns(columns.names, taking_part, request, few)
    if request.categories or request.tables:
        categories = {**columns.categories, **request.categories}
        query, plan = _sums_question(columns, replace(request, bins=None, bounds={}, categories=categories))
        texts, tables = _categorical(plan, sites.sums(query, None)[1])
    else:
        texts = _category_counts(answers, columns, _counted(columns, request, few))
    apart = {name for name in columns.categories if name in texts or name != TARGET}
    if uncounted := sorted(apart - {*texts}):
        say(f"categories of {', '.join(uncounted)} are not told beside histograms: ask for them without bins")
    return FederatedStatistics(
        taking_part, "exact", [moments.rows for moments in answers.moments], _without(numbers, apart), texts, tables,
        {client: _without(own, apart) for client, own in by_client.items()}, left_out=sites.left_out,
    )  # fmt: skip


def _without(numbers: Mapping[str, NumberColumn], texts: Collection[str]) -> dict[str, NumberColumn]:
    return {name: column for name, column in numbers.items() if name not in texts}


def _few_questions(
    clients: Clients, columns: AskedColumns, request: StatisticsRequest
) -> tuple[StatisticsRequest, bool]:  # fmt: skip
    """Return the request with bounds of the numbers of categories, and whether one question about counts is enough."""
    if isinstance(clients, TableClients):  # which answer as often as they are asked
        counted = {name for pair in request.tables for name in pair if name not in columns.categories}
        present = {name: clients.categories(name) for name in sorted(counted - {*request.categories})}
        return replace(request, categories={**request.categories, **present}), False
    if request.bins is not None:
        # each number is in the middle of a bin
        coded = {name: (-0.5, len(words) - 0.5) for name, words in columns.categories.items()}
        request = replace(request, bounds={**coded, **request.bounds})
    bounded = request.bins is not None and all(name in request.bounds for name in columns.names)
    return request, not request.quantiles or bounded


def _counted(columns: AskedColumns, request: StatisticsRequest, few: bool) -> dict[str, Sequence[str]]:
    """Return the columns whose categories are counted: where one question about counts must do, none beside bins."""
    if few and request.bins is not None:
        return {}
    return {name: words for name, words in columns.categories.items() if not few or name != TARGET}


def _category_limits(columns: AskedColumns, categories: Mapping[str, Sequence[str]]) -> Floats:
    """Return the numbers of categories as thresholds [d, t]: as many for all columns, as a question has them."""
    most = max(map(len, categories.values()), default=0)
    return np.tile(np.arange(most, dtype=np.float64), (len(columns.names), 1))


def _category_counts(
    answers: ExactAnswers, columns: AskedColumns, categories: Mapping[str, Sequence[str]]
) -> dict[str, TextColumn]:
    """Return the rows of each category, from counts of their numbers."""
    if not categories:
        return {}
    at_most = answers.at_most(_category_limits(columns, categories)).sum(0)
    pooled, texts = merged(answers.moments), {}
    for name, words in categories.items():
        place = columns.names.index(name)
        counts = dict(zip(words, np.diff(at_most[place], prepend=0).astype(float).tolist(), strict=False))
        other = counts.pop(OTHER, 0.0) + float(pooled.present[place]) - float(at_most[place, len(words) - 1])
        texts[name] = TextColumn(counts, other, float(pooled.missing[place]))
    return texts


def _hidden(
    sites: AskedSites, work: ClientWork, columns: AskedColumns, request: StatisticsRequest, ledger: Ledger | None
) -> FederatedStatistics:  # fmt: skip
    """Return statistics from sums that hide single rows."""
    masking, noise = work.masking if request.secure else None, request.noise
    assert masking is None or isinstance(masking, SecureAggregation)
    query, plan = _hidden_question(columns, request)
    if ledger is not None:  # spent before anything is known, so that an error costs budget and not privacy
        ledger.spend(", ".join([*plan.bounds, *plan.categories]), noise)
    clients, total = sites.sums(query, masking)
    sites.leave_out(clients)
    # clients state their numbers of rows, so their noise is for a row that takes another's place, see `NoisySumsQuery`
    deviation = noise * plan.exchange_influence * math.sqrt(len(clients))
    if request.central:
        deviation = noise * plan.influence
        total = np.asarray(NoiseSource.fresh().add_to(torch.from_numpy(total), deviation / STEP).numpy())
    texts, tables = _categorical(plan, total)
    mode: Mode = "private" if masking is None else "secure and private" if noise else "secure"
    spent = None
    if request.delta is not None:
        spent = budget([noise], request.delta, "server" if request.central else "site")
    return FederatedStatistics(
        [sites.names[client] for client in clients], mode, None, plan.numbers(total, request.quantiles), texts, tables,
        privacy=spent, noise=deviation, left_out=sites.left_out,
    )  # fmt: skip


def _hidden_question(
    columns: AskedColumns, request: StatisticsRequest
) -> tuple[MaskedSumsQuery, SumPlan]:  # fmt: skip
    """Return the question that clients are asked, and its sums by the names of columns.

    Raises:
        SettingError: an argument is wrong.
    """
    numbers = [name for name in columns.unclassed if name not in columns.coded]
    for name in request.categories:
        if name not in columns.unclassed:
            raise unknown("column of numbers to give categories of,", name, columns.unclassed)
    request.check_columns(numbers, [*columns.categories])
    request = replace(request, categories={**columns.coded, **request.categories})
    # the categories of a class are known from the clients' description
    in_tables = [name for pair in request.tables for name in pair if name in columns.unclassed]
    request.check_hidden(numbers, [*columns.coded, *in_tables])
    query, plan = _sums_question(columns, request)
    if request.epsilon is not None and not request.central:
        return NoisySumsQuery(**query.model_dump(), noise=request.noise, masked=request.secure), plan
    return query, plan


def _sums_question(columns: AskedColumns, request: StatisticsRequest) -> tuple[MaskedSumsQuery, SumPlan]:
    """Return a question about sums, and its sums by the names of columns."""
    names, places = columns.unclassed, {name: place for place, name in enumerate(columns.names)}
    words = {name: request.categories[name] for name in names if name in request.categories}
    bounds = {name: request.bounds[name] for name in names if name in request.bounds}
    query = MaskedSumsQuery(
        split=request.split, bounds=tuple(map(bounds.get, names)), bins=request.bins or 0, classes=columns.classes,
        codes=tuple((places[name], columns.codes(name, values)) for name, values in words.items()),
        tables=tuple((places[first], places[second]) for first, second in request.tables),
    )  # fmt: skip
    classes = {TARGET: columns.categories[TARGET]} if columns.classes else {}
    return query, SumPlan(bounds, query.bins, {**words, **classes}, request.tables)


def _categorical(plan: SumPlan, total: Floats) -> tuple[dict[str, TextColumn], dict[tuple[str, str], Table]]:
    """Return the columns of text and the contingency tables from sums."""
    single, double = plan.counts(total)
    texts = {
        # counts end with "other" and missing, which `strict=False` leaves out of the categories
        name: TextColumn(
            dict(zip(plan.categories[name], counts.tolist(), strict=False)), float(counts[-2]), float(counts[-1])
        )
        for name, counts in single.items()
    }
    tables: dict[tuple[str, str], Table] = {
        (first, second): {
            value: dict(zip(plan.categories[second], line.tolist(), strict=True))
            for value, line in zip(plan.categories[first], counts, strict=True)
        }
        for (first, second), counts in double.items()
    }
    return texts, tables
