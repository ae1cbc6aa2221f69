"""Learning curves on matplotlib's axes, for notebooks, and the look of every figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from piebald.core.errors import SettingError, shown, unknown
from piebald.report.learning_curves import AXES, Axis, Band, Evaluated, Over, bands_of, time_axis
from piebald.report.page.markup import DASHES, LIGHT
from piebald.report.page.markup import line_style as numbered_style
from piebald.report.page.wording import MetricFormat

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
    curves: dict[str, list[Any]] = {}
    for run in runs:
        curves.setdefault(run.label, []).append(run.curve_of(metric))
    with look():
        axes = _new_axes() if ax is None else _checked_axes(ax)
        draw_bands(axes, list(curves), bands_of(curves, axis), axis, MetricFormat(metric))
    name, text = AXES[axis][0], MetricFormat(metric).name
    # these texts are made outside of `look`, where a dollar sign in a name would begin a formula
    for label in (axes.set_xlabel(name), axes.set_ylabel(f"Mean {text} over clients")):
        label.set_parse_math(False)
    for entry in axes.legend().get_texts():
        entry.set_parse_math(False)
    return axes


def look(formulas: bool = False) -> AbstractContextManager[None]:
    """The context in which figures are made."""
    from matplotlib import rc_context

    return rc_context(LOOK | {"text.parse_math": formulas})  # type: ignore[arg-type]  # a name may hold dollar signs


def draw_bands(ax: Axes, labels: list[str], bands: Mapping[str, Band], axis: Axis, shown: MetricFormat) -> None:
    """Draw the mean over clients along an axis: a line for each label, with a band over its seeds.

    Args:
        ax: what is drawn into, without texts.
        labels: all labels, in the order of their colours.
        bands: the curves of those that have one.
        axis: the cost across.
        shown: how the metric is written.
    """
    from matplotlib.ticker import MaxNLocator

    scale = 1e-6 if axis == "bytes" else 1.0
    for label, band in bands.items():
        colour, style = line_style(labels, label)
        x = [value * scale for value in band.x]
        look = {"color": colour, "linestyle": ":" if band.level else style, "marker": "o" if len(x) == 1 else ""}
        ax.plot(x, band.mean, linewidth=1.8, label=label, **look)  # type: ignore[arg-type]
        if band.seeds > 1 and not band.level:
            ax.fill_between(x, band.low, band.high, color=colour, alpha=0.16, linewidth=0)
    if axis == "version":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    percent_ticks(ax.yaxis, shown)


def line_style(labels: list[str], label: str) -> tuple[str, str]:
    """The colour and the style of the line of a label, the same in all figures."""
    colour, dash = numbered_style(labels, label)
    return LIGHT[colour], _STYLES[dash]


def percent_ticks(axis: Axis_, shown: MetricFormat) -> None:
    """Write the numbers of an axis in percent, where the metric is."""
    if shown.percent:
        axis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")


def _new_axes() -> Axes:
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(7.2, 4.4), layout="constrained")[1]


def _checked_axes(ax: Any) -> Axes:
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes):
        raise SettingError(f"ax must be matplotlib's Axes, as pyplot.subplots returns them, got {shown(ax)}")
    return ax
