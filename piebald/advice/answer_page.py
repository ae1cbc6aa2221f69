"""The answer as a page without a script, and its text for one screen of a terminal.

The page shows each client's gain, sentences, learning curves and tables.  On the screen are short paragraphs with a
heading beside them, none of them longer than agreed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from piebald.advice.evidence import ClientGain
from piebald.core.plain_text import WIDTH, cut, wrap
from piebald.core.result_table import ResultTable, plain_cell
from piebald.report.page import markup
from piebald.report.page.markup import Cell, document
from piebald.report.page.wording import MINUS

_LONG = 24  # letters of a cell, beyond which it breaks over several lines
_DRAWN = 40  # clients of a picture: beyond, those in the middle are left out
Axis = tuple[float, Callable[[float], str], str]  # where it begins, a value as text, and what that means


def page(
    title: str,
    parts: Mapping[str, str],
    gains: Sequence[ClientGain],
    factor: float,
    details: Sequence[str],
    curves: Mapping[str, Mapping[str, float]],
    axis: Axis,
    tables: Mapping[str, ResultTable],
    look: str,
) -> str:
    """Return the answer as a page.

    Args:
        title: the answer in one sentence.
        parts: its other paragraphs by their headings.
        gains: of each client.
        factor: of gains in the picture, 100 where they are told in points.
        details: what was measured, in sentences.
        curves: for each learning curve its values by what was trained with, the least first.
        axis: of the curves.
        tables: by heading.
        look: what was said before training, empty where nothing was.
    """
    heading = "What more rounds, rows or clients would change"
    figures = [curve(name, points, axis) for name, points in curves.items() if len(points) > 1]
    facts = markup.facts("facts", parts.items())
    sections = [
        ("gains", "Gains", gain_picture(gains, factor)),
        ("answer", "Answer", markup.section("answer", "In short", "", facts)),
        ("curves", "Curves", markup.section("curves", heading, "", markup.charts(figures)) if figures else ""),
    ]
    for number, (head, table) in enumerate(tables.items()):
        rows = [[_cell(row[name]) for name in table.columns] for row in table]
        body = markup.table(table.title, table.heading, rows, kind="list")
        sections.append((f"table-{number}", markup.text(head), markup.section(f"table-{number}", head, "", body)))
    measured = markup.section("details", "How it was measured", "", markup.paragraphs(details))
    sections.append(("details", "Details", measured))
    if look:
        content = markup.folded("Before training", markup.verbatim(look))
        sections.append(("look", "Before training", f'<section id="look">{content}</section>'))
    return document("answer", f"Piebald: {title}", markup.top(title), sections, "Made with Piebald from one search.")


def _cell(value: Any) -> Cell:
    """Return a value as a cell; a long text breaks over several lines."""
    cell = plain_cell(value)
    return markup.name(cell) if len(cell) > _LONG else cell


def gain_picture(gains: Sequence[ClientGain], factor: float) -> str:
    """Return the section with a dot and an error bar for each client, the largest gain first; empty without gains."""
    bars = [
        (client.client, factor * client.shrunk, factor * (client.shrunk if client.low is None else client.low),
         factor * (client.shrunk if client.high is None else client.high))
        for client in gains if client.shrunk is not None
    ]  # fmt: skip
    if not bars:
        return ""
    bars.sort(key=lambda bar: -bar[1])
    omitted = max(0, len(bars) - _DRAWN)
    # the middle is left out: the largest gains and losses are what a reader looks for
    del bars[_DRAWN // 2 : _DRAWN // 2 + omitted]
    note = "Right of the line a client is better off together than alone, left of it worse."
    if any(low < high for *_, low, high in bars):
        note += (
            " A bar is where its true gain lies with 95 % certainty, by the number of its test rows and by how much "
            "clients differ; one that crosses the line may be chance."
        )
    note += f" {omitted:,} clients between the largest and the smallest gains are not drawn." if omitted else ""
    # 0 is among the levels, since the line without a gain is drawn there
    levels = markup.round_levels(min(0.0, *(bar[2] for bar in bars)), max(0.0, *(bar[3] for bar in bars)))
    form = "{:+.1f}" if factor == 100 else "{:+.3g}"
    body = markup.dot_chart(bars, levels, lambda value: form.format(value).replace("-", MINUS) if value else "0")
    title = f"What each client gains by training together{', in points' if factor == 100 else ''}"
    return markup.section("gains", title, note, body)


def curve(name: str, points: Mapping[str, float], axis: Axis) -> str:
    """Return a learning curve: steps of the same width, which are doublings or nearly so, and an axis of its own."""
    ticks = {float(index): label for index, label in enumerate(points)}
    line = [(float(index), value) for index, value in enumerate(points.values())]
    start, written, note = axis
    return markup.line_chart(name, note, {name: line}, ticks, written, dots=True, start=start)


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
        lines += [f"{'' if index else heading:<{INDENT}}{row}" for index, row in enumerate(rows)]
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
