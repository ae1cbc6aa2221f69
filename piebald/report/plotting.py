"""The page's curves as matplotlib axes, for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from piebald.errors import SettingError, shown, unknown
from piebald.report import charts, figures
from piebald.report.charts import AXES
from piebald.report.comparison import Comparison
from piebald.report.seed_bands import Axis
from piebald.report.tables import History, Over
from piebald.report.wording import MetricFormat

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(histories: Sequence[History], metric: str | None, over: Over, ax: Any) -> Axes:
    """Draw curves, see `Comparison.plot`.

    Raises:
        SettingError: there is no such metric, `ax` is no axes, or nothing has been evaluated.
    """
    comparison = Comparison(histories)
    known = set.intersection(*(set(history.metrics) for history in histories))
    if not known:
        raise SettingError("there is nothing to plot: no client has been evaluated yet")
    metric = comparison.metric if metric is None else metric
    if metric not in known:
        raise unknown("metric by which these runs were evaluated called", metric, known)
    axis: Axis = charts.clock(comparison) if over == "seconds" else "version" if over == "rounds" else "bytes"
    with figures.look():
        made = _new_axes() if ax is None else _given(ax)
        figures.curves(made, comparison, axis, metric)
    name, text = AXES[axis][0], MetricFormat(metric).name
    for label in (made.set_xlabel(name), made.set_ylabel(f"Mean {text} over clients")):
        label.set_parse_math(False)
    for entry in made.legend().get_texts():
        entry.set_parse_math(False)
    return made


def _new_axes() -> Axes:
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(7.2, 4.4), layout="constrained")[1]


def _given(ax: Any) -> Axes:
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes):
        raise SettingError(f"ax must be matplotlib's Axes, as pyplot.subplots returns them, got {shown(ax)}")
    return ax
