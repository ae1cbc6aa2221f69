"""Statistics of the rows of sites: from exact answers, from sums with noise of their own, or from sums under masks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from piebald.contracts import Clients, Query, Runtime, Split
from piebald.contracts.model_spec import ModelSpec
from piebald.core import pytree
from piebald.core.errors import RuntimeFault, SettingError, unknown
from piebald.core.moments import Floats, Ints, Moments, keys_of, merged
from piebald.core.plain_text import printable
from piebald.data.clients.prepared import preparation_of
from piebald.data.preparation.preparation import OTHER
from piebald.methods.client_work import ClientWork
from piebald.privacy import SecureAggregation
from piebald.privacy.ledger import budget
from piebald.statistics.bounded_sums import SumPlan
from piebald.statistics.columns import TARGET, input_names, target_columns
from piebald.statistics.describe import Answers, numbers_of, of_sums
from piebald.statistics.pooled_statistics import FederatedStatistics, Mode, NumberColumn, TextColumn
from piebald.statistics.queries.columns import MOST_KEYS, PARTS, MaskedSumsQuery, NoisySumsQuery, StatisticsQuery
from piebald.statistics.request import StatisticsRequest, noise_multiplier
from piebald.statistics.sites import AskedSites

log = logging.getLogger("piebald.statistics")


class SiteAnswers:
    """Answers of the clients of a runtime (`exact.Answers`).

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
        """See `exact.Answers`.

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
        """See `exact.Answers`."""
        answers = self.sites.ask(_counts_query(thresholds, self._split, self._targets), self.clients)
        # quantiles are a bisection over all rows: counts of fewer clients would lead it astray
        if lost := [client for client in self.clients if client not in answers]:
            raise RuntimeFault(
                f"client {lost[0] + 1} answered the first question and not the next one "
                f"({self.sites.reasons[lost[0]]}): ask again, or for no more than it answers"
            )
        return np.stack([answer.vectors["counts"].numpy().astype(np.int64) for answer in answers.values()])


def statistics_at_sites(
    runtime: Runtime, spec: ModelSpec, clients: Clients, request: StatisticsRequest, *, split: Split = "train",
    features: Sequence[str] | None = None, say: Callable[[str], None] = log.warning,
) -> FederatedStatistics:  # fmt: skip
    """Return statistics of the columns of sites: the numbers of inputs, the categories of tables, and targets.

    Where the request has bins, and bounds of all columns, quantiles come from the histogram, and each site is asked
    twice; otherwise they are exact, to the bit, and it is asked up to about 70 times.

    Args:
        runtime: the runtime that reaches the clients.
        spec: the model that a task carries.
        clients: their names, and the form of their rows.
        request: what is asked for; no categories and tables.
        split: the split that the statistics are of.
        features: names of the inputs, "x0", "x1", ... by default.
        say: called with a sentence about each client that is left out.

    Raises:
        SettingError: no site answers.
        RuntimeFault: a site answers one question and not the next.
    """
    names, targets = column_names(clients, features)
    categories = categories_at_sites(clients)
    request, once = _with_categories(categories, request, names)
    answers = SiteAnswers(runtime, spec, split, targets)
    moments = answers.moments()
    say_left_out(answers.sites, clients, answers.clients, say)
    taking_part = [str(clients.names[client]) for client in answers.clients]
    numbers, by_client = numbers_of(answers, names, taking_part, request, once)
    texts = _category_counts(answers, names, _counted(categories, request, once))
    apart = {name for name in categories if name in texts or name != TARGET}
    if uncounted := sorted(apart - {*texts}):
        say(f"categories of {', '.join(uncounted)} are not told beside histograms: ask for them without bins")
    numbers = _without(numbers, apart)
    by_client = {client: _without(columns, apart) for client, columns in by_client.items()}
    rows = [client_moments.rows for client_moments in moments]
    return FederatedStatistics(taking_part, "exact", rows, numbers, texts, {}, by_client)


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
    request, once = _with_categories(categories, request, names)
    recorder = _QuestionRecorder(len(names), split, targets)
    bounded = all(name in request.bounds for name in names)
    stated_request = replace(
        request, bins=request.bins if once and bounded else None, quantiles=request.quantiles if once else ()
    )
    numbers_of(recorder, names, ["any"], stated_request, once)
    _category_counts(recorder, names, _counted(categories, request, once))
    return list(recorder.questions)


class _QuestionRecorder:
    """Answers of nobody (`exact.Answers`), by which it becomes known what would be asked.

    Attributes:
        questions: the questions so far.
    """

    def __init__(self, columns: int, split: Split, targets: int) -> None:
        self._columns, self._split, self._targets = columns, split, targets
        self.questions: list[Query] = []

    def moments(self) -> list[Moments]:
        """See `exact.Answers`."""
        if not self.questions:
            self.questions.append(StatisticsQuery(split=self._split, targets=self._targets))
        # made-up moments of one row: what is stated must not depend on any answer
        return [Moments.of(np.zeros((1, self._columns)))]

    def at_most(self, thresholds: Floats) -> Ints:
        """See `exact.Answers`."""
        self.questions.append(_counts_query(thresholds, self._split, self._targets))
        # all numbers at most any threshold, so that a bisection would end
        return np.ones((1, *thresholds.shape), dtype=np.int64)


def _counts_query(thresholds: Floats, split: Split, targets: int) -> StatisticsQuery:
    return StatisticsQuery(split=split, targets=targets, keys=tuple(map(tuple, keys_of(thresholds).tolist())))


def categories_at_sites(clients: Clients) -> dict[str, Sequence[str]]:
    """Return the categories of columns whose values at sites are their numbers 0, 1, ..., and the classes."""
    agreed = preparation_of(clients)
    coded = {} if agreed is None or agreed.form != "values" else agreed.coded
    return {**coded, **({} if clients.classes is None else {TARGET: clients.classes})}


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
    categories: Mapping[str, Sequence[str]], request: StatisticsRequest, names: Sequence[str]
) -> tuple[StatisticsRequest, bool]:
    """Return the request with bounds of the numbers of categories, and whether one question about counts is enough."""
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


def _category_counts(
    answers: Answers, names: Sequence[str], categories: Mapping[str, Sequence[str]]
) -> dict[str, TextColumn]:
    """Return the rows of each category, from counts of their numbers."""
    if not categories:
        return {}
    # the same limits for all columns, since a question has as many for each
    most = max(map(len, categories.values()))
    parts = [np.arange(first, min(first + MOST_KEYS, most)) for first in range(0, most, MOST_KEYS)]
    reached = np.concatenate([
        answers.at_most(np.tile(part.astype(np.float64), (len(names), 1))).sum(0) for part in parts
    ], 1)  # fmt: skip
    pooled, texts = merged(answers.moments()), {}
    for name, words in categories.items():
        place = names.index(name)
        counts = dict(zip(words, np.diff(reached[place], prepend=0).astype(float).tolist(), strict=False))
        other = counts.pop(OTHER, 0.0) + float(pooled.present[place]) - float(reached[place, len(words) - 1])
        texts[name] = TextColumn(counts, other, float(pooled.missing[place]))
    return texts


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
    delta: float | None, split: Split = "train", features: Sequence[str] | None = None,
    say: Callable[[str], None] = log.warning,
) -> FederatedStatistics:  # fmt: skip
    """Return statistics of the columns of sites, from sums that hide single rows.

    With an epsilon each site adds noise to its own sums, and its ledger counts the question; where the run masks, sums
    leave under its masks.  A class is counted, and so are columns with categories; all others need bounds, and
    quantiles a histogram.

    Args:
        runtime: the runtime that reaches the clients.
        work: the run, with `SecureAggregation` of 64 bits for sums under masks.
        clients: their names, and the form of their rows.
        request: what is asked for; nothing of single clients.
        epsilon, delta: what the question spends of each site's budget, None for no noise.
        split: the split that the statistics are of.
        features: names of the inputs, "x0", "x1", ... by default.
        say: called with a sentence about each client that is left out.

    Raises:
        SettingError: an argument is wrong, or no site answers.
        RuntimeFault: the masks cannot be taken off.
    """
    masking = work.masking
    assert masking is None or isinstance(masking, SecureAggregation)
    query, noise = hidden_question(clients, request, features, split, masking is not None, epsilon, delta)
    sites = AskedSites(runtime, work)
    taking_part, total = sites.sums(query, masking)
    say_left_out(sites, clients, taking_part, say)
    counted = column_names(clients, features)[0]
    bounds = {name: request.bounds[name] for name in counted if name in request.bounds}
    asked = {**categories_at_sites(clients), **request.categories}
    categories = {counted[place]: tuple(asked[counted[place]]) for place, _ in query.codes}
    if clients.classes is not None:
        categories[TARGET] = tuple(clients.classes)
    plan = SumPlan(bounds, query.bins, categories, request.tables)
    numbers, texts, tables = of_sums(plan, total, request.quantiles)
    mode: Mode = "private" if masking is None else "secure and private" if noise else "secure"
    spent = None if delta is None or not noise else budget([noise], delta, "site")
    # sites state their numbers of rows, so their noise is for a row that takes another's place, see `NoisySumsQuery`
    deviation = noise * query.plan.exchange_influence * math.sqrt(len(taking_part))
    names = [str(clients.names[client]) for client in taking_part]
    return FederatedStatistics(names, mode, None, numbers, texts, tables, privacy=spent, noise=deviation)


def hidden_question(
    clients: Clients, request: StatisticsRequest, features: Sequence[str] | None, split: Split, masked: bool,
    epsilon: float | None, delta: float | None,
) -> tuple[MaskedSumsQuery, float]:  # fmt: skip
    """Return the question that sites are asked, and its noise in units of a row's influence.

    Raises:
        SettingError: an argument is wrong.
    """
    names, _ = column_names(clients, features)
    coded = {name: tuple(words) for name, words in categories_at_sites(clients).items() if name != TARGET}
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
    places = {name: place for place, name in enumerate(names)}
    plain = MaskedSumsQuery(
        split=split, bounds=tuple(request.bounds[name] for name in numbers), bins=request.bins or 0,
        classes=len(clients.classes or ()),
        codes=tuple(
            (places[name], code_words(coded.get(name), request.categories[name]))
            for name in columns if name in request.categories
        ),
        tables=tuple((places[first], places[second]) for first, second in request.tables),
    )  # fmt: skip
    noise = noise_multiplier(epsilon, delta)
    if noise:
        return NoisySumsQuery(**plain.model_dump(), noise=noise, masked=masked), noise
    if not masked:
        raise SettingError("sums leave a site with noise or under masks: give epsilon, or secure=True")
    return plain, 0.0
