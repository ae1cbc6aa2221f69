"""What a chart shows, described once, the learning curves that most of them show, and charts as pictures.

The page draws a chart with plotly, and matplotlib draws it as a picture for papers, slides and notebooks.  Learning
curves are the evaluations of one run, and bands over the seeds of a label.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar

from piebald.core.errors import SettingError, shown, unknown
from piebald.core.plain_text import any_letters
from piebald.core.private_files import write_private
from piebald.report.page.wording import MetricFormat
from piebald.storage.schema import explained

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as Axis_

Number = TypeVar("Number", int, float)
Over = Literal["rounds", "megabytes", "seconds"]  # what users name the axes
Axis = Literal["version", "bytes", "seconds", "wall"]
AXES: dict[Axis, tuple[str, str]] = {
    "version": ("Rounds", "over rounds"),
    "bytes": ("Megabytes sent, both ways, by all clients", "over traffic"),
    "seconds": ("Seconds on the run's clock", "over time"),
    "wall": ("Seconds of real time", "over real time"),
}


class Point(TypedDict):
    """One evaluation: after `version` server steps, `bytes` sent both ways and `seconds` of the runtime's clock."""

    version: int
    bytes: int
    seconds: float
    wall: float
    mean: float


class Evaluated(Protocol):
    """A run with curves, such as `tables.History`."""

    @property
    def label(self) -> str:
        """The run's name in tables."""

    @property
    def metric(self) -> str:
        """The main metric."""

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics by which clients were evaluated."""

    @property
    def final(self) -> dict[str, Any]:
        """The final figures."""

    def curve_of(self, metric: str) -> list[Point]:
        """The mean over clients at each evaluation."""


@dataclass(frozen=True, slots=True)
class Band:
    """A curve over seeds: at each `x` the mean, the smallest and the largest value of the seeds.

    A `level` band is a horizontal line at the label's final value, for comparison.
    """

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    seeds: int
    level: bool = False


def band_of(curves: Sequence[Sequence[Point]], axis: Axis, points: int = 300) -> Band | None:
    """The band of the curves of several seeds over a cost, None where no seed was evaluated.

    Args:
        curves: one for each seed; those without a point are left out.
        axis: the cost.
        points: the largest number of versions, at least 2; more are thinned out.

    Examples:
        >>> seeds = [
        ...     [Point(version=1, bytes=10, seconds=1.0, wall=1.0, mean=score)] for score in (0.25, 0.75)
        ... ]
        >>> band_of(seeds, "version")
        Band(x=[1.0], mean=[0.5], low=[0.25], high=[0.75], seeds=2, level=False)
    """
    seeds = [{point["version"]: point for point in curve} for curve in curves if curve]
    if not seeds:
        return None
    # averages need the same seeds at every point: otherwise a curve would jump where a seed ends
    versions = sorted(set.intersection(*(set(seed) for seed in seeds)))
    rows = [[seed[version] for seed in seeds] for version in thinned(versions, points)]
    if not rows:  # evaluated at different versions: only the final values can be averaged
        rows = [[seed[max(seed)] for seed in seeds]]
    values = [[point["mean"] for point in row] for row in rows]
    return Band(
        [sum(float(point[axis]) for point in row) / len(row) for row in rows],
        [sum(row) / len(row) for row in values],
        [min(row) for row in values],
        [max(row) for row in values],
        len(seeds),
    )


def thinned(values: list[Number], most: int) -> list[Number]:
    """Values at equal distances in their order, the first and the last among them, where they are more than `most`."""
    if len(values) <= most:
        return values
    # both ends are kept: the last value is the one that tables state
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


def bands_of(curves: Mapping[str, Sequence[Sequence[Point]]], axis: Axis) -> dict[str, Band]:
    """The bands of all labels that have one.

    A label that sends almost nothing (less than a twentieth of the largest traffic) would be a dot on the axis of
    bytes, so it is drawn as a level there.

    Args:
        curves: those of the seeds of each label.
        axis: the cost.
    """
    bands = {label: band for label, seeds in curves.items() if (band := band_of(seeds, axis))}
    last = max((band.x[-1] for band in bands.values()), default=0.0)
    for label, band in bands.items():
        # training alone sends nothing, and would be a dot at the left edge
        if axis == "bytes" and band.x[-1] < 0.05 * last:
            means, low, high = ([values[-1]] * 2 for values in (band.mean, band.low, band.high))
            bands[label] = Band([0.0, last], means, low, high, band.seeds, level=True)
    return bands


def time_axis(runs: Sequence[Evaluated]) -> Axis:
    """The axis of time: the run's clock, or real time where devices take no simulated time."""
    return "seconds" if any(run.final["seconds"] for run in runs) else "wall"


# Distinguishable with any kind of colour vision, with a contrast of at least 3 : 1 to the background.
LIGHT = ("#737a86", "#1569c3", "#cc8251", "#006051", "#5b1576", "#916900", "#4f8bea", "#7b0c00")
DARK = ("#98a0ab", "#00aafe", "#ee7500", "#c9f7bd", "#f6c5ff", "#f5b800", "#5d78ee", "#b56f69")
# Of clusters and clients, so that none is taken for a label: other hues than those above.
GROUPS_LIGHT = ("#0e8a8a", "#c2338a", "#5f8a00", "#7a5bd6", "#a8563f", "#3a7d57", "#9a3fb0", "#4c6a92")
GROUPS_DARK = ("#3fd0cf", "#ff7cc4", "#b5e04a", "#b9a2ff", "#ff9e80", "#7fdcae", "#e08cf5", "#9fb4d8")
COLOURS = len(LIGHT)  # further series repeat the colours with other dashes
DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What is drawn of one series.

    Attributes:
        name: as a legend shows it.
        colour: "series-0" of a label, or "group-0" of a client or a cluster, see `markup`.
        label: the label that the page hides it with, None where it is of none.
    """

    name: str
    colour: str
    label: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line(Mark):
    """A line, or a dot where it has one point.

    Attributes:
        x, y: its points.
        dash: "solid", "dash", "dot" or "dashdot".
        low, high: the ends of a band around it, empty without one.
    """

    x: Sequence[float]
    y: Sequence[float]
    dash: str = "solid"
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Share(Mark):
    """A share of the whole, on top of those before it; it holds from each point to the next."""

    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars(Mark):
    """A bar at each of some names, beside those of other series."""

    x: Sequence[str]
    y: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box(Mark):
    """The distribution of values, across; with a dot for each where `dots` says so."""

    values: Sequence[float]
    dots: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Dots(Mark):
    """Dots with names and, where they are given, error bars across from `low` to `high`."""

    x: Sequence[float]
    y: Sequence[float]
    names: Sequence[str]
    hollow: Sequence[bool]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """A heat map of named columns and, from the top down, named rows; the colours start at zero.

    Attributes:
        z: values by row and column, None for a blank cell; numbers of `groups` where these are given.
        x, y: names of columns and rows.
        unit: of the values.
        hover: what is said of a cell, with %{x}, %{y}, %{z} and %{text}.
        groups: colours of whole numbers, instead of shades.
        texts: what stands in each cell, empty without texts.
    """

    z: Sequence[Sequence[float | None]]
    x: Sequence[str]
    y: Sequence[str]
    unit: str = ""
    hover: str
    groups: Sequence[str] = ()
    texts: Sequence[Sequence[str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartAxis:
    """An axis.

    Attributes:
        title: what it shows.
        percent: whether its values are shares.
        signed: whether they are differences.
        zero: whether it begins at zero.
        whole: whether its values are whole numbers, such as rounds.
        names: of the values 0, 1, ..., where it has names.
    """

    title: str = ""
    percent: bool = False
    signed: bool = False
    zero: bool = False
    whole: bool = False
    names: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart.

    Attributes:
        id: unique in the page.
        file: the name of its picture, without a suffix; by default that of its id.
        title: the finding, in one sentence.
        caption: how to read it.
        marks: what is drawn, in this order.
        x, y: the axes across and up.
        height: in pixels of the page.
        wide: takes the page's whole width.
    """

    id: str
    title: str
    caption: str
    marks: Sequence[Mark | Cells]
    x: ChartAxis
    y: ChartAxis = ChartAxis()
    height: int = 340
    wide: bool = True
    file: str = ""


def line_style(labels: Sequence[str], label: str) -> tuple[int, str]:
    """Return the number of a label's colour and the name of its dash, the same in all charts and figures."""
    place = labels.index(label)
    return place % COLOURS, DASHES[place // COLOURS % len(DASHES)]


def series(labels: Sequence[str], label: str) -> tuple[str, str]:
    """Return the colour and the dash of a label, the same in all charts."""
    colour, dash = line_style(labels, label)
    return f"series-{colour}", dash


def group(number: int) -> str:
    """Return the colour of a cluster or a client."""
    return f"group-{number % len(GROUPS_LIGHT)}"


def short(text: str, most: int = 20) -> str:
    """Return a name for a tick or a legend, short enough for a phone."""
    return text if len(text) <= most else f"{text[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def curves(labels: Sequence[str], bands: Mapping[str, Band], axis: Axis, metric: str) -> Chart:
    """Return the mean over clients along an axis: a line for each label, with a band over its seeds.

    Args:
        labels: all labels, in the order of their colours.
        bands: the curves of those that have one.
        axis: the cost across.
        metric: the metric's name.
    """
    shown, scale = MetricFormat(metric), 1e-6 if axis == "bytes" else 1.0
    lines = []
    for label, band in bands.items():
        colour, dash = series(labels, label)
        spread = band.seeds > 1 and not band.level
        lines.append(
            Line(
                name=label, label=label, colour=colour, dash="dot" if band.level else dash,
                x=[value * scale for value in band.x], y=band.mean,
                low=band.low if spread else (), high=band.high if spread else (),
            )
        )  # fmt: skip
    seeds = max((band.seeds for band in bands.values()), default=0)
    over_seeds = f" Lines are means over {seeds} seeds, bands are their range." if seeds > 1 else ""
    levels = ", ".join(label for label, band in bands.items() if band.level)
    level = f" The horizontal line is the final value of {levels}, with almost no traffic." if levels else ""
    title, over = AXES[axis]
    return Chart(
        id=f"plot-{axis}",
        file=f"{metric}_over_{'rounds' if axis == 'version' else 'megabytes' if axis == 'bytes' else 'seconds'}",
        title=f"{shown.name.capitalize()} {over}",
        caption=f"Mean {shown.name} over clients.{over_seeds}{level}",
        marks=lines,
        x=ChartAxis(title=title, zero=True, whole=axis == "version"),
        y=ChartAxis(title=f"Mean {shown.name} over clients", percent=shown.percent),
        wide=axis == "version",
    )


INK, SOFT, GRID = "#14181f", "#505a68", "#e8ebef"
LOOK = {  # matplotlib settings of every figure
    "font.family": "sans-serif", "font.size": 10, "text.color": INK, "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT, "xtick.color": SOFT, "ytick.color": SOFT, "axes.grid": True, "grid.color": GRID,
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip
_STYLES = dict(zip(DASHES, ("-", "--", ":", "-."), strict=True))
_PALETTES = {"series": LIGHT, "group": GROUPS_LIGHT}
_M = TypeVar("_M", bound=Mark | Cells)


def draw(charts: Iterable[Chart], folder: Path) -> list[Path]:
    """Write each chart as a PNG file, and return their paths.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    paths = []
    for chart in charts:  # one at a time, so that only one picture is in memory
        # a metric of one's own may have any name
        name = re.sub(r"[^\w.+-]", "_", chart.file or chart.id.removeprefix("plot-"))
        path = folder / f"{name}.png"
        png = picture(partial(paint, chart=chart, headed=True))
        with explained(f"{path} cannot be written"):
            write_private(path, png, lasting=False)
        paths.append(path)
    return paths


def picture(
    paint: Callable[[Any], object],
    *,
    columns: int = 1,
    size: tuple[float, float] = (7.2, 4.4),
    dpi: int = 160,
    formulas: bool = False,
) -> bytes:
    """Return a figure as PNG.

    Args:
        paint: draws into the axes, of several columns into an array of them.
        columns: the number of axes side by side.
        size: in inches.
        dpi: pixels per inch.
        formulas: take text between dollar signs for a formula; never where a name that others chose is drawn.
    """
    from matplotlib.figure import Figure

    with look(formulas), any_letters():
        # a figure without pyplot needs no display, and is not kept by it
        figure, png = Figure(figsize=size, layout="constrained"), BytesIO()
        paint(figure.subplots(1, columns))
        figure.savefig(png, dpi=dpi, format="png")
    return png.getvalue()


def plot(runs: Sequence[Evaluated], metric: str | None, over: Over, ax: Any) -> Axes:
    """Draw curves, see `Comparison.plot`.

    Raises:
        SettingError: there is no such metric, `ax` is no axes, or nothing has been evaluated.
    """
    metrics = set.intersection(*(set(run.metrics) for run in runs))
    if not metrics:
        raise SettingError("there is nothing to plot: no client has been evaluated yet")
    metric = runs[0].metric if metric is None else metric
    if metric not in metrics:
        raise unknown("metric by which these runs were evaluated called", metric, metrics)
    axis: Axis = time_axis(runs) if over == "seconds" else "version" if over == "rounds" else "bytes"
    points: dict[str, list[Any]] = {}
    for run in runs:
        points.setdefault(run.label, []).append(run.curve_of(metric))
    with look():
        axes = _new_axes() if ax is None else _checked_axes(ax)
        paint(axes, curves(list(points), bands_of(points, axis), axis, metric))
    # these texts are drawn outside of `look`, where a dollar sign in a name would begin a formula
    for text in (axes.xaxis.label, axes.yaxis.label, *axes.legend().get_texts()):
        text.set_parse_math(False)
    return axes


def look(formulas: bool = False) -> AbstractContextManager[None]:
    """The context in which figures are made."""
    from matplotlib import rc_context

    return rc_context(LOOK | {"text.parse_math": formulas})  # type: ignore[arg-type]  # a name may hold dollar signs


def paint(ax: Axes, chart: Chart, headed: bool = False) -> None:
    """Draw a chart into axes, with its title and a legend around them where it is headed."""
    _lines(ax, _of(chart, Line))
    _shares(ax, _of(chart, Share))
    _bars(ax, _of(chart, Bars))
    _boxes(ax, _of(chart, Box))
    _dots(ax, _of(chart, Dots))
    _cells(ax, _of(chart, Cells))
    _scale(ax.xaxis, chart.x)
    _scale(ax.yaxis, chart.y)
    ax.set_xlabel(chart.x.title)
    ax.set_ylabel(chart.y.title)
    figure = ax.get_figure(root=True)
    if headed and figure is not None:
        # over the whole figure: over the axes, long row labels would push the title out on the right
        figure.suptitle(textwrap.fill(chart.title, 68), x=0.01, ha="left", fontsize=12, fontweight="bold")
        handles, _ = ax.get_legend_handles_labels()
        if handles:
            figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), fontsize=9)


def _of(chart: Chart, kind: type[_M]) -> list[_M]:
    return [mark for mark in chart.marks if isinstance(mark, kind)]


def _colour(name: str) -> str:
    palette, number = name.split("-")
    return _PALETTES[palette][int(number)]


def _lines(ax: Axes, lines: Sequence[Line]) -> None:
    for line in lines:
        colour, dot = _colour(line.colour), "o" if len(line.x) == 1 else ""
        style = {"color": colour, "linestyle": _STYLES[line.dash], "marker": dot}
        ax.plot(line.x, line.y, linewidth=1.8, label=line.name, **style)  # type: ignore[arg-type]
        if line.low:
            ax.fill_between(line.x, line.low, line.high, color=colour, alpha=0.16, linewidth=0)


def _shares(ax: Axes, shares: Sequence[Share]) -> None:
    if shares:
        colours = [_colour(share.colour) for share in shares]
        names = [share.name for share in shares]
        ax.stackplot(
            shares[0].x, [share.y for share in shares], labels=names, colors=colours, alpha=0.75, step="post"
        )  # fmt: skip


def _bars(ax: Axes, bars: Sequence[Bars]) -> None:
    names = list(dict.fromkeys(name for series in bars for name in series.x))
    width = 0.8 / max(1, len(bars))
    for number, series in enumerate(bars):
        at = [names.index(name) + (number - (len(bars) - 1) / 2) * width for name in series.x]
        ax.bar(at, series.y, width, color=_colour(series.colour), label=series.name)
    if bars:
        ax.set_xticks(range(len(names)), names, rotation=90 if len(names) > 8 else 0)


def _boxes(ax: Axes, boxes: Sequence[Box]) -> None:
    if not boxes:
        return
    drawn = ax.boxplot(
        [box.values for box in boxes], orientation="horizontal", patch_artist=True, widths=0.55,
        medianprops={"color": INK}, flierprops={"markersize": 2.5, "markeredgecolor": SOFT},
    )  # fmt: skip
    for patch, box in zip(drawn["boxes"], boxes, strict=True):
        patch.set(facecolor=f"{_colour(box.colour)}55", edgecolor=_colour(box.colour))
    ax.set_yticks(range(1, len(boxes) + 1), [box.name for box in boxes])
    ax.grid(visible=False, axis="y")


def _dots(ax: Axes, dots: Sequence[Dots]) -> None:
    for series in dots:
        colour = _colour(series.colour)
        if series.low:
            ax.hlines(series.y, series.low, series.high, color=colour, alpha=0.55, linewidth=1)
        inside = ["none" if hollow else colour for hollow in series.hollow]
        ax.scatter(series.x, series.y, s=36, facecolors=inside, edgecolors=colour, label=series.name)


def _cells(ax: Axes, maps: Sequence[Cells]) -> None:
    for cells in maps:
        import numpy as np
        from matplotlib.colors import ListedColormap
        from matplotlib.ticker import MaxNLocator

        # cells without a value are blank
        z = np.array(cells.z, float)
        ends: dict[str, Any] = {"vmin": 0, "cmap": "Blues"}
        if cells.groups:
            colours = ListedColormap([_colour(group) for group in cells.groups])
            ends = {"vmin": -0.5, "vmax": len(cells.groups) - 0.5, "cmap": colours}
        image = ax.imshow(z, aspect="auto", interpolation="nearest", **ends)
        if len(cells.y) <= 30:
            ax.set_yticks(range(len(cells.y)), cells.y)
        if cells.groups:
            ax.set_xticks(range(len(cells.x)), cells.x)
        else:
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            bar = ax.figure.colorbar(image, ax=ax, label=cells.unit.capitalize())
            bar.outline.set_visible(False)
        ax.grid(visible=False)


def _scale(axis: Axis_, scale: ChartAxis) -> None:
    from matplotlib.ticker import MaxNLocator

    if scale.percent:
        axis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    if scale.whole:
        axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if scale.signed:
        axis.axes.axhline(0, color=SOFT, linewidth=1)
    if scale.names:
        axis.set_ticks(range(len(scale.names)), scale.names)


def _new_axes() -> Axes:
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(7.2, 4.4), layout="constrained")[1]


def _checked_axes(ax: Any) -> Axes:
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes):
        raise SettingError(f"ax must be matplotlib's Axes, as pyplot.subplots returns them, got {shown(ax)}")
    return ax
