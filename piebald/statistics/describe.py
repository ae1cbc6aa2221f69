"""Statistics over clients: the function behind `piebald.statistics` and the command of that name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from piebald.contracts import Split
from piebald.core.arguments import Fraction, Positive, checked
from piebald.core.errors import SettingError
from piebald.core.moments import Floats, Moments, merged
from piebald.core.noise import NoiseSource
from piebald.data.partition.split import Ints
from piebald.privacy.accounting import PrivacyBudget
from piebald.privacy.ledger import Ledger, budget, noise_for
from piebald.statistics import exact
from piebald.statistics.bounded_sums import STEP, SumPlan, binned_quantiles
from piebald.statistics.columns import ClientColumns, columns_of
from piebald.statistics.columns_asked import Bins, Quantiles, Wanted, wanted_of
from piebald.statistics.exact import Answers, HereAnswers
from piebald.statistics.pooled_statistics import FederatedStatistics, Mode, NumberColumn, TextColumn
from piebald.statistics.secure_sum import secure_sum

MOST_CATEGORIES = 10_000


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
    """Counts, missing values, means, deviations, quantiles, histograms and contingency tables over all clients.

    Without `secure` and `epsilon` they are those of the pooled rows: counts and quantiles to the bit, means and
    variances to rounding (each client's are merged as in Chan, Golub, LeVeque 1983).  Clients tell their counts and
    moments, and how many of their numbers are at most the thresholds of a bisection, never a row.

    Args: What is counted
        clients: `Clients`, or anything that `clients_from` accepts; or a pandas DataFrame, or the path of a CSV or
            Parquet file, with a column `client`; or a mapping from clients' names to such tables of their own.  Tables
            may have gaps and text.
        client: the column that names the client of each row.
        columns: the columns that are wanted, all by default.
        split: whose rows, where clients have splits; tables are taken whole.
        features: names of the inputs of `Clients`; "x0", "x1", ... by default, and "target".

    Args: What is wanted
        quantiles: shares in [0, 1] of the numbers below.
        bins: bins of a histogram of each column of numbers, from its smallest to its largest number, or its bounds.
        bounds: (low, high) of columns of numbers.  Under `secure` or `epsilon`, all must have them, and a number
            outside counts as the nearer bound.
        categories: the categories of columns, by name.  By default those that clients name, which they do neither under
            `secure` nor under `epsilon`: then only columns with stated categories are counted.
        tables: pairs of columns to count together; whole numbers count as categories, too.
        by_client: each client's own columns of numbers, too.

    Args: What is hidden
        secure: clients' sums are added up under masks, so that nobody learns one client's; three clients at least.
        epsilon, delta: the privacy budget of this question, for all statistics together: Gaussian noise hides whether
            a row is there.  `delta` is below one over the number of rows.
        noise_at: where noise is added: once to the sum, by a "server" that must be trusted, or by each "client" to its
            own sums, so that nobody must.  Under `secure` it is the clients.
        ledger: the budget of all questions about these rows; this one is counted, or refused.

    Returns:
        The statistics; under `secure` or `epsilon`, quantiles come from the histogram, and are at most one bin's width
        from those of the pooled rows, noise aside.

    Raises:
        SettingError: an argument is wrong, or clients' rows do not fit together.
    """
    found = columns_of(clients, client, columns, split, features)
    wanted = wanted_of(found, quantiles, bins, bounds or {}, categories or {}, tables, by_client)
    if epsilon is None and (delta is not None or ledger is not None):
        given = "delta" if delta is not None else "ledger"
        raise SettingError(f"{given} belongs to noise: give epsilon, too, or leave it out")
    if not secure and epsilon is None:
        return _exactly(found, wanted)
    if by_client:
        raise SettingError("by_client tells what secure and epsilon are to hide: leave it out")
    if epsilon is not None and delta is None:
        raise SettingError("epsilon needs a delta, below one over the number of rows: write delta=1e-6")
    hidden = Hidden.of(secure, epsilon, delta, noise_at, ledger)
    return _hidden(found, wanted, hidden)


@dataclass(frozen=True, slots=True)
class Hidden:
    """How sums are hidden.

    Attributes:
        secure: under masks.
        noise: multiplier of the noise in units of a row's influence, 0 for none.
        where: who adds it.
        spent: what this question spends, None without noise.
        ledger: counts it.
    """

    secure: bool
    noise: float
    where: Literal["server", "client"]
    spent: PrivacyBudget | None
    ledger: Ledger | None

    @classmethod
    def of(
        cls,
        secure: bool,
        epsilon: float | None,
        delta: float | None,
        where: Literal["server", "client"],
        ledger: Ledger | None,
    ) -> Hidden:
        """From the arguments of `statistics`."""
        where = "client" if secure else where
        if epsilon is None or delta is None:
            return cls(secure, 0.0, where, None, None)
        if ledger is not None and ledger.delta != delta:
            raise SettingError(f"delta must be the ledger's, {ledger.delta:g}, got {delta:g}")
        noise = noise_for(epsilon, delta)
        return cls(secure, noise, where, budget([noise], delta, where), ledger)

    @property
    def mode(self) -> Mode:
        """In words."""
        return "secure and private" if self.secure and self.noise else "secure" if self.secure else "private"

    def total(self, vectors: Sequence[Ints], deviation: float) -> Floats:
        """The sum of the clients' vectors as it may be known, in steps; `deviation` is that of noise on a count."""
        steps = deviation / STEP
        if self.noise and self.where == "client":
            vectors = [np.rint(_noised(vector, steps)).astype(np.int64) for vector in vectors]
        total = secure_sum(vectors) if self.secure else np.stack(vectors).sum(0)
        return _noised(total, steps) if self.noise and self.where == "server" else total.astype(np.float64)


def _noised(vector: Ints, deviation: float) -> Floats:
    """A vector with fresh noise from the operating system's randomness."""
    made = NoiseSource.fresh().add_to(torch.from_numpy(vector.astype(np.float64)), deviation)
    return np.asarray(made.numpy())


# ------------------------------------------------------------------------------------------------------- exact answers


def _exactly(clients: Sequence[ClientColumns], wanted: Wanted) -> FederatedStatistics:
    names = list(clients[0].numbers)
    numbers, by_client = of_answers(HereAnswers(clients, names), names, [one.name for one in clients], wanted)
    counted = {*clients[0].texts, *wanted.categories, *itertools.chain(*wanted.tables)}
    categories = {name: wanted.categories.get(name) or _named(clients, name) for name in sorted(counted)}
    plan = SumPlan({}, 0, categories, wanted.tables)
    total = np.stack([plan.vector(one) for one in clients]).sum(0).astype(np.float64)
    texts, tables = _categorical(plan, total)
    rows = [one.rows for one in clients]
    return FederatedStatistics([one.name for one in clients], "exact", rows, numbers, texts, tables, by_client)


def of_answers(
    answers: Answers, names: Sequence[str], clients: Sequence[str], wanted: Wanted, once: bool = False
) -> tuple[dict[str, NumberColumn], dict[str, dict[str, NumberColumn]]]:
    """The columns of numbers over all clients, and each client's own where that is wanted.

    Args:
        answers: of the clients about these columns, wherever they are.
        names: the columns.
        clients: the clients' names.
        wanted: what is wanted.
        once: quantiles are left out, NaN, so that at most one question is about counts, that of the histogram.
    """
    if not names:
        return {}, {}
    told = answers.moments()
    pooled = merged(told)
    found = np.full((len(names), len(wanted.quantiles)), np.nan)
    if not once:
        found = exact.quantiles(answers, pooled.present, wanted.quantiles)
    edges: Floats | None = None
    counts = np.zeros((len(told), len(names), 0), dtype=np.int64)
    if wanted.bins is not None:
        ends = np.full((len(names), 2), np.nan)
        if any(name not in wanted.bounds for name in names):
            ends = exact.quantiles(answers, pooled.present, (0.0, 1.0))
        for place, name in enumerate(names):
            ends[place] = wanted.bounds.get(name, ends[place])
        edges = exact.edges_of(ends[:, 0], ends[:, 1], wanted.bins)
        counts = exact.histogram(answers, edges)
    numbers = _columns(names, pooled, wanted.quantiles, found, edges, counts.sum(0))
    if once and edges is not None:
        numbers = {name: _with_binned(one) for name, one in numbers.items()}
    if not wanted.by_client:
        return numbers, {}
    own = {
        name: _columns(names, moments, (), np.zeros((len(names), 0)), edges, counts[place])
        for place, (name, moments) in enumerate(zip(clients, told, strict=True))
    }
    return numbers, own


def _columns(
    names: Sequence[str], moments: Moments, shares: Sequence[float], quantiles: Floats, edges: Floats | None,
    counts: Ints,
) -> dict[str, NumberColumn]:  # fmt: skip
    found, variance = {}, moments.variance
    for place, name in enumerate(names):
        present = int(moments.present[place])
        found[name] = NumberColumn(
            present=present,
            missing=int(moments.missing[place]),
            infinite=int(moments.infinite[place]),
            mean=float(moments.mean[place]) if present else float("nan"),
            variance=float(variance[place]),
            quantiles={share: float(quantiles[place, number]) for number, share in enumerate(shares)},
            edges=() if edges is None else tuple(edges[place].tolist()),
            counts=tuple(counts[place].tolist()),
        )
    return found


def _with_binned(column: NumberColumn) -> NumberColumn:
    """A column with the quantiles of its histogram."""
    found = binned_quantiles(np.array(column.counts), np.array(column.edges), tuple(column.quantiles))
    width = column.edges[1] - column.edges[0]
    return replace(column, quantiles=dict(zip(column.quantiles, found, strict=True)), quantile_error=width)


def _named(clients: Sequence[ClientColumns], name: str) -> tuple[str, ...]:
    """The categories that clients name, sorted."""
    found = sorted({str(value) for one in clients for value in set(one.text(name).tolist()) if value is not None})
    if len(found) > MOST_CATEGORIES:
        raise SettingError(
            f"column {name!r} has {len(found):,} different values, which are no categories: name the columns that you "
            "want without it"
        )
    return tuple(found)


def _categorical(
    plan: SumPlan, total: Floats
) -> tuple[dict[str, TextColumn], dict[tuple[str, str], dict[str, dict[str, float]]]]:
    single, double = plan.counts(total)
    texts = {
        name: TextColumn(
            dict(zip(plan.categories[name], counts.tolist(), strict=False)), float(counts[-2]), float(counts[-1])
        )
        for name, counts in single.items()
    }
    tables = {
        (one, other): {
            value: dict(zip(plan.categories[other], line.tolist(), strict=True))
            for value, line in zip(plan.categories[one], counts, strict=True)
        }
        for (one, other), counts in double.items()
    }
    return texts, tables


# ------------------------------------------------------------------------------------------------------ hidden answers


def _hidden(clients: Sequence[ClientColumns], wanted: Wanted, hidden: Hidden) -> FederatedStatistics:
    what = "epsilon" if hidden.noise else "secure"
    for name in clients[0].numbers:
        if name not in wanted.bounds and name not in wanted.categories:
            raise SettingError(
                f"{what} needs bounds of column {name!r}, which must not be taken from the rows: write "
                f"bounds={{{name!r}: (low, high)}}, or name the columns that you want"
            )
    for name in [*clients[0].texts, *itertools.chain(*wanted.tables)]:
        if name not in wanted.categories:
            raise SettingError(
                f"{what} needs categories of column {name!r}, which must not be taken from the rows: write "
                f"categories={{{name!r}: [...]}}, or name the columns that you want"
            )
    if wanted.quantiles and wanted.bins is None and wanted.bounds:
        raise SettingError(
            f"{what} takes quantiles from a histogram: write bins=100 for an error of a hundredth of the bounds, or "
            "quantiles=()"
        )
    plan = SumPlan(wanted.bounds, wanted.bins or 0, wanted.categories, wanted.tables)
    vectors = [plan.vector(one) for one in clients]
    deviation = hidden.noise * plan.influence
    if hidden.ledger is not None:
        hidden.ledger.spend(", ".join([*plan.bounds, *plan.categories]), hidden.noise)
    total = hidden.total(vectors, deviation)
    numbers, texts, tables = of_sums(plan, total, wanted.quantiles)
    names = [one.name for one in clients]
    together = deviation * (len(clients) ** 0.5 if hidden.where == "client" else 1.0)
    return FederatedStatistics(
        names, hidden.mode, None, numbers, texts, tables, privacy=hidden.spent, noise=together if hidden.noise else 0.0
    )


def of_sums(
    plan: SumPlan, total: Floats, quantiles: Sequence[float]
) -> tuple[dict[str, NumberColumn], dict[str, TextColumn], dict[tuple[str, str], dict[str, dict[str, float]]]]:
    """Columns of numbers, of text, and tables, from the sums of all clients.

    Args:
        plan: what was summed.
        total: the sums [plan.length], in steps.
        quantiles: which are wanted, from the histogram.
    """
    texts, tables = _categorical(plan, total)
    numbers = {}
    for name, sums in plan.numbers(total).items():
        low, high = plan.bounds[name]
        edges = np.linspace(low, high, plan.bins + 1) if plan.bins else np.zeros(0)
        found = binned_quantiles(sums.bins, edges, quantiles) if plan.bins else []
        numbers[name] = NumberColumn(
            present=sums.present,
            missing=sums.missing,
            infinite=sums.infinite,
            mean=sums.mean,
            variance=sums.variance,
            quantiles=dict(zip(quantiles, found, strict=False)),
            edges=tuple(edges.tolist()),
            counts=tuple(sums.bins.tolist()),
            quantile_error=(high - low) / plan.bins if plan.bins else 0.0,
        )
    return numbers, texts, tables
