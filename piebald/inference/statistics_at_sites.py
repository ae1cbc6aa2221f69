"""Statistics of the columns of clients that are asked: exact ones, or from sums with noise or under masks.

Exact quantiles need no bounds and no sorted rows: the server bisects the order of all float64 numbers, and each client
counts how many of its numbers are at most the thresholds of the question.  After 16 questions at most, an order
statistic is known to the bit.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from piebald.contracts import Clients, Query, Runtime, Split
from piebald.core import pytree
from piebald.core.arguments import Fraction, Positive, checked
from piebald.core.errors import RuntimeFault, SettingError, unknown
from piebald.core.moments import HIGHEST, LOWEST, Floats, Ints, Moments, keys_of, merged, number_of, order_statistics
from piebald.core.randomness import NoiseSource
from piebald.data.clients.prepared import preparation_of
from piebald.data.preparation.column_models import DateColumn
from piebald.data.preparation.preparation import OTHER, PrepareSettings
from piebald.inference.columns import (
    STEP,
    TARGET,
    Bins,
    NoiseAt,
    Quantiles,
    StatisticsRequest,
    SumPlan,
    asked_owners,
    client_names,
    columns_of,
    input_names,
    statistics_request,
    target_columns,
)
from piebald.inference.pooled_statistics import FederatedStatistics, Mode, NumberColumn, Table, TextColumn
from piebald.inference.queries.columns import MOST_KEYS, PARTS, MaskedSumsQuery, NoisySumsQuery, StatisticsQuery
from piebald.inference.simulated import MOST_CATEGORIES, AskedSites, TableClients, simulated
from piebald.methods.client_work import ClientWork
from piebald.privacy import SecureAggregation
from piebald.privacy.ledger import Ledger, Withheld, budget

log = logging.getLogger("piebald.statistics")


class CountsWithheld(RuntimeFault):
    """Counts at thresholds that a site's rules of disclosure keep."""


_SECTIONS = 16  # of the numbers that are left: 2 would take 64 questions in place of 16


class ExactAnswers:
    """The answers of clients about d columns of numbers.

    The first question says who takes part: clients that refuse it, or do not answer, are left out, and those who
    answered must answer all further ones.

    Args:
        sites: reaches the clients.
        split: the split that the questions are about.
        targets: how many numbers a target has.

    Attributes:
        clients: the numbers of those who take part.
        moments: of the columns of each of them.

    Raises:
        SettingError: nobody answers.
    """

    def __init__(self, sites: AskedSites, split: Split, targets: int) -> None:
        self._sites, self._split, self._targets = sites, split, targets
        answers = sites.ask(StatisticsQuery(split=split, targets=targets), sites.runtime.clients())
        if not answers:
            raise sites.refusal("no site answers questions about statistics")
        sites.leave_out(answers)
        self.clients = list(answers)
        self.moments = [_moments(answer.vectors["moments"].numpy()) for answer in answers.values()]

    def at_most(self, thresholds: Floats) -> Ints:
        """Count the finite numbers of each client that are at most these thresholds [d, t]: [clients, d, t]."""
        queries = counts_queries(thresholds, self._split, self._targets)
        answers = [self._sites.ask(query, self.clients) for query in queries]
        # quantiles are a bisection over all rows: counts of fewer clients would lead it astray
        if lost := [client for client in self.clients if not all(client in answer for answer in answers)]:
            reason = self._sites.refused.get(lost[0], "it is away")
            kind = CountsWithheld if reason.endswith(Withheld.sentence) else RuntimeFault
            raise kind(
                f"{self._sites.names[lost[0]]} answered the first question and not the next one, which counts rows by "
                f"their values ({reason}): the log of a site that refuses names the column: leave that out, ask for "
                "no quantiles, or ask again"
            )
        counts = [[answer[client].vectors["counts"] for answer in answers] for client in self.clients]
        return torch.stack([torch.cat(parts, 1) for parts in counts]).numpy().astype(np.int64)

    def quantiles(self, present: Ints, shares: Sequence[float]) -> Floats:
        """Return exact quantiles [d, shares] of the pooled numbers, linear between neighbours like numpy.quantile.

        Args:
            present: how many numbers each column has [d].
            shares: of the numbers below.
        """
        if not shares:
            return np.zeros((len(present), 0))
        positions = np.maximum(present - 1, 0)[:, None] * np.asarray(shares, dtype=np.float64)
        # as numpy's method "linear": a share p lies at the position p (n - 1), between two order statistics
        below = np.floor(positions).astype(np.int64)
        # the neighbour of the last rank is itself; without numbers both are 0, and the result becomes NaN below
        ranks = np.minimum(np.concatenate([below, below + 1], axis=1), np.maximum(present - 1, 0)[:, None])
        keys = order_statistics(
            lambda thresholds: self.at_most(number_of(thresholds)).sum(0), ranks, LOWEST, HIGHEST, _SECTIONS
        )
        ends = np.where(present[:, None] > 0, number_of(keys) + 0.0, np.nan)  # -0.0 becomes 0.0
        lower, upper = ends[:, : len(shares)], ends[:, len(shares) :]
        part = positions - below
        with np.errstate(over="ignore", invalid="ignore"):
            # from the nearer end, as numpy interpolates: the other form would differ in the last bit
            between = np.where(part < 0.5, lower + (upper - lower) * part, upper - (upper - lower) * (1 - part))
        # at a rank itself nothing is interpolated: with an infinite neighbour 0 times infinity would be NaN
        return np.where(part == 0, lower, between)

    def columns(
        self, names: Sequence[str], clients: Sequence[str], request: StatisticsRequest, few_questions: bool = False,
        say: Callable[[str], None] = log.warning,
    ) -> tuple[dict[str, NumberColumn], dict[str, dict[str, NumberColumn]]]:  # fmt: skip
        """Return the columns of numbers over all clients, and each client's own where the request asks for them.

        Args:
            names: of the columns.
            clients: names of those who take part.
            request: what is asked for.
            few_questions: whether quantiles come from the histogram, whose counts are the only ones that are asked for.
            say: called with a sentence about quantiles that sites do not tell, which are left out.
        """
        if not names:
            return {}, {}
        pooled, shares = merged(self.moments), request.quantiles
        quantiles = np.full((len(names), len(shares)), np.nan)
        if not few_questions:
            try:
                quantiles = self.quantiles(pooled.present, shares)
            except CountsWithheld as error:
                # an exact quantile ends at a row, which a site with a floor never tells
                say(f"quantiles are left out: {error}; bins, with bounds of all columns, give those of histograms")
                quantiles, shares = quantiles[:, :0], ()
        edges: Floats | None = None
        counts = np.zeros((len(self.moments), len(names), 0), dtype=np.int64)
        if request.bins is not None:
            edges = edges_of(*self._ends(names, pooled.present, request), request.bins)
            counts = np.diff(self.at_most(bin_limits(edges)), axis=2)
        numbers = _columns(names, pooled, shares, quantiles, edges, counts.sum(0))
        if few_questions and edges is not None:
            numbers = {
                name: column.with_histogram(np.array(column.edges), np.array(column.counts), shares)
                for name, column in numbers.items()
            }
        no_quantiles = np.zeros((len(names), 0))
        by_client = {
            client: _columns(names, moments, (), no_quantiles, edges, own_counts)
            for client, moments, own_counts in zip(clients, self.moments, counts, strict=True)
        }
        return numbers, by_client if request.by_client else {}

    def _ends(self, names: Sequence[str], present: Ints, request: StatisticsRequest) -> tuple[Floats, Floats]:
        """Return the ends [d] of histograms: stated bounds, or the extremes, which are asked for."""
        ends = np.full((len(names), 2), np.nan)
        if any(name not in request.bounds for name in names):
            ends = self.quantiles(present, (0.0, 1.0))
        low, high = np.array([request.bounds.get(name, own) for name, own in zip(names, ends, strict=True)]).T
        return low, high


def counts_queries(thresholds: Floats, split: Split, targets: int) -> list[StatisticsQuery]:
    """Return questions about thresholds [d, t], each about no more than a question may have."""
    keys = keys_of(thresholds)
    parts = [keys[:, first : first + MOST_KEYS] for first in range(0, keys.shape[1], MOST_KEYS)]
    return [StatisticsQuery(split=split, targets=targets, keys=tuple(map(tuple, part.tolist()))) for part in parts]


def edges_of(low: Floats, high: Floats, bins: int) -> Floats:
    """Return edges [d, bins + 1] of bins of one width; as numpy.histogram's, a constant column has ends 1 apart."""
    # not numpy.histogram_bin_edges, which refuses a column whose numbers lie too near for so many bins
    low, high = np.where(low == high, low - 0.5, low), np.where(low == high, high + 0.5, high)
    ends = zip(low, high, strict=True)
    edges = [np.linspace(*pair, bins + 1) if np.isfinite(pair).all() else [np.nan] * (bins + 1) for pair in ends]
    return np.array(edges, dtype=np.float64).reshape(len(low), bins + 1)


def bin_limits(edges: Floats) -> Floats:
    """Return thresholds [d, bins + 1] whose counts tell those of bins: each has its lower edge, the last one both."""
    # questions count numbers at most a limit, and a bin has its lower edge: the next smaller float is the limit
    limits = np.nextafter(edges, -np.inf)
    limits[:, -1] = edges[:, -1]
    # columns without numbers have edges NaN, which are no thresholds; their counts are 0 anywhere
    return np.nan_to_num(limits)


def _columns(
    names: Sequence[str], moments: Moments, shares: Sequence[float], quantiles: Floats, edges: Floats | None,
    counts: Ints,
) -> dict[str, NumberColumn]:  # fmt: skip
    columns, variance = {}, moments.variance
    for index, name in enumerate(names):
        present = int(moments.present[index])
        columns[name] = NumberColumn(
            present=present,
            missing=int(moments.missing[index]),
            infinite=int(moments.infinite[index]),
            mean=float(moments.mean[index]) if present else float("nan"),
            variance=float(variance[index]),
            quantiles=dict(zip(shares, quantiles[index].tolist(), strict=True)),
            edges=() if edges is None else tuple(edges[index].tolist()),
            counts=tuple(counts[index].tolist()),
        )
    return columns


def _moments(vectors: Floats) -> Moments:
    """Return the moments of one client from its answer [parts, d]."""
    parts = dict(zip(PARTS, np.asarray(vectors), strict=True))
    counts = {name: parts[name].astype(np.int64) for name in PARTS[:3]}
    # each row is present, missing or infinite in the first column
    rows = int(vectors[:3, 0].sum()) if vectors.shape[1] else 0
    return Moments(rows, **counts, mean=parts["mean"], scatter=parts["scatter"])


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
        if (words := self.categories.get(name)) is None:
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
    request, pairs = _without_clients(request, columns)
    told, plan = (
        _hidden(sites, work, columns, request, ledger) if request.hides_rows
        else _exact(sites, clients, columns, request, say)
    )  # fmt: skip
    tables = {**told.tables, **_by_client(sites, plan, pairs)}
    # as they were asked for
    tables = {pair: tables[pair] for pair in (*request.tables, *pairs)}
    return replace(told, tables=tables, dates=_dates_of(clients) & {*told.numbers})


def _without_clients(
    request: StatisticsRequest, columns: AskedColumns
) -> tuple[StatisticsRequest, dict[tuple[str, str], str]]:
    """Return the request without tables of clients by a column, and the column of each, which is counted alone."""
    mine = client_names(request.client) - {*columns.names}
    pairs = {pair: other for pair in request.tables for own, other in (pair, pair[::-1]) if own in mine}
    if pairs and (request.secure or request.central):
        raise SettingError("a table by client shows what secure, or noise at the server, is to hide: leave it out")
    tables = tuple(pair for pair in request.tables if pair not in pairs)
    return replace(request, tables=tables, counted=tuple(pairs.values())), pairs


def _by_client(
    sites: AskedSites, plan: SumPlan | None, pairs: Mapping[tuple[str, str], str]
) -> dict[tuple[str, str], Table]:
    """Return tables of clients by a column, from the counts of each client."""
    tables = dict[tuple[str, str], Table]()
    if plan is None:
        return tables
    own = {sites.names[client]: _categorical(plan, sums)[0] for client, sums in sorted(sites.open_sums.items())}
    for (first, second), other in pairs.items():
        lines = {name: dict(counts[other].counts) for name, counts in own.items()}
        across = {value: {name: line[value] for name, line in lines.items()} for value in plan.categories[other]}
        tables[first, second] = lines if other == second else across
    return tables


def _dates_of(clients: Clients) -> frozenset[str]:
    """Return the columns of dates."""
    if isinstance(clients, TableClients):
        return clients.dates
    agreed = preparation_of(clients)
    return frozenset(column.name for column in (agreed.columns if agreed else ()) if isinstance(column, DateColumn))


def stated_questions(
    clients: Clients, request: StatisticsRequest, features: Sequence[str] | None = None
) -> list[Query]:  # fmt: skip
    """Return the questions that are known before the first answer.

    The thresholds of a bisection follow from answers, so its questions are not among them.

    Raises:
        SettingError: an argument is wrong.
    """
    columns = AskedColumns.of(clients, features)
    request, _ = _without_clients(request, columns)
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
) -> tuple[FederatedStatistics, SumPlan | None]:  # fmt: skip
    """Return exact statistics, and the sums that categories were counted by."""
    # a class may have bounds as well, of its numbers
    request.check_columns([name for name in columns.names if name not in columns.coded], [*columns.categories])
    request, few = _few_questions(clients, columns, request)
    answers = ExactAnswers(sites, request.split, columns.targets)
    taking_part, tables = [sites.names[client] for client in answers.clients], dict[tuple[str, str], Table]()
    numbers, by_client = answers.columns(columns.names, taking_part, request, few, say)
    plan = None
    if request.categories or request.tables or request.counted:
        categories = {**columns.categories, **request.categories}
        query, plan = _sums_question(columns, replace(request, bins=None, bounds={}, categories=categories))
        texts, tables = _categorical(plan, sites.sums(query, None)[1])
    else:
        try:
            texts = _category_counts(answers, columns, _counted(columns, request, few))
        except CountsWithheld as error:
            say(f"categories are left out: {error}")
            texts = {}
    apart = {name for name in columns.categories if name in texts or name != TARGET}
    if (uncounted := sorted(apart - {*texts})) and request.bins is not None:
        say(f"categories of {', '.join(uncounted)} are not told beside histograms: ask for them without bins")
    told = FederatedStatistics(
        taking_part, "exact", [moments.rows for moments in answers.moments], _without(numbers, apart), texts, tables,
        {client: _without(own, apart) for client, own in by_client.items()}, left_out=sites.left_out,
    )  # fmt: skip
    return told, plan


def _without(numbers: Mapping[str, NumberColumn], texts: Collection[str]) -> dict[str, NumberColumn]:
    return {name: column for name, column in numbers.items() if name not in texts}


def _few_questions(
    clients: Clients, columns: AskedColumns, request: StatisticsRequest
) -> tuple[StatisticsRequest, bool]:  # fmt: skip
    """Return the request with bounds of the numbers of categories, and whether one question about counts is enough."""
    if isinstance(clients, TableClients):  # which answer as often as they are asked
        named = {*request.counted, *itertools.chain(*request.tables)} - {*columns.categories, *request.categories}
        present = {name: clients.categories(name) for name in sorted(named)}
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
        index = columns.names.index(name)
        counts = dict(zip(words, np.diff(at_most[index], prepend=0).astype(float).tolist(), strict=False))
        other = counts.pop(OTHER, 0.0) + float(pooled.present[index]) - float(at_most[index, len(words) - 1])
        texts[name] = TextColumn(counts, other, float(pooled.missing[index]))
    return texts


def _hidden(
    sites: AskedSites, work: ClientWork, columns: AskedColumns, request: StatisticsRequest, ledger: Ledger | None
) -> tuple[FederatedStatistics, SumPlan]:  # fmt: skip
    """Return statistics from sums that hide single rows, and what these are of."""
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
    told = FederatedStatistics(
        [sites.names[client] for client in clients], mode, None, plan.numbers(total, request.quantiles), texts, tables,
        privacy=spent, noise=deviation, left_out=sites.left_out,
    )  # fmt: skip
    return told, plan


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
    named = (*request.counted, *itertools.chain(*request.tables))
    in_tables = [name for name in named if name in columns.unclassed]
    request.check_hidden(numbers, [*columns.coded, *in_tables])
    query, plan = _sums_question(columns, request)
    if request.epsilon is not None and not request.central:
        return NoisySumsQuery(**query.model_dump(), noise=request.noise, masked=request.secure), plan
    return query, plan


def _sums_question(columns: AskedColumns, request: StatisticsRequest) -> tuple[MaskedSumsQuery, SumPlan]:
    """Return a question about sums, and its sums by the names of columns."""
    names, places = columns.unclassed, {name: index for index, name in enumerate(columns.names)}
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


@checked
def statistics(
    clients: Any,
    *,
    client: str | None = None,
    columns: Sequence[str] | None = None,
    split: Split = "train",
    features: Sequence[str] | None = None,
    quantiles: Quantiles = (0.25, 0.5, 0.75),
    bins: Bins | None = None,
    bounds: Mapping[str, Sequence[float]] | None = None,
    categories: Mapping[str, Sequence[str]] | None = None,
    tables: Sequence[Sequence[str]] = (),
    by_client: bool = False,
    secure: bool = False,
    epsilon: Positive | None = None,
    delta: Fraction | None = None,
    noise_at: NoiseAt = "server",
    ledger: Ledger | None = None,
    prepare: PrepareSettings | Mapping[str, Any] | None = None,
) -> FederatedStatistics:
    """Compute counts, means, deviations, quantiles, histograms and contingency tables over the rows of all clients.

    Without `secure` and `epsilon` they are those of the pooled rows: counts and quantiles to the bit, means and
    variances to rounding (each client's are merged as in Chan, Golub, LeVeque 1983).  Clients send their counts and
    moments, and how many of their numbers are at most the thresholds of a bisection, never a row.

    Args: Rows
        clients: `Clients`, or anything that `clients_from` accepts; or a pandas DataFrame, or the path of a CSV or
            Parquet file, with a column `client`; or a mapping from clients' names to such tables of their own.  Tables
            may have gaps and text.
        client: the column that names the client of each row.
        columns: names of columns, all by default.
        split: the split, where clients have splits; tables are taken whole.
        features: names of the inputs of `Clients`; "x0", "x1", ... by default, and "target".
        prepare: how columns of tables are read, see `PrepareSettings`: cleaned, and with further words for gaps.

    Args: Statistics
        quantiles: shares in [0, 1] of the numbers below.
        bins: bins of a histogram of each column of numbers, from its smallest to its largest number, or its bounds.
        bounds: (low, high) of columns of numbers.  Under `secure` or `epsilon`, all must have them, and a number
            outside counts as the nearer bound.
        categories: the categories of columns, by name; by default those that clients have.  Under `secure` or
            `epsilon` clients do not say them, so only columns with stated categories are counted; one of numbers that
            has bounds, too, is counted and added up.
        tables: pairs of columns to count together; whole numbers count as categories, too, and so does `client`, which
            may also be called "client".
        by_client: also each client's own columns of numbers.

    Args: Privacy
        secure: clients' sums are added up under masks, so that nobody learns one client's; three clients at least.
        epsilon, delta: the privacy budget of this question, for all statistics together: Gaussian noise hides whether
            the data has a row.  `delta` is below one over the number of rows.
        noise_at: the place where noise is added: once to the sum, by a "server" that must be trusted, or by each
            "client" to its own sums, so that no server must be.  Under `secure` it is the clients.  A client states how
            many rows it has, so its noise hides which row is in the place of one and not whether there is one more;
            the change is larger, and so is the noise: of one column of numbers 1.15 times, of counts alone 1.41 times,
            besides the root of the number of clients.
        ledger: the budget of all questions about these rows; this one is counted, or refused.

    Returns:
        The statistics; under `secure` or `epsilon`, quantiles come from the histogram, and are at most one bin's width
        from those of the pooled rows, noise aside.

    Raises:
        SettingError: an argument is wrong, or clients' rows do not fit together.

    Examples:
        >>> import pandas as pd
        >>> import piebald
        >>> visits = pd.DataFrame({"clinic": ["A", "A", "B", "B"], "age": [30.0, 50.0, 40.0, None]})
        >>> ages = piebald.statistics(visits, client="clinic", quantiles=(0.5,))["age"]
        >>> ages.present, ages.missing, ages.mean, ages.quantiles[0.5]
        (3, 1, 40.0, 40.0)
    """
    request = statistics_request(
        quantiles, bins, bounds, by_client, categories, tables, "train", secure, epsilon, delta, noise_at, client
    )
    if ledger is not None and epsilon is None:
        raise SettingError("ledger belongs to noise: give epsilon, too, or leave it out")
    if delta is not None and ledger is not None and ledger.delta != delta:
        raise SettingError(f"delta must be the ledger's, {ledger.delta:g}, got {delta:g}")
    # words of clients are no numbers of categories where nobody may look at them: others than the stated ones are one
    most = None if request.hides_rows else MOST_CATEGORIES
    owners = asked_owners(clients, client, prepare, (client,))
    rows = TableClients.of(columns_of(owners, client, columns, split, features), request.categories, most)
    with simulated(rows, [SecureAggregation(bits=64)] * secure) as (runtime, work):
        return statistics_at_sites(runtime, work, rows, request, ledger=ledger)
