"""Statistics over the clients of a table on this machine: `piebald.statistics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piebald.contracts import Split
from piebald.core.arguments import Fraction, Positive, checked
from piebald.core.errors import SettingError
from piebald.inference.columns import columns_of
from piebald.inference.pooled_statistics import FederatedStatistics
from piebald.inference.request import Bins, NoiseAt, Quantiles, statistics_request
from piebald.inference.simulated import MOST_CATEGORIES, TableClients, simulated
from piebald.inference.statistics_at_sites import statistics_at_sites
from piebald.privacy import SecureAggregation
from piebald.privacy.ledger import Ledger


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
            `epsilon` clients do not say them, so only columns with stated categories are counted; one of numbers that
            has bounds, too, is counted and added up.
        tables: pairs of columns to count together; whole numbers count as categories, too.
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
        quantiles, bins, bounds, by_client, categories, tables, "train", secure, epsilon, delta, noise_at
    )
    if ledger is not None and epsilon is None:
        raise SettingError("ledger belongs to noise: give epsilon, too, or leave it out")
    if delta is not None and ledger is not None and ledger.delta != delta:
        raise SettingError(f"delta must be the ledger's, {ledger.delta:g}, got {delta:g}")
    # words of clients are no numbers of categories where nobody may look at them: others than the stated ones are one
    most = None if request.hides_rows else MOST_CATEGORIES
    rows = TableClients.of(columns_of(clients, client, columns, split, features), request.categories, most)
    with simulated(rows, [SecureAggregation(bits=64)] * secure) as (runtime, work):
        return statistics_at_sites(runtime, work, rows, request, ledger=ledger)
