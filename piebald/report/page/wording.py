"""Numbers as text, the same on the page, on the terminal and in the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from piebald.report.crossed_effects import ERROR_RATE

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
    """A count: without decimals if it is whole or has three digits, else to one decimal."""
    if number is None:
        return NONE
    return f"{number:,.0f}" if number >= 100 or abs(number - round(number)) < 0.05 else f"{number:,.1f}"


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


def plural(number: float, thing: str) -> str:
    """A number of things."""
    shown = count(number)
    return f"{shown} {thing}{'' if shown == '1' else 's'}"


def names(labels: Sequence[str], most: int = 4) -> str:
    """Labels in running text: "A, B and C", or "A, B, C and 7 more"; one with a comma of its own is quoted."""
    shown = [f'"{label}"' if "," in label and len(labels) > 1 else label for label in labels]
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


def holdings(counts: list[list[int]]) -> str:
    """The number of classes that clients hold."""
    held = sorted(sum(number > 0 for number in row) for row in counts)
    classes, middle = len(counts[0]), held[len(held) // 2]
    if held[0] == held[-1]:
        return f"Every client holds {'all' if middle == classes else middle} of {classes} classes"
    return f"Clients hold {held[0]} to {held[-1]} of {classes} classes, half of them {middle} or fewer"
