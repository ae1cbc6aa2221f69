"""Statistics over clients whose rows are on this machine: `piebald.statistics`.

Quantiles need no bounds and no sorted rows: the server bisects the order of all float64 numbers, and each client counts
how many of its numbers are at most the threshold of the question.  After 64 questions at most, an order statistic is
known to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from piebald.contracts import Split
from piebald.core.arguments import Fraction, Positive, checked
from piebald.core.errors import SettingError
from piebald.core.moments import HIGHEST, LOWEST, Floats, Moments, counts_at_most, merged, number_of, order_statistics
from piebald.core.noise import NoiseSource
from piebald.data.partition.split import Ints
from piebald.privacy.accounting import PrivacyBudget
from piebald.privacy.ledger import Ledger, budget
from piebald.statistics.bounded_sums import STEP, SumPlan, secure_sum
from piebald.statistics.columns import ClientColumns, columns_of
from piebald.statistics.pooled_statistics import FederatedStatistics, Mode, NumberColumn, Table, TextColumn
from piebald.statistics.request import Bins, Quantiles, StatisticsRequest, noise_multiplier, statistics_request


class Answers(Protocol):
    """Answers of clients about d columns of numbers, on this machine or at sites."""

    def moments(self) -> list[Moments]:
        """Return each client's moments of the columns."""

    def at_most(self, thresholds: Floats) -> Ints:
        """Count the finite numbers of each client that are at most these thresholds [d, t]: [clients, d, t]."""


class LocalAnswers:
    """Answers of clients on this machine.

    Args:
        clients: their rows.
        names: the columns of numbers, in order.
    """

    def __init__(self, clients: Sequence[ClientColumns], names: Sequence[str]) -> None:
        self._names = names
        self._values = [client.matrix(names) for client in clients]
        self._sorted: list[list[Floats]] | None = None

    def moments(self) -> list[Moments]:
        """See `Answers`."""
        return [Moments.of(values, self._names) for values in self._values]

    def at_most(self, thresholds: Floats) -> Ints:
        """See `Answers`."""
        # sorted once, so that each of up to about 70 questions costs a binary search and no pass over the rows
        if self._sorted is None:
            self._sorted = [[np.sort(column[np.isfinite(column)]) for column in values.T] for values in self._values]
        return np.array([counts_at_most(columns, thresholds) for columns in self._sorted], dtype=np.int64)


def edges_of(low: Floats, high: Floats, bins: int) -> Floats:
    """Return edges [d, bins + 1] of bins of one width; as numpy.histogram's, a constant column has ends 1 apart."""
    # not numpy.histogram_bin_edges, which refuses a column whose numbers lie too near for so many bins
    low, high = np.where(low == high, low - 0.5, low), np.where(low == high, high + 0.5, high)
    ends = zip(low, high, strict=True)
    edges = [np.linspace(*pair, bins + 1) if np.isfinite(pair).all() else [np.nan] * (bins + 1) for pair in ends]
    return np.array(edges, dtype=np.float64).reshape(len(low), bins + 1)


MOST_CATEGORIES = 10_000


def exact_quantiles(answers: Answers, present: Ints, shares: Sequence[float]) -> Floats:
    """Return exact_quantiles [d, shares] of the pooled numbers, linear between order statistics like numpy.quantile."""
    if not shares:
        return np.zeros((len(present), 0))
    places = np.maximum(present - 1, 0)[:, None] * np.asarray(shares, dtype=np.float64)
    # as numpy's method "linear": a share p lies at the place p (n - 1), between two order statistics
    below = np.floor(places).astype(np.int64)
    # the neighbour of the last rank is itself; without numbers both are 0, and the result becomes NaN below
    ranks = np.minimum(np.concatenate([below, below + 1], axis=1), np.maximum(present - 1, 0)[:, None])
    places_of = order_statistics(lambda keys: answers.at_most(number_of(keys)).sum(0), ranks, LOWEST, HIGHEST)
    ends = np.where(present[:, None] > 0, number_of(places_of) + 0.0, np.nan)  # -0.0 becomes 0.0
    lower, upper = ends[:, : len(shares)], ends[:, len(shares) :]
    part = places - below
    with np.errstate(over="ignore", invalid="ignore"):
        # from the nearer end, as numpy interpolates: the other form would differ in the last bit
        between = np.where(part < 0.5, lower + (upper - lower) * part, upper - (upper - lower) * (1 - part))
    # at a rank itself nothing is interpolated: with an infinite neighbour 0 times infinity would be NaN
    return np.where(part == 0, lower, between)


def exact_histogram(answers: Answers, edges: Floats) -> Ints:
    """Return counts of bins [clients, d, bins]: each has its lower edge, and only the last has its upper one, too."""
    # questions count numbers at most a limit, and a bin has its lower edge: the next smaller float is the limit
    limits = np.nextafter(edges, -np.inf)
    limits[:, -1] = edges[:, -1]
    # columns without numbers have edges NaN, which are no thresholds; their counts are 0 anywhere
    counts = answers.at_most(np.nan_to_num(limits))
    return np.diff(counts, axis=2)


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
    noise_at: Literal["server", "client"] = "server",
    ledger: Ledger | None = None,
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

    Args: Statistics
        quantiles: shares in [0, 1] of the numbers below.
        bins: bins of a histogram of each column of numbers, from its smallest to its largest number, or its bounds.
        bounds: (low, high) of columns of numbers.  Under `secure` or `epsilon`, all must have them, and a number
            outside counts as the nearer bound.
        categories: the categories of columns, by name; by default those that clients have.  Under `secure` or
            `epsilon` clients do not say them, so only columns with stated categories are counted.
        tables: pairs of columns to count together; whole numbers count as categories, too.
        by_client: also each client's own columns of numbers.

    Args: Privacy
        secure: clients' sums are added up under masks, so that nobody learns one client's; three clients at least.
        epsilon, delta: the privacy budget of this question, for all statistics together: Gaussian noise hides whether
            the data has a row.  `delta` is below one over the number of rows.
        noise_at: the place where noise is added: once to the sum, by a "server" that must be trusted, or by each
            "client" to its own sums, so that no server must be.  Under `secure` it is the clients.
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
    tables_of_clients = columns_of(clients, client, columns, split, features)
    request = statistics_request(quantiles, bins, bounds or {}, by_client, categories, tables)
    # before the ledger is charged: a question that cannot be answered must not spend budget
    request.check_columns([*tables_of_clients[0].numbers], [*tables_of_clients[0].texts])
    noise = noise_multiplier(epsilon, delta)
    if not noise and ledger is not None:
        raise SettingError("ledger belongs to noise: give epsilon, too, or leave it out")
    if not secure and not noise:
        return _exact_statistics(tables_of_clients, request)
    if delta is not None and ledger is not None and ledger.delta != delta:
        raise SettingError(f"delta must be the ledger's, {ledger.delta:g}, got {delta:g}")
    # under masks nobody sees the sum before it is complete, so noise can only be added by the clients
    place: Literal["server", "client"] = "client" if secure else noise_at
    spent = None if delta is None else budget([noise], delta, place)
    return _hidden_statistics(tables_of_clients, request, _Hiding(secure, noise, place, spent, ledger))


@dataclass(frozen=True, slots=True)
class _Hiding:
    """The way in which sums are hidden.

    Attributes:
        secure: whether they are added up under masks.
        noise: multiplier of the noise in units of a row's influence, 0 for none.
        place: the place where it is added.
        spent: the budget that this question spends, None without noise.
        ledger: the budget of all questions.
    """

    secure: bool
    noise: float
    place: Literal["server", "client"]
    spent: PrivacyBudget | None
    ledger: Ledger | None

    @property
    def mode(self) -> Mode:
        """The mode in words."""
        return "secure and private" if self.secure and self.noise else "secure" if self.secure else "private"

    def total(self, vectors: Sequence[Ints], deviation: float) -> Floats:
        """Return the sum of the clients' vectors as it may be known, in steps; noise on a count has this deviation."""
        steps = deviation / STEP
        if self.noise and self.place == "client":
            # rounded to whole steps, since masks cancel only for whole numbers modulo 2^64
            vectors = [np.rint(_noised(vector, steps)).astype(np.int64) for vector in vectors]
        total = secure_sum(vectors) if self.secure else np.stack(vectors).sum(0)
        return _noised(total, steps) if self.noise and self.place == "server" else total.astype(np.float64)


def _noised(vector: Ints, deviation: float) -> Floats:
    """Return a vector with fresh noise from the operating system's randomness."""
    noisy = NoiseSource.fresh().add_to(torch.from_numpy(vector.astype(np.float64)), deviation)
    return np.asarray(noisy.numpy())


def _exact_statistics(tables: Sequence[ClientColumns], request: StatisticsRequest) -> FederatedStatistics:
    names, clients = list(tables[0].numbers), [table.name for table in tables]
    numbers, by_client = numbers_of(LocalAnswers(tables, names), names, clients, request)
    counted = {*tables[0].texts, *request.categories, *itertools.chain(*request.tables)}
    # sorted, since a set has another order in each process
    categories = {name: request.categories.get(name) or _present_categories(tables, name) for name in sorted(counted)}
    # only counts: moments of columns of numbers need no bounds here and come from `numbers_of`
    plan = SumPlan({}, 0, categories, request.tables)
    total = np.stack([plan.vector(table) for table in tables]).sum(0).astype(np.float64)
    texts, contingency = _categorical(plan, total)
    rows = [table.rows for table in tables]
    return FederatedStatistics(clients, "exact", rows, numbers, texts, contingency, by_client)


def numbers_of(
    answers: Answers, names: Sequence[str], clients: Sequence[str], request: StatisticsRequest, once: bool = False
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
        counts = exact_histogram(answers, edges)
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


def _present_categories(tables: Sequence[ClientColumns], name: str) -> tuple[str, ...]:
    """Return the categories of a column at any client, sorted."""
    values = sorted({str(value) for table in tables for value in set(table.text(name).tolist()) if value is not None})
    if len(values) > MOST_CATEGORIES:
        raise SettingError(
            f"column {name!r} has {len(values):,} different values, which are no categories: name the columns that you "
            "want without it"
        )
    return tuple(values)


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


def _hidden_statistics(
    tables: Sequence[ClientColumns], request: StatisticsRequest, hiding: _Hiding
) -> FederatedStatistics:
    counted = [*tables[0].texts, *itertools.chain(*request.tables)]
    option = "epsilon" if hiding.noise else "secure"
    request.check_hidden([*tables[0].numbers], counted, option, "name the columns that you want")
    plan = SumPlan(request.bounds, request.bins or 0, request.categories, request.tables)
    vectors = [plan.vector(table) for table in tables]
    # noise is calibrated to a row that is added or removed, as `influence` states, not to an exchange
    deviation = hiding.noise * plan.influence
    if hiding.ledger is not None:  # spent before anything is known, so that an error costs budget and not privacy
        hiding.ledger.spend(", ".join([*plan.bounds, *plan.categories]), hiding.noise)
    numbers, texts, contingency = of_sums(plan, hiding.total(vectors, deviation), request.quantiles)
    # the noise of several clients adds up in variance
    noise = deviation * (len(tables) ** 0.5 if hiding.place == "client" else 1.0) if hiding.noise else 0.0
    return FederatedStatistics(
        [table.name for table in tables], hiding.mode, None, numbers, texts, contingency, privacy=hiding.spent,
        noise=noise,
    )  # fmt: skip


def of_sums(
    plan: SumPlan, total: Floats, quantiles: Sequence[float]
) -> tuple[dict[str, NumberColumn], dict[str, TextColumn], dict[tuple[str, str], Table]]:
    """Return columns of numbers, of text, and tables, from the sums of all clients.

    Args:
        plan: the sums that were made.
        total: the sums [plan.length], in steps.
        quantiles: shares of the quantiles, which come from the histogram.
    """
    return plan.numbers(total, quantiles), *_categorical(plan, total)
