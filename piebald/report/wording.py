"""Numbers and findings as text, the same on the page and in the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from piebald.report.paired import ERROR_RATE, Scores, cannot_be_told_apart, ranking

if TYPE_CHECKING:
    from piebald.report.comparison import Comparison

NONE = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"  # as wide as a plus sign


@dataclass(frozen=True, slots=True)
class MetricFormat:
    """How a metric is written: accuracies in percent, other metrics to three digits."""

    metric: str

    @property
    def percent(self) -> bool:
        """Whether the metric is written in percent."""
        return "accuracy" in self.metric

    @property
    def name(self) -> str:
        """The metric's name in running text."""
        return self.metric.replace("_", " ")

    def value(self, value: float | None) -> str:
        """A value with its unit; a dash for None."""
        if value is None:
            return NONE
        return f"{100 * value:.1f}%" if self.percent else f"{value:.3g}"

    def size(self, value: float | None) -> str:
        """A spread or the size of a difference, without unit; in percentage points for percentages."""
        if value is None:
            return NONE
        return f"{100 * value:.1f}" if self.percent else f"{value:.3g}"

    def difference(self, value: float | None) -> str:
        """A signed difference; in percentage points for percentages."""
        if value is None:
            return NONE
        text = f"{100 * value:+.1f}" if self.percent else f"{value:+.3g}"
        return text.replace("-", MINUS)

    @property
    def points(self) -> str:
        """The unit of differences, with a space before it."""
        return " points" if self.percent else ""


def count(number: float | None) -> str:
    """A count: without decimals if it is whole, else to one decimal."""
    if number is None:
        return NONE
    return f"{number:,.0f}" if abs(number - round(number)) < 0.05 else f"{number:,.1f}"


def megabytes(number: float | None) -> str:
    """Millions of bytes to three digits."""
    if number is None:
        return NONE
    return "0" if number == 0 else f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def duration(seconds: float | None) -> str:
    """Seconds in a readable unit."""
    if seconds is None:
        return NONE
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def plural(number: int, thing: str) -> str:
    """A number of things."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def names(labels: Sequence[str], most: int = 4) -> str:
    """Labels in running text: "A, B and C", or "A, B, C and 7 more"."""
    shown = list(labels)
    if len(shown) > most:
        shown = [*shown[: most - 1], f"{len(shown) - most + 1} more"]
    return " and ".join(piece for piece in (", ".join(shown[:-1]), shown[-1]) if piece)


def is_significant(row: dict[str, Any]) -> bool:
    """Whether the two labels of a row of `Comparison.paired` can be told apart."""
    return bool(row["p"] < ERROR_RATE)


def interval(row: dict[str, Any], shown: MetricFormat) -> str:
    """The interval of a row of `Comparison.paired`, or what stands in its place, said so."""
    if row["low"] is None:
        return "one seed"
    ends = f"{shown.difference(row['low'])} to {shown.difference(row['high'])}"
    return ends if row["kind"] == "interval" else f"range of {row['seeds']} seeds {ends}"


def progress(comparison: Comparison) -> str:
    """The rounds after which the best label reaches the final value of FedAvg, or else of the second best."""
    shown, ranked = MetricFormat(comparison.metric), comparison.ranking()
    fedavg = comparison.made_by("fedavg")
    if len(ranked) > 1:
        other = fedavg if fedavg in ranked[1:] else ranked[1]
        end = comparison.over_seeds(other, "mean")
        row = next((row for row in comparison.to_target(end.mean) if row["label"] == ranked[0]), None) if end else None
        if end and row and row["reached"] == row["runs"]:
            rounds = count(row["rounds"])
            return f"{ranked[0]} reaches the final value of {other}, {shown.value(end.mean)}, after {rounds} rounds"
    return f"{shown.name.capitalize()} over the run"


def worst_tenth(comparison: Comparison) -> str:
    """The label with the best worst tenth of clients, or those that cannot be told apart by it."""
    shown = MetricFormat(comparison.metric)
    tails = {label: one for label in comparison.ranking() if (one := _tails(comparison.finals[label]))}
    if len(tails) < 2:
        return f"Distribution of {shown.name} over clients"
    order = ranking(tails, comparison.higher_is_better)
    tied = cannot_be_told_apart(tails, comparison.higher_is_better)
    if len(tied) > 1:
        return f"Worst tenth of clients: {names(tied)} cannot be told apart"
    ends = [shown.value(float(tails[label].values.mean())) for label in (order[0], order[-1])]
    return f"The worst tenth of clients does best with {order[0]}: {ends[0]}, compared with {ends[1]} with {order[-1]}"


def _tails(finals: list[dict[str, Any]]) -> Scores | None:
    """The mean of the worst tenth in each run: one number for each seed."""
    found = {final["seed"]: final["worst_decile"] for final in finals if final["worst_decile"] is not None}
    seeds = [seed for seed in found if seed is not None] or list(range(len(found)))
    return Scores(np.array(list(found.values()), float)[:, None], ["worst tenth"], seeds) if found else None


def gains(comparison: Comparison, base: str) -> str:
    """The share of clients for which the best label is better than the base."""
    best = next((label for label in comparison.ranking() if label != base and comparison.per_client(label, base)), None)
    if best is None:
        return f"Clients that gain and lose compared with {base}"
    share = gaining(comparison, best, base)[0]
    row = next((row for row in comparison.paired(base) if row["label"] == best), None)
    if row is None or not is_significant(row):
        return f"{best} and {base} cannot be told apart; {share:.0%} of clients score better with {best}"
    return f"{best} is better than {base} for {share:.0%} of clients"


def gaining(comparison: Comparison, label: str, base: str) -> tuple[float, float]:
    """The shares of clients that gain and that lose compared with the base."""
    sign = 1 if comparison.higher_is_better else -1
    differences = comparison.per_client(label, base)
    better = sum(sign * difference > 0 for difference in differences)
    worse = sum(sign * difference < 0 for difference in differences)
    return better / len(differences), worse / len(differences)


def cheapest(comparison: Comparison, target: float) -> str:
    """The label that reaches the target with the least traffic."""
    shown = MetricFormat(comparison.metric)
    alone = comparison.made_by("local")  # its traffic is not comparable
    reached = [row for row in comparison.to_target(target) if row["reached"] == row["runs"] and row["mb"]]
    rows = [row for row in reached if row["label"] != alone]
    if len(rows) < 2:
        return f"Cost of reaching {shown.value(target)}"
    rows.sort(key=lambda row: row["mb"])
    return (
        f"{rows[0]['label']} reaches {shown.value(target)} with {megabytes(rows[0]['mb'])} MB; "
        f"{rows[-1]['label']} needs {megabytes(rows[-1]['mb'])} MB"
    )


def holdings(counts: list[list[int]]) -> str:
    """The number of classes that clients hold."""
    held = sorted(sum(number > 0 for number in row) for row in counts)
    classes, middle = len(counts[0]), held[len(held) // 2]
    if held[0] == held[-1]:
        return f"Every client holds {'all' if middle == classes else middle} of {classes} classes"
    return f"Clients hold {held[0]} to {held[-1]} of {classes} classes, half of them {middle} or fewer"
