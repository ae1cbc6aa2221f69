"""Numbers and findings as text, the same on the page and in the figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


def headline(comparison: Comparison) -> str:
    """The main finding in one sentence."""
    shown, ranked = MetricFormat(comparison.metric), comparison.ranking()
    if not ranked:
        return "No client has been evaluated yet"
    best = ranked[0]
    found = comparison.over_seeds(best, "mean")
    assert found is not None  # it would not be ranked
    if len(ranked) == 1:
        return f"{best} ends at {shown.value(found.mean)} {shown.name}"
    return f"{best} ends best of {len(ranked)}, at {shown.value(found.mean)} {shown.name}"


def lead(comparison: Comparison) -> str:
    """The lead of the best label over FedAvg, or else over the second best, with its interval."""
    shown, ranked = MetricFormat(comparison.metric), comparison.ranking()
    if len(ranked) < 2:
        return ""
    fedavg = comparison.made_by("fedavg")
    best = ranked[0]
    other = fedavg if fedavg in ranked[1:] else ranked[1]
    row = next((row for row in comparison.paired(other) if row["label"] == best), None)
    if row is None:
        return ""
    way = "above" if row["difference"] > 0 else "below"
    text = f"{best} is {shown.size(abs(row['difference']))}{shown.points} {way} {other}"
    if row["low"] is None:
        return f"{text}, on one seed."
    low, high = shown.difference(row["low"]), shown.difference(row["high"])
    doubt = "" if is_significant(row) else ", no clear difference"
    return f"{text} (95% interval {low} to {high}, {row['seeds']} seeds{doubt})."


def is_significant(row: dict[str, Any]) -> bool:
    """Whether a row of `Comparison.paired` has an interval that excludes zero."""
    return row["low"] is not None and (row["low"] > 0 or row["high"] < 0)


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
    """The label with the best worst tenth of clients."""
    shown = MetricFormat(comparison.metric)
    tails = {
        label: found.mean for label in comparison.ranking() if (found := comparison.over_seeds(label, "worst_decile"))
    }
    if len(tails) < 2:
        return f"Distribution of {shown.name} over clients"
    order = sorted(tails, key=lambda label: tails[label], reverse=comparison.higher_is_better)
    return (
        f"The worst tenth of clients does best with {order[0]}: "
        f"{shown.value(tails[order[0]])}, compared with {shown.value(tails[order[-1]])} with {order[-1]}"
    )


def gains(comparison: Comparison, base: str) -> str:
    """The share of clients for which the best label is better than the base."""
    best = next((label for label in comparison.ranking() if label != base and comparison.per_client(label, base)), None)
    if best is None:
        return f"Clients that gain and lose compared with {base}"
    share = gaining(comparison, best, base)[0]
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
