"""The rule of every headline: on the page, on the terminal and in a repr.

The best label is a winner only if it can be told apart from all others (`report.paired.cannot_be_told_apart`).
Otherwise the headline names all that cannot be told apart, and which of them sends least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from piebald.report.wording import MetricFormat, interval, is_significant, megabytes, names

if TYPE_CHECKING:
    from piebald.report.comparison import Comparison

_CLEARLY_LESS = 0.9  # of the traffic of the next one


def rule(tied: Sequence[str], tried: int, best: str, sent: Mapping[str, float | None]) -> str:
    """The headline in one sentence.

    Args:
        tied: the best label and all that cannot be told apart from it, the best first.
        tried: the number of labels compared.
        best: the best label's mean as text, such as "88.1% accuracy".
        sent: bytes that each label sends, both ways; None where it is not known.
    """
    if tried == 1:
        return f"{tied[0]} ends at {best}"
    if len(tied) == 1:
        return f"{tied[0]} ends best of {tried}, at {best}"
    cheap = cheapest(tied, sent)
    order = sorted(tied, key=lambda label: label != cheap)  # so that the one talked about is not among "7 more"
    which = names(order) if len(tied) > 4 else names(tied)
    clear = f"{which} cannot be told apart" if len(tied) == tried else f"{which} are best and cannot be told apart"
    if cheap is None:
        return clear
    amount = sent[cheap] or 0.0
    return f"{clear}; {cheap} sends {'nothing' if not amount else f'least, {megabytes(amount / 1e6)} MB'}"


def cheapest(tied: Sequence[str], sent: Mapping[str, float | None]) -> str | None:
    """The label that sends clearly less than all others, None where none does."""
    known = {label: amount for label in tied if (amount := sent.get(label)) is not None}
    order = sorted(known, key=lambda label: known[label])
    if len(known) < len(tied) or len(order) < 2 or known[order[0]] >= _CLEARLY_LESS * known[order[1]]:
        return None
    return order[0]


def sentence(comparison: Comparison) -> str:
    """The finding of a comparison."""
    shown, tied = MetricFormat(comparison.metric), comparison.tied
    if not tied:
        return "No client has been evaluated yet"
    best = f"{shown.value(comparison.levels[tied[0]].mean)} {shown.name}"
    sent = {row["label"]: 1e6 * (row["mb_up"] + row["mb_down"]) for row in comparison.summary()}
    return rule(tied, len(comparison.ranking()), best, sent)


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
    doubt = "" if is_significant(row) else ", no clear difference"
    if row["low"] is None:
        return f"{text} on one seed, which says nothing about other seeds{doubt}."
    what = interval(row, shown)
    if row["kind"] == "interval":
        what = f"95% interval {what} for other clients and seeds, {row['seeds']} seeds"
    return f"{text} ({what}{doubt})."
