"""The rule of every headline: on the page, on the terminal and in a repr.

The best label is a winner only if it can be told apart from all others (`report.paired.cannot_be_told_apart`).
Otherwise the headline names all that cannot be told apart, and which of them sends least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from piebald.report.page.wording import megabytes, names

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
