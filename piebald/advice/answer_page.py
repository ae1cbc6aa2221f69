"""The answer as a page: sentences, learning curves and tables, without a script."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from piebald.report.page import markup
from piebald.report.page.document import document
from piebald.report.page.markup import Cell

_LONG = 24  # letters of a cell, beyond which it breaks over several lines
PlainTable = tuple[str, Sequence[str], Sequence[Sequence[Any]]]  # its caption, its heading and its rows


def page(
    title: str,
    paragraphs: Sequence[str],
    curves: Mapping[str, Mapping[str, float]],
    tables: Mapping[str, PlainTable],
    look: str,
) -> str:
    """Return the answer as a page.

    Args:
        title: the answer in one sentence.
        paragraphs: its other sentences; indented ones are the points of a list under the one before.
        curves: for each learning curve its values by what was trained with, the least first.
        tables: by heading.
        look: what was said before training, empty where nothing was.
    """
    heading = "What more rounds, rows or clients would change"
    figures = [curve(name, points) for name, points in curves.items() if len(points) > 1]
    sections = [("curves", "Curves", markup.section("curves", heading, "", markup.charts(figures)) if figures else "")]
    for number, (head, (caption, columns, rows)) in enumerate(tables.items()):
        body = markup.table(caption, columns, [[_cell(value) for value in row] for row in rows], kind="list")
        sections.append((f"table-{number}", markup.text(head), markup.section(f"table-{number}", head, "", body)))
    if look:
        content = markup.folded("Before training", f"<pre>{markup.text(look)}</pre>")
        sections.append(("look", "Before training", f'<section id="look">{content}</section>'))
    top = f"<h1>{markup.text(title)}</h1>{''.join(_with_lists(paragraphs))}"
    return document("answer", f"Piebald: {title}", top, sections, "Made with Piebald from one search.")


def _cell(value: Any) -> Cell:
    """Return a value as a cell; a long text breaks over several lines."""
    cell = markup.plain_cell(value)
    return markup.name(cell) if len(cell) > _LONG else cell


def _with_lists(paragraphs: Sequence[str]) -> Iterator[str]:
    """Yield each paragraph, and each list of indented ones, in HTML."""
    for is_indented, lines in itertools.groupby(paragraphs, lambda line: line.startswith(" ")):
        tag = "li" if is_indented else "p"
        items = "".join(f"<{tag}>{markup.text(line.strip())}</{tag}>" for line in lines)
        yield f"<ul>{items}</ul>" if is_indented else items


def curve(name: str, points: Mapping[str, float]) -> str:
    """Return a learning curve: steps of the same width, which are doublings or nearly so, and an axis of its own."""
    ticks = {float(place): label for place, label in enumerate(points)}
    line = [(float(place), value) for place, value in enumerate(points.values())]
    return markup.line_chart(name, "", {name: line}, ticks, "{:.4g}".format, dots=True)
