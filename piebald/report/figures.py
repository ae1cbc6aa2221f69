"""Charts as pictures, for papers, slides and notebooks, drawn with matplotlib."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from piebald.core.errors import SettingError, shown, unknown
from piebald.core.plain_text import any_letters
from piebald.core.private_files import write_private
from piebald.report.chart import (
    DASHES,
    GROUPS_LIGHT,
    LIGHT,
    Axis,
    Bars,
    Box,
    Cells,
    Chart,
    ChartAxis,
    Dots,
    Evaluated,
    Line,
    Mark,
    Over,
    Share,
    bands_of,
    curves,
    time_axis,
)
from piebald.storage.schema import explained

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as Axis_

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
