"""HTML pages: their building blocks, made by the templates in `markup.html`, and the one document that all of them are.

The report, the answer of `piebald advise`, the status page of a federation and the page of a transfer are made of these
blocks alone: text, tables, tiles, sections and charts.  Values from a run folder or a site are escaped by every
template.  `document` puts them together: self-contained, without network access, for screens, phones and paper.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from piebald.core.plain_text import html_text, visible
from piebald.report import chart
from piebald.report.chart import COLOURS, Chart, line_style
from piebald.report.page.charts import plotly_chart

_STROKES = {"solid": "none", "dash": "5 3", "dot": "2 2", "dashdot": "6 2 2 2"}  # dashes in SVG

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 360, 190, 52, 14, 10, 22  # of a line chart, in units of its picture

Curve = Sequence[tuple[float, float]]  # points of a line: the place across and the value
Cell = str  # text, or markup


class SortedCell(Markup):
    """A cell that a sortable table sorts by a number."""

    sort: float


def text(value: object) -> Markup:
    """Return any value as HTML, escaped unless it is markup.

    Examples:
        >>> str(text("<b>")), str(text(Markup("<b>")))
        ('&lt;b&gt;', '<b>')
    """
    return value if isinstance(value, Markup) else Markup(html_text(value))


def asset(name: str) -> str:
    """Return the content of a file beside this one."""
    return files("piebald.report.page").joinpath(name).read_text("utf-8")


@cache
def templates() -> Environment:
    """Return the templates of pages, which escape every value."""
    return Environment(
        loader=FunctionLoader(asset), autoescape=True, finalize=text, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip


@cache
def _blocks() -> Any:
    return templates().get_template("markup.html").module


def _block(name: str, *values: Any) -> Markup:
    return Markup(getattr(_blocks(), name)(*values))


# ------------------------------------------------------------------------------------------------------ text and tables


def top(title: str, lead: str = "", tiles: Sequence[tuple[str, Cell]] = (), notices: Sequence[str] = ()) -> Markup:
    """Return the head of a page: its title, what it says, sentences that stand out, and the main figures."""
    return _block("top", title, lead, notices, tiles)


def paragraphs(sentences: Iterable[str]) -> Markup:
    """Return sentences as paragraphs."""
    return _block("paragraphs", sentences)


def verbatim(text: str) -> Markup:
    """Return text whose lines and blanks stay as they are."""
    return _block("verbatim", text)


def heading(text: str) -> Markup:
    """Return a heading within a section."""
    return _block("heading", text)


def span(kind: str, value: str) -> Markup:
    """Return text with a CSS class."""
    return _block("span", kind, value)


def name(value: str) -> Markup:
    """Return a long text that may break over several lines in a table."""
    return span("name", value)


def key(labels: Sequence[str], label: str) -> Markup:
    """Return a label with a sample of its line, as the charts draw it."""
    colour, dash = line_style(labels, label)
    return _block("key", f"series-{colour}", _STROKES[dash], label)


def swatch(colour: str, label: str) -> Markup:
    """Return a label with a sample of a colour of the charts, such as "group-0"."""
    return _block("swatch", colour, label)


def keys(labels: Sequence[str], order: Sequence[str]) -> Markup:
    """Return the legend of all charts, in an order of its own; its buttons hide series."""
    return _block("keys", [(label, key(labels, label)) for label in order])


def table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[Cell]], kind: str = "", marks: Sequence[str] = ()
) -> Markup:
    """Return a table in a scrolling box.

    Args:
        caption: how to read it.
        head: the heading of each column.
        rows: cells; the first cell of a row is its heading.
        kind: a CSS class: "list", "text" or "sortable".
        marks: CSS classes of the rows.
    """
    return _block("table", caption, head, rows, kind, marks)


def sorted_by(cell: Cell, number: float) -> SortedCell:
    """Return a cell that a sortable table sorts by a number."""
    made = SortedCell(text(cell))
    made.sort = number
    return made


def facts(kind: str, pairs: Iterable[tuple[str, Cell]]) -> Markup:
    """Return a list of named values."""
    return _block("facts", kind, pairs)


def small(first: str, second: str) -> Markup:
    """Return a value with a note below it, where there is one."""
    return _block("small", first, second)


def judged(shown: str, good: bool | None) -> Markup:
    """Return a difference in the colour of good or bad, or without colour if it is neither."""
    return span({True: "good", False: "bad", None: "even"}[good], shown)


def folded(summary: str, content: str, kind: str = "") -> Markup:
    """Return content in HTML below a line that unfolds it; the kind "part" is for whole sections."""
    return _block("folded", summary, Markup(content), kind)


def section(ident: str, heading: str, note: str, *content: str) -> Markup:
    """Return a section with a heading; `content` is HTML."""
    return _block("section", ident, heading, note, Markup("".join(content)))


# --------------------------------------------------------------------------------------------------------------- charts


def figure(chart: Chart, heading: str = "h3") -> Markup:
    """Return the place where the script draws a chart, with its title and caption."""
    return _block("figure", chart, heading)


def section_of(chart: Chart, ident: str, before: str, *content: str) -> Markup:
    """Return a section whose heading is the title of a chart, with HTML before and after the chart."""
    return _block("section_of", chart, ident, Markup(before), Markup("".join(content)))


def charts(figures: Iterable[str]) -> Markup:
    """Return figures side by side, as far as the page is wide enough."""
    return _block("charts", Markup("".join(figures)))


def picture(png: bytes, description: str) -> Markup:
    """Return a picture that is in the page itself."""
    return _block("picture", base64.b64encode(png).decode(), description)


def line_chart(
    title: str,
    caption: str,
    curves: Mapping[str, Curve],
    ticks: Mapping[float, str],
    written: Callable[[float], str],
    dots: bool = False,
    start: float | None = None,
) -> Markup:
    """Return a chart of lines as SVG, for pages without a script.

    Args:
        title, caption: what it shows, and how to read it.
        curves: lines by name, none of them empty.
        ticks: texts below places of the axis across, in their order.
        written: a value as text.
        dots: mark each point, with its tick and value.
        start: a value that the axis up shows as well, by default only those of the curves.
    """
    points = [point for curve in curves.values() for point in curve]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    values = [value for _, value in points]
    shown = values if start is None else [start, *values]
    levels = round_levels(min(shown), max(shown))

    def at(x: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (x - first) / ((last - first) or 1.0)

    def up(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - (value - levels[0]) / (levels[-1] - levels[0]))

    anchors = {first: "start", last: "end"}
    colours = [f"series-{1 + number % (COLOURS - 1)}" for number in range(len(curves))]  # grey is for baselines
    coloured = list(zip(colours, curves.values(), strict=True))
    marked = [(colour, x, value) for colour, curve in coloured for x, value in curve if dots]
    spoken = f"{title}: from {written(values[0])} to {written(values[-1])}"
    if dots:
        spoken = f"{title}: {', '.join(f'{ticks.get(x, x)} {written(value)}' for x, value in points)}"
    return _block(
        "line_chart", title, caption, spoken, list(zip(colours, curves, strict=True)), f"0 0 {_WIDTH} {_HEIGHT}",
        [(_LEFT, _WIDTH - _RIGHT, up(level), written(level)) for level in levels],
        [(at(x), _HEIGHT - 5, anchors.get(x, "middle"), tick) for x, tick in ticks.items()],
        [(colour, " ".join(f"{at(x):.1f},{up(value):.1f}" for x, value in curve)) for colour, curve in coloured],
        [(colour, at(x), up(value), f"{ticks.get(x, x)}: {written(value)}") for colour, x, value in marked],
    )  # fmt: skip


def dot_chart(
    bars: Sequence[tuple[str, float, float, float]], levels: Sequence[float], written: Callable[[float], str]
) -> Markup:
    """Return a table with a dot and an error bar for each name, for pages without a script.

    Args:
        bars: of each row its name, value, and the ends of its bar.
        levels: of the axis, from its left end to its right, with 0 among them.
        written: a value as text.
    """

    def at(value: float) -> str:
        return f"{100 * (value - levels[0]) / (levels[-1] - levels[0]):.2f}%"

    rows = [
        (
            name, "group-0" if low > 0 else "group-1" if high < 0 else "soft", at(value), at(low), at(high),
            written(value), f" ({written(low)} to {written(high)})" if low < high else "",
        )
        for name, value, low, high in bars
    ]  # fmt: skip
    named = [f"{level:+g}".replace("-", "\N{MINUS SIGN}") if level else "0" for level in levels]
    rules = [("rule" if level else "zero", at(level)) for level in levels]
    return _block("dot_chart", rows, rules, [(at(level), tick) for level, tick in zip(levels, named, strict=True)])


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


def spark(values: Sequence[float], label: str) -> Markup:
    """Return values as a small line in a row of text, before a label."""
    low, height = min(values), (max(values) - min(values)) or 1.0
    wide = 96 / max(len(values) - 1, 1)
    return _block(
        "spark",
        " ".join(f"{wide * index:.1f},{18 - 16 / height * (value - low):.1f}" for index, value in enumerate(values)),
        label,
    )


# plotly.js 4.1.1 with lines, bars, boxes and heat maps alone (npm: plotly.js-cartesian-dist-min, MIT licence).  As
# base64 of gzip, which the page unpacks, it has 0.66 MB in place of the 4.8 MB of all of plotly.js.
_PLOTLY = "plotly-cartesian.min.js.gz"

Section = tuple[str, str, str]  # its id, the text of the link to it, and its HTML


def document(
    kind: str,
    title: str,
    top: str,
    sections: Sequence[Section],
    footer: Cell,
    *,
    charts: Sequence[Chart] | None = None,
    refresh: int | None = None,
    beside: str = "",
    forms: bool = False,
) -> str:
    """Return a page as HTML.

    Args:
        kind: "report", "answer", "status", "transfer" or "runs": what stands beside the name, and the page's CSS class.
        title: the page's title.
        top: its head, as HTML.
        sections: its sections; empty ones are left out.
        footer: its last sentence.
        charts: what its script draws; None for a page without a script.
        refresh: seconds after which a browser asks for the page again.
        beside: a text in the bar at its top.
        forms: whether it has forms, which are sent to where the page comes from.
    """
    scripts, policy = _scripts(charts) if charts is not None else ({"script": None}, content_policy(forms=forms))
    page = templates().get_template("page.html").render(
        kind=kind, title=title, policy=Markup(policy), refresh=refresh, style=Markup(_style()), beside=beside,
        top=Markup(top), sections=[(ident, link, Markup(body)) for ident, link, body in sections if body],
        footer=footer, **scripts,
    )  # fmt: skip
    return visible(page)  # whatever a section was made of


def content_policy(*scripts: str, forms: bool = False) -> str:
    """Return a content security policy that runs only these scripts, and fetches nothing.

    Without scripts only the page's own style sheet is allowed; plotly sets styles of elements.
    """
    allowed = " ".join(map(_hash, scripts))
    style = f"script-src {allowed}; style-src 'unsafe-inline'" if scripts else f"style-src {_hash(_style())}"
    target = "'self'" if forms else "'none'"
    # a page of a run from elsewhere may hold any label: whatever is not listed by hash cannot run or be fetched
    return f"default-src 'none'; {style}; img-src data: blob:; base-uri 'none'; form-action {target}"


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _scripts(charts: Sequence[Chart]) -> tuple[dict[str, Any], str]:
    """Return the charts and what draws them as HTML, and the policy under which it may run."""
    # plotly is unpacked here only to state its hash, by which the browser lets it run
    packed = files("piebald.report.page").joinpath(_PLOTLY).read_bytes() if charts else b""
    plotly, script = gzip.decompress(packed).decode() if charts else "", asset("page.js")
    plain = json.dumps([plotly_chart(chart) for chart in charts], allow_nan=False, separators=(",", ":"))
    # no "<" ends the script element, whatever a label is called
    parts = {"charts": plain.replace("<", "\\u003c"), "plotly": base64.b64encode(packed).decode(), "script": script}
    return {name: Markup(part) for name, part in parts.items()}, content_policy(plotly, script)


@cache
def _style() -> str:
    def block(**palettes: tuple[str, ...]) -> str:
        variables = (
            f"--{name}-{index}: {colour};" for name, colours in palettes.items() for index, colour in enumerate(colours)
        )
        return f":root {{ {' '.join(variables)} }}"

    light = block(series=chart.LIGHT, group=chart.GROUPS_LIGHT)
    dark = block(series=chart.DARK, group=chart.GROUPS_DARK)
    return f"\n{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n{asset('page.css')}\n"
