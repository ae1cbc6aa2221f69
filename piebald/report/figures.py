"""The page's charts as PNG files, for papers and slides."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piebald.core.plain_text import any_letters
from piebald.core.private_files import write_private
from piebald.report import findings
from piebald.report.comparison import Comparison
from piebald.report.curve_plot import INK, SOFT, draw_bands, line_style, look, percent_ticks
from piebald.report.learning_curves import AXES, Axis, time_axis
from piebald.report.page import charts, client_section
from piebald.report.page.markup import Chart
from piebald.report.page.wording import MetricFormat
from piebald.storage.schema import explained

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(comparison: Comparison, folder: Path) -> list[Path]:
    """Write the figures that these runs have data for, and return their paths.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    axes: dict[str, Axis] = {"rounds": "version", "megabytes": "bytes", "seconds": time_axis(comparison.runs)}
    # default arguments bind the loop's value; a plain closure would see the last one
    painters: dict[str, Callable[[Axes], bool]] = {
        f"{comparison.metric}_over_{name}": lambda ax, axis=axis: _curves(ax, comparison, axis)  # type: ignore[misc]
        for name, axis in axes.items()
    }
    painters["clients"] = lambda ax: _clients(ax, comparison)
    for recipe in ("local", "fedavg"):
        if (base := comparison.made_by(recipe)) is not None:
            painters[f"gains_against_{recipe}"] = lambda ax, to=base: _gains(ax, comparison, to)  # type: ignore[misc]
    painters["partition"] = lambda ax: _partition(ax, comparison)
    # one at a time, so that only one picture is in memory
    drawn = (_write(folder / f"{name}.png", paint) for name, paint in painters.items())
    return [path for path in drawn if path is not None]


def picture(
    paint: Callable[[Any], bool | None],
    *,
    columns: int = 1,
    size: tuple[float, float] = (7.2, 4.4),
    dpi: int = 160,
    formulas: bool = False,
) -> bytes | None:
    """Return a figure as PNG, None where there is nothing to draw.

    Args:
        paint: draws into the axes, of several columns into an array of them; False where there is nothing to draw.
        columns: the number of axes side by side.
        size: in inches.
        dpi: pixels per inch.
        formulas: take text between dollar signs for a formula; never where a name that others chose is drawn.
    """
    from matplotlib.figure import Figure

    with look(formulas), any_letters():
        # a figure without pyplot needs no display, and is not kept by it
        figure, png = Figure(figsize=size, layout="constrained"), BytesIO()
        if paint(figure.subplots(1, columns)) is False:
            return None
        figure.savefig(png, dpi=dpi, format="png")
    return png.getvalue()


def _write(path: Path, paint: Callable[[Axes], bool]) -> Path | None:
    if (png := picture(paint)) is None:
        return None
    with explained(f"{path} cannot be written"):
        write_private(path, png, lasting=False)
    return path


def _curves(ax: Axes, comparison: Comparison, axis: Axis) -> bool:
    shown, bands = MetricFormat(comparison.metric), comparison.bands(axis)
    draw_bands(ax, comparison.labels, bands, axis, shown)
    name, over = AXES[axis]
    _label_axes(ax, f"{shown.name.capitalize()} {over}", name, f"Mean {shown.name} over clients")
    if bands:
        _legend(ax)
    return bool(bands)


def _clients(ax: Axes, comparison: Comparison) -> bool:
    shown, ranked = MetricFormat(comparison.metric), comparison.ranking()[::-1]
    if not ranked:
        return False
    if few := client_section.dots(comparison):
        return _dots(ax, few, comparison)
    values = [[v for final in comparison.finals[label] for v in final["per_client"].values()] for label in ranked]
    boxes = ax.boxplot(
        values, orientation="horizontal", patch_artist=True, widths=0.55, medianprops={"color": INK},
        flierprops={"markersize": 2.5, "markeredgecolor": SOFT},
    )  # fmt: skip
    for box, label in zip(boxes["boxes"], ranked, strict=True):
        colour, _ = line_style(comparison.labels, label)
        box.set(facecolor=f"{colour}55", edgecolor=colour)
    ax.set_yticks(range(1, len(ranked) + 1), [textwrap.shorten(label, 24, placeholder="…") for label in ranked])
    ax.grid(visible=False, axis="y")
    _label_axes(ax, findings.worst_tenth(comparison), f"Final {shown.name} of individual clients", "")
    percent_ticks(ax.xaxis, shown)
    return True


def _dots(ax: Axes, chart: Chart, comparison: Comparison) -> bool:
    """The page's dots of a few clients beside their names."""
    shown = MetricFormat(comparison.metric)
    for label in chart.data:
        colour, _ = line_style(comparison.labels, label["meta"])
        inside = ["none" if "open" in symbol else colour for symbol in label["marker"]["symbol"]]
        ax.scatter(
            label["x"], label["y"], s=36, facecolors=inside, edgecolors=colour, label=html.unescape(label["name"])
        )
    axis = chart.layout["yaxis"]
    ax.set_yticks(axis["tickvals"], [html.unescape(name) for name in axis["ticktext"]])
    ax.set_ylim(*axis["range"])
    _label_axes(ax, chart.title, f"Final {shown.name}", "")
    percent_ticks(ax.xaxis, shown)
    _legend(ax)
    return True


def _gains(ax: Axes, comparison: Comparison, base: str) -> bool:
    """The page's lines of clients that gain and lose."""
    if (chart := charts.gains(comparison, base)) is None:
        return False
    for line in chart.data:
        colour, style = line_style(comparison.labels, line["meta"])
        x = [100 * share for share in line["x"]]
        ax.plot(x, line["y"], color=colour, linestyle=style, linewidth=1.8, label=line["meta"])
    ax.axhline(0, color=SOFT, linewidth=1)
    unit = chart.layout["yaxis"]["title"]["text"]
    _label_axes(ax, chart.title, "Share of clients, largest loss first, %", unit)
    _legend(ax)
    return True


def _partition(ax: Axes, comparison: Comparison) -> bool:
    """The page's heat map of classes and clients."""
    chart = next((chart for history in comparison.runs if (chart := charts.partition(history))), None)
    if chart is None:
        return False
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    (cells,) = chart.data
    # cells without rows are None on the page and stay blank here, too
    image = ax.imshow(np.array(cells["z"], float), aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    if len(cells["y"]) <= 30:
        ax.set_yticks(range(len(cells["y"])), [html.unescape(name) for name in cells["y"]])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(visible=False)
    bar = ax.figure.colorbar(image, ax=ax, label="Training rows")
    bar.outline.set_visible(False)
    _label_axes(ax, chart.title, "Client", "Class")
    return True


def _label_axes(ax: Axes, title: str, x: str, y: str) -> None:
    figure = ax.get_figure(root=True)
    assert figure is not None  # axes are always made with a figure
    # over the whole figure: over the axes, long row labels would push the title out on the right
    figure.suptitle(textwrap.fill(title, 68), x=0.01, ha="left", fontsize=12, fontweight="bold")
    ax.set_xlabel(x)
    ax.set_ylabel(y)


def _legend(ax: Axes) -> None:
    handles, _ = ax.get_legend_handles_labels()
    figure = ax.get_figure(root=True)
    assert figure is not None  # axes are always made with a figure
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), fontsize=9)
