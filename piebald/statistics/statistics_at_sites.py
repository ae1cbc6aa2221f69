"""Statistics of clients that are asked: from exact answers, from sums with noise, or from sums under masks.

Exact quantiles need no bounds and no sorted rows: the server bisects the order of all float64 numbers, and each client
counts how many of its numbers are at most the thresholds of the question.  After 16 questions at most, an order
statistic is known to the bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from piebald.contracts import Clients, Query, Runtime, Split
from piebald.contracts.model_spec import ModelSpec
from piebald.core import pytree
from piebald.core.errors import RuntimeFault, SettingError, unknown
from piebald.core.moments import (
    HIGHEST,
    LOWEST,
    Floats,
    Ints,
    Moments,
    keys_of,
    merged,
    number_of,
    order_statistics,
)
from piebald.core.noise import NoiseSource
from piebald.core.plain_text import printable
from piebald.data.clients.prepared import preparation_of
from piebald.data.preparation.preparation import OTHER
from piebald.methods.client_work import ClientWork
from piebald.privacy import SecureAggregation
from piebald.privacy.ledger import Ledger, budget
from piebald.statistics.bounded_sums import STEP, SumPlan
from piebald.statistics.columns import TARGET, input_names, target_columns
from piebald.statistics.pooled_statistics import FederatedStatistics, Mode, NumberColumn, Table, TextColumn
from piebald.statistics.queries.columns import MOST_KEYS, PARTS, MaskedSumsQuery, NoisySumsQuery, StatisticsQuery
from piebald.statistics.request import StatisticsRequest, noise_multiplier
from piebald.statistics.simulated import TableClients
from piebald.statistics.sites import AskedSites

log = logging.getLogger("piebald.statistics")
_PARTS = 16  # of the numbers that are left: 2 would take 64 questions in place of 16


class SiteAnswers:
    """Answers of the clients of a runtime about d columns of numbers.

    The first question says who takes part: sites that refuse it, or do not answer, are left out, and those who answered
    must answer all further ones.

    Args:
        runtime: the runtime that reaches the clients.
        spec: the model that a task carries, which the questions are not about.
        split: the split that the questions are about.
        targets: how many numbers a target has.

    Attributes:
        clients: the numbers of those who take part.
        sites: the clients, with the reasons of those who do not take part.
    """

    def __init__(self, runtime: Runtime, spec: ModelSpec, split: Split, targets: int) -> None:
        self.sites, self._split, self._targets = AskedSites(runtime, spec), split, targets
        self._moments: list[Moments] = []
        self.clients = list(runtime.clients())

    def moments(self) -> list[Moments]:
        """Return each client's moments of the columns.

        Raises:
            SettingError: nobody answers.
        """
        if not self._moments:
            answers = self.sites.ask(StatisticsQuery(split=self._split, targets=self._targets), self.clients)
            if not answers:
                raise self.sites.refusal("no site answers questions about statistics")
            # whoever does not answer the first question is left out of all further ones
            self.clients = list(answers)
            self._moments = [_moments(answer.vectors["moments"].numpy()) for answer in answers.values()]
        return self._moments

    def at_most(self, thresholds: Floats) -> Ints:
        """Count the finite numbers of each client that are at most these thresholds [d, t]: [clients, d, t]."""
        answers = [
            self.sites.ask(query, self.clients) for query in _counts_queries(thresholds, self._split, self._targets)
        ]
        # quantiles are a bisection over all rows: counts of fewer clients would lead it astray
        if lost := [client for client in self.clients if not all(client in answer for answer in answers)]:
            raise RuntimeFault(
                f"client {lost[0] + 1} answered the first question and not the next one "
                f"({self.sites.refused[lost[0]]}): ask again, or for no more than it answers"
            )
        counts = [[answer[client].vectors["counts"] for answer in answers] for client in self.clients]
        return torch.stack([torch.cat(parts, 1) for parts in counts]).numpy().astype(np.int64)


def statistics_at_sites(
    runtime: Runtime, spec: ModelSpec, clients: Clients, request: StatisticsRequest, *, split: Split = "train",
    features: Sequence[str] | None = None, say: Callable[[str], None] = log.warning,
) -> FederatedStatistics:  # fmt: skip
    """Return statistics of the columns of sites: the numbers of inputs, the categories of tables, and targets.

    Where the request has bins, and bounds of all columns, quantiles come from the histogram, and each site is asked
    twice; otherwise, and of tables on this machine, they are exact, to the bit, and it is asked up to about 20 times.

    Args:
        runtime: the runtime that reaches the clients.
        spec: the model that a task carries.
        clients: their names, and the form of their rows.
        request: what is asked for; of sites, no categories and tables.
        split: the split that the statistics are of.
        features: names of the inputs, "x0", "x1", ... by default.
        say: called with a sentence about each client that is left out.

    Raises:
        SettingError: no site answers.
        RuntimeFault: a site answers one question and not the next.
    """
    names, targets = column_names(clients, features)
    categories, tables = categories_at_sites(clients), dict[tuple[str, str], Table]()
    request, once = _with_categories(clients, categories, request, names)
    answers = SiteAnswers(runtime, spec, split, targets)
    moments = answers.moments()
    say_left_out(answers.sites, clients, answers.clients, say)
    taking_part = [str(clients.names[client]) for client in answers.clients]
    numbers, by_client = numbers_of(answers, names, taking_part, request, once)
    if request.categories or request.tables:
        # counts alone: columns of numbers have sums in any bounds, which nobody reads
        counts = replace(
            request, bins=None, bounds=dict.fromkeys(names, (0.0, 1.0)),
            categories={**categories, **request.categories},
        )  # fmt: skip
        query, plan = _sums_query(clients, names, counts, split)
        texts, tables = _categorical(plan, answers.sites.sums(query, None)[1])
    else:
        texts = _category_counts(answers, names, _counted(categories, request, once))
    apart = {name for name in categories if name in texts or name != TARGET}
    if uncounted := sorted(apart - {*texts}):
        say(f"categories of {', '.join(uncounted)} are not told beside histograms: ask for them without bins")
    numbers = _without(numbers, apart)
    by_client = {client: _without(columns, apart) for client, columns in by_client.items()}
    rows = [client_moments.rows for client_moments in moments]
    return FederatedStatistics(taking_part, "exact", rows, numbers, texts, tables, by_client)


def say_left_out(sites: AskedSites, clients: Clients, taking_part: Sequence[int], say: Callable[[str], None]) -> None:
    """Say which clients are left out, and why."""
    for client, reason in sites.refused.items():
        if client not in taking_part:
            say(f"{printable(str(clients.names[client]))} is left out: {reason}")


def stated_questions(
    clients: Clients, request: StatisticsRequest, features: Sequence[str] | None, split: Split
) -> list[Query]:
    """Return the questions that are known before the first answer.

    The thresholds of a bisection follow from answers, so its questions are not among them.

    Raises:
        SettingError: there are too many columns, or another number of names.
    """
    names, targets = column_names(clients, features)
    categories = categories_at_sites(clients)
    request, once = _with_categories(clients, categories, request, names)
    thresholds = _category_limits(len(names), _counted(categories, request, once))
    if once and request.bins is not None and all(name in request.bounds for name in names):
        low, high = np.array([request.bounds[name] for name in names], dtype=np.float64).reshape(-1, 2).T
        thresholds = _bin_limits(edges_of(low, high, request.bins))
    moments = StatisticsQuery(split=split, targets=targets)
    return [moments, *_counts_queries(thresholds, split, targets)]


def _counts_queries(thresholds: Floats, split: Split, targets: int) -> list[StatisticsQuery]:
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


def exact_quantiles(answers: SiteAnswers, present: Ints, shares: Sequence[float]) -> Floats:
    """Return exact_quantiles [d, shares] of the pooled numbers, linear between order statistics like numpy.quantile."""
    if not shares:
        return np.zeros((len(present), 0))
    places = np.maximum(present - 1, 0)[:, None] * np.asarray(shares, dtype=np.float64)
    # as numpy's method "linear": a share p lies at the place p (n - 1), between two order statistics
    below = np.floor(places).astype(np.int64)
    # the neighbour of the last rank is itself; without numbers both are 0, and the result becomes NaN below
    ranks = np.minimum(np.concatenate([below, below + 1], axis=1), np.maximum(present - 1, 0)[:, None])
    places_of = order_statistics(lambda keys: answers.at_most(number_of(keys)).sum(0), ranks, LOWEST, HIGHEST, _PARTS)
    ends = np.where(present[:, None] > 0, number_of(places_of) + 0.0, np.nan)  # -0.0 becomes 0.0
    lower, upper = ends[:, : len(shares)], ends[:, len(shares) :]
    part = places - below
    with np.errstate(over="ignore", invalid="ignore"):
        # from the nearer end, as numpy interpolates: the other form would differ in the last bit
        between = np.where(part < 0.5, lower + (upper - lower) * part, upper - (upper - lower) * (1 - part))
    # at a rank itself nothing is interpolated: with an infinite neighbour 0 times infinity would be NaN
    return np.where(part == 0, lower, between)


def _bin_limits(edges: Floats) -> Floats:
    """Return thresholds [d, bins + 1] whose counts tell those of bins: each has its lower edge, the last one both."""
    # questions count numbers at most a limit, and a bin has its lower edge: the next smaller float is the limit
    limits = np.nextafter(edges, -np.inf)
    limits[:, -1] = edges[:, -1]
    # columns without numbers have edges NaN, which are no thresholds; their counts are 0 anywhere
    return np.nan_to_num(limits)


def numbers_of(
    answers: SiteAnswers, names: Sequence[str], clients: Sequence[str], request: StatisticsRequest, once: bool = False
) -> tuple[dict[str, NumberColumn], dict[str, dict[str, NumberColumn]]]:
    """Return the columns of numbers over all clients, and each client's own where the request asks for them.

    Args:
        answers: of the clients about these columns.
        names: the columns.
        clients: the clients' names.
        request: what is asked for.
        once: leave quantiles out, NaN, so that at most one question is about counts, that of the histogram.
    """
    if not names:
        return {}, {}
    moments = answers.moments()
    pooled = merged(moments)
    quantiles = np.full((len(names), len(request.quantiles)), np.nan)
    if not once:
        quantiles = exact_quantiles(answers, pooled.present, request.quantiles)
    edges: Floats | None = None
    counts = np.zeros((len(moments), len(names), 0), dtype=np.int64)
    if request.bins is not None:
        ends = np.full((len(names), 2), np.nan)
        # stated bounds need no question; without them the extremes are asked for
        if any(name not in request.bounds for name in names):
            ends = exact_quantiles(answers, pooled.present, (0.0, 1.0))
        for place, name in enumerate(names):
            ends[place] = request.bounds.get(name, ends[place])
        edges = edges_of(ends[:, 0], ends[:, 1], request.bins)
        counts = np.diff(answers.at_most(_bin_limits(edges)), axis=2)
    numbers = _columns(names, pooled, request.quantiles, quantiles, edges, counts.sum(0))
    if once and edges is not None:
        numbers = {
            name: column.with_histogram(np.array(column.edges), np.array(column.counts), request.quantiles)
            for name, column in numbers.items()
        }
    if not request.by_client:
        return numbers, {}
    no_quantiles = np.zeros((len(names), 0))
    by_client = {
        client: _columns(names, client_moments, (), no_quantiles, edges, counts[place])
        for place, (client, client_moments) in enumerate(zip(clients, moments, strict=True))
    }
    return numbers, by_client


def _columns(
    names: Sequence[str], moments: Moments, shares: Sequence[float], quantiles: Floats, edges: Floats | None,
    counts: Ints,
) -> dict[str, NumberColumn]:  # fmt: skip
    columns, variance = {}, moments.variance
    for place, name in enumerate(names):
        present = int(moments.present[place])
        columns[name] = NumberColumn(
            present=present,
            missing=int(moments.missing[place]),
            infinite=int(moments.infinite[place]),
            mean=float(moments.mean[place]) if present else float("nan"),
            variance=float(variance[place]),
            quantiles=dict(zip(shares, quantiles[place].tolist(), strict=True)),
            edges=() if edges is None else tuple(edges[place].tolist()),
            counts=tuple(counts[place].tolist()),
        )
    return columns


def categories_at_sites(clients: Clients) -> dict[str, tuple[str, ...]]:
    """Return the categories of columns whose values are their numbers 0, 1, ..., and the classes."""
    coded: Mapping[str, Sequence[str]] = clients.coded if isinstance(clients, TableClients) else {}
    if (agreed := preparation_of(clients)) is not None and agreed.form == "values":
        coded = agreed.coded
    classes = {} if clients.classes is None else {TARGET: clients.classes}
    return {name: tuple(words) for name, words in {**coded, **classes}.items()}


def code_words(coded: Sequence[str] | None, values: Sequence[str]) -> tuple[str, ...]:
    """Return categories as sites have them: by their numbers where the column is coded, else as they are.

    Raises:
        SettingError: the column has no such category.
    """
    if coded is None:
        return tuple(values)
    if strange := next((value for value in values if value not in coded), None):
        raise unknown("category", strange, coded)
    return tuple(str(coded.index(value)) for value in values)


def _with_categories(
    clients: Clients, categories: Mapping[str, Sequence[str]], request: StatisticsRequest, names: Sequence[str]
) -> tuple[StatisticsRequest, bool]:
    """Return the request with bounds of the numbers of categories, and whether one question about counts is enough."""
    if isinstance(clients, TableClients):  # which answer as often as they are asked
        return request, False
    if request.bins is not None:
        # each number is in the middle of a bin
        coded = {name: (-0.5, len(words) - 0.5) for name, words in categories.items()}
        request = replace(request, bounds={**coded, **request.bounds})
    bounded = request.bins is not None and all(name in request.bounds for name in names)
    return request, not request.quantiles or bounded


def column_names(clients: Clients, features: Sequence[str] | None) -> tuple[list[str], int]:
    """Return the names of the numbers of inputs and then of targets, and how many of them targets are.

    Args:
        clients: clients whose rows have this form.
        features: names of the inputs, "x0", "x1", ... by default.

    Raises:
        SettingError: there are too many columns, or another number of names.
    """
    if isinstance(clients, TableClients):
        return list(clients.features), 0
    if (agreed := preparation_of(clients)) is not None:
        features = agreed.feature_names_out
    blank = clients.rows(0, "train")
    inputs, targets = math.prod(pytree.single(blank.x, "statistics").shape[1:]), list(target_columns(blank.y))
    return [*input_names(inputs, features, len(targets)), *targets], len(targets)


def _counted(
    categories: Mapping[str, Sequence[str]], request: StatisticsRequest, once: bool
) -> dict[str, Sequence[str]]:
    """Return the columns whose categories are counted: where one question about counts must do, none beside bins."""
    if once and request.bins is not None:
        return {}
    return {name: words for name, words in categories.items() if not once or name != TARGET}


def _category_limits(columns: int, categories: Mapping[str, Sequence[str]]) -> Floats:
    """Return the numbers of categories as thresholds [d, t]: as many for all columns, as a question has them."""
    most = max(map(len, categories.values()), default=0)
    return np.tile(np.arange(most, dtype=np.float64), (columns, 1))


def _category_counts(
    answers: SiteAnswers, names: Sequence[str], categories: Mapping[str, Sequence[str]]
) -> dict[str, TextColumn]:
    """Return the rows of each category, from counts of their numbers."""
    if not categories:
        return {}
    reached = answers.at_most(_category_limits(len(names), categories)).sum(0)
    pooled, texts = merged(answers.moments()), {}
    for name, words in categories.items():
        place = names.index(name)
        counts = dict(zip(words, np.diff(reached[place], prepend=0).astype(float).tolist(), strict=False))
        other = counts.pop(OTHER, 0.0) + float(pooled.present[place]) - float(reached[place, len(words) - 1])
        texts[name] = TextColumn(counts, other, float(pooled.missing[place]))
    return texts


def _sums_query(
    clients: Clients, names: Sequence[str], request: StatisticsRequest, split: Split
) -> tuple[MaskedSumsQuery, SumPlan]:
    """Return a question about sums, and its sums by the names of columns.

    Args:
        clients: whose rows have these columns.
        names: of the columns.
        request: has categories of some of them, and bounds of all others.
        split: the split of the rows.
    """
    coded, places = categories_at_sites(clients), {name: place for place, name in enumerate(names)}
    columns = names if clients.classes is None else names[:-1]  # besides a class, which is always counted
    words = {name: tuple(request.categories[name]) for name in columns if name in request.categories}
    bounds = {name: request.bounds[name] for name in columns if name not in words}
    query = MaskedSumsQuery(
        split=split, bounds=tuple(bounds.values()), bins=request.bins or 0, classes=len(clients.classes or ()),
        codes=tuple((places[name], code_words(coded.get(name), words[name])) for name in words),
        tables=tuple((places[first], places[second]) for first, second in request.tables),
    )  # fmt: skip
    classes = {} if clients.classes is None else {TARGET: tuple(clients.classes)}
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


def _without(numbers: Mapping[str, NumberColumn], texts: Collection[str]) -> dict[str, NumberColumn]:
    return {name: column for name, column in numbers.items() if name not in texts}


def _moments(vectors: Floats) -> Moments:
    """Return the moments of one client from its answer [parts, d]."""
    parts = dict(zip(PARTS, np.asarray(vectors), strict=True))
    counts = {name: parts[name].astype(np.int64) for name in PARTS[:3]}
    # each row is present, missing or infinite in the first column
    rows = int(vectors[:3, 0].sum()) if vectors.shape[1] else 0
    return Moments(rows, **counts, mean=parts["mean"], scatter=parts["scatter"])


def hidden_at_sites(
    runtime: Runtime, work: ClientWork, clients: Clients, request: StatisticsRequest, *, epsilon: float | None,
    delta: float | None, noise_at: Literal["server", "client"] = "client", ledger: Ledger | None = None,
    split: Split = "train", features: Sequence[str] | None = None, say: Callable[[str], None] = log.warning,
) -> FederatedStatistics:  # fmt: skip
    """Return statistics of columns from sums that hide single rows.

    With an epsilon each client adds noise to its own sums, and the ledger of a site counts the question; where the run
    masks, sums leave under its masks.  A class is counted, and so are columns with categories; all others need bounds,
    and quantiles a histogram.

    Args:
        runtime: the runtime that reaches the clients.
        work: the run, with `SecureAggregation` of 64 bits for sums under masks.
        clients: their names, and the form of their rows.
        request: what is asked for; nothing of single clients.
        epsilon, delta: what the question spends of each site's budget, None for no noise.
        noise_at: "server" to add noise once, to the sum of clients on this machine, which then comes in the open.
        ledger: the budget of all questions of the caller, besides those of sites.
        split: the split that the statistics are of.
        features: names of the inputs, "x0", "x1", ... by default.
        say: called with a sentence about each client that is left out.

    Raises:
        SettingError: an argument is wrong, or no site answers.
        RuntimeFault: the masks cannot be taken off.
    """
    masking = work.masking
    assert masking is None or isinstance(masking, SecureAggregation)
    # under masks nobody sees the sum before it is complete, so noise can only be added by the clients
    central = noise_at == "server" and masking is None and epsilon is not None
    query, plan = hidden_question(clients, request, features, split, masking is not None, epsilon, delta, central)
    noise = noise_multiplier(epsilon, delta)
    if ledger is not None:  # spent before anything is known, so that an error costs budget and not privacy
        ledger.spend(", ".join([*plan.bounds, *plan.categories]), noise)
    sites = AskedSites(runtime, work)
    taking_part, total = sites.sums(query, masking)
    say_left_out(sites, clients, taking_part, say)
    # sites state their numbers of rows, so their noise is for a row that takes another's place, see `NoisySumsQuery`
    deviation = noise * plan.exchange_influence * math.sqrt(len(taking_part))
    if central:
        deviation = noise * plan.influence
        total = np.asarray(NoiseSource.fresh().add_to(torch.from_numpy(total), deviation / STEP).numpy())
    texts, tables = _categorical(plan, total)
    mode: Mode = "private" if masking is None else "secure and private" if noise else "secure"
    spent = None if delta is None or not noise else budget([noise], delta, "server" if central else "site")
    names = [str(clients.names[client]) for client in taking_part]
    numbers = plan.numbers(total, request.quantiles)
    return FederatedStatistics(names, mode, None, numbers, texts, tables, privacy=spent, noise=deviation)


def hidden_question(
    clients: Clients, request: StatisticsRequest, features: Sequence[str] | None, split: Split, masked: bool,
    epsilon: float | None, delta: float | None, central: bool = False,
) -> tuple[MaskedSumsQuery, SumPlan]:  # fmt: skip
    """Return the question that clients are asked, and its sums by the names of columns.

    Args:
        clients, request, features, split, epsilon, delta: as of `hidden_at_sites`.
        masked: whether sums leave under masks.
        central: whether the server adds the noise.

    Raises:
        SettingError: an argument is wrong.
    """
    names, _ = column_names(clients, features)
    coded = {
        name: tuple(words)
        for name, words in categories_at_sites(clients).items()
        if name != TARGET or not clients.classes
    }
    request = replace(request, categories={**coded, **request.categories})
    columns = names[:-1] if clients.classes is not None else names  # besides a class, which is always counted
    numbers = [name for name in columns if name not in request.categories]
    for name in request.bounds:
        if name not in numbers:
            raise unknown("column of numbers to give bounds of,", name, numbers)
    for name in request.categories:
        if name not in columns:
            raise unknown("column of numbers to give categories of,", name, columns)
    request.check_columns([name for name in names if name not in coded], [*coded])
    option = "epsilon" if epsilon is not None else "secure"
    # the categories of a class are known from the clients' description, also in a table
    in_tables = [name for pair in request.tables for name in pair if name in columns]
    request.check_hidden(numbers, in_tables, option, "give its categories if it is a code")
    plain, plan = _sums_query(clients, names, request, split)
    noise = noise_multiplier(epsilon, delta)
    if noise and not central:
        return NoisySumsQuery(**plain.model_dump(), noise=noise, masked=masked), plan
    if not masked and not central:
        raise SettingError("sums leave a site with noise or under masks: give epsilon, or secure=True")
    return plain, plan
