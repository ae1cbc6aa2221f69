"""Text for one screen of a terminal: short paragraphs with a heading beside them, none of them longer than agreed."""

from __future__ import annotations

from collections.abc import Sequence

from piebald.core.plain_text import WIDTH, cut, wrap

LINES = 24  # of a terminal
INDENT = 10  # columns of a heading
_NAME = 26  # columns of a client's name

Part = tuple[str, str, int]  # a heading, its paragraph, and the lines that it may have however much others have


def screen(parts: Sequence[Part]) -> str:
    r"""Return parts as at most 24 lines of 80 columns, without those that have no text.

    Lines that some parts leave over are for the first of those that need more than theirs.

    Examples:
        >>> screen([("Short", "a few words", 2), ("Long", "word " * 30, 2)]).count("\n")
        4
    """
    lines: list[str] = []
    columns = WIDTH - INDENT
    # what each part needs within its own lines is counted first, so that no part is cut for another
    spare = LINES - sum(min(len(wrap(text, columns)), most) for _, text, most in parts)
    for heading, text, most in parts:
        more = max(0, min(len(wrap(text, columns)) - most, spare))
        spare -= more
        rows = wrap(text, columns, most + more)
        lines += [f"{'' if place else heading:<{INDENT}}{row}" for place, row in enumerate(rows)]
    return "\n".join(lines) + "\n"


def fitting(items: Sequence[str], columns: int, unit: str = "") -> str:
    """Return as many items as fit into so many columns, with their unit behind them, and the number of the others.

    Examples:
        >>> fitting(["north +4.0", "south +3.1", "west +2.2"], 30, " points")
        'north +4.0 points and 2 more'
    """
    from rich.cells import cell_len

    shown = f"{', '.join(items)}{unit}"
    count = len(items)
    # columns of a terminal and not letters: some letters take two
    while count and cell_len(shown) > columns:
        count -= 1
        shown = f"{', '.join(items[:count])}{unit} and {len(items) - count:,} more"
    return shown if count else f"{len(items):,} clients" if items else ""


def short(name: str) -> str:
    """Return a client's name in at most 26 columns."""
    return cut(name, _NAME)
