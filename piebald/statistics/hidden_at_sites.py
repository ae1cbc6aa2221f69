"""Statistics of the rows of sites that send only sums with noise of their own, or sums under masks, or both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from piebald.contracts import Clients, Runtime, Split
from piebald.core.errors import SettingError, unknown
from piebald.methods.client_work import ClientWork
from piebald.privacy import SecureAggregation
from piebald.privacy.ledger import budget
from piebald.statistics.bounded_sums import SumPlan
from piebald.statistics.columns import TARGET
from piebald.statistics.describe import of_sums
from piebald.statistics.exact_at_sites import categories_at_sites, code_words, column_names, log, say_left_out
from piebald.statistics.pooled_statistics import FederatedStatistics, Mode
from piebald.statistics.queries.columns import MaskedSumsQuery, NoisySumsQuery
from piebald.statistics.request import StatisticsRequest, noise_multiplier
from piebald.statistics.sites import AskedSites


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
