"""What federated statistics are: columns, histograms, counts of categories, tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from piebald.core.arguments import checked, checked_class
from piebald.core.errors import SettingError, unknown
from piebald.data.clients.standardise import Standardisation
from piebald.privacy.accounting import PrivacyBudget
from piebald.report.page.markup import html_table

Mode = Literal["exact", "secure", "private", "secure and private"]


@dataclass(frozen=True, slots=True)
class NumberColumn:
    """A column of numbers over all clients.

    Attributes:
        present: finite numbers; they are what the other statistics are of.
        missing: rows without a number.
        infinite: rows with an infinite number.
        mean: their mean, NaN where there are none.
        variance: their unbiased variance, NaN for fewer than two.
        quantiles: quantile by share.
        edges: of the histogram's bins [bins + 1], empty without one; each bin has its lower edge, the last one both.
        counts: numbers in each bin [bins].
        quantile_error: how far a quantile may be from that of the pooled rows, 0 where it is exact; noise comes on top.
    """

    present: float
    missing: float
    infinite: float
    mean: float
    variance: float
    quantiles: Mapping[float, float] = field(default_factory=dict)
    edges: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    quantile_error: float = 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation, the root of the unbiased variance."""
        return math.sqrt(self.variance)

    def plain(self) -> dict[str, Any]:
        """As JSON values; NaN becomes None."""
        found: dict[str, Any] = {name: getattr(self, name) for name in ("present", "missing", "infinite")}
        found |= {"mean": _known(self.mean), "deviation": _known(self.deviation)}
        if self.quantiles:
            found["quantiles"] = {f"{share:g}": _known(value) for share, value in self.quantiles.items()}
            found["quantile_error"] = self.quantile_error
        if self.counts:
            found |= {"edges": [_known(edge) for edge in self.edges], "counts": list(self.counts)}
        return found


@dataclass(frozen=True, slots=True)
class TextColumn:
    """A column of text over all clients: rows of each category, in other ones where categories were stated, in none."""

    counts: Mapping[str, float]
    other: float
    missing: float

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {"counts": dict(self.counts), "other": self.other, "missing": self.missing}


@checked_class
@dataclass(frozen=True, slots=True)
class FederatedStatistics:
    """Statistics over the rows of all clients.

    Attributes:
        clients: the clients' names.
        mode: how the answers were summed.
        rows: rows of each client; None where only sums are known.
        numbers: columns of numbers, by name.
        texts: columns of text, by name.
        tables: contingency tables, by their two columns: rows of one category and of the other, nested.
        by_client: each client's own columns of numbers, where that was wanted.
        privacy: what was spent, None without noise.
        noise: standard deviation of the noise on each count, 0 without noise.
    """

    clients: Sequence[str]
    mode: Mode
    rows: Sequence[int] | None
    numbers: Mapping[str, NumberColumn]
    texts: Mapping[str, TextColumn] = field(default_factory=dict)
    tables: Mapping[tuple[str, str], Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    by_client: Mapping[str, Mapping[str, NumberColumn]] = field(default_factory=dict)
    privacy: PrivacyBudget | None = None
    noise: float = 0.0

    def __repr__(self) -> str:
        """How much there is, in one line."""
        rows = "" if self.rows is None else f"{sum(self.rows):,} rows of "
        return (
            f"<FederatedStatistics, {self.mode}: {rows}{len(self.clients)} clients, {len(self.numbers)} columns of "
            f"numbers, {len(self.texts)} of text>"
        )

    def _repr_html_(self) -> str:
        heading, *rows = self.table()
        return html_table(heading, rows)

    def __getitem__(self, column: str) -> NumberColumn | TextColumn:
        """A column.

        Raises:
            SettingError: there is none of this name.
        """
        found: NumberColumn | TextColumn | None = self.numbers.get(column) or self.texts.get(column)
        if found is None:
            raise unknown("column", column, [*self.numbers, *self.texts])
        return found

    @checked
    def only(self, columns: Sequence[str]) -> FederatedStatistics:
        """The same of some columns.

        Raises:
            SettingError: there is none of a name.
        """
        for column in columns:
            self[column]
        numbers = {name: one for name, one in self.numbers.items() if name in columns}
        texts = {name: one for name, one in self.texts.items() if name in columns}
        own = {client: {name: held[name] for name in numbers} for client, held in self.by_client.items()}
        return replace(self, numbers=numbers, texts=texts, by_client=own)

    def table(self) -> list[list[Any]]:
        """A table of the columns of numbers, with its heading as the first row."""
        shares = next(iter(self.numbers.values())).quantiles if self.numbers else {}
        heading = ["column", "count", "missing", "mean", "sd", *(f"{100 * share:g}%" for share in shares)]
        infinite = any(round(one.infinite) for one in self.numbers.values())
        heading[3:3] = ["infinite"] if infinite else []
        rows = []
        for name, one in self.numbers.items():
            counts = [one.present, one.missing, *([one.infinite] if infinite else [])]
            values = [one.mean, one.deviation, *(one.quantiles[share] for share in shares)]
            rows.append([name, *(round(count) for count in counts), *(_known(value) for value in values)])
        return [heading, *rows]

    @checked
    def standardisation(self, columns: Sequence[str] | None = None) -> Standardisation:
        """The constants that give columns mean 0 and deviation 1.

        Args:
            columns: in the order of the model's inputs; all columns of numbers by default.

        Raises:
            SettingError: a column has no numbers, or none of this name exists.
        """
        names = list(self.numbers) if columns is None else list(columns)
        for name in names:
            if name not in self.numbers:
                raise unknown("column of numbers", name, self.numbers)
            if math.isnan(self.numbers[name].mean):
                raise SettingError(f"column {name!r} has no numbers, so it has no mean: leave it out")
        found = [self.numbers[name] for name in names]
        # divided by the count, as in scikit-learn's StandardScaler
        spread = [math.sqrt(max(one.variance, 0.0) * (one.present - 1) / one.present) if one.present > 1 else 0.0
                  for one in found]  # fmt: skip
        return Standardisation(mean=[one.mean for one in found], deviation=[one or 1.0 for one in spread])

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "clients": list(self.clients),
            "mode": self.mode,
            "rows": None if self.rows is None else list(self.rows),
            "columns": {name: one.plain() for name, one in self.numbers.items()}
            | {name: one.plain() for name, one in self.texts.items()},
            "tables": [{"columns": list(pair), "counts": table} for pair, table in self.tables.items()],
            "by_client": {
                client: {name: one.plain() for name, one in own.items()} for client, own in self.by_client.items()
            },
            "privacy": None if self.privacy is None else self.privacy.plain(),
            "noise": self.noise,
        }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
