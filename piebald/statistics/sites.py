"""Questions to the sites of a federation, or to the clients of a cluster, over whatever runtime reaches them.

Exact statistics of the rows of sites, which answer with moments and counts.

Statistics of the rows of sites that send only sums with noise of their own, or sums under masks, or both.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from torch import Tensor

from piebald.contracts import SUM, ChecksSignatures, Clients, Query, QueryRequest, Runtime, Split, Task, Update
from piebald.contracts.component import ModelSpec
from piebald.core import pytree
from piebald.core.errors import RuntimeFault, SettingError, unknown
from piebald.core.moments import Floats, Ints, Moments, keys_of
from piebald.core.plain_text import printable
from piebald.methods.client_work import ClientWork
from piebald.privacy import SecureAggregation
from piebald.privacy.ledger import budget
from piebald.privacy.secure_aggregation.server_side import SecureRound
from piebald.server.client_queries import ClientQueries
from piebald.statistics.bounded_sums import SumPlan
from piebald.statistics.columns import TARGET, input_names, target_columns
from piebald.statistics.describe import Answers, numbers_of, of_sums
from piebald.statistics.pooled_statistics import (
    FederatedStatistics,
    Mode,
    NumberColumn,
    StatisticsRequest,
    TextColumn,
    noise_multiplier,
)
from piebald.statistics.queries.columns import PARTS, MaskedSumsQuery, NoisySumsQuery, StatisticsQuery

NO_VECTORS: Mapping[str, Tensor] = MappingProxyType({})
log = logging.getLogger("piebald.statistics")


class AskedSites:
    """Clients who are asked through a runtime (`contracts.AsksClients`).

    Args:
        runtime: the runtime that reaches the clients.
        spec: the model that a task carries, which the questions are not about; for sums under masks, the run's
            `ClientWork`.

    Attributes:
        runtime: the runtime.
        refused: why clients did not answer, by number; the first reason of each client.
        reasons: why clients did not answer the last question, by number.
    """

    def __init__(self, runtime: Runtime, spec: ModelSpec) -> None:
        self.runtime, self._queries = runtime, ClientQueries(runtime, spec)
        self._model = spec.initial[: spec.layout.shared]
        self._ids, self._version = itertools.count(), 0
        self.refused: dict[int, str] = {}
        self.reasons: dict[int, str] = {}

    def query(self, requests: Sequence[QueryRequest]) -> list[Update | None]:
        """See `contracts.AsksClients`."""
        tasks = [
            Task(next(self._ids), request.client, self._version, request.vectors, request.query) for request in requests
        ]
        answers = self._queries.ask(tasks, self._version)
        rows = [row for row in self._queries.take_rows() if row["status"] != "ok"]
        self.reasons = {int(row["client"]): printable(str(row["reason"]), 200) for row in rows}
        # the first reason says why a client is left out; later ones follow from it
        self.refused = {**self.reasons, **self.refused}
        return answers

    def exclude_client(self, client: int, reason: str) -> None:
        """See `contracts.AsksClients`."""
        self.refused[client] = printable(reason, 200)

    def check_signature(self, client: int, text: bytes, signature: bytes) -> bool:
        """See `contracts.AsksClients`."""
        runtime = self.runtime
        return not isinstance(runtime, ChecksSignatures) or runtime.check_signature(client, text, signature)

    def ask(
        self, query: Query, clients: Iterable[int], vectors: Mapping[str, Tensor] = NO_VECTORS, version: int = 0
    ) -> dict[int, Update]:
        """Ask clients the same question and return the answers, by client.

        Args:
            query: the question.
            clients: the clients' numbers.
            vectors: vectors that go along besides the model.
            version: the version of the model, where questions are about several.
        """
        return self._ask(query, dict.fromkeys(clients, vectors), version)

    def refusal(self, sentence: str) -> SettingError:
        """Return an error that says that nobody answers, with the first reason."""
        return SettingError(f"{sentence}, the first one says: {next(iter(self.refused.values()), 'no site is there')}")

    def sums(
        self, query: Query, masking: SecureAggregation | None, vectors: Mapping[str, Tensor] = NO_VECTORS,
        version: int = 0,
    ) -> tuple[list[int], Floats]:  # fmt: skip
        """Return the numbers of the clients who took part, and the sum of their answers [k] in steps.

        Args:
            query: a question about sums.
            masking: the masks under which answers come, or None where they come in the open.
            vectors: vectors that go along besides the model.
            version: the version of the model, where questions are about several.

        Raises:
            SettingError: no site answers.
            RuntimeFault: the masks cannot be taken off.
        """
        clients = list(self.runtime.clients())
        if masking is None:
            answers = self.ask(query, clients, vectors, version)
            if not answers:
                raise self.refusal("no site answers questions about sums")
            parts = [answer.vectors[SUM].numpy().astype(np.float64) for answer in answers.values()]
            return sorted(answers), np.stack(parts).sum(0)
        self._version = version
        agreed = SecureRound.of(masking, clients, self)
        present = [client for client in clients if client not in agreed.absent]
        answers = self._ask(query, {client: {**vectors, **agreed.vectors(client)} for client in present}, version)
        total = agreed.total(answers, self) if answers else "no secure aggregation: nobody sent a sum"
        if isinstance(total, str):
            reasons = (self.refused or agreed.absent).items()
            first = "".join(f"; site {client + 1} says: {reason}" for client, reason in itertools.islice(reasons, 1))
            raise RuntimeFault(f"{total}{first}")
        # modulo 2^64 the masks have cancelled, and the sums fit 63 bits and a sign
        return sorted(answers), total.view(np.int64).astype(np.float64)

    def _ask(self, query: Query, vectors: Mapping[int, Mapping[str, Tensor]], version: int) -> dict[int, Update]:
        """Ask with vectors of each client."""
        self._version = version
        requests = [QueryRequest(client, query, {"model": self._model, **sent}) for client, sent in vectors.items()]
        answers = self.query(requests)
        return {client: answer for client, answer in zip(vectors, answers, strict=True) if answer is not None}


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
            self.clients = list(answers)
            self._moments = [_moments(answer.vectors["moments"].numpy()) for answer in answers.values()]
        return self._moments

    def at_most(self, thresholds: Floats) -> Ints:
        """See `exact.Answers`."""
        answers = self.sites.ask(_counts_query(thresholds, self._split, self._targets), self.clients)
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
    """Return statistics of the columns of sites: the numbers of inputs, and of targets.

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
    request, once = _with_classes(clients, request, names)
    answers = SiteAnswers(runtime, spec, split, targets)
    moments = answers.moments()
    say_left_out(answers.sites, clients, answers.clients, say)
    taking_part = [str(clients.names[client]) for client in answers.clients]
    numbers, by_client = numbers_of(answers, names, taking_part, request, once)
    texts = {}
    if clients.classes is not None and not once:
        texts[TARGET] = _class_counts(answers, len(names), clients.classes)
        numbers = _without_target(numbers)
        by_client = {client: _without_target(columns) for client, columns in by_client.items()}
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
    request, once = _with_classes(clients, request, names)
    recorder = _QuestionRecorder(len(names), split, targets)
    bounded = all(name in request.bounds for name in names)
    stated_request = replace(
        request, bins=request.bins if once and bounded else None, quantiles=request.quantiles if once else ()
    )
    numbers_of(recorder, names, ["any"], stated_request, once)
    if clients.classes is not None and not once:
        _class_counts(recorder, len(names), clients.classes)
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
        self.questions.append(StatisticsQuery(split=self._split, targets=self._targets))
        return [Moments.of(np.zeros((1, self._columns)))]

    def at_most(self, thresholds: Floats) -> Ints:
        """See `exact.Answers`."""
        self.questions.append(_counts_query(thresholds, self._split, self._targets))
        return np.ones((1, *thresholds.shape), dtype=np.int64)


def _counts_query(thresholds: Floats, split: Split, targets: int) -> StatisticsQuery:
    return StatisticsQuery(split=split, targets=targets, keys=tuple(map(tuple, keys_of(thresholds).tolist())))


def _with_classes(clients: Clients, request: StatisticsRequest, names: Sequence[str]) -> tuple[StatisticsRequest, bool]:
    """Return the request with bounds of the numbers of classes, and whether one question about counts is enough."""
    if clients.classes is not None and request.bins is not None:
        # classes are the numbers 0, 1, ..., each in the middle of a bin
        request = replace(request, bounds={TARGET: (-0.5, len(clients.classes) - 0.5), **request.bounds})
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
    blank = clients.rows(0, "train")
    inputs, targets = math.prod(pytree.single(blank.x, "statistics").shape[1:]), list(target_columns(blank.y))
    return [*input_names(inputs, features, len(targets)), *targets], len(targets)


def _class_counts(answers: Answers, columns: int, classes: Sequence[str]) -> TextColumn:
    """Return the rows of each class, from counts of class numbers in the last column."""
    # the same limits for all columns, since a question has as many for each
    limits = np.tile(np.arange(len(classes), dtype=np.float64), (columns, 1))
    reached = answers.at_most(limits)[:, -1].sum(0)
    counts = np.diff(reached, prepend=0).astype(float).tolist()
    return TextColumn(dict(zip(classes, counts, strict=True)), 0.0, 0.0)


def _without_target(numbers: Mapping[str, NumberColumn]) -> dict[str, NumberColumn]:
    return {name: column for name, column in numbers.items() if name != TARGET}


def _moments(vectors: Floats) -> Moments:
    """Return the moments of one client from its answer [parts, d]."""
    parts = dict(zip(PARTS, np.asarray(vectors), strict=True))
    counts = {name: parts[name].astype(np.int64) for name in PARTS[:3]}
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
    categories = {counted[place]: values for place, values in query.codes}
    if clients.classes is not None:
        categories[TARGET] = tuple(clients.classes)
    plan = SumPlan(bounds, query.bins, categories, request.tables)
    numbers, texts, tables = of_sums(plan, total, request.quantiles)
    mode: Mode = "private" if masking is None else "secure and private" if noise else "secure"
    spent = None if delta is None or not noise else budget([noise], delta, "site")
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
    columns = names[:-1] if clients.classes is not None else names  # besides a class, which is always counted
    numbers = [name for name in columns if name not in request.categories]
    for name in request.bounds:
        if name not in numbers:
            raise unknown("column of numbers to give bounds of,", name, numbers)
    for name in request.categories:
        if name not in columns:
            raise unknown("column of numbers to give categories of,", name, columns)
    request.check_columns(names, ())
    option = "epsilon" if epsilon is not None else "secure"
    # the categories of a class are known from the clients' description, also in a table
    in_tables = [name for pair in request.tables for name in pair if name in columns]
    request.check_hidden(numbers, in_tables, option, "give its categories if it is a code")
    places = {name: place for place, name in enumerate(names)}
    plain = MaskedSumsQuery(
        split=split, bounds=tuple(request.bounds[name] for name in numbers), bins=request.bins or 0,
        classes=len(clients.classes or ()),
        codes=tuple((places[name], request.categories[name]) for name in columns if name in request.categories),
        tables=tuple((places[first], places[second]) for first, second in request.tables),
    )  # fmt: skip
    noise = noise_multiplier(epsilon, delta)
    if noise:
        return NoisySumsQuery(**plain.model_dump(), noise=noise, masked=masked), noise
    if not masked:
        raise SettingError("sums leave a site with noise or under masks: give epsilon, or secure=True")
    return plain, 0.0
