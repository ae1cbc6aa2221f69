"""The charts of every report, and charts as plotly's traces and layouts, which the page's script draws.

A report has curves, budgets, distributions, gains and the partition.  Colours are names of the page's CSS variables
("$series-0", "$ink", with an opacity after a slash).  The page's script replaces them, so that a chart works in the
light and in the dark theme.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import numpy as np

from piebald.core.plain_text import html_text, visible
from piebald.report import findings
from piebald.report.chart import (
    GROUPS_LIGHT,
    Axis,
    Bars,
    Box,
    Cells,
    Chart,
    ChartAxis,
    Dots,
    Line,
    Mark,
    Share,
    curves,
    series,
    short,
    thinned,
)
from piebald.report.comparison import Comparison
from piebald.report.page import wording
from piebald.report.page.wording import MetricFormat
from piebald.report.tables import History

MANY_CLIENTS = 400  # values of a label above which individual clients are not drawn
WIDE = 300  # clients a heat map can show


def curve(comparison: Comparison, axis: Axis) -> Chart | None:
    """The mean over clients along an axis: a line for each label, with a band over its seeds."""
    bands = comparison.bands(axis)
    return curves(comparison.labels, bands, axis, comparison.metric) if bands else None


def spent(comparison: Comparison) -> Chart | None:
    """The privacy budget spent by round: a line for each label and unit, of its first run."""
    lines = []
    for label, runs in comparison.by_label.items():
        rows = [row for row in runs[0].spent if row["epsilon"] is not None]
        colour, dash = series(comparison.labels, label)
        for unit in dict.fromkeys(row["unit"] for row in rows):
            points = [(row["version"], row["epsilon"]) for row in rows if row["unit"] == unit]
            x, y = zip(*points, strict=True)
            lines.append(Line(name=f"{label}, {unit}", label=label, colour=colour, dash=dash, x=x, y=y))
    if not lines:
        return None
    return Chart(
        id="plot-spent",
        file="epsilon_over_rounds",
        title=f"Epsilon comes to {max(line.y[-1] for line in lines):.3g}",
        caption="The privacy budget that a run has spent after each round, by the privacy loss distribution.",
        marks=lines,
        x=ChartAxis(title="Rounds", zero=True, whole=True),
        y=ChartAxis(title="Epsilon", zero=True),
        wide=False,
    )


def distribution(comparison: Comparison) -> Chart | None:
    """The metric of individual clients: a box for each label."""
    shown, boxes = MetricFormat(comparison.metric), []
    for label in reversed(comparison.ranking()):  # drawn from the bottom up
        values = [value for final in comparison.finals[label] for value in final["per_client"].values()]
        colour, _ = series(comparison.labels, label)
        # beyond that, dots are a cloud, and the page grows by their numbers
        dots = len(values) <= MANY_CLIENTS
        boxes.append(Box(name=short(label), label=label, colour=colour, values=values, dots=dots))
    if not boxes:
        return None
    dots_said = " Each dot is one client in one run." if any(box.dots for box in boxes) else ""
    return Chart(
        id="plot-clients",
        title=findings.worst_tenth(comparison),
        caption=f"Final {shown.name} of individual clients. A box holds the middle half, the solid line is the median, "
        f"the dashed line the mean.{dots_said}",
        marks=boxes,
        x=ChartAxis(title=f"Final {shown.name} of individual clients", percent=shown.percent),
        height=110 + 64 * len(boxes),
    )


def gains(comparison: Comparison, base: str) -> Chart | None:
    """Differences of individual clients to a base label, sorted: a line for each label."""
    shown, lines = MetricFormat(comparison.metric), []
    for label in comparison.labels:
        differences = comparison.per_client(label, base) if label != base else []
        if not differences:
            continue
        colour, dash = series(comparison.labels, label)
        # percentages as points: plotly has no format for a signed difference of percentages
        thin = [100 * value if shown.percent else value for value in thinned(differences, 300)]
        shares = [index / max(1, len(thin) - 1) for index in range(len(thin))]
        lines.append(Line(name=label, label=label, colour=colour, dash=dash, x=shares, y=thin))
    if not lines:
        return None
    return Chart(
        id=f"plot-gains-{comparison.labels.index(base)}",
        file=f"gains_against_{comparison.by_label[base][0].recipe}",
        title=findings.gains(comparison, base),
        caption=f"Each client's {shown.name} minus its {shown.name} with {base} on the same seed; clients are sorted "
        f"by their gain. A line is {'above' if comparison.higher_is_better else 'below'} zero for clients that gain.",
        marks=lines,
        x=ChartAxis(title="Share of clients, largest loss first", percent=True),
        y=ChartAxis(title=f"Difference{' in points' if shown.percent else ''}", signed=True),
        wide=False,
    )


def partition(history: History) -> Chart | None:
    """Training rows of each class on each client."""
    counts = [row["counts"] for row in history.clients if row["counts"]]
    if not counts:
        return None
    classes = history.meta.get("classes") or [str(index) for index in range(len(counts[0]))]
    rest = f", the first {WIDE} of {len(counts):,}" if len(counts) > WIDE else ""
    seed = "" if history.seed is None else f", seed {history.seed}"
    cells = Cells(
        # None stays blank, where 0 would have the lightest colour
        z=[[row[index] or None for row in counts[:WIDE]] for index in range(len(counts[0]))],
        x=[short(history.names[row["client"]]) for row in history.clients if row["counts"]][:WIDE],
        y=[short(str(name)) for name in classes],
        unit="rows",
        hover="%{x}, class %{y}: %{z:,} rows",
    )
    return Chart(
        id="plot-partition",
        title=wording.holdings(counts),
        caption=f"Training rows of each class (down) on each client (across){rest}{seed}. A stronger colour means more "
        "rows; blank means none, and the colours start at zero.",
        marks=[cells],
        x=ChartAxis(title="Client"),
        y=ChartAxis(title="Class"),
        height=max(220, min(640, 110 + 22 * len(counts[0]))),
    )


_FEW_ROUNDS = 10  # up to which plotly would write fractions of rounds
_SOFT = {"color": "$soft"}


def plotly_chart(chart: Chart) -> dict[str, Any]:
    """Return a chart as the page's script takes it: its id, data and layout."""
    data = [trace for mark in chart.marks for trace in _traces(mark, chart)]
    across, up = _axis(chart.x), _axis(chart.y)
    layout: dict[str, Any] = {"height": chart.height, "xaxis": across, "yaxis": up, "hovermode": "x unified"}
    first = chart.marks[0]
    if isinstance(first, Line) and chart.x.whole:
        last = max((max(mark.x) for mark in chart.marks if isinstance(mark, Line)), default=0)
        across |= {"dtick": 1} if last <= _FEW_ROUNDS else {}
    if isinstance(first, Bars):
        longest = max(len(mark.x) for mark in chart.marks if isinstance(mark, Bars))
        across |= {"type": "category", "tickangle": "auto", "nticks": 0 if longest <= 20 else 12}
        layout["barmode"] = "group"
    if isinstance(first, Share):
        up["range"] = [0, 1]
    if isinstance(first, Box):
        up["showgrid"] = False
    if isinstance(first, Cells):
        ticks = {"type": "category", "showgrid": False, "tickangle": "auto"}
        across |= ticks | ({} if chart.wide else {"nticks": 12})
        up |= ticks | {"autorange": "reversed"}
    if isinstance(first, Box | Dots | Cells):
        layout["hovermode"] = "closest"
    return {"id": visible(chart.id), "data": data, "layout": layout}


def _axis(scale: ChartAxis) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": scale.title}} if scale.title else {}
    if scale.percent:
        axis["tickformat"] = ".0%"
    if scale.signed:
        axis |= {"tickformat": "+.3~g", "zeroline": True, "zerolinewidth": 1.5}
    if scale.zero:
        axis["rangemode"] = "tozero"
    if scale.names:
        axis |= {"tickmode": "array", "tickvals": list(range(len(scale.names))), "ticktext": _safe(scale.names)}
        axis["range"] = [-0.6, len(scale.names) - 0.4]
    return axis


def _format(scale: ChartAxis) -> str:
    return ".1%" if scale.percent else "+.3~g" if scale.signed else ".3~g"


def _safe(names: Any) -> list[str]:
    # plotly reads markup in names, and a name may hold anything
    return [html_text(name, quote=False) for name in names]


def _named(mark: Mark) -> dict[str, Any]:
    named = {"name": html_text(mark.name, quote=False)}
    return named if mark.label is None else named | {"meta": visible(mark.label)}


@singledispatch
def _traces(mark: Mark | Cells, chart: Chart) -> list[dict[str, Any]]:
    """Return what plotly draws of a mark."""
    raise NotImplementedError(type(mark))


@_traces.register
def _(mark: Line, chart: Chart) -> list[dict[str, Any]]:
    colour, x = f"${mark.colour}", list(mark.x)
    line = _named(mark) | {
        "type": "scatter", "mode": "lines" if len(x) > 1 else "markers", "x": x, "y": list(mark.y),
        "line": {"color": colour, "width": 2.25, "dash": mark.dash}, "marker": {"color": colour, "size": 9},
        "hovertemplate": f"%{{y:{_format(chart.y)}}}",
    }  # fmt: skip
    if not mark.low:
        return [line]
    outline = {
        "type": "scatter", "mode": "lines", "x": x + x[::-1], "y": [*mark.high, *mark.low[::-1]],
        "meta": line.get("meta"), "fill": "toself", "fillcolor": f"{colour}/0.16", "line": {"width": 0},
        "hoverinfo": "skip",
    }  # fmt: skip
    return [outline, line]


@_traces.register
def _(mark: Share, chart: Chart) -> list[dict[str, Any]]:
    opacity = 0.75 if chart.marks.index(mark) < len(GROUPS_LIGHT) else 0.4
    return [
        _named(mark) | {
            "type": "scatter", "mode": "lines", "stackgroup": "all", "x": list(mark.x), "y": list(mark.y),
            "line": {"width": 0.5, "color": f"${mark.colour}", "shape": "hv"},
            "fillcolor": f"${mark.colour}/{opacity}", "hovertemplate": f"%{{y:{_format(chart.y)}}}",
        }
    ]  # fmt: skip


@_traces.register
def _(mark: Bars, chart: Chart) -> list[dict[str, Any]]:
    bars = {"type": "bar", "x": _safe(mark.x), "y": list(mark.y), "marker": {"color": f"${mark.colour}"}}
    return [_named(mark) | bars | {"hovertemplate": f"%{{y:{_format(chart.y)}}}"}]


@_traces.register
def _(mark: Box, chart: Chart) -> list[dict[str, Any]]:
    box: dict[str, Any] = _named(mark) | {
        "type": "box", "orientation": "h", "boxmean": True, "line": {"color": f"${mark.colour}", "width": 1.5},
        "fillcolor": f"${mark.colour}/0.18", "marker": {"color": f"${mark.colour}/0.55", "size": 4},
        "hoverlabel": {"namelength": 0},
    }  # fmt: skip
    if mark.dots:
        dots = {"boxpoints": "all", "jitter": 0.6, "pointpos": 0, "hoveron": "points"}
        return [box | dots | {"x": list(mark.values)}]
    # plotly draws a box from these five numbers, so the page has no value of single clients
    ends = np.quantile(mark.values, (0.05, 0.25, 0.5, 0.75, 0.95)).tolist()
    numbers = zip(("lowerfence", "q1", "median", "q3", "upperfence"), ends, strict=True)
    summary = {name: [value] for name, value in [*numbers, ("mean", float(np.mean(mark.values)))]}
    return [box | summary | {"y0": 0, "boxpoints": False}]


@_traces.register
def _(mark: Dots, chart: Chart) -> list[dict[str, Any]]:
    symbols = ["circle-open" if hollow else "circle" for hollow in mark.hollow]
    dots = _named(mark) | {
        "type": "scatter", "mode": "markers", "x": list(mark.x), "y": list(mark.y), "text": _safe(mark.names),
        "marker": {"color": f"${mark.colour}", "size": 10, "symbol": symbols},
        "hovertemplate": f"%{{text}}: %{{x:{_format(chart.x)}}}",
    }  # fmt: skip
    if mark.low:
        dots["error_x"] = {
            "array": np.subtract(mark.high, mark.x).tolist(), "arrayminus": np.subtract(mark.x, mark.low).tolist(),
            "symmetric": False, "thickness": 1, "width": 0, "color": f"${mark.colour}/0.55",
        }  # fmt: skip
    return [dots]


@_traces.register
def _(mark: Cells, chart: Chart) -> list[dict[str, Any]]:
    cells: dict[str, Any] = {
        "type": "heatmap", "z": [list(row) for row in mark.z], "x": _safe(mark.x), "y": _safe(mark.y),
        "hoverongaps": False, "xgap": 1 if len(mark.x) <= 100 else 0, "ygap": 1 if len(mark.y) <= 100 else 0,
        "hovertemplate": f"{mark.hover}<extra></extra>",
    }  # fmt: skip
    if mark.texts:
        cells["text"] = [_safe(row) for row in mark.texts]
        readable = len(mark.y) <= 40 and len(mark.x) <= 12
        cells |= {"texttemplate": "%{text}" if readable else "", "textfont": {"color": "$surface"}}
    if mark.groups:
        count = len(mark.groups)
        # plotly interpolates colours, so each group has its colour at both ends of its interval
        ends = [[(index + end) / count, f"${colour}"] for index, colour in enumerate(mark.groups) for end in (0, 1)]
        return [cells | {"colorscale": ends, "zmin": -0.5, "zmax": count - 0.5, "showscale": False}]
    bar = {"thickness": 10, "outlinewidth": 0, "len": 1, "y": 0.5, "tickfont": _SOFT}
    bar |= {"title": {"text": mark.unit, "side": "right", "font": _SOFT}}
    shades = {"colorscale": [[0, "$heat-low"], [1, "$heat-high"]], "zmin": 0, "zmax": _most(mark), "colorbar": bar}
    return [cells | shades]


def _most(cells: Cells) -> float:
    return max((value for row in cells.z for value in row if value is not None), default=0) or 1
