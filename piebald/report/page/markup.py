"""Building blocks of the HTML page.  Values from a run folder are always escaped by `text`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from piebald.report.page.charts import Chart
from piebald.report.page.palette import COLOURS, DASHES


@dataclass(frozen=True, slots=True)
class Markup:
    """A string that is already HTML."""

    html: str
    sort: float | None = None  # the number that a sortable table sorts by


Cell = str | Markup


def text(value: object) -> str:
    """Any value as HTML, escaped unless it is markup."""
    return value.html if isinstance(value, Markup) else html.escape(str(value))


def key(labels: Sequence[str], label: str) -> Markup:
    """A label with a sample of its line, as the charts draw it."""
    place = labels.index(label)
    pattern = {"solid": "none", "dash": "5 3", "dot": "2 2", "dashdot": "6 2 2 2"}[
        DASHES[place // COLOURS % len(DASHES)]
    ]
    line = (
        f'<svg class="key" viewBox="0 0 26 11" aria-hidden="true"><line x1="0" x2="26" y1="6" y2="6" stroke-width="3.5"'
        f' stroke="var(--series-{place % COLOURS})" stroke-dasharray="{pattern}"/></svg>'
    )
    return Markup(f'{line}<span class="name">{text(label)}</span>')


def swatch(colour: str, name: str) -> Markup:
    """A name with a sample of a colour of the charts, such as "$group-0"."""
    square = f'<rect width="11" height="11" rx="2" fill="var(--{text(colour.removeprefix("$"))})"/>'
    return Markup(f'<svg class="key dot" viewBox="0 0 11 11" aria-hidden="true">{square}</svg>{text(name)}')


def keys(labels: Sequence[str], order: Sequence[str] | None = None) -> str:
    """The legend of all charts, in an order of its own; its buttons hide series."""
    shown = labels if order is None else order
    items = "".join(
        f'<li><button type="button" aria-pressed="true" data-series="{text(label)}" title="Show or hide in all charts">'
        f"{key(labels, label).html}</button></li>"
        for label in shown
    )
    return f'<ul class="keys" aria-label="Line of each label; press one to hide it">{items}</ul>'


def figure(chart: Chart, heading: str = "h3") -> str:
    """The place where the script draws a chart, with its title and caption."""
    name = text(chart.id)
    return (
        f'<figure class="{"wide" if chart.wide else "half"}"><figcaption>'
        f'<{heading} id="{name}-title">{text(chart.title)}</{heading}>'
        f'<p id="{name}-note">{text(chart.caption)}</p></figcaption>'
        f'<div class="plot" id="{name}" role="img" aria-labelledby="{name}-title" aria-describedby="{name}-note"'
        f' style="height: {chart.layout["height"]}px"></div></figure>'
    )


def table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[Cell]], kind: str = "", marks: Sequence[str] = ()
) -> str:
    """A table in a scrolling box; the first cell of a row is its heading; `marks` are CSS classes of the rows."""
    heads = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    body = []
    for place, (first, *others) in enumerate(rows):
        mark = f' class="{marks[place]}"' if marks and marks[place] else ""
        cells = "".join(f"<td{_sort(cell)}>{text(cell)}</td>" for cell in others)
        body.append(f'<tr{mark}><th scope="row">{text(first)}</th>{cells}</tr>')
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{text(caption)}"><table class="{kind}">'
        f"<caption><span>{text(caption)}</span></caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _sort(cell: Cell) -> str:
    return f' data-sort="{cell.sort:.6g}"' if isinstance(cell, Markup) and cell.sort is not None else ""


def sorted_by(cell: Cell, number: float) -> Markup:
    """A cell that a sortable table sorts by a number."""
    return Markup(text(cell), number)


def facts(kind: str, pairs: Iterable[tuple[str, Cell]]) -> str:
    """A list of named values."""
    return f'<dl class="{kind}">{"".join(f"<div><dt>{text(n)}</dt><dd>{text(v)}</dd></div>" for n, v in pairs)}</dl>'


def small(first: str, second: str) -> Markup:
    """A value with a note below it."""
    return Markup(f"{text(first)}<small>{text(second)}</small>")


def judged(shown: str, good: bool | None) -> Markup:
    """A difference in the colour of good or bad, or without colour if it is neither."""
    kind = {True: "good", False: "bad", None: "even"}[good]
    return Markup(f'<span class="{kind}">{text(shown)}</span>')


def section(name: str, heading: str, note: str, *content: str) -> str:
    """A section with a heading; `content` is HTML."""
    about = f'<p class="note">{text(note)}</p>' if note else ""
    title = f'<h2 id="{name}-h">{text(heading)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-h">{title}{about}{"".join(content)}</section>'
