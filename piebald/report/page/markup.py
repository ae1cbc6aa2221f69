"""Building blocks of HTML pages: colours, text, tables, tiles, sections and charts.

The report, the answer of `piebald advise`, the status page of a federation and the page of a transfer are made of these
alone (`document` puts them together).  Values from a run folder or a site are always escaped by `text`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from piebald.core.plain_text import html_text
from piebald.report.chart import COLOURS, Chart, line_style

_STROKES = {"solid": "none", "dash": "5 3", "dot": "2 2", "dashdot": "6 2 2 2"}  # the same in SVG

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 360, 190, 52, 14, 10, 22  # of a line chart, in units of its picture

Curve = Sequence[tuple[float, float]]  # points of a line: the place across and the value


@dataclass(frozen=True, slots=True)
class Markup:
    """A string that is already HTML.

    Attributes:
        html: the string.
        sort: the number that a sortable table sorts by.
    """

    html: str
    sort: float | None = None


Cell = str | Markup


def text(value: object) -> str:
    """Return any value as HTML, escaped unless it is markup.

    Examples:
        >>> text("<b>")
        '&lt;b&gt;'
        >>> text(Markup("<b>"))
        '<b>'
    """
    return value.html if isinstance(value, Markup) else html_text(value)


# ------------------------------------------------------------------------------------------------------ text and tables


def name(value: object) -> Markup:
    """Return a long text that may break over several lines in a table."""
    return Markup(f'<span class="name">{text(value)}</span>')


def key(labels: Sequence[str], label: str) -> Markup:
    """Return a label with a sample of its line, as the charts draw it."""
    colour, dash = line_style(labels, label)
    line = (
        f'<svg class="key" viewBox="0 0 26 11" aria-hidden="true"><line x1="0" x2="26" y1="6" y2="6" stroke-width="3.5"'
        f' stroke="var(--series-{colour})" stroke-dasharray="{_STROKES[dash]}"/></svg>'
    )
    return Markup(f"{line}{name(label).html}")


def swatch(colour: str, label: str) -> Markup:
    """Return a label with a sample of a colour of the charts, such as "group-0"."""
    square = f'<rect width="11" height="11" rx="2" fill="var(--{text(colour)})"/>'
    return Markup(f'<svg class="key dot" viewBox="0 0 11 11" aria-hidden="true">{square}</svg>{text(label)}')


def keys(labels: Sequence[str], order: Sequence[str]) -> str:
    """Return the legend of all charts, in an order of its own; its buttons hide series."""
    items = "".join(
        f'<li><button type="button" aria-pressed="true" data-series="{text(label)}" title="Show or hide in all charts">'
        f"{key(labels, label).html}</button></li>"
        for label in order
    )
    return f'<ul class="keys" aria-label="Line of each label; press one to hide it">{items}</ul>'


def table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[Cell]], kind: str = "", marks: Sequence[str] = ()
) -> str:
    """Return a table in a scrolling box.

    Args:
        caption: how to read it.
        head: the heading of each column.
        rows: cells; the first cell of a row is its heading.
        kind: a CSS class: "list", "text" or "sortable".
        marks: CSS classes of the rows.
    """
    heads = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    body = []
    for place, (first, *rest) in enumerate(rows):
        mark = f' class="{marks[place]}"' if marks and marks[place] else ""
        cells = "".join(f"<td{_sort(cell)}>{text(cell)}</td>" for cell in rest)
        body.append(f'<tr{mark}><th scope="row">{text(first)}</th>{cells}</tr>')
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{text(caption)}"><table class="{kind}">'
        f"<caption><span>{text(caption)}</span></caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _sort(cell: Cell) -> str:
    return f' data-sort="{cell.sort:.6g}"' if isinstance(cell, Markup) and cell.sort is not None else ""


def sorted_by(cell: Cell, number: float) -> Markup:
    """Return a cell that a sortable table sorts by a number."""
    return Markup(text(cell), number)


def facts(kind: str, pairs: Iterable[tuple[str, Cell]]) -> str:
    """Return a list of named values."""
    items = "".join(f"<div><dt>{text(term)}</dt><dd>{text(value)}</dd></div>" for term, value in pairs)
    return f'<dl class="{kind}">{items}</dl>'


def small(first: str, second: str) -> Markup:
    """Return a value with a note below it."""
    return Markup(f"{text(first)}<small>{text(second)}</small>")


def judged(shown: str, good: bool | None) -> Markup:
    """Return a difference in the colour of good or bad, or without colour if it is neither."""
    kind = {True: "good", False: "bad", None: "even"}[good]
    return Markup(f'<span class="{kind}">{text(shown)}</span>')


def notice(sentence: str) -> str:
    """Return a sentence that stands out."""
    return f'<p class="notice" role="note">{text(sentence)}</p>'


def folded(summary: str, content: str, kind: str = "") -> str:
    """Return content in HTML below a line that unfolds it; the kind "part" is for whole sections."""
    kind = f' class="{kind}"' if kind else ""
    return f"<details{kind}><summary>{text(summary)}</summary>{content}</details>"


def section(ident: str, heading: str, note: str, *content: str) -> str:
    """Return a section with a heading; `content` is HTML."""
    lead = f'<p class="note">{text(note)}</p>' if note else ""
    title = f'<h2 id="{ident}-h">{text(heading)}</h2>'
    return f'<section id="{ident}" aria-labelledby="{ident}-h">{title}{lead}{"".join(content)}</section>'


# --------------------------------------------------------------------------------------------------------------- charts


def figure(chart: Chart, heading: str = "h3") -> str:
    """Return the place where the script draws a chart, with its title and caption."""
    ident = text(chart.id)
    return (
        f'<figure class="{"wide" if chart.wide else "half"}"><figcaption>'
        f'<{heading} id="{ident}-title">{text(chart.title)}</{heading}>'
        f'<p id="{ident}-note">{text(chart.caption)}</p></figcaption>'
        f'<div class="plot" id="{ident}" role="img" aria-labelledby="{ident}-title" aria-describedby="{ident}-note"'
        f' style="height: {chart.height}px"></div></figure>'
    )


def section_of(chart: Chart, ident: str, before: str, *content: str) -> str:
    """Return a section whose heading is the title of a chart, with HTML before and after the chart."""
    body = f"{before}{figure(chart, 'h2')}{''.join(content)}"
    return f'<section id="{ident}" aria-labelledby="{text(chart.id)}-title">{body}</section>'


def charts(figures: Iterable[str]) -> str:
    """Return figures side by side, as far as the page is wide enough."""
    return f'<div class="charts">{"".join(figures)}</div>'


def picture(png: bytes, description: str) -> str:
    """Return a picture that is in the page itself."""
    source = base64.b64encode(png).decode()
    return f'<figure class="wide"><img alt="{text(description)}" src="data:image/png;base64,{source}"></figure>'


def line_chart(
    title: str,
    caption: str,
    curves: Mapping[str, Curve],
    ticks: Mapping[float, str],
    written: Callable[[float], str],
    dots: bool = False,
    start: float | None = None,
) -> str:
    """Return a chart of lines as SVG, for pages without a script.

    Args:
        title, caption: what it shows, and how to read it.
        curves: lines by name, none of them empty.
        ticks: texts below places of the axis across, in their order.
        written: a value as text.
        dots: mark each point, with its tick and value.
        start: a value that the axis up shows as well, by default only those of the curves.
    """
    places = [place for curve in curves.values() for place, _ in curve]
    values = [value for curve in curves.values() for _, value in curve]
    shown = values if start is None else [start, *values]
    levels = round_levels(min(shown), max(shown))
    low, height = levels[0], levels[-1] - levels[0]
    first, width = min(places), (max(places) - min(places)) or 1.0
    inner, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(place: float) -> float:
        return _LEFT + inner * (place - first) / width

    def up(value: float) -> float:
        return _TOP + tall * (1 - (value - low) / height)

    # lines first, so that curves are drawn over them
    drawn = ""
    for value in levels:
        y = f"{up(value):.1f}"
        drawn += f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        drawn += f'<text x="{_LEFT - 6}" y="{up(value) + 4:.1f}" text-anchor="end">{text(written(value))}</text>'
    for place, tick in ticks.items():
        anchor = "start" if place == first else "end" if place == max(places) else "middle"
        drawn += f'<text x="{at(place):.1f}" y="{_HEIGHT - 5}" text-anchor="{anchor}">{text(tick)}</text>'
    colours = [f"series-{1 + number % (COLOURS - 1)}" for number in range(len(curves))]  # grey is for baselines
    for colour, curve in zip(colours, curves.values(), strict=True):
        points = " ".join(f"{at(place):.1f},{up(value):.1f}" for place, value in curve)
        drawn += f'<polyline class="line" stroke="var(--{colour})" points="{points}"/>'
        drawn += "".join(
            f'<circle cx="{at(place):.1f}" cy="{up(value):.1f}" r="3.5" fill="var(--{colour})">'
            f"<title>{text(ticks.get(place, place))}: {text(written(value))}</title></circle>"
            for place, value in (curve if dots else ())
        )
    items = "".join(f"<li>{swatch(colour, label).html}</li>" for colour, label in zip(colours, curves, strict=True))
    legend = f'<ul class="keys">{items}</ul>' if len(curves) > 1 else ""
    spoken = f"{title}: from {written(values[0])} to {written(values[-1])}"
    if dots:
        spoken = f"{title}: {', '.join(f'{ticks.get(place, place)} {written(y)}' for place, y in curve)}"
    head = f"<figcaption><h3>{text(title)}</h3>{f'<p>{text(caption)}</p>' if caption else ''}</figcaption>{legend}"
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<figure class="half">{head}<svg {size} role="img" aria-label="{text(spoken)}">{drawn}</svg></figure>'


def dot_chart(
    bars: Sequence[tuple[str, float, float, float]], levels: Sequence[float], written: Callable[[float], str]
) -> str:
    """Return a table with a dot and an error bar for each name, for pages without a script.

    Args:
        bars: of each row its name, value, and the ends of its bar.
        levels: of the axis, from its left end to its right, with 0 among them.
        written: a value as text.
    """
    width = levels[-1] - levels[0]

    def at(value: float) -> str:
        return f"{100 * (value - levels[0]) / width:.2f}%"

    rules = "".join(
        f'<line class="{"zero" if level == 0 else "rule"}" x1="{at(level)}" x2="{at(level)}" y1="0" y2="100%"/>'
        for level in levels
    )
    rows = ""
    for name, value, low, high in bars:
        ends = f" ({written(low)} to {written(high)})" if low < high else ""
        colour = "group-0" if low > 0 else "group-1" if high < 0 else "soft"
        drawn = (
            f'<line x1="{at(low)}" x2="{at(high)}" y1="50%" y2="50%" stroke="var(--{colour})" stroke-width="2.5"/>'
            f'<circle cx="{at(value)}" cy="50%" r="4.5" fill="var(--{colour})"/>'
        )
        rows += (
            f'<tr><th scope="row">{text(name)}</th><td><svg aria-hidden="true">{rules}{drawn}</svg></td>'
            f"<td>{text(written(value))}<small>{text(ends)}</small></td></tr>"
        )
    named = [f"{level:+g}".replace("-", "\N{MINUS SIGN}") if level else "0" for level in levels]
    ticks = "".join(f'<text x="{at(level)}" y="70%">{tick}</text>' for level, tick in zip(levels, named, strict=True))
    axis = f'<tr class="axis"><td></td><td><svg aria-hidden="true">{ticks}</svg></td><td></td></tr>'
    return f'<table class="dots"><tbody>{rows}{axis}</tbody></table>'


def round_levels(low: float, high: float) -> list[float]:
    """Return three to five round numbers from `low` or less to `high` or more.

    Examples:
        >>> round_levels(0.4417, 0.7833)
        [0.4, 0.6, 0.8]
        >>> round_levels(3, 3)
        [0.0, 3.0, 6.0]
    """
    width = (high - low) or 2 * (abs(low) or 1.0)
    if low == high:
        low, high = low - width / 2, low + width / 2
        return [low, (low + high) / 2, high]
    unit = 10.0 ** math.floor(math.log10(width / 2))
    step = next(unit * factor for factor in (1, 2, 5, 10) if width / (unit * factor) <= 2.5)
    # the tiny terms keep an end that is a level itself from adding a further one
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # rounded, so that 3 * 0.1 is written as 0.3
    return [round(number * step, 12) for number in range(first, last + 1)]


def spark(values: Sequence[float]) -> str:
    """Return values as a small line in a row of text."""
    low, height = min(values), (max(values) - min(values)) or 1.0
    wide = 96 / max(len(values) - 1, 1)
    points = " ".join(
        f"{wide * place:.1f},{18 - 16 / height * (value - low):.1f}" for place, value in enumerate(values)
    )
    line = f'<polyline class="line" points="{points}" stroke="var(--series-1)"/>'
    return f'<svg class="spark" viewBox="0 0 96 20" aria-hidden="true">{line}</svg>'
