"""Numbers as text, the same on the page, on the terminal and in the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piebald.report.crossed_effects import ERROR_RATE

NONE = "\N{EN DASH}"
_CLEARLY_LESS = 0.9  # of the traffic of the next one
MINUS = "\N{MINUS SIGN}"  # as wide as a plus sign


@dataclass(frozen=True, slots=True)
class MetricFormat:
    """The format of a metric: accuracies in percent, other metrics to three digits.

    Examples:
        >>> accuracy, loss = MetricFormat("accuracy"), MetricFormat("loss")
        >>> accuracy.value(0.8125), accuracy.difference(0.05) + accuracy.points
        ('81.2%', '+5.0 points')
        >>> loss.value(0.8125), loss.value(None) == NONE
        ('0.812', True)
    """

    metric: str

    @property
    def percent(self) -> bool:
        """True for metrics that are written in percent."""
        return "accuracy" in self.metric or self.metric in ("sensitivity", "specificity")

    @property
    def name(self) -> str:
        """The metric's name in running text."""
        return self.metric.replace("_", " ")

    def value(self, value: float | None) -> str:
        """A value with its unit; a dash for None."""
        if value is None:
            return NONE
        return f"{100 * value:.1f}%" if self.percent else three_digits(value)

    def size(self, value: float | None) -> str:
        """A spread or the size of a difference, without unit; in percentage points for percentages."""
        if value is None:
            return NONE
        return f"{100 * value:.1f}" if self.percent else three_digits(value)

    def difference(self, value: float | None) -> str:
        """A signed difference; in percentage points for percentages."""
        if value is None:
            return NONE
        text = f"{100 * value:+.1f}" if self.percent else three_digits(value, "+")
        return text.replace("-", MINUS)

    @property
    def plotly(self) -> str:
        """The format of a value in a chart."""
        return ".1%" if self.percent else ".3~g"

    @property
    def axis(self) -> dict[str, str]:
        """The layout of an axis of values in a chart."""
        return {"tickformat": ".0%"} if self.percent else {}

    @property
    def points(self) -> str:
        """The unit of differences, with a space before it."""
        return " points" if self.percent else ""


def three_digits(value: float, sign: str = "") -> str:
    """Return a number to three digits, without a power of ten for amounts of thousands and more.

    Examples:
        >>> three_digits(0.8125), three_digits(14149.7), three_digits(-2100000, "+"), three_digits(1e20)
        ('0.812', '14,100', '-2,100,000', '1e+20')
    """
    # rounded before the comparison: 999.9 becomes 1,000 and belongs to the other form
    rounded = float(f"{value:.3g}")
    return f"{rounded:{sign},.0f}" if 1000 <= abs(rounded) < 1e12 else f"{value:{sign}.3g}"


def count(number: float | None) -> str:
    """Return a count as text: without decimals if it is whole or has three digits, else to one decimal.

    Examples:
        >>> count(12345), count(2.5)
        ('12,345', '2.5')
    """
    if number is None:
        return NONE
    return f"{number:,.0f}" if number >= 100 or abs(number - round(number)) < 0.05 else f"{number:,.1f}"


def megabytes(number: float | None) -> str:
    """Millions of bytes to three digits."""
    if number is None:
        return NONE
    return "0" if number == 0 else f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def duration(seconds: float | None) -> str:
    """Return seconds in a readable unit.

    Examples:
        >>> duration(90), duration(150), duration(9000)
        ('90 s', '2.5 min', '2.5 h')
    """
    if seconds is None:
        return NONE
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def plural(number: float, thing: str) -> str:
    """A number of things."""
    # by the text and not the number: 1.04 is written as 1, and "1 rounds" would be wrong
    shown = count(number)
    return f"{shown} {thing}{'' if shown == '1' else 's'}"


def rounds(versions: Sequence[int]) -> str:
    """Return numbers of rounds in words.

    Examples:
        >>> rounds([2]), rounds([1, 2, 3, 4, 7])
        ('round 2', 'rounds 1, 2, 3 and 2 more')
    """
    shown, more = ", ".join(map(str, versions[:3])), len(versions) - 3
    return f"round{'' if len(versions) == 1 else 's'} {shown}{f' and {more} more' if more > 0 else ''}"


BEHIND, NOT_BEHIND = "clearly behind it", "not clearly behind it"  # the leader


def standing(labels: Sequence[str], clearly: bool) -> str:
    """The clause on methods that are clearly behind the leader, or on those that are not."""
    return f"{names(labels)} {'is' if len(labels) == 1 else 'are'} {BEHIND if clearly else NOT_BEHIND}"


def names(labels: Sequence[str], most: int = 4) -> str:
    """Return labels in running text; a label with a comma of its own is quoted.

    Examples:
        >>> names(["local", "fedavg", "ditto"])
        'local, fedavg and ditto'
        >>> names(list("abcdefgh"))
        'a, b, c and 5 more'
    """
    shown = [f'"{label}"' if "," in label and len(labels) > 1 else label for label in labels]
    if len(shown) > most:
        shown = [*shown[: most - 1], f"{len(shown) - most + 1} more"]
    return " and ".join(piece for piece in (", ".join(shown[:-1]), shown[-1]) if piece)


def is_significant(row: dict[str, Any]) -> bool:
    """Return whether the two labels of a row of `Comparison.paired` differ clearly."""
    return bool(row["p"] < ERROR_RATE)


def interval(row: dict[str, Any], shown: MetricFormat) -> str:
    """The interval of a row of `Comparison.paired`, or the range over its seeds, which is named so."""
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


def cheapest(tied: Sequence[str], sent: Mapping[str, float | None]) -> str | None:
    """The label that sends clearly less than all others, None where none does."""
    amounts = {label: amount for label in tied if (amount := sent.get(label)) is not None}
    order = sorted(amounts, key=lambda label: amounts[label])
    if len(amounts) < len(tied) or len(order) < 2 or amounts[order[0]] >= _CLEARLY_LESS * amounts[order[1]]:
        return None
    return order[0]
