"""Statistics of the rows of sites that tell only sums with noise of their own, or sums under masks, or both."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from torch import Tensor

from piebald.contracts import SUM, ChecksSignatures, Clients, Query, QueryRequest, Runtime, Split, Task, Update
from piebald.core.errors import RuntimeFault, SettingError, unknown
from piebald.core.moments import Floats
from piebald.core.plain_text import printable
from piebald.methods.client_work import ClientWork
from piebald.privacy import SecureAggregation
from piebald.privacy.ledger import budget, noise_for
from piebald.privacy.secure_aggregation.server_side import SecureRound
from piebald.server.client_queries import ClientQueries
from piebald.statistics.bounded_sums import SumPlan
from piebald.statistics.columns import TARGET
from piebald.statistics.columns_asked import Wanted
from piebald.statistics.describe import of_sums
from piebald.statistics.exact_at_sites import column_names
from piebald.statistics.pooled_statistics import FederatedStatistics, Mode
from piebald.statistics.queries.column_sums import MaskedSumsQuery, NoisySumsQuery

log = logging.getLogger("piebald.statistics")
NOTHING: Mapping[str, Tensor] = MappingProxyType({})


class AskedSites:
    """Clients who are asked for sums through a runtime (`contracts.AsksClients`).

    Args:
        runtime: where the clients are.
        work: the run, whose model a task brings.

    Attributes:
        refused: why clients took no part, by number; what a client said first counts.
    """

    def __init__(self, runtime: Runtime, work: ClientWork) -> None:
        self._queries, self._runtime = ClientQueries(runtime, work), runtime
        self._model = work.initial[: work.layout.shared]
        self._ids, self._version = itertools.count(), 0
        self.refused: dict[int, str] = {}

    def query(self, requests: Sequence[QueryRequest]) -> list[Update | None]:
        """See `contracts.AsksClients`."""
        tasks = [Task(next(self._ids), one.client, self._version, one.vectors, one.query) for one in requests]
        told = self._queries.ask(tasks, self._version)
        for row in self._queries.take_rows():
            if row["reason"] is not None:
                self.refused.setdefault(int(row["client"]), printable(str(row["reason"]), 200))
        return told

    def exclude_client(self, client: int, reason: str) -> None:
        """See `contracts.AsksClients`."""
        self.refused[client] = printable(reason, 200)

    def check_signature(self, client: int, text: bytes, signature: bytes) -> bool:
        """See `contracts.AsksClients`."""
        runtime = self._runtime
        return not isinstance(runtime, ChecksSignatures) or runtime.check_signature(client, text, signature)

    def sums(
        self, query: Query, masking: SecureAggregation | None, brought: Mapping[str, Tensor] = NOTHING,
        version: int = 0,
    ) -> tuple[list[int], Floats]:  # fmt: skip
        """Who took part, and the sum of their answers [k] in steps.

        Args:
            query: about sums.
            masking: the masks under which answers come, or None where they come in the open.
            brought: vectors that the question is about.
            version: the model's, where questions are about several.

        Raises:
            SettingError: no site answers.
            RuntimeFault: no sum can be opened.
        """
        self._version = version
        asked = list(self._runtime.clients())
        if masking is None:
            answers = self._answers(query, {client: brought for client in asked})
            if not answers:
                why = next(iter(self.refused.values()), "none is there")
                raise SettingError(f"no site answers questions about sums, the first one says: {why}")
            return sorted(answers), np.stack(
                [one.vectors[SUM].numpy().astype(np.float64) for one in answers.values()]
            ).sum(0)
        agreed = SecureRound.of(masking, asked, self)
        there = [client for client in asked if client not in agreed.absent]
        answers = self._answers(query, {client: {**brought, **agreed.vectors(client)} for client in there})
        total = agreed.total(answers, self) if answers else "no secure aggregation: nobody sent a sum"
        if isinstance(total, str):
            known = self.refused or agreed.absent
            first = "".join(f"; site {client + 1} says: {why}" for client, why in itertools.islice(known.items(), 1))
            raise RuntimeFault(f"{total}{first}")
        return sorted(answers), total.view(np.int64).astype(np.float64)

    def _answers(self, query: Query, about: Mapping[int, Mapping[str, Tensor]]) -> dict[int, Update]:
        requests = [QueryRequest(client, query, {"model": self._model, **brought}) for client, brought in about.items()]
        told = self.query(requests)
        return {client: one for client, one in zip(about, told, strict=True) if one is not None}


def hidden_at_sites(
    runtime: Runtime,
    work: ClientWork,
    clients: Clients,
    wanted: Wanted,
    *,
    epsilon: float | None,
    delta: float | None,
    split: Split = "train",
    features: Sequence[str] | None = None,
    say: Callable[[str], None] = log.warning,
) -> FederatedStatistics:
    """Statistics of the columns of sites, from sums that hide single rows.

    With an epsilon each site adds noise to its own sums, and its ledger counts the question; where the run masks, sums
    leave under its masks.  A class is counted, and so are columns with categories; all others need bounds, and
    quantiles a histogram.

    Args:
        runtime: where the clients are.
        work: the run, with `SecureAggregation` of 64 bits for sums under masks.
        clients: their names, and the form of their rows.
        wanted: what is wanted; nothing of single clients.
        epsilon, delta: what the question spends of each site's budget, None for no noise.
        split: whose rows.
        features: names of the inputs, "x0", "x1", ... by default.
        say: is told which clients are left out.

    Raises:
        SettingError: an argument is wrong, or no site answers.
        RuntimeFault: no sum can be opened.
    """
    names, _ = column_names(clients, features)
    classes = clients.classes
    counted = names[:-1] if classes is not None else names
    masking = work.masking
    assert masking is None or isinstance(masking, SecureAggregation)
    query, noise = hidden_question(clients, wanted, features, split, masking is not None, epsilon, delta)
    sites = AskedSites(runtime, work)
    taking_part, total = sites.sums(query, masking)
    for client, why in sites.refused.items():
        if client not in taking_part:
            say(f"{printable(str(clients.names[client]))} is left out: {why}")
    bounds = {name: wanted.bounds[name] for name in counted if name not in wanted.categories}
    counts = {counted[place]: known for place, known in query.codes}
    if classes is not None:
        counts[TARGET] = tuple(classes)
    numbers, texts, tables = of_sums(SumPlan(bounds, query.bins, counts, wanted.tables), total, wanted.quantiles)
    mode: Mode = "private" if masking is None else "secure and private" if noise else "secure"
    spent = None if delta is None or not noise else budget([noise], delta, "site")
    deviation = noise * query.plan.exchange_influence * math.sqrt(len(taking_part))
    told = [str(clients.names[client]) for client in taking_part]
    return FederatedStatistics(told, mode, None, numbers, texts, tables, privacy=spent, noise=deviation)


def hidden_question(
    clients: Clients, wanted: Wanted, features: Sequence[str] | None, split: Split, masked: bool, epsilon: float | None,
    delta: float | None,
) -> tuple[MaskedSumsQuery, float]:  # fmt: skip
    """The question that sites are asked, and its noise in units of a row's influence.

    Raises:
        SettingError: an argument is wrong.
    """
    names, _ = column_names(clients, features)
    counted = names[:-1] if clients.classes is not None else names
    _check(wanted, counted, "epsilon" if epsilon is not None else "secure")
    _check_codes(wanted, counted, names)
    return _query(wanted, names, split, len(clients.classes or ()), masked, epsilon, delta)


def _check(wanted: Wanted, counted: Sequence[str], what: str) -> None:
    """Refuse what sums do not tell.

    Raises:
        SettingError: an argument is wrong.
    """
    numbers = [name for name in counted if name not in wanted.categories]
    for name in wanted.bounds:
        if name not in numbers:
            raise unknown("column of numbers to give bounds of,", name, numbers)
    for name in numbers:
        if name not in wanted.bounds:
            raise SettingError(
                f"{what} needs bounds of column {name!r}, which must not be taken from the rows: write "
                f"bounds={{{name!r}: (low, high)}}, or give its categories if it is a code"
            )
    if wanted.quantiles and wanted.bins is None and numbers:
        raise SettingError(
            f"{what} takes quantiles from a histogram: write bins=100 for an error of a hundredth of the bounds, or "
            "quantiles=()"
        )
    if wanted.by_client:
        raise SettingError("by_client tells what secure and epsilon are to hide: leave it out")


def _check_codes(wanted: Wanted, counted: Sequence[str], names: Sequence[str]) -> None:
    """Refuse categories and tables of columns that are not there, or are not counted by category.

    Raises:
        SettingError: an argument is wrong.
    """
    for name in wanted.categories:
        if name not in counted:
            raise unknown("column of numbers to give categories of,", name, counted)
    for name in itertools.chain(*wanted.tables):
        if name not in names:
            raise unknown("column", name, names)
        if name in counted and name not in wanted.categories:
            raise SettingError(
                f"a table needs the categories of column {name!r}, which must not be taken from the rows: write "
                f"categories={{{name!r}: ('0', '1')}}"
            )


def _query(
    wanted: Wanted, names: Sequence[str], split: Split, classes: int, masked: bool, epsilon: float | None,
    delta: float | None,
) -> tuple[MaskedSumsQuery, float]:  # fmt: skip
    """The question, and its noise in units of a row's influence."""
    counted = names[:-1] if classes else names
    bounds = tuple(wanted.bounds[name] for name in counted if name not in wanted.categories)
    codes = tuple((place, wanted.categories[name]) for place, name in enumerate(counted) if name in wanted.categories)
    places = {name: place for place, name in enumerate(names)}
    tables = tuple((places[one], places[other]) for one, other in wanted.tables)
    plain = MaskedSumsQuery(
        split=split, bounds=bounds, bins=wanted.bins or 0, classes=classes, codes=codes, tables=tables
    )
    if epsilon is None:
        if not masked:
            raise SettingError("sums leave a site with noise or under masks: give epsilon, or secure=True")
        return plain, 0.0
    if delta is None:
        raise SettingError("epsilon needs a delta, below one over the number of rows: write delta=1e-6")
    noise = noise_for(epsilon, delta)
    return NoisySumsQuery(**plain.model_dump(), noise=noise, masked=masked), noise
