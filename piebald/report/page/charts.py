"""The page's charts as plain plotly traces and layouts.

Colours are names of the page's CSS variables ("$series-0", "$ink", with an opacity after a slash).  The page's script
replaces them, so that a chart works in the light and in the dark theme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piebald.core.plain_text import html_text
from piebald.report import findings
from piebald.report.comparison import Comparison
from piebald.report.learning_curves import AXES, Axis, Band, thinned
from piebald.report.page import wording
from piebald.report.page.markup import GROUPS_LIGHT, Chart, line_style
from piebald.report.page.wording import MetricFormat
from piebald.report.tables import History

MANY_CLIENTS = 400  # values of a label above which individual clients are not drawn
WIDE = 300  # clients a heat map can show


def series(labels: list[str], label: str) -> tuple[str, str]:
    """The colour and the dash of a label, the same in all charts."""
    colour, dash = line_style(labels, label)
    return f"$series-{colour}", dash


def group(number: int) -> str:
    """The colour of a cluster or a client."""
    return f"$group-{number % len(GROUPS_LIGHT)}"


def curve(comparison: Comparison, axis: Axis) -> Chart | None:
    """The mean over clients along an axis: a line for each label, with a band over its seeds."""
    shown = MetricFormat(comparison.metric)
    bands = comparison.bands(axis)
    if not bands:
        return None
    scale = 1e-6 if axis == "bytes" else 1.0
    data = [trace for label, band in bands.items() for trace in _band(comparison.labels, label, band, scale, shown)]
    seeds = max(band.seeds for band in bands.values())
    spread = f" Lines are means over {seeds} seeds, bands are their range." if seeds > 1 else ""
    name, over = AXES[axis]
    levels = ", ".join(label for label, band in bands.items() if band.level)
    level = f" The horizontal line is the final value of {levels}, with almost no traffic." if levels else ""
    return Chart(
        f"plot-{axis}",
        f"{shown.name.capitalize()} {over}",
        f"Mean {shown.name} over clients.{spread}{level}",
        data,
        over_axis(name, shown.axis, rangemode="tozero"),
        wide=axis == "version",
    )


def _band(labels: list[str], label: str, band: Band, scale: float, shown: MetricFormat) -> list[dict[str, Any]]:
    colour, dash = series(labels, label)
    x = [value * scale for value in band.x]
    dash = "dot" if band.level else dash
    line = line_trace(html_text(label, quote=False), x, band.mean, colour, dash) | {
        "meta": label,
        "hovertemplate": f"%{{y:{shown.plotly}}}",
    }
    if band.seeds == 1 or band.level:
        return [line]
    outline = {
        "type": "scatter",
        "mode": "lines",
        "x": x + x[::-1],
        "y": band.high + band.low[::-1],
        "meta": label,
        "fill": "toself",
        "fillcolor": f"{colour}/0.16",
        "line": {"width": 0},
        "hoverinfo": "skip",
    }
    return [outline, line]


def spent(comparison: Comparison) -> Chart | None:
    """The privacy budget spent by round: a line for each label and unit, of its first run."""
    data: list[dict[str, Any]] = []
    for label, runs in comparison.by_label.items():
        rows = [row for row in runs[0].spent if row["epsilon"] is not None]
        for unit in dict.fromkeys(row["unit"] for row in rows):
            of_unit = [row for row in rows if row["unit"] == unit]
            # plotly reads markup in names, and a label may hold anything
            name = html_text(f"{label}, {unit}", quote=False)
            points = [row["version"] for row in of_unit], [row["epsilon"] for row in of_unit]
            data.append(line_trace(name, *points, *series(comparison.labels, label)) | {"meta": label})
    if not data:
        return None
    last = max(trace["y"][-1] for trace in data)
    return Chart(
        "plot-spent",
        f"Epsilon comes to {last:.3g}",
        "The privacy budget that a run has spent after each round, by the privacy loss distribution.",
        data,
        over_axis("Round", {"title": {"text": "Epsilon"}, "rangemode": "tozero"}, rangemode="tozero"),
        wide=False,
    )


def distribution(comparison: Comparison) -> Chart | None:
    """The metric of individual clients: a box for each label."""
    shown = MetricFormat(comparison.metric)
    data = []
    for label in reversed(comparison.ranking()):  # plotly draws from the bottom up
        values = [value for final in comparison.finals[label] for value in final["per_client"].values()]
        colour, _ = series(comparison.labels, label)
        box: dict[str, Any] = {
            "type": "box",
            "orientation": "h",
            "name": short(label),
            "meta": label,
            "boxmean": True,
            "line": {"color": colour, "width": 1.5},
            "fillcolor": f"{colour}/0.18",
            "marker": {"color": f"{colour}/0.55", "size": 4},
            "hoverlabel": {"namelength": 0},
        }
        # beyond that, dots are a cloud, and the page grows by their numbers
        if len(values) <= MANY_CLIENTS:
            box |= {"x": values, "boxpoints": "all", "jitter": 0.6, "pointpos": 0, "hoveron": "points"}
        else:
            box |= _summary(values)
        data.append(box)
    if not data:
        return None
    dots = " Each dot is one client in one run." if any("x" in box for box in data) else ""
    return Chart(
        "plot-clients",
        findings.worst_tenth(comparison),
        f"Final {shown.name} of individual clients. A box holds the middle half, the solid line is the median, "
        f"the dashed line the mean.{dots}",
        data,
        {"height": 110 + 64 * len(data), "xaxis": shown.axis, "yaxis": {"showgrid": False}, "hovermode": "closest"},
    )


def _summary(values: list[float]) -> dict[str, Any]:
    import numpy as np

    # plotly draws a box from these five numbers, so the page has no value of single clients
    low, first, median, third, high = (float(q) for q in np.quantile(values, (0.05, 0.25, 0.5, 0.75, 0.95)))
    boxes = {
        "q1": first,
        "median": median,
        "q3": third,
        "lowerfence": low,
        "upperfence": high,
        "mean": float(np.mean(values)),
    }
    return {name: [value] for name, value in boxes.items()} | {"y0": 0, "boxpoints": False}


def gains(comparison: Comparison, base: str) -> Chart | None:
    """Differences of individual clients to a base label, sorted: a line for each label."""
    shown = MetricFormat(comparison.metric)
    data = []
    for label in comparison.labels:
        differences = comparison.per_client(label, base) if label != base else []
        if not differences:
            continue
        colour, dash = series(comparison.labels, label)
        # percentages as points: plotly has no format for a signed difference of percentages
        thin = [100 * value if shown.percent else value for value in thinned(differences, 300)]
        shares = [place / max(1, len(thin) - 1) for place in range(len(thin))]
        hover = "%{y:+.1f}" if shown.percent else "%{y:+.3~g}"
        line = line_trace(html_text(label, quote=False), shares, thin, colour, dash)
        data.append(line | {"mode": "lines", "meta": label, "hovertemplate": hover})
    if not data:
        return None
    unit = f"Difference{' in points' if shown.percent else ''}"
    up = {"title": {"text": unit}, "tickformat": "+.3~g", "zeroline": True, "zerolinewidth": 1.5}
    return Chart(
        f"plot-gains-{comparison.labels.index(base)}",
        findings.gains(comparison, base),
        f"Each client's {shown.name} minus its {shown.name} with {base} on the same seed; clients are sorted by their "
        f"gain. A line is {'above' if comparison.higher_is_better else 'below'} zero for clients that gain.",
        data,
        over_axis("Share of clients, largest loss first", up, tickformat=".0%"),
        wide=False,
    )


def partition(history: History) -> Chart | None:
    """Training rows of each class on each client."""
    counts = [row["counts"] for row in history.clients if row["counts"]]
    if not counts:
        return None
    classes = history.meta.get("classes") or [str(place) for place in range(len(counts[0]))]
    rest = f", the first {WIDE} of {len(counts):,}" if len(counts) > WIDE else ""
    seed = "" if history.seed is None else f", seed {history.seed}"
    shown = counts[:WIDE]
    clients = [short(history.names[row["client"]]) for row in history.clients if row["counts"]][:WIDE]
    return Chart(
        "plot-partition",
        wording.holdings(counts),
        f"Training rows of each class (down) on each client (across){rest}{seed}. A stronger colour means more rows; "
        "blank means none, and the colours start at zero.",
        [
            heat_map(
                # None stays blank, where 0 would have the lightest colour
                [[row[place] or None for row in shown] for place in range(len(counts[0]))],
                clients,
                [short(str(name)) for name in classes],
                max(map(max, shown)),
                "rows",
                "%{x}, class %{y}: %{z:,} rows",
            )
            | {"hoverongaps": False, "xgap": 1 if len(shown) <= 100 else 0, "ygap": 1}
        ],
        in_a_grid(max(220, min(640, 110 + 22 * len(counts[0]))), "Client", "Class", tickangle="auto"),
    )


def over_axis(x: str, up: Mapping[str, Any], height: int = 340, **across: Any) -> dict[str, Any]:
    """Return the layout of a chart over an axis of this title, where a pointer shows all values at its place.

    Args:
        x: the title of the axis across.
        up, across: further settings of the two axes.
        height: in pixels.
    """
    return {"height": height, "hovermode": "x unified", "xaxis": {"title": {"text": x}, **across}, "yaxis": {**up}}


def in_a_grid(height: int, x: str, y: str, **ticks: Any) -> dict[str, Any]:
    """Return the layout of a heat map of named columns and, from the top down, named rows.

    Args:
        height: in pixels.
        x, y: titles of the axes.
        ticks: further settings of both.
    """
    across, down = ({"title": {"text": title}, "type": "category", "showgrid": False, **ticks} for title in (x, y))
    return {"height": height, "xaxis": across, "yaxis": down | {"autorange": "reversed"}, "hovermode": "closest"}


def short(text: str, most: int = 20) -> str:
    """A name for a tick or a legend: short enough for a phone, and safe in plotly's markup."""
    return html_text(text if len(text) <= most else text[: most - 1] + "…", quote=False)


def line_trace(name: str, x: Sequence[float], y: Sequence[Any], colour: str, dash: str = "solid") -> dict[str, Any]:
    """Return a line for plotly, a dot where it has one point; the name is already safe in plotly's markup."""
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": colour, "width": 2.25, "dash": dash},
        "marker": {"color": colour, "size": 9},
    }


def heat_map(z: list[list[Any]], x: list[str], y: list[str], most: float, unit: str, hover: str) -> dict[str, Any]:
    """Return a heat map for plotly, whose colours start at zero and end at `most`."""
    soft = {"color": "$soft"}
    bar = {"thickness": 10, "outlinewidth": 0, "len": 1, "y": 0.5, "tickfont": soft}
    return {
        "type": "heatmap",
        "z": z,
        "x": x,
        "y": y,
        "colorscale": [[0, "$heat-low"], [1, "$heat-high"]],
        "zmin": 0,
        "zmax": most,
        "colorbar": bar | {"title": {"text": unit, "side": "right", "font": soft}},
        "hovertemplate": f"{hover}<extra></extra>",
    }
