"""Numbers and findings in words, the same in the page and in the figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from piebald.report.comparison import Comparison

NONE = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"  # as wide as a plus


@dataclass(frozen=True, slots=True)
class MetricFormat:
    """How a metric is written: accuracies in percent, anything else to three digits."""

    metric: str

    @property
    def percent(self) -> bool:
        """Whether the metric is a share, which is written in percent."""
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
        """A spread or the size of a difference, without unit; of percentages it is in points."""
        if value is None:
            return NONE
        return f"{100 * value:.1f}" if self.percent else f"{value:.3g}"

    def difference(self, value: float | None) -> str:
        """A signed difference; of percentages it is in points."""
        if value is None:
            return NONE
        text = f"{100 * value:+.1f}" if self.percent else f"{value:+.3g}"
        return text.replace("-", MINUS)

    @property
    def points(self) -> str:
        """The unit of differences, with a space before it."""
        return " points" if self.percent else ""


def count(number: float | None) -> str:
    """A count; whole where it is whole, else to one decimal."""
    if number is None:
        return NONE
    return f"{number:,.0f}" if abs(number - round(number)) < 0.05 else f"{number:,.1f}"


def megabytes(number: float | None) -> str:
    """Millions of bytes to three digits."""
    if number is None:
        return NONE
    return "0" if number == 0 else f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def duration(seconds: float | None) -> str:
    """Seconds in a unit that can be read."""
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
    """What came out, in one sentence."""
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
    """How far the best is ahead of FedAvg, or else of the next, and how sure that is."""
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
    doubt = "" if sure(row) else ", so that they cannot be told apart"
    return f"{text} (95% interval {low} to {high}, {row['seeds']} seeds{doubt})."


def sure(row: dict[str, Any]) -> bool:
    """Whether a row of `Comparison.paired` has an interval, and zero is not in it."""
    return row["low"] is not None and (row["low"] > 0 or row["high"] < 0)


def progress(comparison: Comparison) -> str:
    """How soon the best is where FedAvg, or else the next, ends."""
    shown, ranked = MetricFormat(comparison.metric), comparison.ranking()
    fedavg = comparison.made_by("fedavg")
    if len(ranked) > 1:
        other = fedavg if fedavg in ranked[1:] else ranked[1]
        end = comparison.over_seeds(other, "mean")
        row = next((row for row in comparison.to_target(end.mean) if row["label"] == ranked[0]), None) if end else None
        if end and row and row["reached"] == row["runs"]:
            return f"{ranked[0]} is where {other} ends, {shown.value(end.mean)}, after {count(row['rounds'])} rounds"
    return f"{shown.name.capitalize()} over the run"


def worst_tenth(comparison: Comparison) -> str:
    """For whom the worst-off clients fare best."""
    shown = MetricFormat(comparison.metric)
    tails = {
        label: found.mean for label in comparison.ranking() if (found := comparison.over_seeds(label, "worst_decile"))
    }
    if len(tails) < 2:
        return f"How {shown.name} is spread over clients"
    order = sorted(tails, key=lambda label: tails[label], reverse=comparison.higher_is_better)
    return (
        f"The worst-off tenth of clients does best under {order[0]}: "
        f"{shown.value(tails[order[0]])}, against {shown.value(tails[order[-1]])} under {order[-1]}"
    )


def gains(comparison: Comparison, base: str) -> str:
    """What share of clients the best label serves better than the base."""
    best = next((label for label in comparison.ranking() if label != base and comparison.per_client(label, base)), None)
    if best is None:
        return f"Who gains and who loses against {base}"
    share = gaining(comparison, best, base)[0]
    return f"{best} serves {share:.0%} of clients better than {base}"


def gaining(comparison: Comparison, label: str, base: str) -> tuple[float, float]:
    """The shares of clients that gain and that lose against the base."""
    sign = 1 if comparison.higher_is_better else -1
    differences = comparison.per_client(label, base)
    better = sum(sign * difference > 0 for difference in differences)
    worse = sum(sign * difference < 0 for difference in differences)
    return better / len(differences), worse / len(differences)


def cheapest(comparison: Comparison, target: float) -> str:
    """Who needs the least traffic to come to the target."""
    shown = MetricFormat(comparison.metric)
    alone = comparison.made_by("local")  # it has no traffic worth comparing
    reached = [row for row in comparison.to_target(target) if row["reached"] == row["runs"] and row["mb"]]
    rows = [row for row in reached if row["label"] != alone]
    if len(rows) < 2:
        return f"What it takes to reach {shown.value(target)}"
    rows.sort(key=lambda row: row["mb"])
    return (
        f"{rows[0]['label']} reaches {shown.value(target)} with {megabytes(rows[0]['mb'])} MB; "
        f"{rows[-1]['label']} needs {megabytes(rows[-1]['mb'])} MB"
    )


def holdings(counts: list[list[int]]) -> str:
    """How many classes a client holds."""
    held = sorted(sum(number > 0 for number in row) for row in counts)
    classes, middle = len(counts[0]), held[len(held) // 2]
    if held[0] == held[-1]:
        return f"Every client holds {'all' if middle == classes else middle} of {classes} classes"
    return f"Clients hold {held[0]} to {held[-1]} of {classes} classes, half of them {middle} or fewer"
